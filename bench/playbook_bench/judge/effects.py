"""Effects over blocks of variants, with their intervals: what a verdict is decided from, and how it is put in words.

A pair is a sweep with two variants. Its record has the shape `Comparison`, all others have `Curve`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from playbook.cards.model import Expect, Quantity
from playbook.errors import ConfigError
from playbook.planner.memory import GIB
from playbook.records.case import Case
from playbook.records.evidence import Comparison, Condition, Contrast, Curve, Plan, PointFigure, Run, Variant
from playbook_bench.judge import design, guards, statistics
from playbook_bench.judge.curve_rules import Asked, asked, over, question
from playbook_bench.judge.guards import Block
from playbook_bench.judge.verdict_rules import Rules
from playbook_bench.metrics import Metric

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
    told = {v.name: v.predicted for v in case.values if v.predicted}
    if told and metric.scale != "log_ratio":
        raise ConfigError(
            f"case '{case.id}': {metric.name} is compared by difference; a prediction needs a metric that is compared as a ratio"
        )
    ends = {v: sorted(guards.compare(metric, p.value, end) for end in (p.low, p.high)) for v, p in told.items()}
    return {v: (low, high) for v, (low, high) in ends.items()}


def measure(
    rules: Rules,
    runs: Sequence[Run],
    case: Case,
    metric: Metric,
    expect: Expect | None,
    plan: Plan,
    blocks: Sequence[Block],
    noise: Sequence[float],
) -> Curve:
    """The contrasts that a claim's rule asks for, each with its interval; against the first variant where there is no claim.

    Where the claim is that predictions hold, each variant is compared with what was predicted for it.

    `noise` holds the differences of the A/A pairs. A deterministic metric has no intervals: its first block is all there is to know.
    """
    exact = metric.deterministic
    blocks = blocks[:1] if exact else blocks
    names = list(blocks[0])
    wanted = _wanted(case, expect, names)
    # The error rate is shared among the contrasts that were planned, whether or not all of them came about.
    planned = max(len(wanted), len(_wanted(case, expect, list(case.variants))))
    n = len(blocks)
    alpha = None if exact else rules.level(plan.looks, plan.alpha, n) / planned
    values = [[required(metric, b[v]) for v in names] for b in blocks]
    told = {v.name: v.predicted.value for v in case.values if v.predicted} if expect and expect.op == "inside" else {}
    found: list[statistics.Interval] = []
    if n >= 2 and alpha is not None:
        rows = [
            [guards.compare(metric, told.get(v, row[0] if rules.by_block else values[0][0]), x) for v, x in zip(names, row, strict=True)]
            for row in values
        ]
        found = rules.intervals(rows, launches(runs, blocks), [[a.weights.get(v, 0.0) for v in names] for a in wanted], alpha, noise)
    labelled = [dict(zip(names, row, strict=True)) for row in values]
    return Curve(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="deterministic" if exact else "launches_blocks",
        scale=metric.scale,
        points=points(runs, case, metric, blocks),
        contrasts=[_contrast(metric, a, labelled, told, found[i] if found else None) for i, a in enumerate(wanted)],
        blocks=n,
        look=plan.looks.index(n) + 1 if n in plan.looks and not exact else None,
        alpha_contrast=alpha,
        freedom=found[0].freedom if found else None,
        floor=statistics.aa_deviation(noise) if rules.has_aa and not exact else None,
        blocks_needed=_needed(found, _ends(case, metric, expect, len(wanted)), alpha) if alpha and expect else None,
    )


def launches(runs: Sequence[Run], blocks: Sequence[Block]) -> list[design.Launch]:
    """The launches of blocks in the order in which they were made."""
    names = list(blocks[0])
    made = {r.position: r.variant for r in runs}
    index = {name: i for i, name in enumerate(names)}
    placed = sorted((run.position, block, index[v]) for block, each in enumerate(blocks) for v, run in each.items())
    return [design.Launch(v, block, index.get(made.get(at - 1, "")), at) for at, block, v in placed]


def rows_of(metric: Metric, blocks: Sequence[Block]) -> list[list[float]]:
    """How much better each launch is than the first one, on the metric's scale. Shape: [blocks, variants].

    Raises:
        ConfigError: a launch does not report the metric.
        ValueError: two values cannot be compared on that scale.
    """
    values = [[required(metric, run) for run in block.values()] for block in blocks]
    return [[guards.compare(metric, values[0][0], x) for x in row] for row in values]


def carry_over(runs: Sequence[Run], metric: Metric, blocks: Sequence[Block], margin: float) -> tuple[Condition | None, str]:
    """What launches leave behind for the next one, by the two variants that differ most in it; and a remark where that is certain and more than a third of the margin.

    The remark is made of one series in a hundred without carry-over, at most. Where there is no margin, it is made from `CONTAMINATION_LEAST` on.
    """
    names, rows, placed = list(blocks[0]), rows_of(metric, blocks), launches(runs, blocks)
    each = [(design.carry_over(rows, placed, a, b), names[a], names[b]) for a, b in itertools.combinations(range(len(names)), 2)]
    known = [(found, a, b) for found, a, b in each if found is not None]
    if not known:
        return None, ""
    found, before, after = max(known, key=lambda row: abs(float(row[0].mean)))
    mean = float(found.mean)
    half = statistics.t_quantile(_CARRY_ALPHA / len(known), float(found.freedom)) * float(found.error)
    ratio = metric.scale == "log_ratio"
    low, middle, high = (100 * math.expm1(x) if ratio else x for x in (mean - half, mean, mean + half))
    text = f"a launch after {after} is better by {middle:+.1f}{' %' if ratio else ''} [{low:.1f}, {high:.1f}] than one after {before}"
    least = abs(margin) / 3 if margin else statistics.CONTAMINATION_LEAST if ratio else 0.0
    remark = f"{text}: more than a third of the margin, and taken out of the effect" if abs(mean) > max(half, least) else ""
    return Condition(name="carry_over", ok=True, detail=remark or text), remark


def as_pair(curve: Curve, rules: Rules, metric: Metric, expect: Expect | None) -> Comparison:
    """A curve of two variants as the `Comparison` that a pair's record holds."""
    baseline, candidate = (p.value or 0.0 for p in curve.points)
    c = curve.contrasts[0]
    exact = curve.design == "deterministic"
    figures = {}
    if c.used is not None and curve.alpha_contrast is not None:
        wanted = None if expect is None else (expect.op, threshold(metric, expect.margin))
        figures = rules.pair_figures(curve, c.used, curve.alpha_contrast, wanted)
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
        **figures,
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


def _needed(found: Sequence[statistics.Interval], ends: Sequence[tuple[float, ...]], alpha: float) -> int | None:
    """About how many blocks would settle the claim: the most that an interval needs to leave the `ends` it contains. None if no interval contains one, or no sensible number would do."""
    if not found:
        return None
    needs = [
        statistics.pairs_needed(i.mean - m, i.largest, alpha) for i, own in zip(found, ends, strict=True) for m in own if i.low < m < i.high
    ]
    known = [n for n in needs if n is not None]
    return max(known) if known and len(known) == len(needs) else None


def _wanted(case: Case, expect: Expect | None, names: Sequence[Variant]) -> list[Asked]:
    if expect is None:
        return [over(v, names[0]) for v in names[1:]]
    return asked(question(expect, names, 0.0), case.kind == "interaction")


def _contrast(
    metric: Metric,
    a: Asked,
    blocks: Sequence[Mapping[Variant, float]],
    told: Mapping[Variant, float],
    found: statistics.Interval | None,
) -> Contrast:
    plus = [v for v, w in a.weights.items() if w > 0]
    minus = [v for v, w in a.weights.items() if w < 0]
    pairs = [[(b[m], b[p]) for p, m in zip(plus, minus, strict=True)] if minus else [(told[v], b[v]) for v in plus] for b in blocks]
    differences = [sum(guards.compare(metric, before, after) for before, after in pair) for pair in pairs]
    mean = found.mean if found else math.fsum(differences) / len(differences)
    finite = math.isfinite(mean)
    return Contrast(
        name=a.name,
        weights=dict(a.weights),
        effect=_as_effect(metric, mean) if finite else None,
        low=_as_effect(metric, found.low) if found else None,
        high=_as_effect(metric, found.high) if found else None,
        differences=differences if finite else [],
        mean=mean if finite else None,
        deviation=found.deviation if found else None,
        used=found.used if found else None,
    )


def points(runs: Sequence[Run], case: Case, metric: Metric, blocks: Sequence[Block]) -> list[PointFigure]:
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
    parts = [_show_contrast(curve, c, between) for c in curve.contrasts]
    parts += [f"{p.variant} {'did not fit' if p.outcome == 'oom' else 'was refused'}" for p in curve.points if p.outcome != "ok"]
    return "; ".join(parts)


def show_predicted(case: Case, metric: Metric) -> str:
    """What a case predicts, such as `winner 11500 [9700, 13800] tokens/s`."""
    told = [(v.name, v.predicted) for v in case.values if v.predicted]
    return ", ".join(f"{name} {p.value:g} [{p.low:g}, {p.high:g}]" for name, p in told) + f" {metric.unit}"


def _show_contrast(curve: Curve, c: Contrast, between: bool = False) -> str:
    """One contrast in words."""
    if c.effect is None:
        return f"{c.name} without bound as a ratio"
    return f"{c.name} {_in_words(curve, c.effect, c.low, c.high, between)}"


def show_effect(found: Comparison, between: bool = False) -> str:
    """The effect of a pair in words, such as `+3.6 % [3.1, 4.2]`; a share is shown in points.

    A verdict's sentence has the interval of a look only; `between` shows that of other numbers of pairs too. It holds as well: what stops a
    series there is time, not the effect, and no more than the planned number of looks is ever taken, so it spends the next one's share.
    """
    if found.effect is None:
        return f"{found.baseline:g} -> {found.candidate:g} {found.unit}, without bound as a ratio"
    return _in_words(found, found.effect, found.low, found.high, between)


def _in_words(of: Comparison | Curve, effect: float, low: float | None, high: float | None, between: bool) -> str:
    factor, unit, digits = (100, "%", 1) if of.scale == "log_ratio" else (100, "points", 1) if of.unit == "share" else (1, of.unit, 3)
    text = f"{factor * effect:+.{digits}f} {unit}"
    if (of.look is None and not between) or low is None or high is None:
        return text
    return f"{text} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"
