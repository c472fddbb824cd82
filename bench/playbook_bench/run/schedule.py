"""The order of runs, fixed before the data: a burn-in of each variant, then what `judge/design.py` draws; and which effect such launches
can show at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from playbook.records.evidence import Comparison, Measured, Role, Run, Variant
from playbook_bench.judge import design, verdict
from playbook_bench.judge import statistics as judge

PAIR: tuple[Variant, Variant] = ("baseline", "candidate")
AA_PAIRS = 4
"""Pairs of an A/A."""
_DRAWN_HERE = 3
"""The version of rules since which `design.order` draws the order; `playbook.records.consistency` has that of older ones."""


@dataclass(frozen=True)
class RunSpec:
    """One launch to come."""

    variant: Variant
    role: Role
    pair: int | None = None


def burn_in(variants: Iterable[Variant] = PAIR) -> list[RunSpec]:
    """One run of each variant, discarded: it fills the compile caches and warms the machine."""
    return [RunSpec(variant, "burn_in") for variant in variants]


def series(seed: int, variants: Sequence[Variant], looks: Sequence[int]) -> Iterator[tuple[str, list[RunSpec]]]:
    """The launches of a series as `design.order` draws them, two at a time (A is the first variant) or a block of all variants, each group
    with its label.

    A pair, or a block, is the n-th launch of each variant; the two launches of a pair need not be neighbours. No limit moves them: a second
    command goes on with them.
    """
    names = list(variants)
    drawn = design.launched(design.order(seed, len(names), looks), len(names))
    for at in range(0, len(drawn), len(names)):
        group = drawn[at : at + len(names)]
        label = "".join("AB"[x.variant] for x in group) if tuple(names) == PAIR else " ".join(names[x.variant] for x in group)
        yield label, [RunSpec(names[x.variant], "measure", x.block) for x in group]


def once(variants: Sequence[Variant]) -> Iterator[tuple[str, list[RunSpec]]]:
    """One launch of each variant: all that a metric needs which repeats."""
    yield "AB" if tuple(variants) == PAIR else " ".join(variants), [RunSpec(v, "measure", 0) for v in variants]


def contradictions(measured: Measured) -> list[str]:
    """Where the order of a series that was planned with these looks is not the one that its seed gives; a metric that repeats takes one
    launch of each variant.
    """
    plan, case = measured.plan, measured.case
    if plan is None or case is None or plan.rules < _DRAWN_HERE or len(plan.order) < 2:
        return []
    drawn = [label for label, _ in series(plan.seed, list(case.content.variants), plan.looks)][: len(plan.order)]
    return [] if drawn == plan.order else [f"the order is {', '.join(plan.order)[:80]}, its seed gives {', '.join(drawn)[:80]}"]


def last_pair(looks: Sequence[int], limit: int | None) -> int:
    """After how many pairs the series ends at the latest: the last look within the limit, or the limit itself before the first look."""
    if limit is None:
        return looks[-1]
    return max((look for look in looks if look <= limit), default=max(1, limit))


def launches(looks: Sequence[int], limit: int | None, variants: int = 2) -> int:
    """Launches up to the first look, burn-in included: what a reader may expect."""
    return variants + variants * min(looks[0], last_pair(looks, limit))


_BY_STEPS = 0.5
"""Share of the variance between launches that steps must explain for more of them to help."""


def least_shown(measured: Measured, comparison: Comparison) -> str:
    """The least effect that the last look would show four times out of five, and what would make it smaller.

    Empty where launches do not differ. It takes the launches so far for those to come. More steps help where what single steps differ by
    explains what launches differ by.
    """
    plan = measured.plan
    if plan is None or not comparison.deviation or comparison.pairs < 2 or comparison.scale != "log_ratio" or comparison.alpha_look is None:
        return ""
    last = last_pair(plan.looks, plan.pairs_limit)
    alpha = verdict.rules_of(plan).level(plan.looks, plan.alpha, last)
    least = judge.least_effect(last, comparison.deviation, alpha)
    return (
        f"pairs of launches differ by {100 * comparison.deviation:.1f} %: "
        f"{last} pairs show an effect from about {100 * math.expm1(least):.0f} % on; "
        f"to see a smaller one, {_advice(measured.runs, comparison)}"
    )


def _advice(runs: Sequence[Run], comparison: Comparison) -> str:
    """What would make launches differ less: more steps, where these explain it, else a quieter machine."""
    spread = [_relative_error(run) for run in runs if run.role == "measure" and run.outcome == "ok"]
    errors = [each for each in spread if each is not None]
    of_steps = 2 * statistics.fmean(e**2 for e in errors) if errors else 0.0
    if of_steps > _BY_STEPS * (comparison.deviation or 0.0) ** 2:
        return "let each launch make more steps: four times as many halve it"
    what = f", while their steps explain {100 * math.sqrt(of_steps):.1f} %" if errors else ""
    return f"quieten the machine (other processes, clocks of CPU and GPU): launches differ as wholes{what}, so more steps do not help"


def _relative_error(run: Run) -> float | None:
    """The standard error of a launch's mean step, as a share of it; None below two timed steps."""
    seconds = [sample.seconds for sample in run.samples if sample.timed]
    if len(seconds) < 2 or not (mean := statistics.fmean(seconds)) > 0:
        return None
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / mean


def order_matters(comparison: Comparison) -> str:
    """A clause where the means of the launches say better and the effect says worse, or the other way round; else empty."""
    if comparison.scale != "log_ratio" or not comparison.effect or min(comparison.baseline, comparison.candidate) <= 0:
        return ""
    ratio = comparison.candidate / comparison.baseline
    plain = (ratio if comparison.better == "higher" else 1 / ratio) - 1
    if plain * comparison.effect >= 0:
        return ""
    return (
        f"the means alone say {100 * plain:+.1f} %, and {100 * comparison.effect:+.1f} % is what is left once drift and what a launch"
        " leaves for the next are taken out: launches differ too much to say which"
    )
