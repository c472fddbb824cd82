"""From the runs of a sweep or an interaction to a verdict: a pure function, called by `verdict.derive`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from playbook.cards.model import Expect, in_words
from playbook.records.case import Case
from playbook.records.evidence import Check, Contrast, Curve, Derived, Gate, Measured, Plan, PointFigure, Run, Variant, Verdict
from playbook_bench.judge import guards, metrics, receipt, statistics, verdict
from playbook_bench.judge.curve_rules import Asked, asked, decide, named, over, question
from playbook_bench.judge.metrics import Metric

Block = Mapping[Variant, Run]


def derive(measured: Measured, case: Case, metric: Metric, expect: Expect | None, plan: Plan) -> Derived:
    """The verdict of a sweep or an interaction, with its figures."""
    allowed = set(named(expect.infeasible)) if expect else set()
    dead = {r.variant for r in measured.runs if r.variant in allowed and r.outcome in ("oom", "refused")}
    checks = receipt.judge_runs(case.activation, [r for r in measured.runs if r.role == "measure" and r.outcome == "ok"])
    failed = verdict.failure([r for r in measured.runs if r.variant not in dead], metric)
    if failed:
        return Derived(receipts=checks, verdict=failed)
    names = [v for v in case.variants if v not in dead]
    blocks = blocks_of(measured.runs, names)
    faulty = verdict.faulty([r for r in measured.runs if r.variant not in dead and r.outcome == "ok"], metric, checks)
    if not (faulty or blocks or dead) and (
        early := verdict.from_the_start(measured, case, metric, lambda first: block_gates(measured, case, metric, [first]))
    ):
        return early
    if faulty or not (blocks or dead):
        text = "the budget ended before the first block of runs"
        return Derived(receipts=checks, verdict=faulty or Verdict(status="inconclusive", reason="budget", sentence=text))
    if expect is not None and expect.op == "excludes":
        return _excludes(measured, case, metric, expect, checks, blocks)
    lost = _lost(case, expect, names)
    if lost or not blocks:
        return Derived(receipts=checks, verdict=lost or Verdict(status="inconclusive", reason="budget", sentence="no block is complete"))
    return _compare(measured, case, metric, expect, plan, checks, blocks)


def blocks_of(runs: Sequence[Run], names: Sequence[Variant]) -> list[Block]:
    """Blocks in which each of `names` ran, in the order in which they were numbered."""
    found: dict[int, dict[Variant, Run]] = {}
    for run in runs:
        if run.role == "measure" and run.pair is not None and run.outcome == "ok":
            found.setdefault(run.pair, {})[run.variant] = run
    return [b for _, b in sorted(found.items()) if names and all(v in b for v in names)]


def steady(runs: Sequence[Run], names: Sequence[Variant], tolerance: float) -> bool:
    """Whether no variant's step time drifts; runs whose steps cannot be used show no drift, and get their verdict for that."""
    blocks, times = blocks_of(runs, names), metrics.get("step_seconds")
    if any(guards.complete(run, times) for block in blocks for run in block.values()):
        return True
    return guards.steady_all({v: [b[v] for b in blocks] for v in names}, tolerance).ok


def block_gates(measured: Measured, case: Case, metric: Metric, blocks: Sequence[Block]) -> list[Gate]:
    """Every condition that makes launches comparable, of each variant against the first."""
    first, *others = blocks[0]
    found: dict[str, Gate] = {}
    for other in others:
        for g in verdict.pair_gates(measured, case, metric, [(b[first], b[other]) for b in blocks]):
            if g.name not in found or (found[g.name].ok and not g.ok):
                found[g.name] = g.model_copy(update={"detail": g.detail if g.ok else f"{other} against {first}: {g.detail}"})
    return list(found.values())


def _compare(
    measured: Measured, case: Case, metric: Metric, expect: Expect | None, plan: Plan, checks: list[Check], blocks: list[Block]
) -> Derived:
    names = [v for v in case.variants if v in blocks[0]]
    blocks = [{v: b[v] for v in names} for b in blocks]
    conditions = block_gates(measured, case, metric, blocks)
    if unlike := verdict.incomparable(conditions, checks):
        return unlike
    if metric.deterministic:
        spread = next((s for v in names if (s := verdict.spread(metric, [b[v] for b in blocks]))), "")
        conditions.append(Gate(name="repeatable", ok=not spread, detail=spread))
        curve = _curve(measured, case, metric, expect, plan, blocks[:1], 0.0)
        found = (
            Verdict(status="inconclusive", reason="environment", sentence=spread) if spread else _verdict(curve, case, metric, expect, plan)
        )
        return Derived(curve=curve, receipts=checks, gates=conditions, verdict=found)
    noise, floor = guards.noise(metric, measured.runs, measured.aa)
    # Of the blocks to the first look, as for pairs.
    early = blocks[: plan.looks[0]]
    steady = guards.steady_all({v: [b[v] for b in early] for v in names}, guards.step_deviation(measured.aa))
    conditions += [noise, steady]
    curve = _curve(measured, case, metric, expect, plan, blocks, floor)
    if not noise.ok:
        text = f"this machine is too noisy for a verdict now: {noise.detail}"
        found = Verdict(status="inconclusive", reason="environment", sentence=text)
    elif not steady.ok:
        found = Verdict(status="inconclusive", reason="not_steady", sentence=f"step time still drifts: {steady.detail}")
    else:
        found = _verdict(curve, case, metric, expect, plan)
    return Derived(curve=curve, receipts=checks, gates=conditions, verdict=found)


def _curve(
    measured: Measured, case: Case, metric: Metric, expect: Expect | None, plan: Plan, blocks: Sequence[Block], floor: float
) -> Curve:
    names = list(blocks[0])
    values = [[verdict.required(metric, b[v]) for v in names] for b in blocks]
    wanted = _wanted(case, expect, names)
    # The error rate is shared among the contrasts that were planned, whether or not all of them came about.
    planned = max(len(wanted), len(_wanted(case, expect, list(case.variants))))
    n, exact = len(blocks), metric.deterministic
    alpha = plan.alpha / len(plan.looks) / planned
    found: list[statistics.Interval] = []
    if n >= 2 and not exact:
        rows = [[guards.compare(metric, row[0], x) for x in row] for row in values]
        weights = [[a.weights.get(v, 0.0) for v in names] for a in wanted]
        found = statistics.simultaneous(rows, weights, alpha * len(weights), floor)
    labelled = [dict(zip(names, row, strict=True)) for row in values]
    return Curve(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="deterministic" if exact else "launches_blocks",
        scale=metric.scale,
        points=_points(measured.runs, case, metric, blocks),
        contrasts=[_contrast(metric, a, labelled, found[i] if found else None) for i, a in enumerate(wanted)],
        blocks=n,
        look=plan.looks.index(n) + 1 if n in plan.looks and not exact else None,
        alpha_contrast=None if exact else alpha,
        freedom=(len(names) - 1) * (n - 1) if found else None,
        floor=None if exact else floor,
        blocks_needed=_needed(found, metric, expect, alpha),
    )


def _needed(found: Sequence[statistics.Interval], metric: Metric, expect: Expect | None, alpha: float) -> int | None:
    """About how many blocks settle every interval that a margin lies in; None where none does, or no sensible number."""
    if expect is None:
        return None
    margin = verdict.threshold(metric, expect.margin)
    ends = {margin, -margin} if expect.op in ("within", "band") else {margin}
    needs = [statistics.pairs_needed(i.mean - m, i.largest, alpha) for i in found for m in ends if i.low < m < i.high]
    known = [n for n in needs if n is not None]
    return max(known) if known and len(known) == len(needs) else None


def _wanted(case: Case, expect: Expect | None, names: Sequence[Variant]) -> list[Asked]:
    if expect is None:
        return [over(v, names[0]) for v in names[1:]]
    return asked(question(expect, names, 0.0), case.kind == "interaction")


def _contrast(metric: Metric, a: Asked, blocks: Sequence[Mapping[Variant, float]], found: statistics.Interval | None) -> Contrast:
    plus = [v for v, w in a.weights.items() if w > 0]
    minus = [v for v, w in a.weights.items() if w < 0]
    differences = [sum(guards.compare(metric, b[m], b[p]) for p, m in zip(plus, minus, strict=True)) for b in blocks]
    mean = math.fsum(differences) / len(differences)
    finite = math.isfinite(mean)
    return Contrast(
        name=a.name,
        weights=dict(a.weights),
        effect=verdict.as_effect(metric, mean) if finite else None,
        low=verdict.as_effect(metric, found.low) if found else None,
        high=verdict.as_effect(metric, found.high) if found else None,
        differences=differences if finite else [],
        mean=mean if finite else None,
        deviation=found.deviation if found else None,
        used=found.used if found else None,
    )


def _points(runs: Sequence[Run], case: Case, metric: Metric, blocks: Sequence[Block]) -> list[PointFigure]:
    out: list[PointFigure] = []
    first = next(iter(blocks[0]), None) if blocks else None
    for variant in case.variants:
        launches = [b[variant] for b in blocks if variant in b]
        if not launches:
            bad = [r for r in runs if r.variant == variant and r.outcome in ("oom", "refused")]
            if bad:
                out.append(PointFigure(variant=variant, outcome="oom" if bad[0].outcome == "oom" else "refused", launches=len(bad)))
            continue
        values = [verdict.required(metric, r) for r in launches]
        gains = [guards.compare(metric, verdict.required(metric, b[first]), v) for b, v in zip(blocks, values, strict=True) if first]
        mean = math.fsum(gains) / len(gains)
        out.append(
            PointFigure(
                variant=variant,
                outcome="ok",
                launches=len(values),
                value=math.fsum(values) / len(values),
                effect=verdict.as_effect(metric, mean) if math.isfinite(mean) else None,
            )
        )
    return out


def _verdict(curve: Curve, case: Case, metric: Metric, expect: Expect | None, plan: Plan) -> Verdict:
    shown = show(curve)
    if expect is None:
        return Verdict(status="measured", reason="no_claim", sentence=shown)
    margin = verdict.threshold(metric, expect.margin)
    names = [p.variant for p in curve.points if p.outcome == "ok"]
    q = question(expect, names, margin)
    wanted = in_words(expect, case.kind)
    interaction = case.kind == "interaction"
    if curve.design == "deterministic":
        slack = verdict.EXACT_TOLERANCE * max(1.0, abs(margin))
        # A figure that meets the margin to the last digits meets it, from whichever side the rule looks.
        exact = [margin if abs(d - margin) <= slack else d for d in (_exact(c, curve) for c in curve.contrasts)]
        status = decide(q, [(d, d) for d in exact], interaction)
        return Verdict(status="confirmed" if status else "refuted", reason="exact", sentence=f"{shown}; claimed {wanted}")
    if curve.look is None or curve.blocks < 2:
        need = next((look for look in plan.looks if look > curve.blocks), plan.looks[-1])
        text = f"{shown}; stopped after {curve.blocks} blocks, a verdict needs {need}; claimed {wanted}"
        return Verdict(status="inconclusive", reason="budget", sentence=text)
    status = decide(q, [_bounds(c, curve) for c in curve.contrasts], interaction)
    if status is not None and expect.op == ">=" and _fragile(curve.contrasts[0]):
        return Verdict(status="inconclusive", reason="fragile", sentence=f"{shown}; the median of the blocks points the other way")
    if status is not None:
        return Verdict(status="confirmed" if status else "refuted", reason="margin", sentence=f"{shown}; claimed {wanted}")
    more = "" if curve.blocks_needed is None else f"; about {curve.blocks_needed} blocks would settle it"
    if curve.blocks < plan.looks[-1]:
        text = f"{shown}; claimed {wanted}; undecided after {curve.blocks} of {plan.looks[-1]} blocks{more}"
        return Verdict(status="inconclusive", reason="budget", sentence=text)
    return Verdict(
        status="inconclusive", reason="power", sentence=f"{shown}; claimed {wanted}; undecided after all {curve.blocks} blocks{more}"
    )


def _bounds(c: Contrast, curve: Curve) -> tuple[float, float]:
    """The interval on the scale that the margin is on; the record's own ends are shown as shares."""
    if c.mean is None or c.used is None or curve.alpha_contrast is None or curve.freedom is None:
        return -math.inf, math.inf
    half = statistics.t_quantile(curve.alpha_contrast, curve.freedom) * c.used / math.sqrt(curve.blocks)
    return c.mean - half, c.mean + half


def _exact(c: Contrast, curve: Curve) -> float:
    """A deterministic contrast; a ratio against zero is infinitely better or worse."""
    if c.differences:
        return c.differences[0]
    values = {p.variant: p.value or 0.0 for p in curve.points}
    gain = math.fsum(w * values.get(v, 0.0) for v, w in c.weights.items())
    return math.copysign(math.inf, gain if curve.better == "higher" else -gain)


def _fragile(c: Contrast) -> bool:
    return statistics.hodges_lehmann(c.differences) * (c.mean or 0.0) < 0


def _lost(case: Case, expect: Expect | None, names: Sequence[Variant]) -> Verdict | None:
    """What follows when variants that the rule needs did not run. A curve may lose values, but not those that its rule stands on."""
    if len(names) == len(case.variants) or expect is None:
        return None
    first, *_, last = case.variants
    text = f"{', '.join(v for v in case.variants if v not in names)} did not fit or was refused"
    at = set(named(expect.at)) & set(names)
    if expect.op in ("best", "reaches") and not at and names:
        claimed = f"while {', '.join(names)} ran; claimed {in_words(expect, case.kind)}"
        return Verdict(status="refuted", reason="exact", sentence=f"{text}, {claimed}")
    broken = {
        "best": at == set(names),
        "not_best": not at or at == set(names),
        "band": first not in names,
        "knee": len(names) < 3 or bool(expect.at and not at & set(names[1:-1])),
        "reaches": len(names) < 3 or last not in names,
        "rising": False,
    }
    if len(names) < 2 or broken.get(expect.op, True):
        return Verdict(status="inconclusive", reason="oom", sentence=f"{text}; the rest does not settle: {in_words(expect, case.kind)}")
    return None


def _excludes(measured: Measured, case: Case, metric: Metric, expect: Expect, checks: list[Check], blocks: Sequence[Block]) -> Derived:
    wanted = set(named(expect.infeasible))
    launched = [r for r in measured.runs if r.role == "measure"]
    ran = sorted({r.variant for r in launched if r.outcome == "ok"})
    out = {r.variant: r for r in launched if r.variant in wanted and r.outcome != "ok"}
    curve = Curve(
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        design="deterministic",
        scale=metric.scale,
        points=_points(measured.runs, case, metric, blocks),
        contrasts=[],
        blocks=len(blocks),
    )
    contradicted = sorted(wanted & set(ran))
    others = [r.variant for r in launched if r.outcome != "ok" and r.variant not in wanted]
    missing = [v for v in case.variants if v not in ran and v not in out]
    if contradicted:
        text = f"{', '.join(contradicted)} ran; claimed {in_words(expect, case.kind)}"
        return Derived(curve=curve, receipts=checks, verdict=Verdict(status="refuted", reason="exact", sentence=text))
    if others:
        text = f"{', '.join(others)} did not fit either; claimed {in_words(expect, case.kind)}"
        return Derived(curve=curve, receipts=checks, verdict=Verdict(status="inconclusive", reason="oom", sentence=text))
    if missing:
        text = f"the budget ended before {', '.join(missing)} ran"
        return Derived(curve=curve, receipts=checks, verdict=Verdict(status="inconclusive", reason="budget", sentence=text))
    why = "; ".join(
        f"{v} {'was refused' if r.outcome == 'refused' else 'was out of memory'}: {verdict.first_line(r.message)}" for v, r in out.items()
    )
    text = f"{why}; {', '.join(ran)} ran"
    return Derived(curve=curve, receipts=checks, verdict=Verdict(status="confirmed", reason="exact", sentence=text))


def show(curve: Curve, between: bool = False) -> str:
    """The contrasts in words, such as `2 over 4 -2.7 % [-3.5, -1.8]`, and what did not run; `between` as in `verdict.show_effect`."""
    parts = [show_contrast(curve, c, between) for c in curve.contrasts]
    parts += [f"{p.variant} {'did not fit' if p.outcome == 'oom' else 'was refused'}" for p in curve.points if p.outcome != "ok"]
    return "; ".join(parts)


def show_contrast(curve: Curve, c: Contrast, between: bool = False) -> str:
    """One contrast in words."""
    if c.effect is None:
        return f"{c.name} without bound as a ratio"
    factor, unit, digits = (
        (100, "%", 1) if curve.scale == "log_ratio" else (100, "points", 1) if curve.unit == "share" else (1, curve.unit, 3)
    )
    text = f"{c.name} {factor * c.effect:+.{digits}f} {unit}"
    if (curve.look is None and not between) or c.low is None or c.high is None:
        return text
    return f"{text} [{factor * c.low:.{digits}f}, {factor * c.high:.{digits}f}]"
