"""Activation proof: what a run's receipt must show, and must not show, before its speed means anything; and how the test behind a record
has been edited since: the settings of its case, its activation rules, or the trainer's configuration that the case names.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

from playbook.errors import ConfigError, PlaybookError
from playbook.records.case import Activation, Case, Receipt, Rule, is_shipped, load_case
from playbook.records.evidence import Check, Measured, Observed, Run, Variant
from playbook_bench.variants.resolve import resolve

_MAX_FORMULA = 200
_COUNT_TOLERANCE = 1e-9
_ALIKE = "both variants print what proves the candidate, so nothing shows that its path ran"

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda count, expected: abs(count - expected) <= _COUNT_TOLERANCE * max(1.0, abs(expected)),
    ">=": operator.ge,
    "<=": operator.le,
}


class Launched(Protocol):
    """A launch, as far as its receipt goes."""

    @property
    def variant(self) -> Variant:
        """Which variant was launched."""

    @property
    def observed(self) -> Observed | None:
        """What was seen in its observed step; None where nothing was looked at."""


def evaluate(formula: str, numbers: Mapping[str, float]) -> float:
    """The value of an arithmetic formula over `numbers`: names, numbers, + - * / // % and parentheses, nothing else.

    Raises:
        ConfigError: anything else, an unknown name, or a division by zero.
    """
    if len(formula) > _MAX_FORMULA:
        raise ConfigError(f"count formula has {len(formula)} characters; at most {_MAX_FORMULA} are read")
    try:
        return _value(_parsed(formula), numbers, formula)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ConfigError(f"count formula '{formula}' is not arithmetic; write for example 4 * layers * microbatches") from e
    except ZeroDivisionError as e:
        raise ConfigError(f"count formula '{formula}' divides by zero with {dict(numbers)}") from e


@cache
def _parsed(formula: str) -> ast.expr:
    """The formula as a syntax tree; a list of all records evaluates the same few formulas for each launch."""
    return ast.parse(formula, mode="eval").body


def _value(node: ast.expr, numbers: Mapping[str, float], formula: str) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        if node.id not in numbers:
            raise ConfigError(
                f"count formula '{formula}': '{node.id}' is not in the receipt; it has: {', '.join(sorted(numbers)) or 'nothing'}"
            )
        return float(numbers[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers, formula), _value(node.right, numbers, formula))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers, formula)
    raise ConfigError(f"count formula '{formula}' uses {type(node).__name__}; only names, numbers, + - * / // % and parentheses are read")


def computing(runs: Sequence[Run], variant: Variant) -> float | None:
    """Median share of the traced step, in percent, during which the GPU computed; None off the GPU.

    A low share says that other ranks or the host are what was timed, and that a machine with faster ones may see another effect.
    """
    shares = [
        s for r in runs if r.variant == variant and r.observed and (s := r.observed.counters.get("gpu_computing_percent")) is not None
    ]
    return statistics.median(shares) if shares else None


def _describe(rule: Rule) -> str:
    """The rule's subject in words, such as `all_to_all inside dispatch on ep`."""
    kernel, line = f"kernel {rule.kernel}" if rule.kernel else "", f"line {rule.log}" if rule.log else ""
    subject = rule.collective or rule.range or rule.counter or kernel or line or "nothing"
    inside = f" inside {rule.inside}" if rule.inside else ""
    group = f" on {rule.group}" if rule.group else ""
    phase = f" in the {rule.phase} pass" if rule.phase else ""
    return f"{subject}{inside}{group}{phase}"


def observe(rule: Rule, observed: Observed) -> float | None:
    """How often the rule's subject appears; None where the run does not report it."""
    if rule.collective is not None:
        return float(
            sum(
                c.count
                for c in observed.collectives
                if c.op == rule.collective
                and (rule.inside is None or rule.inside in (c.inside or "").split("/"))
                and (rule.group is None or rule.group == c.group)
                and (rule.phase is None or rule.phase == c.phase)
            )
        )
    if rule.range is not None:
        return float(observed.ranges.get(rule.range, 0))
    if rule.counter is not None:
        return observed.counters.get(rule.counter)
    if rule.log is not None:
        return observed.logs.get(rule.log)
    if rule.kernel is not None and observed.kernels:
        return float(sum(count for name, count in observed.kernels.items() if re.search(rule.kernel, name)))
    return None


def judge_rule(rule: Rule, forbid: bool, variant: Variant, observed: Observed) -> Check:
    """One rule against one receipt. What a run does not report, or does not give the numbers to count, is not proven."""
    count = observe(rule, observed)
    subject = f"{'forbid' if forbid else 'require'} {_describe(rule)}"
    if forbid:
        op, expected, formula = "==", 0.0, "0"
    elif rule.count is None:
        op, expected, formula = ">=", 1.0, "1"
    else:
        formula = str(rule.count)
        op = rule.op
        try:
            expected = evaluate(formula, observed.numbers)
        except ConfigError:  # the runs are paid for by now; they must leave a record
            return Check(variant=variant, rule=subject, observed=None, expected=f"{op} {formula}", ok=False)
    shown = formula if formula == f"{expected:g}" else f"{formula} = {expected:g}"
    # An overflow to infinity would be within the tolerance of any count.
    ok = count is not None and math.isfinite(expected) and _COMPARE[op](count, expected)
    return Check(variant=variant, rule=subject, observed=count, expected=f"{op} {shown}", ok=ok)


def judge_run(activation: Activation, run: Launched) -> list[Check]:
    """All rules of the run's variant against its receipt; a run without a receipt proves nothing."""
    rules = activation.of(run.variant)
    observed = run.observed or Observed()
    return [
        *(judge_rule(r, False, run.variant, observed) for r in rules.require),
        *(_unproven(judge_rule(r, True, run.variant, observed), run) for r in rules.forbid),
    ]


def _unproven(check: Check, run: Launched) -> Check:
    """The check of a `forbid` rule, failed if the run has no receipt: what nobody looked for is not proven absent."""
    return check if run.observed is not None else check.model_copy(update={"ok": False, "observed": None})


def judge_case(case: Case, runs: Sequence[Run], roles: Collection[str] = ("measure",)) -> list[Check]:
    """The case's rules over the launches that can show them: a command's trace comes from its discarded launch, all else from those of
    `roles`.
    """
    ended = [r for r in runs if r.outcome == "ok"]
    checks = judge_runs(_rules(case.activation, traced=False) if case.trace else case.activation, [r for r in ended if r.role in roles])
    if case.trace:
        checks += judge_runs(_rules(case.activation, traced=True), [r for r in ended if r.role == "burn_in"])
    return checks + alike(case, [r for r in ended if r.role in (("burn_in",) if case.trace else roles)], checks)


def alike(case: Case, runs: Sequence[Launched], checks: Sequence[Check]) -> list[Check]:
    """One failed check where the two commands of a pair meet each other's rules as well as their own, which `checks` says: such rules tell
    no path from the other.

    Rules that both share say nothing of the difference, and are left alone. So are rules of a trace alone: it shows what ran, a line what a
    script says.
    """
    proof = case.activation
    lines = any(r.log for of in (proof.baseline, proof.candidate) for r in (*of.require, *of.forbid))
    comparable = case.command and lines and proof.baseline != proof.candidate
    if not comparable or not {r.variant for r in runs} >= {"baseline", "candidate"} or not all(c.ok for c in checks):
        return []
    exchanged = proof.model_copy(update={"baseline": proof.candidate, "candidate": proof.baseline})
    indistinct = all(c.ok for c in judge_runs(exchanged, runs))
    return (
        [Check(variant="candidate", rule=_ALIKE, observed=None, expected="a pattern that only its lines match", ok=False)]
        if indistinct
        else []
    )


def in_words(check: Check, before: str = "", by: str = ", expected ") -> str:
    """A check in one line; rules that tell no path from the other have words of their own, without what comes `before`."""
    if check.rule == _ALIKE:
        return f"{check.rule}: expected {check.expected}"
    observed = "not reported" if check.observed is None else f"{check.observed:g}"
    return f"{before}{check.rule}{by}{check.expected}, found {observed}"


def _rules(activation: Activation, traced: bool) -> Activation:
    """Those rules alone that look at a trace, or those that do not."""

    def part(of: Receipt) -> Receipt:
        require, forbid = ([r for r in rules if (r.log is None) is traced] for rules in (of.require, of.forbid))
        return Receipt(require=require, forbid=forbid)

    parts = {name: part(getattr(activation, name)) for name in ("baseline", "candidate", "every")}
    return Activation(**parts, variants={name: part(of) for name, of in activation.variants.items()})


def judge_runs(activation: Activation, runs: Sequence[Launched]) -> list[Check]:
    """One line per rule over all `runs`: the first failure where there is one, else the last run's figures."""
    lines: dict[tuple[str, str, str], list[Check]] = {}
    for run in runs:
        for i, check in enumerate(judge_run(activation, run)):
            lines.setdefault((run.variant, str(i), check.rule), []).append(check)
    out = []
    for checks in lines.values():
        worst = next((c for c in checks if not c.ok), checks[-1])
        out.append(worst.model_copy(update={"runs": len(checks)}))
    return sorted(out, key=lambda c: c.variant)


_SHOWN, _LONG = 4, 60
_PLACES = frozenset({"output", "data.path", "init.weights", "checkpoint.dir", "checkpoint.export"})
"""Keys that hold paths; what is computed does not depend on them, so they are not compared."""


def case_changes(measured: Measured) -> list[str]:
    """How today's case differs from the one that a record was measured with: a few words for each setting, with both values. Empty if it
    does not, or no such case ships.

    Settings that the trainer's tree has gained or lost since are not compared: its performance revision speaks for those. Budgets and
    bounds are not either: they decide nothing about what ran. Of proofs only what the record's launches do not show counts: a proof that
    they meet as well is no other test.
    """
    if measured.case is None or not is_shipped(measured.case.id):
        return []
    try:
        today = load_case(measured.case.id)
    except PlaybookError:
        return []  # others say what is wrong with such a case
    changes = list(_differences(measured, measured.case.content, today))
    omitted = len(changes) - _SHOWN
    return changes[:_SHOWN] + ([f"{omitted} more"] if omitted > 0 else [])


def _differences(then: Measured, content: Case, today: Case) -> Iterator[str]:
    """In words, what sets today's case apart from `content`, the one that the record `then` holds: its settings, then what its proof
    misses.
    """
    if (content.function, content.arguments) != (today.function, today.arguments):
        yield "what the case computes"
    if content.delta.environment != today.delta.environment:
        yield "environment variables of the variants"
    if then.plan is not None and content.budget.pairs != today.budget.pairs:
        yield f"looks {_short(content.budget.pairs)} -> {_short(today.budget.pairs)}"
    predictions = {v.name: v.predicted for v in today.values}
    edited = [
        (v.name, v.predicted, predictions.get(v.name)) for v in content.values if v.predicted and v.predicted != predictions.get(v.name)
    ]
    yield from (f"the prediction of {name}: {_short(a)} -> {_short(b)}" for name, a, b in edited)
    variants = {run.variant: run for run in then.runs}
    if not variants or then.profile is None:
        return
    if set(variants) - set(today.variants) or then.profile not in today.profiles:
        yield f"the case's variants, or its profile {_short(then.profile)}"
        return
    settings: dict[str, dict[str, str]] = {}
    for name, run in variants.items():
        try:
            now = resolve(today, name, then.profile)
        except PlaybookError:
            yield f"the configuration of {name}, which cannot be read"
            continue
        if then.plan is not None and then.plan.extended:
            now = now.extended()  # as the harness has done then
        was = {**then.configs.get(run.config_sha, {}), "ranks": run.ranks}
        for key, a, b in _changed(was, {**now.dump, "ranks": now.ranks}):
            settings.setdefault(key, {})[name] = f"{key} {_short(a)} -> {_short(b)}"
    unmet = (check for check in judge_case(today, then.runs) if not check.ok)
    yield from (in_words(check, f"{check.variant}: its proof wants ", " ") for check in unmet)
    for _, texts in sorted(settings.items()):
        common = len(texts) == len(variants) and all(a == b for a, b in pairwise(texts.values()))
        yield from [next(iter(texts.values()))] if common else [f"{name}: {text}" for name, text in texts.items()]


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys that both trees have and that differ, with both values; a part that is there in one alone, such as a tower, is one
    key.
    """
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
