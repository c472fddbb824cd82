"""Cases: how one claim is put to the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from playbook.cards import Slug
from playbook.document import Strict, did_you_mean, load, locate
from playbook.errors import FileError, Finding
from playbook.paths import data_root

GENERIC_RANGES = frozenset({"step", "data", "forward", "backward", "optimizer", "loss", "decoder"})
"""Ranges that every run has; finding one proves nothing."""


class Rule(Strict):
    """One thing that a run's receipt must show, or must not show.

    Exactly one of `collective`, `range` or `counter` names what is looked at. `count` is a number or a formula over the
    receipt's numbers (layers, moe_layers, microbatches, ranks, steps, images); without it, `require` asks for at least one.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast"] | None = None
    range: str | None = None
    counter: str | None = None
    inside: str | None = None
    """Count only collectives issued inside this range."""
    group: str | None = None
    """Count only collectives on this process group: world, dp, ep, tp, pp, cp."""
    count: str | int | None = None
    op: Literal["==", ">=", "<="] = "=="


class Receipt(Strict):
    """What one variant's receipt must and must not show."""

    require: list[Rule] = Field(default_factory=list)
    forbid: list[Rule] = Field(default_factory=list)


class Activation(Strict):
    """Proof, per variant, that the tested path ran."""

    baseline: Receipt = Field(default_factory=Receipt)
    candidate: Receipt = Field(default_factory=Receipt)


class Loss(Strict):
    """How far the mean losses of a pair's timed steps may differ, relative; or why they may differ."""

    relative: float | None = Field(default=0.01, gt=0)
    reason: str | None = None


class Guardrails(Strict):
    """Conditions that void a pair."""

    loss: Loss = Field(default_factory=Loss)


class Budget(Strict):
    """The looks, in pairs, and the longest time that a case may take."""

    pairs: list[int] = Field(default_factory=lambda: [4, 8, 12])
    minutes: float = Field(default=10, gt=0)
    launch_timeout_s: float = Field(default=300, gt=0)


class Delta(Strict):
    """What may differ between the variants besides the declared keys, and why."""

    data: bool = False
    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment variables per variant."""
    parameters: bool = False
    ranks: bool = False
    work: bool = False
    """The variants may do different work per step; only metrics per useful token compare them then."""
    reason: str | None = None


class Case(Strict):
    """One matched pair, arithmetic statement or invariant."""

    id: str = Slug
    kind: Literal["pair", "sweep", "interaction", "arithmetic", "invariant"] = "pair"
    summary: str
    trainer: str | None = None
    """The trainer's configuration, a path from the repository's root."""
    baseline: dict[str, Any] = Field(default_factory=dict)
    candidate: dict[str, Any] = Field(default_factory=dict)
    metric: str | None = None
    """The metric to compare; a claim that names the case says which it expects."""
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Per machine class: `ranks` and configuration overrides (dotted keys). Keys: cpu, h200x1, h200x2, h200x4, ..."""
    variant_profiles: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Per machine class and variant, where a variant's delta needs another value there."""
    requires: list[str] = Field(default_factory=list)
    """Python packages or backends that must be present, such as `deep_ep` or `backend:megatron`."""
    delta: Delta = Field(default_factory=Delta)
    guardrails: Guardrails = Field(default_factory=Guardrails)
    activation: Activation = Field(default_factory=Activation)
    budget: Budget = Field(default_factory=Budget)
    function: str | None = None
    """For `arithmetic` and `invariant`: the name of a function in the harness's table."""
    arguments: dict[str, Any] = Field(default_factory=dict)


def load_case(id_or_path: str | Path) -> Case:
    """The case of that id in `bench/cases/`, or the one in the file of that path.

    Raises:
        FileError: no such case, or the file is invalid.
    """
    path = _case_path(str(id_or_path))
    case, marks = load(path, Case)
    findings = [Finding(str(path), *locate(marks, where), message) for where, message in case_problems(case)]
    if case.id != path.stem:
        findings.append(Finding(str(path), *locate(marks, ("id",)), f"id '{case.id}' differs from the file's name; expected '{path.stem}'"))
    if findings:
        raise FileError(findings)
    return case


def list_cases() -> list[str]:
    """The ids of all shipped cases."""
    return sorted(p.stem for p in data_root("cases").glob("*.yaml"))


def case_problems(case: Case) -> list[tuple[tuple[str | int, ...], str]]:
    """What the schema cannot say: (key path, message) for each problem."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    if case.kind in ("arithmetic", "invariant"):
        if not case.function:
            found.append((("kind",), f"a case of kind {case.kind} needs 'function'"))
        return found
    found += [
        ((field,), f"'{field}' is missing; a case of kind {case.kind} needs it")
        for field in ("trainer", "metric")
        if not getattr(case, field)
    ]
    if not case.profiles:
        found.append((("kind",), "'profiles' is missing; name at least one machine class, such as cpu"))
    delta = case.delta
    if (delta.data or delta.environment or delta.parameters or delta.ranks or delta.work) and not delta.reason:
        found.append((("delta",), "'reason' is missing; say why the variants may differ in this"))
    if case.guardrails.loss.relative is None and not case.guardrails.loss.reason:
        found.append((("guardrails", "loss"), "'reason' is missing; say why the losses may differ"))
    if case.budget.pairs != sorted(set(case.budget.pairs)) or not case.budget.pairs or case.budget.pairs[0] < 2:
        found.append((("budget", "pairs"), f"looks are {case.budget.pairs}; expected rising numbers of at least 2, such as [4, 8, 12]"))
    return found + _receipt_problems(case)


def _receipt_problems(case: Case) -> list[tuple[tuple[str | int, ...], str]]:
    found: list[tuple[tuple[str | int, ...], str]] = []
    for variant in ("baseline", "candidate"):
        receipt: Receipt = getattr(case.activation, variant)
        rules = [*receipt.require, *receipt.forbid]
        if all(r.range in GENERIC_RANGES for r in rules):
            found.append(
                (("activation", variant), f"nothing proves that the {variant} ran as meant; require or forbid a collective or a counter")
            )
        for kind in ("require", "forbid"):
            for i, rule in enumerate(getattr(receipt, kind)):
                where = ("activation", variant, kind, i)
                if sum(x is not None for x in (rule.collective, rule.range, rule.counter)) != 1:
                    found.append((where, "a rule looks at exactly one of collective, range and counter"))
                if kind == "forbid" and rule.count is not None:
                    found.append((where, "a forbidden thing has no count; use require with op and count"))
    return found


def _case_path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in list_cases():
        raise FileError([Finding(name, 1, 1, f"no such case{did_you_mean(name, list_cases()) or '; playbook bench list names them'}")])
    return data_root("cases") / f"{name}.yaml"
