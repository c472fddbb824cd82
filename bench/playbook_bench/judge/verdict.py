"""From what was measured to a verdict: a pure function, so that a replay gives the same answer.

Order, first match wins: what the machine lacks; runs that failed; paths that did not run; pairs that are not pairs; a noisy
machine; drifting steps; and only then the effect, by its interval against the claimed margin, never by its point estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from playbook.cards.model import Expect, Quantity
from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.records.evidence import Check, Comparison, Derived, Gate, Measured, Plan, Reason, Run, Status, Variant, Verdict
from playbook_bench.judge import guards, metrics, receipt, statistics
from playbook_bench.judge.metrics import Metric

EXACT_TOLERANCE = 1e-9
_GIB = 2.0**30
_ABSOLUTE = {"count": 1.0, "bytes": 1.0, "gib": _GIB, "tokens": 1.0, "seconds": 1.0, "points": 0.01, "flops": 1.0, "gpus": 1.0}
_OP_WORDS = {">=": "at least", "<=": "at most", "within": "equal within"}

Statement = tuple[bool, str, dict[str, Any]]
"""Whether an arithmetic statement or an invariant holds, the sentence that says why, and the figures behind it."""


def threshold(metric: Metric, margin: Quantity | None) -> float:
    """The margin on the metric's scale.

    Raises:
        ConfigError: the margin's unit does not fit the metric.
    """
    if margin is None:
        return 0.0
    if metric.scale == "log_ratio":
        ratio = {"percent": 1 + margin.value / 100, "ratio": margin.value}.get(margin.unit)
        if ratio is None or ratio <= 0:
            raise ConfigError(
                f"margin {margin.value:g} {margin.unit} does not fit {metric.name}; write percent above -100, or a positive ratio"
            )
        return math.log(ratio)
    if margin.unit not in _ABSOLUTE:
        raise ConfigError(f"margin unit {margin.unit} does not fit {metric.name}, which is compared by difference; write points or count")
    return margin.value * _ABSOLUTE[margin.unit]


def decide(op: str, margin: float, low: float, high: float) -> Status | None:
    """What an interval says about the margin; None where it says nothing yet."""
    if op == ">=":
        return "confirmed" if low >= margin else "refuted" if high < margin else None
    if op == "<=":
        return "confirmed" if high <= margin else "refuted" if low > margin else None
    if op == "within":
        if -margin < low and high < margin:
            return "confirmed"
        return "refuted" if low > margin or high < -margin else None
    raise ConfigError(f"'{op}' does not compare two runs; expected >=, <= or within")


def derive(measured: Measured, statement: Statement | None = None) -> Derived:
    """The verdict and its figures.

    `statement` is what the function of an arithmetic or invariant case gave.

    Raises:
        ConfigError: the claim's metric or margin cannot be applied.
    """
    if measured.missing:
        text = "; ".join(m.detail for m in measured.missing)
        return Derived(verdict=Verdict(status="not_applicable", reason=measured.missing[0].reason, sentence=f"not applicable: {text}"))
    if measured.case is None:
        raise ConfigError("a record without a case must say what is missing")
    case = measured.case.content
    if case.kind in ("arithmetic", "invariant"):
        if statement is None:
            raise ConfigError(f"case '{case.id}' is of kind {case.kind}: its verdict needs what its function gave")
        holds, sentence, figures = statement
        return Derived(figures=figures, verdict=_verdict("confirmed" if holds else "refuted", "exact", sentence))
    metric, expect = _subject(measured, case)
    plan = measured.plan
    if plan is None:
        raise ConfigError("a record of runs must hold the plan that was fixed before them")
    if case.kind in ("sweep", "interaction"):
        from playbook_bench.judge import curve

        return curve.derive(measured, case, metric, expect, plan)
    failed = failure(measured.runs, metric)
    checks = receipt.judge_runs(case.activation, [r for r in measured.runs if r.role == "measure" and r.outcome == "ok"])
    if failed:
        return Derived(receipts=checks, verdict=failed)
    unusable = faulty([r for r in measured.runs if r.outcome == "ok"], metric, checks)
    if unusable:
        return Derived(receipts=checks, verdict=unusable)
    pairs = guards.pairs_of(measured.runs)
    if not pairs:
        out_of_time = Derived(receipts=checks, verdict=_verdict("inconclusive", "budget", "the budget ended before the first pair of runs"))
        return from_the_start(measured, case, metric, lambda first: pair_gates(measured, case, metric, [_pair(first)])) or out_of_time
    if metric.name == "fits":
        return Derived(comparison=(c := exact(metric, pairs)), receipts=checks, verdict=_on_exact(c, metric, expect))
    return _compare(measured, case, plan, metric, expect, checks, pairs)


def _compare(
    measured: Measured, case: Case, plan: Plan, metric: Metric, expect: Expect | None, checks: list[Check], pairs: list[guards.Pair]
) -> Derived:
    conditions = pair_gates(measured, case, metric, pairs)
    if unlike := incomparable(conditions, checks):
        return unlike
    if metric.deterministic:
        moved = next((s for side in zip(*pairs, strict=True) if (s := spread(metric, side))), "")
        conditions.append(Gate(name="repeatable", ok=not moved, detail=moved))
        comparison = exact(metric, pairs)
        verdict = _verdict("inconclusive", "environment", moved) if moved else _on_exact(comparison, metric, expect)
        return Derived(comparison=comparison, receipts=checks, gates=conditions, verdict=verdict)
    noise, floor = guards.noise(metric, measured.runs, measured.aa)
    # Of the pairs to the first look, at which a drifting series starts over: a test at each look would reject more often than it promises.
    steady = guards.steady(pairs[: plan.looks[0]], tolerance=guards.step_deviation(measured.aa))
    conditions += [noise, steady]
    found = compare_launches(metric, pairs, floor, plan, expect)
    if not noise.ok:
        verdict = _verdict("inconclusive", "environment", f"this machine is too noisy for a verdict now: {noise.detail}")
    elif not steady.ok:
        verdict = _verdict("inconclusive", "not_steady", f"step time still drifts: {steady.detail}")
    else:
        verdict = _on_interval(found, metric, expect, plan)
    return Derived(comparison=found, receipts=checks, gates=conditions, verdict=verdict)


def incomparable(conditions: list[Gate], checks: list[Check], what: str = "the runs cannot be compared") -> Derived | None:
    """Runs that do not meet the conditions have no verdict; None where they do."""
    broken = "; ".join(f"{g.name}: {g.detail}" for g in conditions if not g.ok)
    return (
        Derived(receipts=checks, gates=conditions, verdict=_verdict("inconclusive", "invalid_pair", f"{what}: {broken}"))
        if broken
        else None
    )


def from_the_start(
    measured: Measured, case: Case, metric: Metric, conditions: Callable[[dict[Variant, Run]], list[Gate]]
) -> Derived | None:
    """What the first, discarded run of each variant shows before any pair: a path that did not run, or runs that cannot be compared. None where all is well so far.

    Their speed is not looked at, for they warm up caches and machine. What is looked at would end the series at its first look anyway.
    """
    ran = {r.variant: r for r in measured.runs if r.role == "burn_in" and r.outcome == "ok"}
    if ran.keys() != set(case.variants):
        return None
    first = {v: ran[v] for v in case.variants}
    checks = receipt.judge_runs(case.activation, list(first.values()))
    if unusable := faulty([], metric, checks):
        return Derived(receipts=checks, verdict=unusable)
    return incomparable(conditions(first), checks, "the first run of each shows that they cannot be compared")


def _pair(runs: Mapping[Variant, Run]) -> guards.Pair:
    return runs["baseline"], runs["candidate"]


def pair_gates(measured: Measured, case: Case, metric: Metric, pairs: Sequence[guards.Pair], allowed: Collection[str] = ()) -> list[Gate]:
    """Every condition that makes two runs a pair."""
    return [
        guards.configurations(case, measured.configs, pairs),
        guards.environment(case, measured.strict, [r for pair in pairs for r in pair], allowed),
        guards.data(case, pairs),
        guards.parameters(case, pairs),
        guards.work(case, metric, pairs),
        guards.loss(case, pairs),
    ]


def compare_launches(metric: Metric, pairs: Sequence[guards.Pair], floor: float, plan: Plan, expect: Expect | None) -> Comparison:
    """The effect over pairs of launches, with the interval of the look that this number of pairs belongs to."""
    values = [(required(metric, a), required(metric, b)) for a, b in pairs]
    differences = [guards.compare(metric, a, b) for a, b in values]
    n = len(pairs)
    alpha = plan.alpha / len(plan.looks)
    out: dict[str, Any] = {}
    if n >= 2:
        found = statistics.interval(differences, alpha, floor)
        distance = None if expect is None else found.mean - _nearest(expect, threshold(metric, expect.margin), found.mean)
        out = {
            "low": as_effect(metric, found.low),
            "high": as_effect(metric, found.high),
            "deviation": found.deviation,
            "hodges_lehmann": statistics.hodges_lehmann(differences),
            "sign_flip_p": statistics.sign_flip_p(differences) if n <= 16 else None,
            "mde": statistics.least_effect(n, found.used, alpha),
            "pairs_needed": None if distance is None else statistics.pairs_needed(distance, found.used, alpha),
        }
    mean = math.fsum(differences) / n
    return Comparison(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="launches_abba",
        scale=metric.scale,
        baseline=math.fsum(a for a, _ in values) / n,
        candidate=math.fsum(b for _, b in values) / n,
        effect=as_effect(metric, mean),
        pairs=n,
        look=plan.looks.index(n) + 1 if n in plan.looks else None,
        alpha_look=alpha,
        differences=differences,
        mean=mean,
        floor=floor,
        **out,
    )


def _on_interval(found: Comparison, metric: Metric, expect: Expect | None, plan: Plan) -> Verdict:
    shown = show_effect(found)
    if expect is None:
        return _verdict("measured", "no_claim", shown)
    wanted = show_expect(expect)
    if found.look is None or found.low is None or found.high is None or found.deviation is None:
        return _verdict(
            "inconclusive",
            "budget",
            f"{shown}; stopped after {found.pairs} pairs, a verdict needs {_next(plan, found.pairs)}; claimed {wanted}",
        )
    exact = statistics.interval(found.differences, plan.alpha / len(plan.looks), found.floor or 0.0)
    status = decide(expect.op, threshold(metric, expect.margin), exact.low, exact.high)
    if status and expect.op == ">=" and found.hodges_lehmann is not None and found.hodges_lehmann * exact.mean < 0:
        return _verdict("inconclusive", "fragile", f"{shown}; the median of the pairs points the other way")
    if status:
        return _verdict(status, "margin", f"{shown}; claimed {wanted}")
    more = "" if found.pairs_needed is None else f"; about {found.pairs_needed} pairs would settle it"
    if found.pairs < plan.looks[-1]:
        return _verdict(
            "inconclusive", "budget", f"{shown}; claimed {wanted}; undecided after {found.pairs} of {plan.looks[-1]} pairs{more}"
        )
    return _verdict("inconclusive", "power", f"{shown}; claimed {wanted}; undecided after all {found.pairs} pairs{more}")


def _on_exact(found: Comparison, metric: Metric, expect: Expect | None) -> Verdict:
    shown = show_effect(found)
    if expect is None:
        return _verdict("measured", "no_claim", shown)
    margin = threshold(metric, expect.margin)
    value = found.differences[0] if found.differences else unbounded(found)
    slack = EXACT_TOLERANCE * max(1.0, abs(margin))
    ok = {">=": value >= margin - slack, "<=": value <= margin + slack, "within": abs(value) <= margin + slack}.get(expect.op)
    if ok is None:
        raise ConfigError(f"'{expect.op}' does not compare two runs; expected >=, <= or within")
    return _verdict("confirmed" if ok else "refuted", "exact", f"{shown}; claimed {show_expect(expect)}")


def exact(metric: Metric, pairs: Sequence[guards.Pair]) -> Comparison:
    """The effect of a deterministic metric, from the first pair; the rest must repeat it."""
    a, b = (required(metric, r) for r in pairs[0])
    found = guards.compare(metric, a, b)
    finite = math.isfinite(found)
    effect = as_effect(metric, found) if finite else None
    return Comparison(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="deterministic",
        scale=metric.scale,
        baseline=a,
        candidate=b,
        effect=effect,
        low=effect,
        high=effect,
        pairs=1,
        differences=[found] if finite else [],
        mean=found if finite else None,
    )


def unbounded(found: Comparison) -> float:
    """A ratio against zero: infinitely better or worse."""
    better = found.candidate > found.baseline if found.better == "higher" else found.candidate < found.baseline
    return math.inf if better else -math.inf


def spread(metric: Metric, runs: Sequence[Run]) -> str:
    """How a metric that should repeat exactly differs between launches of one variant, or nothing."""
    values = [required(metric, r) for r in runs]
    if max(values) - min(values) > EXACT_TOLERANCE * max(abs(v) for v in values):
        return f"{metric.name} should repeat exactly, but the {runs[0].variant}'s launches gave {min(values):g} to {max(values):g}"
    return ""


def failure(runs: Sequence[Run], metric: Metric) -> Verdict | None:
    """A run error beats out of memory: it says that the figures behind the rest may be wrong too."""
    bad = [r for r in runs if r.outcome != "ok" and not (metric.name == "fits" and r.outcome == "oom")]
    other = next((r for r in bad if r.outcome != "oom"), None)
    if other is not None:
        text = {
            "nan": "printed a NaN loss",
            "hang": "stopped making progress",
            "crash": "crashed",
            "killed": "was killed",
            "refused": "was refused",
        }[other.outcome]
        return _verdict("error", "run_error", f"a {other.variant} run {text}: {first_line(other.message)}")
    if bad:
        return _verdict("inconclusive", "oom", f"a {bad[0].variant} run was out of memory: {first_line(bad[0].message)}")
    return None


def faulty(runs: Sequence[Run], metric: Metric, checks: Sequence[Check]) -> Verdict | None:
    """What follows from launches whose figures or receipts cannot be used, or None."""
    for run in runs:
        problem = None if run.role == "burn_in" else guards.complete(run, metric)
        if problem:
            return _verdict("error", "run_error", f"a run cannot be used: {problem}")
    dead = next((c for c in checks if not c.ok), None)
    if dead is not None:
        seen = "not reported" if dead.observed is None else f"{dead.observed:g}"
        return _verdict(
            "error", "not_activated", f"the {dead.variant} did not run as configured: {dead.rule}, expected {dead.expected}, found {seen}"
        )
    return None


def _subject(measured: Measured, case: Case) -> tuple[Metric, Expect | None]:
    if measured.claim is not None:
        return metrics.get(measured.claim.metric), measured.claim.expect
    return metrics.get(case.metric or ""), None


def required(metric: Metric, run: Run) -> float:
    """The metric's value of a launch that must have one."""
    value = metric.value(run)
    if value is None:
        raise ConfigError(f"run {run.run_id} reports no {metric.name}")
    return value


def _nearest(expect: Expect, margin: float, mean: float) -> float:
    return math.copysign(margin, mean) if expect.op == "within" else margin


def _next(plan: Plan, pairs: int) -> int:
    return next((look for look in plan.looks if look > pairs), plan.looks[-1])


def as_effect(metric: Metric, value: float) -> float:
    """A difference on the metric's scale as a share, or as it is."""
    return math.expm1(value) if metric.scale == "log_ratio" else value


def show_effect(found: Comparison, between: bool = False) -> str:
    """The effect in words, such as `+3.6 % [3.1, 4.2]`; a share is shown in points.

    A verdict's sentence has the interval of a look only; `between` shows that of other numbers of pairs too. It holds as well: what stops a
    series there is time, not the effect, and no more than the planned number of looks is ever taken, so it spends the next one's share.
    """
    if found.effect is None:
        return f"{found.baseline:g} -> {found.candidate:g} {found.unit}, without bound as a ratio"
    relative = found.scale == "log_ratio"
    points = found.unit == "share"
    factor, unit, digits = (100, "%", 1) if relative else (100, "points", 1) if points else (1, found.unit, 3)
    text = f"{factor * found.effect:+.{digits}f} {unit}"
    if (found.look is None and not between) or found.low is None or found.high is None:
        return text
    return f"{text} [{factor * found.low:.{digits}f}, {factor * found.high:.{digits}f}]"


def show_expect(expect: Expect) -> str:
    """The expectation in words, such as `at least 5 %`."""
    margin = expect.margin or Quantity(value=0.0, unit="percent")
    unit = {"percent": " %", "ratio": " times"}.get(margin.unit, f" {margin.unit}")
    return f"{_OP_WORDS.get(expect.op, expect.op)} {margin.value:g}{unit}"


def _verdict(status: Status, reason: Reason, sentence: str) -> Verdict:
    return Verdict(status=status, reason=reason, sentence=sentence)


def first_line(text: str) -> str:
    """The first line of a message that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]
