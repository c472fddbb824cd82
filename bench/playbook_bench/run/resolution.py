"""Which effect launches of a command can show at all, and what would let them show a smaller one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from playbook.records.evidence import Comparison, Measured, Run
from playbook_bench.judge import statistics as judge
from playbook_bench.judge import verdict
from playbook_bench.run import schedule

_BY_STEPS = 0.5
"""Share of the variance between launches that steps must explain for more of them to help."""


def sentence(measured: Measured, comparison: Comparison) -> str:
    """The least effect that the last look would show four times out of five, and what would make it smaller.

    Empty where launches do not differ. It takes the launches so far for those to come. More steps help where what single steps differ by
    explains what launches differ by.
    """
    plan = measured.plan
    if plan is None or comparison.deviation is None or comparison.scale != "log_ratio" or comparison.alpha_look is None:
        return ""
    n, last = comparison.pairs, schedule.last_pair(plan.looks, plan.pairs_limit)
    if n < 2 or comparison.deviation == 0:
        return ""
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
