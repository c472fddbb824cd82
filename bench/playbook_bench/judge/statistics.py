"""Statistics of matched launches.

The launch is the unit of replication: steps of one launch share its memory layout, its clock and its luck, so they never count as
replicates. The interval is a t interval on log ratios (a percentile bootstrap covers too little at 4 to 12 pairs). It is computed only
at the looks, which share the error rate. `tools/simulate/series.py` shows what error rates come out.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

POWER = 0.8
"""The share of series that should settle an effect, where pairs are counted."""
_MAX_PAIRS = 10_000
"""The most pairs that `pairs_needed` answers with."""
OUT_OF_REACH = 8
"""A series ends, from its second look on, where its claim needs more than so many times the pairs of its case."""
STEADY_ALPHA = 0.05
"""How often a series whose step time is steady is taken for one that is not, at most."""
_AGREE_SHARE = 0.4
"""The part of `STEADY_ALPHA` that the test of agreement gets: the change that the launches are to agree on was chosen on their mean."""
SPENDING = 1.5
"""Of the error rate, the look after a share f of the pairs has spent f to this power: between Pocock's bounds (about 1) and those of
O'Brien and Fleming (about 3)."""
_STANDS_OUT_ALPHA = 0.05
"""How often one launch of an A/A stands out where all are alike; what it costs then is one pair more."""
_AGREEING_LAUNCHES = 3
"""The fewest launches that are asked whether they have a slope in common."""
_CONTAMINATION_ALPHA = 0.01
"""How often the A/A pairs of an undisturbed series are called contaminated."""
CONTAMINATION_LEAST = 0.0025
"""A mean difference up to this never counts as contamination. A share."""


@dataclass(frozen=True)
class Interval:
    """A t interval of a mean difference over blocks. Units: logarithms of ratios, or those of the metric where it is compared by
    difference.
    """

    mean: float
    low: float
    high: float
    deviation: float
    """Sample deviation of the blocks' differences, without the A/A."""
    used: float
    """The deviation that the interval has with `freedom` degrees of freedom: half its width is t x used / sqrt(blocks)."""
    largest: float
    """The larger of the pooled deviation and the blocks' own, from which the number of pairs still needed is counted."""
    freedom: int


def log_ratio(baseline: float, candidate: float, higher_is_better: bool) -> float:
    """Logarithm of how many times better the candidate is; infinite where one value is zero.

    Raises:
        ValueError: a value is negative or not a number.
    """
    for value in (baseline, candidate):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"a ratio needs finite values of at least 0, found {value}")
    if baseline == candidate:
        return 0.0
    worse, better = (baseline, candidate) if higher_is_better else (candidate, baseline)
    if worse == 0:
        return math.inf
    return -math.inf if better == 0 else math.log(better / worse)


def difference(baseline: float, candidate: float, higher_is_better: bool) -> float:
    """By how much the candidate is better, in the metric's unit."""
    return candidate - baseline if higher_is_better else baseline - candidate


def aa_deviation(differences: Sequence[float]) -> float:
    """Deviation of A/A pairs around zero, which is their true mean; 0 where there are none."""
    return math.sqrt(math.fsum(d * d for d in differences) / max(1, len(differences)))


def t_quantile(alpha: float, freedom: float) -> float:
    """The two-sided quantile of Student's t distribution: a value lies beyond it, on either side, with probability `alpha`."""
    return _ppf(1 - alpha / 2, freedom)


@cache
def _ppf(probability: float, freedom: float) -> float:
    """The value below which a variable of Student's t distribution lies with this probability."""
    from scipy.stats import t  # half a second, which commands that judge nothing do without

    return float(t.ppf(probability, freedom))


@cache
def levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The two-sided error rate of the interval at each look, such that all looks together spend `alpha`.

    What earlier looks have caught is not paid for twice, as it is when each look gets an equal part: for looks at 4, 8 and 12 pairs and 5
    %, 1.0, 2.1 and 3.5 % instead of 1.7 % each. The distribution of the running sum, where no look has stopped the series, is carried
    from look to look on a grid.

    Source: K. Kim and D. L. DeMets, Biometrika 74 (1987), the power family; P. Armitage, C. K. McPherson and B. C. Rowe, JRSS A 132 (1969).
    """
    import numpy as np  # start-up time, as above
    from scipy import optimize
    from scipy.stats import norm

    at, mass, before, spent = np.zeros(1), np.ones(1), 0, 0.0
    out = []
    for look in looks:
        rate = alpha * (look / looks[-1]) ** SPENDING - spent
        spent += rate
        step = math.sqrt(look - before)

        def beyond(z: float, at: np.ndarray = at, mass: np.ndarray = mass, step: float = step, look: int = look) -> float:
            bound = z * math.sqrt(look)
            return float(mass @ (norm.sf((bound - at) / step) + norm.cdf((-bound - at) / step)))

        z = float(optimize.brentq(lambda z, f=beyond, rate=rate: f(z) - rate, 0.5, 10.0))
        out.append(float(2 * norm.sf(z)))
        edges = np.linspace(-z * math.sqrt(look), z * math.sqrt(look), 802)
        middle = (edges[1:] + edges[:-1]) / 2
        mass = norm.pdf((middle[:, None] - at) / step) @ mass / step * (edges[1] - edges[0])
        at, before = middle, look
    return tuple(out)


def least_effect(pairs: int, deviation: float, alpha: float) -> float:
    """The least distance from the margin that `pairs` pairs settle with 80 % power (normal approximation of the power), in the unit of
    `deviation`.
    """
    k = _ppf(1 - alpha / 2, pairs - 1) + _ppf(POWER, pairs - 1)
    return k * deviation / math.sqrt(pairs)


def pairs_needed(distance: float, deviation: float, alpha: float) -> int | None:
    """The number of pairs that settle an effect `distance` from the margin, four times out of five; None where it is more than
    `_MAX_PAIRS`.
    """
    counts = range(_MAX_PAIRS + 1)
    pairs = bisect.bisect_left(counts, True, lo=2, key=lambda n: least_effect(n, deviation, alpha) <= abs(distance))
    return pairs if pairs in counts else None


def contaminated(differences: Sequence[float], stored_deviation: float | None, stored_pairs: int = 0) -> bool:
    """Whether A/A pairs of this series differ more than this machine's noise allows.

    With a stored deviation: the mean of the fresh pairs against the prediction interval that the stored pairs give, at 1 %. (A fixed
    limit of three deviations would reject one clean series in seventeen when the deviation rests on four pairs.) Without: the pairs'
    own t test at 1 %. Means below 0.25 % never count: no claim is that fine.
    """
    import numpy as np

    n = len(differences)
    mean = math.fsum(differences) / n
    if abs(mean) <= CONTAMINATION_LEAST:
        return False
    # The stored deviation is taken around zero, so it has as many degrees of freedom as pairs.
    freedom, deviation = (n - 1, float(np.std(differences, ddof=1))) if stored_deviation is None else (stored_pairs, stored_deviation)
    return abs(mean) > t_quantile(_CONTAMINATION_ALPHA, freedom) * deviation / math.sqrt(n)


def stands_out(values: Sequence[float]) -> int | None:
    """The place of the one value that the others do not explain, or None.

    Each value is held against the prediction interval of the rest; with n tests, each spends an n-th of 5 % (Bonferroni). Of the eight
    launches of an A/A, one that is eight deviations off is found in 98 of 100 cases. Launches are asked and not pairs: four differences
    would find half of them.

    Source: R. D. Cook and S. Weisberg, Residuals and Influence in Regression, section 2.2 (externally studentised residuals).
    """
    import numpy as np

    n = len(values)
    if n < 4:
        return None
    x = np.asarray(values, dtype=float)
    off = []
    for i in range(n):
        others = np.delete(x, i)
        # What differs by less than rounding differs by nothing.
        spread = max(float(others.std(ddof=1)), 1e-12 * float(np.abs(others).max()))
        gap = abs(float(x[i] - others.mean()))
        off.append(gap / (spread * math.sqrt(n / (n - 1))) if spread else math.inf if gap else 0.0)
    most = int(np.argmax(off))
    return most if off[most] > t_quantile(_STANDS_OUT_ALPHA / n, n - 2) else None


@dataclass(frozen=True)
class Change:
    """How step time changes inside the timed window, as a share of the step: from one level to another, or along a line."""

    size: float
    """From the first step to the last."""
    after: int | None
    """The number of timed steps before the jump from one level to another; None for a drift."""
    certain: bool
    """Whether it is more than chance."""

    def __str__(self) -> str:
        return f"{100 * self.size:+.1f} % " + (f"from step {self.after + 1} on" if self.after else "over the timed steps, gradually")


def change(launches: Sequence[Sequence[float]], alpha: float) -> Change | None:
    """The step change or linear drift that the launches of a variant fit best; None for fewer than four steps.

    A launch's timed steps are compared with a line, and with a step at each place that leaves a fifth of them, and two at least, on either
    side: one slow step is neither. Two things have to show the change. The steps' mean over the launches does, by a t test for the shape
    that fits best (Bonferroni over shapes): launches read the same data in the same order, so what the data do to a step is in all of them,
    and is no more than chance from step to step. And the launches agree, by a t test over the change of each: slow noise of the host, whose
    neighbouring steps are alike, is each launch's own. Either test alone would reject far more often than it promises.
    The second needs three launches. False alarms are at most `alpha` at any correlation of neighbouring steps up to 0.9.

    Raises:
        ValueError: no launch, or launches of unequal length.
    """
    import numpy as np

    if not launches or len({len(x) for x in launches}) != 1:
        raise ValueError("step times are compared over launches with equally many timed steps")
    y = np.asarray(launches, dtype=float)
    y = y / np.median(y, axis=1, keepdims=True)
    n = y.shape[1]
    if n < 4:
        return None
    shapes = _shapes(n)
    length = np.sqrt((shapes**2).sum(axis=1))
    profile = y.mean(axis=0)
    residual = profile - profile.mean()
    power = float(residual @ residual)
    if power <= (1e-12) ** 2 * n:  # equal to the last digits
        return Change(0.0, None, certain=False)
    r = shapes @ residual / (length * math.sqrt(power))
    best = int(np.argmax(np.abs(r)))
    t = abs(float(r[best])) * math.sqrt((n - 2) / max(1e-15, 1 - float(r[best]) ** 2))
    shape = shapes[best]
    sizes = y @ shape / length[best] ** 2 * (shape[-1] - shape[0])
    certain = t > t_quantile(alpha / len(shapes), n - 2)
    if len(sizes) >= _AGREEING_LAUNCHES:
        half = t_quantile(_AGREE_SHARE * alpha, len(sizes) - 1) * float(sizes.std(ddof=1)) / math.sqrt(len(sizes))
        certain = certain and abs(float(sizes.mean())) > half
    return Change(float(sizes.mean()), _edge(n) + best - 1 if best else None, certain)


def _edge(steps: int) -> int:
    return max(2, -(-steps // 5))


@cache
def _shapes(steps: int) -> np.ndarray:
    """A line, then a step at each place, all with mean zero. Shapes: [places + 1, steps]."""
    import numpy as np

    at = np.arange(steps)
    rows = [at.astype(float), *((at >= k).astype(float) for k in range(_edge(steps), steps - _edge(steps) + 1))]
    return np.stack([row - row.mean() for row in rows])
