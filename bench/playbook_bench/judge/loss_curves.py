"""Whether the losses of two variants are one curve: where they end, how far they fall, and step by step where launches repeat theirs."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from collections.abc import Sequence

from playbook.records.evidence import Run
from playbook_bench.metrics import timed

_FEWEST = 5
"""Steps from which on the noise of a curve is known well enough."""
_DEVIATIONS = 6.0
"""Differences below so many standard errors are noise: a deviation of few steps is known badly, so that equal curves of normal losses exceed it in at most half a percent of series."""
_TREND = 0.5
"""Share of its fall that a loss may lose."""
_LEAST_TREND = 0.25
"""Share of the band below which a fall is not told from none."""
_STEP = 4.0
"""One step may differ by this many times the band, where launches repeat their losses."""
_REPEATS = 0.1
"""Launches repeat their losses where they differ by less than this share of the band, at every step."""
_MEDIAN_SQUARE = 0.4549
"""Median of the square of a standard normal deviate."""


def difference(pairs: Sequence[tuple[Run, Run]], band: float) -> str:
    """What tells the curves of pairs apart by more than the band, a share, and the noise of their steps; empty where nothing does.

    Curves are means over the pairs of the timed steps' losses, where every launch of the baseline tells one. Of fewer than five such steps only the mean is compared.
    """
    before, after = ([_losses(run) for run in side] for side in zip(*pairs, strict=True))
    told = [i for i in range(min(map(len, before))) if all(curve[i] is not None for curve in before)]
    if missing := [i for i in told if any(i >= len(curve) or curve[i] is None for curve in after)]:
        return f"the baseline tells a loss at {len(told)} timed steps, and the other none at {len(missing)} of them, such as the {missing[0] + 1}th"
    if len(told) < _FEWEST:
        return ""
    a, b = ([plain.fmean(curve[i] or 0.0 for curve in side) for i in told] for side in (before, after))
    noise, part = _noise([y - x for x, y in zip(a, b, strict=True)]), max(1, len(a) // 5)
    scale, error = plain.fmean(map(abs, a)), noise / math.sqrt(part)
    ends = plain.fmean(a[-part:]), plain.fmean(b[-part:])
    if abs(ends[1] - ends[0]) > band * max(map(abs, ends)) + _DEVIATIONS * error:
        return f"the losses end at {ends[1]:.4g} and not at {ends[0]:.4g}, by their last {part} steps; at most {100 * band:g} % is allowed"
    falls = [plain.fmean(curve[:part]) - end for curve, end in zip((a, b), ends, strict=True)]
    if abs(falls[1] - falls[0]) > max(_TREND * abs(falls[0]), _LEAST_TREND * band * scale, _DEVIATIONS * math.sqrt(2) * error):
        return f"the loss falls by {falls[1]:.3g} over the timed steps, and by {falls[0]:.3g} in the baseline"
    if len(before) > 1 and all(_repeats([curve[i] or 0.0 for curve in before], band) for i in told):
        for i, x, y in zip(told, a, b, strict=True):
            if abs(y - x) > _STEP * band * max(abs(x), abs(y)):
                return f"the loss of timed step {i + 1} is {y:.4g}, and {x:.4g} in every launch of the baseline"
    return ""


def _losses(run: Run) -> tuple[float | None, ...]:
    return tuple(s.loss for s in timed(run))


def _repeats(values: Sequence[float], band: float) -> bool:
    return max(values) - min(values) <= _REPEATS * band * max(map(abs, values))


def _noise(differences: Sequence[float]) -> float:
    """Standard deviation of one step's difference, from differences of neighbours: a slow divergence of the curves is none of it.

    Source: J. von Neumann, Distribution of the ratio of the mean square successive difference to the variance, 1941; the median in place of the
    mean lets single steps count for nothing.
    """
    squares = [(y - x) ** 2 for x, y in itertools.pairwise(differences)]
    return math.sqrt(plain.median(squares) / (2 * _MEDIAN_SQUARE))
