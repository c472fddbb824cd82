"""What of a test has been edited since it was run: its case with its proofs, or the trainer's configuration that the case names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ValidationError

from playbook.errors import PlaybookError
from playbook.records.case import Case, list_cases, load_case
from playbook.records.evidence import Check, Observed
from playbook.renamed_keys import modern
from playbook_bench.judge.receipt import judge_runs
from playbook_bench.run.variants import extended, resolve_variant
from playbook_trainer.config import tree as trainer_config

_SHOWN, _LONG = 4, 60
_PLACES = frozenset({"output", "data.path", "init.weights", "checkpoint.dir", "checkpoint.export"})
"""Where things lie, which says nothing of what is computed."""


class _Delta(BaseModel, from_attributes=True):
    environment: dict[str, dict[str, str]] = {}


class _Content(BaseModel, from_attributes=True):
    delta: _Delta = _Delta()
    function: str | None = None
    arguments: dict[str, Any] = {}


class _Case(BaseModel, from_attributes=True):
    id: str
    content: _Content


class _Run(BaseModel, from_attributes=True):
    variant: str
    config_sha: str
    ranks: int
    role: str = ""
    outcome: str = ""
    observed: Observed | None = None


class _Plan(BaseModel, from_attributes=True):
    extended: bool = False


class _Tested(BaseModel, from_attributes=True):
    """What a record says of its test, which may come from anybody."""

    case: _Case
    profile: str | None = None
    plan: _Plan | None = None
    configs: dict[str, dict[str, Any]] = {}
    runs: list[_Run] = []


def edited(measured: Any) -> list[str]:
    """What is otherwise in the test of that case today: a few words for each setting, with both values; empty where nothing is, or no such case ships.

    `measured` is that part of a record, as a model or as plain data. Settings that the trainer's tree has gained or lost since are not compared:
    its performance revision speaks for those. Budgets and bounds are not either: they decide nothing about what ran. Of proofs only what the
    record's launches do not show counts: a proof that they meet as well is no other test.
    """
    try:
        then = _Tested.model_validate(measured)
        if then.case.id not in list_cases():
            return []
        today = load_case(then.case.id)
    except (ValidationError, PlaybookError):
        return []  # others say what is wrong with such a record or case
    found = list(_differences(then, today))
    rest = len(found) - _SHOWN
    return found[:_SHOWN] + ([f"{rest} more"] if rest > 0 else [])


def _differences(then: _Tested, today: Case) -> Iterator[str]:
    content = then.case.content
    if (content.function, content.arguments) != (today.function, today.arguments):
        yield "what the case computes"
    if content.delta.environment != today.delta.environment:
        yield "environment variables of the variants"
    variants = {run.variant: run for run in then.runs}
    if not variants or then.profile is None:
        return
    if set(variants) - set(today.variants) or then.profile not in today.profiles:
        yield f"the case's variants, or its profile {_short(then.profile)}"
        return
    settings: dict[str, dict[str, str]] = {}
    for name, run in variants.items():
        try:
            now = resolve_variant(today, name, then.profile)
        except PlaybookError:
            yield f"the configuration of {name}, which cannot be read"
            continue
        if then.plan is not None and then.plan.extended:
            now = extended(now)  # as the harness has done then
        was = {**modern(then.configs.get(run.config_sha, {})), "ranks": run.ranks}
        for key, a, b in _changed(was, {**trainer_config.dump(now.config), "ranks": now.ranks}):
            settings.setdefault(key, {})[name] = f"{key} {_short(a)} -> {_short(b)}"
    judged = [run for run in then.runs if run.role == "measure" and run.outcome == "ok"]
    yield from (_unmet(check) for check in judge_runs(today.activation, judged) if not check.ok)
    for key in sorted(settings):
        own = settings[key]
        common = len(own) == len(variants) and all(a == b for a, b in pairwise(own.values()))
        yield from [next(iter(own.values()))] if common else [f"{name}: {text}" for name, text in own.items()]


def _unmet(check: Check) -> str:
    seen = "not reported" if check.observed is None else f"{check.observed:g}"
    return f"{check.variant}: its proof wants {check.rule} {check.expected}, found {seen}"


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys that both trees have and that differ, with both values; a part that is there in one alone, such as a tower, is one key."""
    for key in was.keys() & now.keys():
        place, a, b = f"{prefix}{key}", was[key], now[key]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _changed(a, b, f"{place}.")
        elif a != b and place not in _PLACES:
            yield place, a, b


def _short(value: Any) -> str:
    """One line of a few words: a record's values may be anything."""
    line = " ".join(str(value).split())
    return line if len(line) <= _LONG else f"{line[:_LONG]}..."
