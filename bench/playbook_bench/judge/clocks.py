"""Whether a command's launches say by other clocks what its log says: by the arrival of their lines, and as whole launches."""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Sequence

from playbook.records.evidence import Condition, Run
from playbook_bench.metrics import METRICS, OUTSIDE, WALL_STEP, Metric

_MARGIN = 0.02
"""Share by which two clocks may differ."""
_DOUBT = 0.01
"""Two-sided error rate of the interval that calls a difference certain."""
_BY_CHANCE = 0.015
"""One-sided error rate of the rank test of what is outside of steps: four launches of each that do not overlap are as rare."""
_UNSYNCHRONISED = 0.5
_TAKEN_BACK = 0.5
"""Share of what steps save by the log that may be lost by another clock, where its noise hides more."""
_BY_STEPS = ("step_seconds", "useful_tokens_per_s_per_gpu", "raw_tokens_per_s_per_gpu", "images_per_s")
"""Metrics that are made of the log's seconds."""

Pair = tuple[Run, Run]


def conditions(metric: Metric, pairs: Sequence[Pair]) -> list[Condition]:
    """The conditions on clocks; none for a metric that no clock goes into, a single pair, or launches of which other clocks are not known."""
    runs = [run for pair in pairs for run in pair]
    if metric.name not in _BY_STEPS or len(pairs) < 2:
        return []
    found = [_arrival(pairs)] if all(run.metrics.get(WALL_STEP) for run in runs) else []
    if all(c.ok for c in found) and all(run.metrics.get(OUTSIDE) is not None for run in runs):
        found.append(_whole(pairs))  # where lines arrive otherwise, whole launches say the same once more
    return found


def _arrival(pairs: Sequence[Pair]) -> Condition:
    """The effect by the log's seconds is that by the arrival of lines."""
    name = "clock"
    by_log = [math.log(_step(a) / _step(b)) for a, b in pairs]
    by_arrival = [math.log(_wall_step(a) / _wall_step(b)) for a, b in pairs]
    low, high = _certain([x - y for x, y in zip(by_log, by_arrival, strict=True)])
    seen, gain = plain.fmean(by_arrival), plain.fmean(by_log)
    # Where lines arrive too irregularly for certainty, they have to bear out half of what the log says.
    unseen = abs(gain) > _MARGIN and math.copysign(seen, seen * gain) < (1 - _TAKEN_BACK) * abs(gain)
    if low > _MARGIN or high < -_MARGIN or unseen:
        return Condition(
            name=name,
            ok=False,
            detail=f"the candidate is {_effect(by_log)} by the seconds of its log, and {_effect(by_arrival)} {_interval(by_arrival)} by the arrival "
            "of its lines. The log leaves out time between steps, or its timer does not wait for the device. "
            f"Log what a step takes until its device is done, or compare by the metric {WALL_STEP}",
        )
    share = plain.median(_step(run) / _wall_step(run) for pair in pairs for run in pair)
    if share < _UNSYNCHRONISED:
        return Condition(
            name=name,
            ok=True,
            detail=f"not compared: steps take {100 * share:.0f} % of the time between their lines, so the log's timer may not wait for the device",
        )
    return Condition(name=name, ok=True)


def _whole(pairs: Sequence[Pair]) -> Condition:
    """What steps save is not spent before the first line, after the last, or between them where lines have no arrival."""
    from scipy import stats as sps  # start-up time: reports of all commands import this module

    name = "whole_launch"
    saved = plain.fmean(_inside(a) - _inside(b) for a, b in pairs)
    # What is outside of steps has outliers, such as a slow disk, so that ranks decide and not means.
    quick, slow = ([_outside(run) for run in side] for side in zip(*pairs, strict=True))
    quick, slow = (quick, slow) if saved > 0 else (slow, quick)
    more = plain.fmean(slow) - plain.fmean(quick)
    if abs(saved) <= _MARGIN * plain.fmean(_inside(a) for a, _ in pairs) or more < _TAKEN_BACK * abs(saved):
        return Condition(name=name, ok=True)
    if float(sps.mannwhitneyu(slow, quick, alternative="greater", method="exact").pvalue) > _BY_CHANCE:
        return Condition(name=name, ok=True, detail="not compared: what is outside of steps varies by more than they save")
    faster = "candidate" if saved > 0 else "baseline"
    whole = [math.log(a.wall_s / b.wall_s) for a, b in pairs]
    return Condition(
        name=name,
        ok=False,
        detail=f"the {faster}'s steps save {abs(saved):.3g} s of a launch, and what lies outside of them takes {more:.3g} s more: "
        f"as whole launches the candidate is {_effect(whole)} {_interval(whole)}. Time all that a step does, or let a launch make more steps",
    )


def _step(run: Run) -> float:
    return METRICS["step_seconds"].value(run) or math.nan


def _wall_step(run: Run) -> float:
    return run.metrics.get(WALL_STEP) or math.nan


def _outside(run: Run) -> float:
    return run.metrics.get(OUTSIDE) or 0.0


def _inside(run: Run) -> float:
    return run.wall_s - _outside(run)


def _certain(values: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean that holds it in all but `_DOUBT` of series."""
    from scipy import stats as sps  # start-up time: reports of all commands import this module

    half = float(sps.t.ppf(1 - _DOUBT / 2, len(values) - 1)) * plain.stdev(values) / math.sqrt(len(values))
    return plain.fmean(values) - half, plain.fmean(values) + half


def _effect(logs: Sequence[float]) -> str:
    """The mean as verdicts say it, such as `faster +2.0 %`."""
    effect = 100 * math.expm1(plain.fmean(logs))
    return f"{'faster' if effect > 0 else 'slower'} {effect:+.1f} %"


def _interval(logs: Sequence[float]) -> str:
    low, high = (100 * math.expm1(v) for v in _certain(logs))
    return f"[{low:+.1f}, {high:+.1f}]"
