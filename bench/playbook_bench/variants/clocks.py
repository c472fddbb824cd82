"""The clock of a command's log, held against two that the command does not write: the arrival of its lines, and the launch's wall time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

from playbook.errors import LogError
from playbook_bench.logs import StepLog
from playbook_bench.logs.checks import in_bursts
from playbook_bench.metrics import OUTSIDE, WALL_STEP

_SLACK = 0.01
"""Share of the wall time by which steps may exceed it: two clocks of one machine drift by far less."""
_THOUSANDTH = (1 / 2000, 1 / 500)
_BIAS = 0.01
"""The largest error of a mean, as a share, that the rounding of a log may cause."""
_ON_GRID = 1e-3
_TWO_VALUES = 0.9
"""Where two values make up this share of the steps, they vary by less than the rounding, which then does not average out.
Source: B. Widrow, I. Kollar, Quantization Noise, 2008: the bias falls with exp(-2 pi^2 (deviation / unit)^2), to 0.04 of half a unit at 0.4 units."""


def figures(log: StepLog, first: int, wall_s: float) -> dict[str, float]:
    """What the other clocks say of a launch, by name: seconds of a timed step between arrivals of lines, where lines were printed one by one, and seconds outside of all steps.

    `first` is the index of the first timed line, `wall_s` the seconds of the whole launch.

    Raises:
        LogError: the steps of the log take longer than the launch, are in another unit, or are rounded too coarsely to be compared.
    """
    _fine(log, first)
    inside = logged(log)
    if inside > (1 + _SLACK) * wall_s:
        raise LogError(
            f"its steps take {inside:.4g} s by its log, and the whole launch took {wall_s:.3g} s. "
            "Log seconds, or name the figure after its unit, such as ms for milliseconds"
        )
    found = {OUTSIDE: wall_s - inside}
    lines = log.steps[max(0, first - 1) :]
    moments = [step.arrived for step in lines if step.arrived is not None]
    if len(moments) < len(lines) or len(moments) < 2 or in_bursts(moments):
        return found
    found[WALL_STEP] = (moments[-1] - moments[0]) / (log.every * (len(moments) - 1))
    share = statistics.fmean(step.seconds for step in lines[1:]) / found[WALL_STEP]
    if _THOUSANDTH[0] < share < _THOUSANDTH[1]:
        raise LogError(
            f"its steps take {share * found[WALL_STEP]:.3g} s by its log, and its lines arrive {found[WALL_STEP]:.3g} s apart, a thousand times as much; "
            "expected as much. Log seconds, or name the figure after its unit, such as ms for milliseconds"
        )
    return found


def logged(log: StepLog) -> float:
    """Seconds of all steps of a log, at least: its first line may be of one step alone."""
    return log.steps[0].seconds + math.fsum((b.step - a.step) * b.seconds for a, b in itertools.pairwise(log.steps))


def _fine(log: StepLog, first: int) -> None:
    """Raise where the rounding of the log may move the mean of its timed steps by more than is let pass."""
    seconds = [step.seconds for step in log.steps[first:]]
    if log.clock == "arrival":
        return
    mean = statistics.fmean(seconds)
    # Differences of time stamps add up to the last less the first, so that one rounding is spread over all steps.
    steps = log.every * len(seconds) if log.clock == "differences" else 1
    unit = 10.0 ** math.ceil(math.log10(2 * _BIAS * mean * steps))
    per_line = log.every if log.clock == "differences" else 1
    if not _on_grid([per_line * s for s in seconds], unit):
        return
    if log.clock == "logged" and sum(n for _, n in Counter(seconds).most_common(2)) < _TWO_VALUES * len(seconds):
        return
    while _on_grid([per_line * s for s in seconds], 10 * unit):
        unit *= 10
    raise LogError(
        f"its log rounds seconds to {unit:g} s, and a step takes {mean:.3g} s: too coarse to compare; log more digits, or milliseconds"
    )


def _on_grid(values: Sequence[float], unit: float) -> bool:
    return all(abs(v / unit - round(v / unit)) < _ON_GRID for v in values)
