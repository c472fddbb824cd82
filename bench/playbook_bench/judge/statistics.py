"""Statistics of matched launches.

The launch is the unit of replication: steps of one launch share its memory layout, its clock and its luck, so they never count as
replicates. Pairs are adjacent launches; the interval is a paired t interval on log ratios (a percentile bootstrap covers too little
at 4 to 12 pairs). The interval is asked only at the looks, and each look spends an equal part of the error rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

POWER = 0.8
MAX_PAIRS = 10_000
STEADY_ALPHA = 0.05
STANDS_OUT_ALPHA = 0.05
"""How often one launch of an A/A stands out where all are alike; what it costs then is one pair more."""
AGREEING_LAUNCHES = 3
"""The fewest launches that are asked whether they have a slope in common."""
CONTAMINATION_ALPHA = 0.01
CONTAMINATION_LEAST = 0.0025
_EXACT_FLIPS = 16


@dataclass(frozen=True)
class Interval:
    """A paired t interval of the mean difference."""

    mean: float
    low: float
    high: float
    deviation: float
    """Sample deviation, before the floor."""
    used: float
    """The deviation that entered the interval, as one of the degrees of freedom that the interval is given for."""
    largest: float
    """The largest deviation that was looked at, the floor included: what further launches are counted with."""


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
    """By how much the candidate is better."""
    return candidate - baseline if higher_is_better else baseline - candidate


def aa_deviation(differences: Sequence[float]) -> float:
    """Deviation of A/A pairs around zero, which is their true mean."""
    return math.sqrt(math.fsum(d * d for d in differences) / len(differences))


def interval(differences: Sequence[float], alpha: float, floor: float = 0.0) -> Interval:
    """The two-sided interval of error rate `alpha`, with the deviation floored.

    Four lucky pairs must not give a width of zero: the machine's own A/A deviation is the least that is believed.

    Raises:
        ValueError: fewer than two pairs, or a value that is not finite.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 pairs, found {n}")
    if not all(math.isfinite(d) for d in differences):
        raise ValueError("a difference is not finite")
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    used = max(deviation, floor)
    half = t_quantile(alpha, n - 1) * used / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, deviation, used, used)


def t_quantile(alpha: float, freedom: int) -> float:
    """The two-sided quantile of Student's t distribution."""
    return _ppf(1 - alpha / 2, freedom)


def _ppf(probability: float, freedom: int) -> float:
    """The value below which a variable of Student's t distribution lies with this probability."""
    from scipy.stats import t  # half a second, which commands that judge nothing do without

    return float(t.ppf(probability, freedom))


def simultaneous(rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], alpha: float, floor: float = 0.0) -> list[Interval]:
    """Two-sided intervals of several contrasts that hold together with error rate `alpha`.

    `rows` holds one value per block and variant. Each interval is `mean -+ q / sqrt(n)` for n blocks of k variants, with the error rate
    shared among the m contrasts: Bonferroni's inequality, which needs nothing of how they hang together. q is the largest of three:
    t(1 - alpha / 2m, f) |w| times the pooled deviation of a launch, which has f = (k - 1)(n - 1) degrees of freedom; for a variant that
    is noisier than the rest, t(1 - alpha / 2m, n - 1) times the contrast's own deviation over the blocks, which has no more than n - 1;
    and t(1 - alpha / 2m, f) |w| / sqrt(2) times the A/A deviation `floor` of a difference of two launches. `used` is q / t(1 - alpha / 2m, f).
    With two variants this is the paired interval of `interval`.

    Raises:
        ValueError: fewer than two blocks, or a value that is not finite.

    Source: O. J. Dunn, Multiple comparisons among means, JASA 56 (1961); pooled deviation of randomised complete blocks: D. C. Montgomery,
    Design and Analysis of Experiments, chapter 4.
    """
    y = np.asarray(rows, dtype=float)
    n, k = y.shape
    if n < 2:
        raise ValueError(f"an interval needs at least 2 blocks, found {n}")
    if not np.isfinite(y).all():
        raise ValueError("a value is not finite")
    residual = y - y.mean(axis=0) - y.mean(axis=1, keepdims=True) + y.mean()
    freedom = (k - 1) * (n - 1)
    pooled = math.sqrt(float((residual**2).sum()) / freedom)
    t, t_own = (t_quantile(alpha / len(weights), f) for f in (freedom, n - 1))
    out = []
    for weight in weights:
        differences = y @ np.asarray(weight, dtype=float)
        mean, own = float(differences.mean()), float(differences.std(ddof=1))
        length = math.sqrt(math.fsum(w * w for w in weight))
        shared = max(length * pooled, length / math.sqrt(2) * floor)
        used = max(shared, t_own / t * own)
        half = t * used / math.sqrt(n)
        out.append(Interval(mean, mean - half, mean + half, own, used, max(shared, own)))
    return out


def hodges_lehmann(differences: Sequence[float]) -> float:
    """Median of all pairwise means: where the effect lies if single launches are not to be trusted."""
    walsh = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(differences, 2)]
    return float(np.median(walsh))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of the mean under random signs; it cannot fall below 2 / 2^n."""
    n = len(differences)
    if n > _EXACT_FLIPS:
        raise ValueError(f"exact sign flips are counted up to {_EXACT_FLIPS} pairs, found {n}")
    d = np.abs(np.asarray(differences, dtype=float))
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    reached = abs(math.fsum(differences)) * (1 - 1e-12)
    return float(np.mean(np.abs(signs @ d) >= reached))


def least_effect(pairs: int, deviation: float, alpha: float) -> float:
    """The effect beyond the margin that `pairs` pairs would settle with 80 % power (normal approximation of the power)."""
    k = _ppf(1 - alpha / 2, pairs - 1) + _ppf(POWER, pairs - 1)
    return k * deviation / math.sqrt(pairs)


def pairs_needed(distance: float, deviation: float, alpha: float) -> int | None:
    """How many pairs settle an effect that lies `distance` from the margin; None where no sensible number does."""
    if deviation == 0:
        return 2
    low, high = 2, MAX_PAIRS
    if least_effect(high, deviation, alpha) > abs(distance):
        return None
    while low < high:
        middle = (low + high) // 2
        if least_effect(middle, deviation, alpha) <= abs(distance):
            high = middle
        else:
            low = middle + 1
    return low


def contaminated(differences: Sequence[float], stored_deviation: float | None, stored_pairs: int = 0) -> bool:
    """Whether A/A pairs of this series differ more than this machine's noise allows.

    With a stored deviation: the mean of the fresh pairs against the prediction interval that the stored pairs give, at 1 %. (A fixed
    limit of three deviations would reject one clean series in seventeen when the deviation rests on four pairs.) Without: the pairs'
    own t test at 1 %. Means below 0.25 % never count: no claim is that fine.
    """
    n = len(differences)
    mean = math.fsum(differences) / n
    if abs(mean) <= CONTAMINATION_LEAST:
        return False
    if stored_deviation is not None:
        # The stored deviation is taken around zero, so it has as many degrees of freedom as pairs.
        limit = _ppf(1 - CONTAMINATION_ALPHA / 2, stored_pairs) * stored_deviation / math.sqrt(n)
        return abs(mean) > limit
    own = interval(differences, CONTAMINATION_ALPHA)
    return not own.low <= 0 <= own.high


def stands_out(values: Sequence[float]) -> int | None:
    """The place of the one value that the others do not explain, or None.

    Each value is held against the prediction interval of the rest; with n tests, each spends an n-th of 5 % (Bonferroni). Of the eight launches
    of an A/A, one that is eight deviations off is found in 98 of 100 cases. Launches are asked and not pairs: four differences would find half of them.

    Source: R. D. Cook and S. Weisberg, Residuals and Influence in Regression, section 2.2 (externally studentised residuals).
    """
    n = len(values)
    if n < 4:
        return None
    x = np.asarray(values, dtype=float)
    off = []
    for i in range(n):
        rest = np.delete(x, i)
        # What differs by less than rounding differs by nothing.
        spread = max(float(rest.std(ddof=1)), 1e-12 * float(np.abs(rest).max()))
        gap = abs(float(x[i] - rest.mean()))
        off.append(gap / (spread * math.sqrt(n / (n - 1))) if spread else math.inf if gap else 0.0)
    most = int(np.argmax(off))
    return most if off[most] > t_quantile(STANDS_OUT_ALPHA / n, n - 2) else None


@dataclass(frozen=True)
class Trend:
    """Drift of step time inside the timed window, as a share of the step per step."""

    slope: float
    low: float
    high: float
    steps: int

    def steady(self, tolerance: float) -> bool:
        """Whether the interval contains zero, or the drift over the whole window stays below `tolerance`."""
        return self.low <= 0 <= self.high or abs(self.slope) * self.steps <= tolerance


def trend(launches: Sequence[Sequence[float]], alpha: float = STEADY_ALPHA / 2) -> Trend:
    """One Theil-Sen test per variant, on the step-by-step mean over its launches, and one of whether the launches have that slope in common.

    A test per launch would reject at its error rate once per launch, so a series of twenty launches would nearly always fail.
    A t test over per-launch slopes alone would be worse: launches read the same data in the same order, so a chance pattern of step sizes
    gives every launch the same slope, and agreement would pass for proof. Averaged over launches, that pattern is one noise series, as
    the interval assumes. The interval is widened by sqrt((1 + r) / (1 - r)) for the lag-one correlation r of the residuals, because
    slow noise looks like drift to a test that believes in independent steps. Few steps tell little of r and too low a value of it, so it
    is the larger of the mean profile's and of the launches' own, averaged and freed of that bias. Two variants are tested, so each spends half.
    Fewer than four steps show no drift.

    No estimate from so few steps tells a correlation of 0.9 from a drift: alone, that test rejects in 8 to 12 of 100 variants there, where 2.5 are
    promised. But noise of the host is each launch's own, and a drift is what launches have in common. So the interval also covers that of the
    launches' mean slope, a t interval. Both have to exclude zero for a drift, so this one may take twice the error rate: 0.3 to 2.2 of 100 at
    any correlation up to 0.9. It needs three launches; the t quantile of two would hide nearly any drift.

    Raises:
        ValueError: no launch, or launches of unequal length.
    """
    if not launches or len({len(x) for x in launches}) != 1:
        raise ValueError("a trend needs launches with equally many timed steps")
    rows = [np.asarray(x, dtype=float) / np.median(x) for x in launches]
    profile = np.mean(rows, axis=0)
    n = len(profile)
    if n < 4:
        return Trend(0.0, -math.inf, math.inf, n)
    slope, low, high = _slope(profile, alpha)
    own = (n * math.fsum(_lag_one(row) for row in rows) / len(rows) + 2) / (n - 4) if n > 4 else 0.0
    r = min(0.9, max(0.0, own, _lag_one(profile)))
    widen = math.sqrt((1 + r) / (1 - r))
    low, high = slope - (slope - low) * widen, slope + (high - slope) * widen
    if len(rows) >= AGREEING_LAUNCHES:
        shared = interval([_slope(row, alpha)[0] for row in rows], 2 * alpha)
        low, high = min(low, shared.low), max(high, shared.high)
    return Trend(slope, low, high, n)


def _slope(profile: np.ndarray, alpha: float) -> tuple[float, float, float]:
    """The slope per step and its interval, by Theil and Sen where so few steps have an order that is rare enough, else by least squares.

    All of n steps are in order by chance once in n! / 2 times: of four, once in twelve, which would pass for a drift at any error rate.
    """
    from scipy.stats import linregress, theilslopes

    at = np.arange(len(profile))
    if 2 / math.factorial(min(len(profile), 20)) <= alpha:
        slope, _, low, high = (float(v) for v in theilslopes(profile, at, alpha=1 - alpha))
        return slope, low, high
    line = linregress(at, profile)
    half = t_quantile(alpha, len(profile) - 2) * float(line.stderr)
    return float(line.slope), float(line.slope) - half, float(line.slope) + half


def _lag_one(values: np.ndarray) -> float:
    """Correlation of neighbours around the straight line that fits best. On average it is (2 + 4 r) / n too low for noise of correlation r."""
    at = np.arange(len(values))
    residual = values - np.polynomial.Polynomial.fit(at, values, 1)(at)
    power = float(residual @ residual)
    return float(residual[1:] @ residual[:-1]) / power if power > 0 else 0.0
