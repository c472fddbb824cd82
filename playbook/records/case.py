"""Cases: how one claim is put to the test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from playbook.cards.load import load_all
from playbook.cards.model import Slug, by_claim
from playbook.errors import FileError, Finding
from playbook.paths import folders
from playbook.records.commands import DELTAS, Steps, Traced, delta_problems, secret_word, template_problems
from playbook.yaml_files import KeyPath, Strict, did_you_mean, load, locate

LAUNCHED_KINDS = ("pair", "sweep", "interaction", "prediction")
"""The kinds of case that launch the trainer, or a command."""

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")

_MAX_REPEATS = 4

MODEL_RANGES = frozenset(
    {"embedding", "vision", "projector", "decoder", "attention", "mlp", "router", "dispatch", "experts", "combine", "loss"}
)
"""Ranges of a model's parts."""

_GENERIC_RANGES = frozenset({"step", "data", "forward", "backward", "optimizer", "loss", "decoder", "embedding"})
"""Ranges that every run has; finding one proves nothing."""

RANGES = MODEL_RANGES | _GENERIC_RANGES | {"recompute", "offload", "prefetch"}
"""Every range that the trainer has; `playbook_trainer.observe.ranges` says what they are. Each has one of the backward pass too, named
`attention.bwd`."""

GROUP_WORDS = frozenset({"world", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "replicate", "shard", "optimizer", "embedding"})
"""What names of process groups are made of, such as `dp_cp`."""


class Rule(Strict):
    """One thing that a run's receipt must show, or must not show.

    Exactly one of `collective`, `range`, `counter`, `kernel` and `log` names what is looked at. `count` is a number or a formula over the
    receipt's numbers (layers, moe_layers, microbatches, ranks, steps, images); without it, `require` asks for at least one.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast"] | None = None
    range: str | None = None
    counter: str | None = None
    kernel: str | None = Field(default=None, max_length=200)
    """A regular expression that is searched for in the names of the GPU kernels that ran; their numbers are summed."""
    log: str | None = Field(default=None, max_length=200)
    """For a command: a regular expression that is searched for in the lines that it prints."""
    inside: str | None = None
    """Count only collectives issued inside this range."""
    group: str | None = None
    """Count only collectives on this process group: world, dp, ep, tp, pp, cp."""
    phase: Literal["forward", "backward"] | None = None
    """Count only collectives of this pass; what the optimizer does counts as forward."""
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
    every: Receipt = Field(default_factory=Receipt)
    """What each variant must and must not show, beside its own."""
    variants: dict[str, Receipt] = Field(default_factory=dict)
    """Per value of a sweep or cell of an interaction, by its name."""

    def of(self, variant: str) -> Receipt:
        """All rules of one variant."""
        of_variant = {"baseline": self.baseline, "candidate": self.candidate}.get(variant) or self.variants.get(variant) or Receipt()
        return Receipt(require=[*self.every.require, *of_variant.require], forbid=[*self.every.forbid, *of_variant.forbid])


class Loss(Strict):
    """How far the mean losses of a pair's timed steps may differ, relative; or why they may differ."""

    relative: float | None = Field(default=0.01, gt=0)
    reason: str | None = None


class Guardrails(Strict):
    """Conditions that void a pair."""

    loss: Loss = Field(default_factory=Loss)


class Budget(Strict):
    """The looks, in pairs of launches or in blocks that hold each variant once, and the longest time that a case may take."""

    pairs: list[int] = Field(default_factory=lambda: [4, 8, 12])
    minutes: float = Field(default=10, gt=0)
    launch_timeout_s: float = Field(default=300, gt=0)

    @property
    def looks(self) -> list[int]:
        """After how many pairs a series of rules since version 3 is judged: from the first of `pairs` to the last, every second one."""
        return sorted({*range(self.pairs[0], self.pairs[-1], 2), self.pairs[-1]})


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


class Predicted(Strict):
    """What the metric was predicted to be before any run, with the interval that it must fall into. Units: the metric's own."""

    value: float = Field(gt=0, allow_inf_nan=False)
    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)


class Value(Strict):
    """One value of a sweep's knob, one level of an interaction's factor, or one run that is predicted."""

    at: str | int | float
    set: dict[str, Any] = Field(default_factory=dict)
    """The configuration delta (dotted keys) that goes with it; a coupled setting moves along here."""
    predicted: Predicted | None = None
    """For a prediction: part of the case, and so of its hash in every record."""

    @property
    def name(self) -> str:
        """The value in words: how claims, receipts and records name the variant."""
        return self.at if isinstance(self.at, str) else f"{self.at:g}"


class Factor(Strict):
    """One of the two factors of an interaction, at its low and its high level."""

    name: str
    low: Value
    high: Value


class Case(Strict):
    """One matched pair, sweep, interaction, prediction, arithmetic statement or invariant."""

    id: str = Slug
    kind: Literal["pair", "command", "sweep", "interaction", "prediction", "arithmetic", "invariant"] = "pair"
    """`command` is another word for a pair whose `command` is launched."""
    summary: str
    trainer: str | None = None
    """The trainer's configuration, a path from the repository's root."""
    command: list[str] = Field(default_factory=list)
    """Instead of `trainer`: the words of a command, started without a shell. `{word}` stands for a value of the profile or the variant."""
    steps: Steps | None = None
    """For a command: where its steps are told."""
    trace: Traced | None = None
    """For a command: the trace in which rules look for kernels, ranges and collectives."""
    prepare: list[str] = Field(default_factory=list)
    """For a command: what makes the files of a commit ready to run, such as a build; run once for each state of the files."""
    baseline: dict[str, Any] = Field(default_factory=dict)
    candidate: dict[str, Any] = Field(default_factory=dict)
    knob: str | None = None
    """For a sweep: what is varied, in words or as the configuration's key."""
    values: list[Value] = Field(default_factory=list)
    """For a sweep: the values in their order. For a prediction: what runs, each with what was predicted for it."""
    factors: list[Factor] = Field(default_factory=list)
    """For an interaction: two. Its cells are named `low+low`, `high+low`, `low+high` and `high+high`, by the levels' values."""
    metric: str | None = None
    """The metric to compare; a claim that names the case says which it expects."""
    also: list[str] = Field(default_factory=list)
    """Further metrics by which claims may judge the same runs."""
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Per machine class: `ranks` and configuration overrides (dotted keys). Keys: cpu, h200x1, h200x2, h200x4, ...

    `like` begins from another profile of the case, its values for single variants included:
    `h100x4: {like: h200x4, model.num_layers: 12}`.
    More ranks than one on a profile of one GPU take turns on it: such a case may judge what is counted (bytes, collectives, memory),
    and no time.
    """
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

    @model_validator(mode="after")
    def _profiles_in_full(self) -> Self:
        """Write out every profile that begins from another."""
        full = {name: values for name, values in self.profiles.items() if "like" not in values}
        for name in self.profiles.keys() - full.keys():
            other, changes = self.profiles[name]["like"], {k: v for k, v in self.profiles[name].items() if k != "like"}
            if not isinstance(other, str) or other not in full:
                raise ValueError(
                    f"profile '{name}' is like {str(other)[:40]!r}; expected one that is written out: {', '.join(sorted(full))}"
                )
            self.profiles[name] = {**full[other], **changes}
            if other in self.variant_profiles:
                self.variant_profiles.setdefault(name, self.variant_profiles[other])
        return self

    @field_validator("kind")
    @classmethod
    def _one_word_for_pairs(cls, kind: str) -> str:
        return "pair" if kind == "command" else kind

    def compared(self, side: str) -> dict[str, Any]:
        """What a claim about a pair says of one side: its delta, and the environment variables that it sets."""
        delta: dict[str, Any] = getattr(self, side)
        return {**delta, **self.delta.environment.get(side, {})}

    @property
    def is_one_sided(self) -> bool:
        """Whether a command's case names no candidate, as a gate's need not: the gate has the same configuration at two commits."""
        return self.kind == "pair" and bool(self.command) and "candidate" not in self.model_fields_set and not self.compared("candidate")

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """Every variant that is launched, with its configuration delta, in order. The first is what noise is measured on."""
        if self.kind == "pair":
            return {"baseline": self.baseline, "candidate": self.candidate}
        if self.kind in ("sweep", "prediction"):
            return {v.name: v.set for v in self.values}
        if self.kind == "interaction" and len(self.factors) == 2:
            a, b = self.factors
            levels = ((a.low, b.low), (a.high, b.low), (a.low, b.high), (a.high, b.high))
            return {f"{x.name}+{y.name}": {**x.set, **y.set} for x, y in levels}
        return {}


def load_case(id_or_path: str | Path) -> Case:
    """The case of that id in `bench/cases/`, or the one in the file of that path.

    Raises:
        FileError: no such case, or the file is invalid.
    """
    name = str(id_or_path)
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    path = case_file(name)
    return _shipped(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _shipped(path: Path, _: int) -> Case:
    """A case that lies in `bench/cases/`, read once: many records rest on the same few."""
    return _read(path)


def _read(path: Path) -> Case:
    case, marks = load(path, Case)
    findings = [Finding(str(path), *locate(marks, where), message) for where, message in case_problems(case)]
    if case.id != path.stem:
        findings.append(Finding(str(path), *locate(marks, ("id",)), f"id '{case.id}' differs from the file's name; expected '{path.stem}'"))
    if findings:
        raise FileError(findings)
    return case


def beside(card: Path, case: str) -> Path | None:
    """The file of a case that a card brings along, in `../bench/cases/` as seen from the card's folder; None where none lies there."""
    path = card.resolve().parent.parent / "bench" / "cases" / f"{case}.yaml"
    return path if path.is_file() else None


def list_cases() -> list[str]:
    """The ids of all cases that ship, and of the user's own."""
    return sorted(p.stem for folder in folders("cases") for p in folder.glob("*.yaml"))


def is_shipped(name: str) -> bool:
    """Whether a case of that id ships, or is among the user's own."""
    return _file_of(name) is not None


def _file_of(name: str) -> Path | None:
    candidates = (folder / f"{name}.yaml" for folder in folders("cases") if _ID.fullmatch(name))
    return next((path for path in candidates if path.is_file()), None)


_Problems = Iterator[tuple[KeyPath, str]]


def case_problems(case: Case) -> list[tuple[KeyPath, str]]:
    """What the schema cannot say: (key path, message) for each problem."""
    if case.kind in ("arithmetic", "invariant"):
        return [] if case.function else [(("kind",), f"a case of kind {case.kind} needs 'function'")]
    return list(_problems(case))


def _problems(case: Case) -> _Problems:
    """The same of a case that launches something."""
    delta, looks, launched = case.delta, case.budget.pairs, "trainer" if case.trainer or not case.command else "command"
    missing = [field for field in (launched, "metric") if not getattr(case, field)]
    yield from (((field,), f"'{field}' is missing; a case of kind {case.kind} needs it") for field in missing)
    yield from _command_problems(case)
    if not case.profiles:
        yield ("kind",), "'profiles' is missing; name at least one machine class, such as cpu"
    yield from _variant_problems(case)
    yield from _names_problems(case)
    if (delta.data or delta.environment or delta.parameters or delta.ranks or delta.work) and not delta.reason:
        yield ("delta",), "'reason' is missing; say why the variants may differ in this"
    if case.guardrails.loss.relative is None and not case.guardrails.loss.reason:
        yield ("guardrails", "loss"), "'reason' is missing; say why the losses may differ"
    if looks != sorted(set(looks)) or not looks or looks[0] < 2:
        yield ("budget", "pairs"), f"looks are {looks}; expected rising numbers of at least 2, such as [4, 8, 12]"
    if any(look % 2 for look in looks):
        unit = "pair" if case.kind == "pair" else "block"
        yield ("budget", "pairs"), f"looks are {looks}; expected even numbers, since a {unit} and its reverse cancel drift"
    yield from _receipt_problems(case)


def _command_problems(case: Case) -> list[tuple[KeyPath, str]]:
    """Whether fields of commands belong to one, and every word of its templates has a value."""
    command_fields = [field for field in ("command", "steps", "trace", "prepare") if getattr(case, field)]
    if not case.command or case.trainer:
        return [((field,), f"'{field}' belongs to a case that launches a command; leave it out, or 'trainer'") for field in command_fields]
    deltas: dict[KeyPath, dict[str, Any]] = {("profiles", p): values for p, values in case.profiles.items()}
    deltas |= {(v if case.kind == "pair" else "kind",): delta for v, delta in case.variants.items()}
    deltas |= {("variant_profiles", p, v): d for p, variants in case.variant_profiles.items() for v, d in variants.items()}
    if problems := [problem for where, delta in deltas.items() for problem in delta_problems(where, delta)]:
        return problems
    texts: list[tuple[KeyPath, str]] = [(("command",), text) for text in (*case.command, *case.prepare)]
    texts += [(("steps",), case.steps.file or "")] if case.steps else []
    texts += [(("trace",), text) for text in (case.trace.file, *case.trace.arguments)] if case.trace else []
    for where, delta in deltas.items():
        texts += [(where, text) for text in (*delta.get("arguments", []), *delta.get("environment", {}).values())]
    secret, words = secret_word(case.command, case.prepare, deltas), {key for delta in deltas.values() for key in delta}
    return [secret] if secret else list(template_problems(texts, sorted(words - {*DELTAS, "ranks"})))


def _variant_problems(case: Case) -> _Problems:
    """Whether the fields that make the variants are those of the case's kind, and enough of them."""
    owners = {"baseline": "pair", "candidate": "pair", "knob": "sweep", "values": "sweep or prediction", "factors": "interaction"}
    yield from (
        ((field,), f"'{field}' belongs to a case of kind {kind}; this one is of kind {case.kind}")
        for field, kind in owners.items()
        if getattr(case, field) and case.kind not in kind.split(" or ")
    )
    yield from _predicted_problems(case)
    if case.kind == "sweep" and not case.knob:
        yield ("kind",), "'knob' is missing; say what the sweep varies"
    if case.kind == "sweep" and len(case.values) < 2:
        yield ("values",), f"a sweep has at least 2 values, found {len(case.values)}"
    if case.kind == "interaction" and len(case.factors) != 2:
        yield ("factors",), f"an interaction has 2 factors, found {len(case.factors)}"
    names = [v.name for v in case.values] if case.kind in ("sweep", "prediction") else list(case.variants)
    where = "values" if case.kind in ("sweep", "prediction") else "factors" if case.kind == "interaction" else "kind"
    twice = sorted({n for n in names if names.count(n) > 1})
    yield from (((where,), f"'{n}' is used twice; each value needs its own name") for n in twice)
    if case.kind == "interaction" and len(case.factors) == 2 and len(names) < 4:
        yield ("factors",), "the levels of a factor have the same name; give each its own"
    yield from (
        ((where,), f"'{n}' names a folder too; expected letters, digits and . _ + -, at most 64") for n in names if not _NAME.match(n)
    )


def _predicted_problems(case: Case) -> _Problems:
    """Whether each value of a prediction, and of nothing else, has one, inside its own interval."""
    if case.kind == "prediction" and not case.values:
        yield ("values",), "a prediction has at least 1 value: what runs, and what was predicted for it"
    levels = [level for f in case.factors for level in (f.low, f.high)]
    if case.kind != "prediction" and any(v.predicted for v in (*case.values, *levels)):
        yield ("kind",), f"'predicted' belongs to a case of kind prediction; this one is of kind {case.kind}"
    for i, v in enumerate(case.values if case.kind == "prediction" else []):
        p = v.predicted
        if p is None:
            yield ("values", i), f"'predicted' is missing for {v.name}; expected its value, low and high"
        elif not p.low <= p.value <= p.high:
            yield ("values", i), f"predicted {p.value:g} does not lie from {p.low:g} to {p.high:g}"


def _names_problems(case: Case) -> _Problems:
    """Profiles and variants that a part of the case speaks of and the case has not: what is said of them would be passed over."""
    by_profile = case.variant_profiles
    yield from (
        (("variant_profiles", name), f"profile '{name}' is not among profiles{did_you_mean(name, case.profiles)}")
        for name in by_profile
        if name not in case.profiles
    )
    places: list[KeyPath] = [("variant_profiles", p, v) for p, variants in by_profile.items() for v in variants]
    places += [("delta", "environment", v) for v in case.delta.environment]
    expected = " or ".join(case.variants)
    yield from ((where, f"variant '{where[-1]}' is not known; expected {expected}") for where in places if where[-1] not in case.variants)


def _receipt_problems(case: Case) -> _Problems:
    """Whether every variant is proven by a rule that can fail, and each rule looks at one thing."""
    for variant in case.variants:
        receipt = case.activation.of(variant)
        if case.command and not (receipt.require or receipt.forbid):
            continue  # allowed, and the verdict says that nothing proves its path
        if all(r.range in _GENERIC_RANGES for r in (*receipt.require, *receipt.forbid)):
            place = ("activation", variant) if case.kind == "pair" else ("activation",)
            yield place, f"nothing proves that the {variant} ran as meant; require or forbid a collective, a counter or a kernel"
    yield from (
        (("activation", name), f"'{name}' is no variant of a case of kind {case.kind}; use every and variants")
        for name in ("baseline", "candidate")
        if case.kind != "pair" and getattr(case.activation, name) != Receipt()
    )
    yield from (
        (("activation", "variants", name), f"variant '{name}' is not known{did_you_mean(name, case.variants)}")
        for name in case.activation.variants
        if name not in case.variants
    )
    for where, receipt in receipts(case):
        for kind in ("require", "forbid"):
            for i, rule in enumerate(getattr(receipt, kind)):
                for key, message in _rule_problems(rule, kind, case):
                    yield (*where, kind, i, *key), message


def _rule_problems(rule: Rule, kind: str, case: Case) -> _Problems:
    """What is wrong with one rule that is required or forbidden; keys are those inside the rule."""
    if sum(x is not None for x in (rule.collective, rule.range, rule.counter, rule.kernel, rule.log)) != 1:
        yield (), "a rule looks at exactly one of collective, range, counter, kernel and log"
    for key in ("kernel", "log"):
        if (pattern := getattr(rule, key)) is not None and (problem := _pattern_problem(pattern)):
            yield (key,), problem
    yield from _not_of_commands(rule, case) if case.command else _empty(rule)
    if kind == "forbid" and rule.count is not None:
        yield (), "a forbidden thing has no count; use require with op and count"


def _not_of_commands(rule: Rule, case: Case) -> _Problems:
    """What a command's launches cannot show."""
    if rule.counter:
        yield ("counter",), "a command counts nothing by itself; use log, or kernel, range or collective with a trace"
    for key in ("collective", "range", "kernel"):
        if case.trace is None and getattr(rule, key) is not None:
            yield (key,), f"'{key}' is looked for in a trace; name it in 'trace', or use log"


def _empty(rule: Rule) -> _Problems:
    """What makes a rule hold whatever ran, or look at something else than it says."""
    if rule.log is not None:
        yield ("log",), "'log' belongs to cases that launch a command"
    for key in ("inside", "group", "phase"):
        if getattr(rule, key) is not None and rule.collective is None:
            yield (key,), f"'{key}' is asked of collectives alone; leave it out, or name a collective"
    # What a collective is inside of is told without the pass, which has a key of its own.
    for key, name in (("range", rule.range and rule.range.removesuffix(".bwd")), ("inside", rule.inside)):
        if name is not None and name not in RANGES:
            yield (key,), f"the trainer has no range '{name}'{did_you_mean(name, RANGES)}"
    if rule.group is not None and not set(rule.group.split("_")) <= GROUP_WORDS:
        yield ("group",), f"the trainer has no process group '{rule.group}'{did_you_mean(rule.group, GROUP_WORDS)}"
    if rule.op == ">=" and re.fullmatch(r"-[0-9.]+|[0.]+", str(rule.count).strip()):
        yield ("count",), f"'>= {rule.count}' holds whatever runs; expected at least 1"


def _pattern_problem(pattern: str) -> str:
    """Why a pattern cannot be searched for, or nothing. Repeats of repeats, or many in a row, can take for ever on a long name."""
    try:
        re.compile(pattern)
    except re.error as e:
        return f"'{pattern}' is no regular expression: {e}"
    if re.search(pattern, ""):
        return f"'{pattern}' is found in an empty text too, so it tells nothing; write a part of the kernel's name, or of the line"
    many = re.search(r"\)[*+{]", pattern) or sum(pattern.count(c) for c in "*+{") > _MAX_REPEATS
    return f"'{pattern}' repeats a group, or repeats more than {_MAX_REPEATS} times; write the names themselves" if many else ""


def case_file(name: str) -> Path:
    """The file of a case: the path itself, or that of the id.

    Raises:
        FileError: no case has the id.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _file_of(name)
    if path is None:
        claim = by_claim(load_all()).get(name)
        advice = f"; it is a claim: playbook confirm {claim[0]}/{name}" if claim else did_you_mean(name, list_cases())
        raise FileError([Finding(name, 1, 1, f"no such case{advice or '; name its file (.yaml), or one that playbook bench list names'}")])
    return path


def receipts(case: Case) -> list[tuple[KeyPath, Receipt]]:
    """Every receipt that the case writes down, with its place."""
    proof = case.activation
    named = [(("activation", name), getattr(proof, name)) for name in ("baseline", "candidate", "every")]
    return [*named, *((("activation", "variants", name), receipt) for name, receipt in proof.variants.items())]
