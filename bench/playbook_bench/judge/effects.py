"""Effects over blocks of variants, with their intervals: what a claim may say of them, and when it is confirmed and refuted.

A pair is a sweep with two variants. Its record has the shape `Comparison`, all others have `Curve`.

A rule names the contrasts that it looks at before any run, and decides from their intervals alone. The intervals hold together
(Bonferroni), so a rule may pick among them: a wrong verdict of either kind is no likelier than the error rate of the look.

`gain(i, j)` is how much better variant i is than variant j, in the metric's own direction; L and U are the ends of its interval and m
is the claimed margin. Refuted means that the interval rules the claim out, so each rule's refutation is its negation.

| op | the claim is confirmed, and refuted, where |
|---|---|
| `>=` | the gain of the last variant over the first is at least m: L >= m; U < m |
| `<=` | it is at most m: U <= m; L > m |
| `within` | it is within m: both ends inside [-m, m]; U < -m or L > m |
| `best` | a value of `at` is within m of the best: for some i in `at`, U(j, i) <= m for every other j; for each i, L(j, i) > m for some j |
| `not_best` | some value beats each of `at` by m: for each i in `at`, L(j, i) >= m for some j; for some i, U(j, i) < m for every other j |
| `band` | every value is within m of the first: all of L, U(j, first) inside [-m, m]; some L > m or U < -m |
| `rising` | each step gains m: every L(next, previous) >= m; some U < m |
| `knee` | steps gain m up to a knee (one of `at`, if given), and at most m after: L >= m, then U <= m; steps rule out every knee |
| `reaches` | only the last value is within m of `at`: L(at, j) >= m for others, U(at, last) <= m; some U(at, j) < m, or L(at, last) > m |
| `crossover` | the first factor gains m at the second's low level and loses m at its high one: both L >= m; one U < m |
| `inside` | each value lies in the interval that was predicted for it: both ends of each inside; some L > high or U < low |
| `excludes` | exactly the variants of `infeasible` cannot run: all their launches were refused or out of memory; one of them ran |

For an interaction, `>=`, `<=` and `within` speak of the first factor's gain at the second's high level less that at its low one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from playbook.cards.model import Expect, Quantity
from playbook.errors import ConfigError
from playbook.planner.memory import GIB
from playbook.records.case import Case
from playbook.records.evidence import Comparison, Condition, Contrast, Curve, Plan, PointFigure, Run, Variant
from playbook_bench.judge import design, guards, statistics
from playbook_bench.judge.verdict_rules import Rules
from playbook_bench.metrics import Metric

_Bounds = tuple[float, float]
Status = bool | None
"""True: confirmed. False: refuted. None: the intervals do not say."""


@dataclass(frozen=True)
class RuleContrast:
    """One contrast that a rule looks at."""

    name: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class ClaimRule:
    """A claim's rule with what it speaks of: the variants that ran, in order, and the margin on the metric's scale."""

    op: str
    names: Sequence[str]
    margin: float
    at: Sequence[str] = field(default_factory=tuple)
    bands: Sequence[_Bounds] = field(default_factory=tuple)
    """What was predicted for each of the names: from least to most gain over the predicted value."""


def variant_names(values: Sequence[str | int | float]) -> list[str]:
    """Values of a claim as variants are named."""
    return [v if isinstance(v, str) else f"{v:g}" for v in values]


def claim_rule(expect: Expect, names: Sequence[str], margin: float, bands: Mapping[str, _Bounds] | None = None) -> ClaimRule:
    """The claim's question about the variants that ran."""
    return ClaimRule(
        expect.op,
        list(names),
        margin,
        [a for a in variant_names(expect.at) if a in names],
        [b for v, b in (bands or {}).items() if v in names],
    )


def over(i: str, j: str) -> RuleContrast:
    """How much better variant i is than variant j."""
    return RuleContrast(f"{i} over {j}", {i: 1.0, j: -1.0})


def rule_contrasts(rule: ClaimRule, interaction: bool = False) -> list[RuleContrast]:
    """The contrasts that a rule looks at, fixed by the variants and the claim alone.

    Raises:
        ConfigError: the rule does not exist, or the variants are too few for it.
    """
    names = rule.names
    if interaction:
        return _interaction_contrasts(rule)
    if rule.op in (">=", "<=", "within"):
        return [over(names[-1], names[0])]
    if rule.op == "inside":
        return [RuleContrast(f"{v} over its prediction", {v: 1.0}) for v in names]
    if rule.op in ("best", "not_best"):
        return [over(j, i) for i in rule.at for j in names if j not in rule.at]
    if rule.op == "band":
        return [over(j, names[0]) for j in names[1:]]
    if rule.op in ("rising", "knee"):
        return [over(j, i) for i, j in itertools.pairwise(names)]
    if rule.op == "reaches":
        return [over(rule.at[0], j) for j in names if j != rule.at[0]]
    raise ConfigError(f"'{rule.op}' is no rule for a sweep; playbook_bench.judge.effects lists them")


def _interaction_contrasts(rule: ClaimRule) -> list[RuleContrast]:
    low, first, second, both = rule.names
    if rule.op == "crossover":
        return [over(first, low), over(second, both)]
    if rule.op in (">=", "<=", "within"):
        return [RuleContrast("difference of differences", {both: 1.0, second: -1.0, first: -1.0, low: 1.0})]
    raise ConfigError(f"'{rule.op}' is no rule for an interaction; playbook_bench.judge.effects lists them")


def decide(rule: ClaimRule, bounds: Sequence[_Bounds]) -> Status:
    """Whether the claim holds, by the intervals of the contrasts that `rule_contrasts` names, in that order. None if they leave it open.

    But for `best` and `knee` a rule says from where to where each contrast may lie.
    """
    if rule.op in ("best", "not_best"):
        return _best(rule, dict(zip((a.name for a in rule_contrasts(rule)), bounds, strict=True)))
    if rule.op == "knee":
        return _knee(rule, bounds)
    margin, at_most = rule.margin, (-math.inf, rule.margin)
    each = {"<=": at_most, "within": (-margin, margin), "band": (-margin, margin)}.get(rule.op, (margin, math.inf))
    claimed = list(rule.bands) if rule.op == "inside" else [each] * len(bounds)
    if rule.op == "reaches":
        claimed[-1] = at_most
    both = list(zip(bounds, claimed, strict=True))
    if any(low > most or high < least for (low, high), (least, most) in both):
        return False
    return True if all(least <= low and high <= most for (low, high), (least, most) in both) else None


def _best(rule: ClaimRule, bounds: Mapping[str, _Bounds]) -> Status:
    others = [j for j in rule.names if j not in rule.at]
    rivals = {i: [bounds[over(j, i).name] for j in others] for i in rule.at}
    unbeaten: Callable[[float], bool] = (lambda u: u <= rule.margin) if rule.op == "best" else (lambda u: u < rule.margin)
    beaten: Callable[[float], bool] = (lambda v: v > rule.margin) if rule.op == "best" else (lambda v: v >= rule.margin)
    stands = any(all(unbeaten(high) for _, high in row) for row in rivals.values())
    falls = all(any(beaten(low) for low, _ in row) for row in rivals.values())
    status = True if stands else False if falls else None
    return status if rule.op == "best" or status is None else not status


def _knee(rule: ClaimRule, bounds: Sequence[_Bounds]) -> Status:
    margin = rule.margin
    # Nothing lies beyond the first and the last of what ran, so no step rules a knee there in or out.
    open_ = bool({rule.names[0], rule.names[-1]} & set(rule.at))
    for knee in range(1, len(rule.names) - 1):
        if rule.at and rule.names[knee] not in rule.at:
            continue
        before, after = bounds[:knee], bounds[knee:]
        if all(low >= margin for low, _ in before) and all(high <= margin for _, high in after):
            return True
        open_ = open_ or not (any(high < margin for _, high in before) or any(low > margin for low, _ in after))
    return None if open_ else False


def claim_problems(expect: Expect, names: Sequence[str], kind: str) -> list[str]:
    """Why a claim cannot be put to a case with these variants, one line for each reason."""
    op, at = expect.op, variant_names(expect.at)
    unknown = [n for n in [*at, *variant_names(expect.infeasible)] if n not in names]
    ends = {*names[:1], *names[-1:]} & set(at)
    reasons = (
        (
            op == "inside" and (expect.margin is not None or expect.infeasible),
            "op 'inside' has neither 'margin' nor 'infeasible': the case has the intervals, and all of it must run",
        ),
        (unknown, f"{', '.join(unknown)}: the case has no such variant; it has {', '.join(names)}"),
        (op in ("best", "not_best", "reaches") and not at, f"op '{op}' needs 'at': the value that it speaks of"),
        (op == "reaches" and len(at) > 1, f"op 'reaches' has one reference, found {len(at)}"),
        (
            op == "reaches" and at and at[0] in names[-1:],
            "op 'reaches' asks whether the last value reaches the reference, so the reference cannot be the last",
        ),
        (op in ("best", "not_best") and at and set(at) >= set(names), f"op '{op}' needs a value beside those of 'at'"),
        (op in ("rising", "knee", "reaches") and len(names) < 3, f"op '{op}' needs at least 3 values, the case has {len(names)}"),
        (
            op == "knee" and ends,
            f"op 'knee' has a step before its knee and one after it, so {', '.join(sorted(ends))} cannot be one",
        ),
        (at and op not in ("best", "not_best", "knee", "reaches"), f"op '{op}' has no 'at'"),
        (op == "excludes" and not expect.infeasible, "op 'excludes' needs 'infeasible': the variants that cannot run"),
        (
            kind == "interaction" and expect.infeasible and op != "excludes",
            "an interaction needs all four cells; only op 'excludes' has 'infeasible'",
        ),
    )
    return [text for applies, text in reasons if applies]


_CARRY_ALPHA = 0.01
"""Error rate of the interval of a carry-over, over all pairs of variants."""
_ABSOLUTE = {"count": 1.0, "bytes": 1.0, "gib": GIB, "tokens": 1.0, "seconds": 1.0, "points": 0.01, "flops": 1.0, "gpus": 1.0}


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


def bands(case: Case, metric: Metric) -> dict[Variant, tuple[float, float]]:
    """For each variant of a prediction, how much better than predicted its metric may be, from least to most; empty for other cases.

    Raises:
        ConfigError: the metric is compared by difference, which may be zero or below.
    """
    predictions = {v.name: v.predicted for v in case.values if v.predicted}
    if predictions and metric.scale != "log_ratio":
        raise ConfigError(
            f"case '{case.id}': {metric.name} is compared by difference; a prediction needs a metric that is compared as a ratio"
        )
    ends = {v: sorted(guards.compare(metric, p.value, end) for end in (p.low, p.high)) for v, p in predictions.items()}
    return {v: (low, high) for v, (low, high) in ends.items()}


def measure(
    rules: Rules,
    runs: Sequence[Run],
    case: Case,
    metric: Metric,
    expect: Expect | None,
    plan: Plan,
    blocks: Sequence[guards.Block],
    noise: Sequence[float],
) -> Curve:
    """The contrasts that a claim's rule asks for, each with its interval; against the first variant where there is no claim.

    Where the claim is that predictions hold, each variant is compared with what was predicted for it.

    `noise` holds the differences of the A/A pairs. A deterministic metric has no intervals: its first block is all there is to know.
    """
    exact = metric.deterministic
    blocks = blocks[:1] if exact else blocks
    names = list(blocks[0])
    contrasts = _planned_contrasts(case, expect, names)
    # The error rate is shared among the contrasts that were planned, whether or not all of them came about.
    planned = max(len(contrasts), len(_planned_contrasts(case, expect, list(case.variants))))
    n = len(blocks)
    alpha = None if exact else rules.level(plan.looks, plan.alpha, n) / planned
    values = [{v: required(metric, b[v]) for v in names} for b in blocks]
    predictions = {v.name: v.predicted.value for v in case.values if v.predicted} if expect and expect.op == "inside" else {}
    intervals: list[statistics.Interval] = []
    if n >= 2 and alpha is not None:
        rows = [
            [guards.compare(metric, predictions.get(v, (row if rules.has_aa else values[0])[names[0]]), x) for v, x in row.items()]
            for row in values
        ]
        intervals = rules.intervals(rows, launches(runs, blocks), [[a.weights.get(v, 0.0) for v in names] for a in contrasts], alpha, noise)
    return Curve(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="deterministic" if exact else "launches_blocks",
        scale=metric.scale,
        points=points(runs, case, metric, blocks),
        contrasts=[_contrast(metric, a, values, predictions, intervals[i] if intervals else None) for i, a in enumerate(contrasts)],
        blocks=n,
        look=plan.looks.index(n) + 1 if n in plan.looks and not exact else None,
        alpha_contrast=alpha,
        freedom=intervals[0].freedom if intervals else None,
        floor=statistics.aa_deviation(noise) if rules.has_aa and not exact else None,
        blocks_needed=_needed(intervals, _ends(case, metric, expect, len(contrasts)), alpha) if alpha and expect else None,
    )


def launches(runs: Sequence[Run], blocks: Sequence[guards.Block]) -> list[design.Launch]:
    """The launches of blocks in the order in which they were made."""
    names = list(blocks[0])
    variant_at = {r.position: r.variant for r in runs}
    index = {name: i for i, name in enumerate(names)}
    placed = sorted((run.position, block, index[v]) for block, each in enumerate(blocks) for v, run in each.items())
    return [design.Launch(v, block, index.get(variant_at.get(at - 1, "")), at) for at, block, v in placed]


def rows_of(metric: Metric, blocks: Sequence[guards.Block]) -> list[list[float]]:
    """How much better each launch is than the first one, on the metric's scale. Shape: [blocks, variants].

    Raises:
        ConfigError: a launch does not report the metric.
        ValueError: two values cannot be compared on that scale.
    """
    values = [[required(metric, run) for run in block.values()] for block in blocks]
    return [[guards.compare(metric, values[0][0], x) for x in row] for row in values]


def carry_over(runs: Sequence[Run], metric: Metric, blocks: Sequence[guards.Block], margin: float) -> tuple[Condition | None, str]:
    """What launches leave behind for the next one, by the two variants that differ most in it; and a remark where that is certain and more
    than a third of the margin.

    The remark is made of one series in a hundred without carry-over, at most. Where there is no margin, it is made from
    `CONTAMINATION_LEAST` on.
    """
    names, rows, placed = list(blocks[0]), rows_of(metric, blocks), launches(runs, blocks)
    candidates = [(design.carry_over(rows, placed, a, b), names[a], names[b]) for a, b in itertools.combinations(range(len(names)), 2)]
    estimates = [(estimate, a, b) for estimate, a, b in candidates if estimate is not None]
    if not estimates:
        return None, ""
    estimate, before, after = max(estimates, key=lambda row: abs(float(row[0].value)))
    mean = float(estimate.value)
    half = statistics.t_quantile(_CARRY_ALPHA / len(estimates), float(estimate.degrees_of_freedom)) * float(estimate.standard_error)
    ratio = metric.scale == "log_ratio"
    low, middle, high = (100 * math.expm1(x) if ratio else x for x in (mean - half, mean, mean + half))
    text = f"a launch after {after} is better by {middle:+.1f}{' %' if ratio else ''} [{low:.1f}, {high:.1f}] than one after {before}"
    least = abs(margin) / 3 if margin else statistics.CONTAMINATION_LEAST if ratio else 0.0
    remark = f"{text}: more than a third of the margin, and taken out of the effect" if abs(mean) > max(half, least) else ""
    return Condition(name="carry_over", ok=True, detail=remark or text), remark


def as_pair(curve: Curve) -> Comparison:
    """A curve of two variants as the `Comparison` that a pair's record holds."""
    baseline, candidate = (p.value or 0.0 for p in curve.points)
    c = curve.contrasts[0]
    exact = curve.design == "deterministic"
    return Comparison(
        metric=curve.metric,
        unit=curve.unit,
        better=curve.better,
        design="deterministic" if exact else "launches_abba",
        scale=curve.scale,
        baseline=baseline,
        candidate=candidate,
        effect=c.effect,
        low=c.effect if exact else c.low,
        high=c.effect if exact else c.high,
        pairs=curve.blocks,
        look=curve.look,
        alpha_look=curve.alpha_contrast,
        differences=c.differences,
        mean=c.mean,
        deviation=c.deviation,
        floor=curve.floor,
        mde=None if c.used is None or curve.alpha_contrast is None else statistics.least_effect(curve.blocks, c.used, curve.alpha_contrast),
        pairs_needed=curve.blocks_needed,
    )


def bounds(curve: Curve) -> list[tuple[float, float]]:
    """The interval of each contrast on the metric's scale (logarithms for ratios), as the margin is; a record shows its ends as shares."""
    return [_bounds(c, curve) for c in curve.contrasts]


def _bounds(c: Contrast, curve: Curve) -> tuple[float, float]:
    if curve.design == "deterministic":
        return (value := _exact(c, curve)), value
    if c.mean is None or c.used is None or curve.alpha_contrast is None or curve.freedom is None:
        return -math.inf, math.inf
    half = statistics.t_quantile(curve.alpha_contrast, curve.freedom) * c.used / math.sqrt(curve.blocks)
    return c.mean - half, c.mean + half


def _exact(c: Contrast, curve: Curve) -> float:
    """Value of a contrast of an exact metric, on the metric's scale; infinite for a ratio to zero."""
    if c.differences:
        return c.differences[0]
    values = {p.variant: p.value or 0.0 for p in curve.points}
    gain = math.fsum(w * values.get(v, 0.0) for v, w in c.weights.items())
    return math.copysign(math.inf, gain if curve.better == "higher" else -gain)


def _ends(case: Case, metric: Metric, expect: Expect, contrasts: int) -> list[tuple[float, ...]]:
    """For each contrast, the values on the metric's scale at which the claim turns from true to false."""
    if expect.op == "inside":
        return list(bands(case, metric).values())
    margin = threshold(metric, expect.margin)
    return [(margin, -margin) if margin and expect.op in ("within", "band") else (margin,)] * contrasts


def _needed(intervals: Sequence[statistics.Interval], ends: Sequence[tuple[float, ...]], alpha: float) -> int | None:
    """About how many blocks would settle the claim: the most that an interval needs to leave the `ends` it contains. None if no interval
    contains one, or no sensible number would do.
    """
    if not intervals:
        return None
    needs = [
        statistics.pairs_needed(i.mean - m, i.largest, alpha)
        for i, margins in zip(intervals, ends, strict=True)
        for m in margins
        if i.low < m < i.high
    ]
    finite = [n for n in needs if n is not None]
    return max(finite) if finite and len(finite) == len(needs) else None


def _planned_contrasts(case: Case, expect: Expect | None, names: Sequence[Variant]) -> list[RuleContrast]:
    if expect is None:
        return [over(v, names[0]) for v in names[1:]]
    return rule_contrasts(claim_rule(expect, names, 0.0), case.kind == "interaction")


def _contrast(
    metric: Metric,
    rule: RuleContrast,
    blocks: Sequence[Mapping[Variant, float]],
    predictions: Mapping[Variant, float],
    interval: statistics.Interval | None,
) -> Contrast:
    """One contrast as a record holds it: the effect as readers see it, differences and deviations on the metric's scale.

    `blocks` hold the metric's value by variant, one mapping a block; a contrast without a baseline is held against `predictions`.
    """
    plus = [v for v, w in rule.weights.items() if w > 0]
    minus = [v for v, w in rule.weights.items() if w < 0]
    pairs = [
        [(block[m], block[p]) for p, m in zip(plus, minus, strict=True)] if minus else [(predictions[v], block[v]) for v in plus]
        for block in blocks
    ]
    differences = [sum(guards.compare(metric, before, after) for before, after in pair) for pair in pairs]
    mean = interval.mean if interval else math.fsum(differences) / len(differences)
    finite = math.isfinite(mean)
    return Contrast(
        name=rule.name,
        weights=dict(rule.weights),
        effect=_as_effect(metric, mean) if finite else None,
        low=_as_effect(metric, interval.low) if interval else None,
        high=_as_effect(metric, interval.high) if interval else None,
        differences=differences if finite else [],
        mean=mean if finite else None,
        deviation=interval.deviation if interval else None,
        used=interval.used if interval else None,
    )


def points(runs: Sequence[Run], case: Case, metric: Metric, blocks: Sequence[guards.Block]) -> list[PointFigure]:
    """What each variant measured, or how it failed."""
    out: list[PointFigure] = []
    first = next(iter(blocks[0]), None) if blocks else None
    for variant in case.variants:
        launches = [b[variant] for b in blocks if variant in b]
        if not launches:
            bad = [r for r in runs if r.variant == variant and r.outcome in ("oom", "refused")]
            if bad:
                out.append(PointFigure(variant=variant, outcome="oom" if bad[0].outcome == "oom" else "refused", launches=len(bad)))
            continue
        values = [required(metric, r) for r in launches]
        gains = [guards.compare(metric, required(metric, b[first]), v) for b, v in zip(blocks, values, strict=True) if first]
        mean = math.fsum(gains) / len(gains)
        out.append(
            PointFigure(
                variant=variant,
                outcome="ok",
                launches=len(values),
                value=math.fsum(values) / len(values),
                effect=_as_effect(metric, mean) if math.isfinite(mean) else None,
            )
        )
    return out


def percent(share: float | None) -> float | None:
    """A share as a percentage with four decimals, as answers in JSON have it."""
    return None if share is None else round(100 * share, 4)


def required(metric: Metric, run: Run) -> float:
    """The metric's value of a launch that must have one."""
    value = metric.value(run)
    if value is None:
        raise ConfigError(f"run {run.run_id} reports no {metric.name}")
    return value


def _as_effect(metric: Metric, value: float) -> float:
    """A mean difference as readers see it: a share for metrics that are compared as ratios, else unchanged in the metric's unit."""
    return math.expm1(value) if metric.scale == "log_ratio" else value


def show(curve: Curve, between: bool = False) -> str:
    """The contrasts in words, such as `2 over 4 -2.7 % [-3.5, -1.8]`, and what did not run; `between` as in `show_effect`."""
    parts = [
        f"{c.name} {'without bound as a ratio' if c.effect is None else _in_words(curve, c.effect, c.low, c.high, between)}"
        for c in curve.contrasts
    ]
    parts += [f"{p.variant} {'did not fit' if p.outcome == 'oom' else 'was refused'}" for p in curve.points if p.outcome != "ok"]
    return "; ".join(parts)


def show_predicted(case: Case, metric: Metric) -> str:
    """What a case predicts, such as `winner 11500 [9700, 13800] tokens/s`."""
    predictions = [(v.name, v.predicted) for v in case.values if v.predicted]
    return ", ".join(f"{name} {p.value:g} [{p.low:g}, {p.high:g}]" for name, p in predictions) + f" {metric.unit}"


def show_effect(comparison: Comparison, between: bool = False) -> str:
    """The effect of a pair in words, such as `+3.6 % [3.1, 4.2]`; a share is shown in points.

    A verdict's sentence has the interval of a look only; `between` shows that of other numbers of pairs too. It holds as well: what stops a
    series there is time, not the effect, and no more than the planned number of looks is ever taken, so it spends the next one's share.
    """
    if comparison.effect is None:
        return f"{comparison.baseline:g} -> {comparison.candidate:g} {comparison.unit}, without bound as a ratio"
    return _in_words(comparison, comparison.effect, comparison.low, comparison.high, between)


def _in_words(of: Comparison | Curve, effect: float, low: float | None, high: float | None, between: bool) -> str:
    factor, unit, digits = (100, "%", 1) if of.scale == "log_ratio" else (100, "points", 1) if of.unit == "share" else (1, of.unit, 3)
    text = f"{factor * effect:+.{digits}f} {unit}"
    if (of.look is None and not between) or low is None or high is None:
        return text
    return f"{text} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"
