"""What turns launches into intervals and says whether step time is steady. The rules have a version, which a record names in its plan.

Records of versions 1 and 2 replay by what decided them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from playbook.cards.model import Expect, Quantity, in_words
from playbook.records.evidence import Curve
from playbook_bench.judge import design, statistics
from playbook_bench.judge.design import Launch
from playbook_bench.judge.statistics import AGREEING_LAUNCHES, Interval, aa_deviation, least_effect, pairs_needed, t_quantile

if TYPE_CHECKING:
    import numpy as np

VERSION = 3


class Rules:
    """The rules of today. A later version is a class that overrides what differs, and older ones keep deciding their records."""

    spent = 0.76
    """The part of the error rate that the looks spend. Their levels are those of normal deviates, which the statistics of few launches, and
    of noise with a period, exceed more often, by up to 1.3 times (`tools/simulate/verdicts.py`)."""
    has_aa = False
    """Whether launches of one variant against itself say how much launches differ. Since version 3 the launches that are compared say
    it."""
    by_block = False
    """Whether values are compared with the first of their block; since version 3 all of them are with one value, so that each launch keeps
    its own noise."""
    balanced_noise = True
    """A/A pairs count as A B B A: the second launch less the first, then the first less the second, so that a drift cancels."""
    not_steady = "step time is not steady"

    def level(self, looks: Sequence[int], alpha: float, blocks: int) -> float:
        """The error rate of the interval after so many blocks: that of the look there, or of the next look if there is none."""
        rates = statistics.levels(tuple(looks), self.spent * alpha)
        return next((rate for look, rate in zip(looks, rates, strict=True) if look >= blocks), rates[-1])

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[Interval]:
        """A two-sided interval of error rate `alpha` for each contrast `weights` of the variants.

        Shapes: rows [blocks, variants], launches [blocks x variants] in their order, weights [contrasts, variants]; `noise` are
        differences of A/A pairs.

        Raises:
            ValueError: fewer than two blocks, or a value that is not finite.
        """
        out, n = [], len(rows)
        for weight in weights:
            estimate = design.contrast(rows, launches, weight)
            mean, error = float(estimate.value), float(estimate.standard_error)
            common = len(launches) - len(weight)
            half = statistics.t_quantile(alpha, float(estimate.degrees_of_freedom)) * error
            used = half * math.sqrt(n) / statistics.t_quantile(alpha, common)
            deviation = error * math.sqrt(n)
            out.append(Interval(mean, mean - half, mean + half, deviation, used, deviation, common))
        return out

    def unsteady(self, label: str, launches: Sequence[Sequence[float]], alpha: float, tolerance: float) -> str:
        """How a variant's step time changes inside its timed window by more than `tolerance`; nothing where it is steady."""
        change = statistics.change(launches, alpha)
        return f"{label} {change}" if change and change.certain and abs(change.size) > tolerance else ""

    def fragile(self, curve: Curve, op: str) -> bool:
        """Whether a decided claim is left open because mean and median of the pairs disagree. Never since version 2: the interval alone
        decides.
        """
        return False

    def claimed(self, expect: Expect, kind: str) -> str:
        """A claim in words."""
        return in_words(expect, kind)

    def pair_figures(self, curve: Curve, used: float, alpha: float, claim: tuple[str, float] | None) -> dict[str, Any]:
        """What the record of a pair says of its resolution; `claim` is the claim's operator and margin."""
        return {"mde": statistics.least_effect(curve.blocks, used, alpha), "pairs_needed": curve.blocks_needed}


# What differs from today's (`verdict_rules.Rules`): pairs of neighbouring launches, whose noise is pooled with that of an A/A; drift and
# carry-over are not fitted; more of the error rate is spent.


class RulesV2(Rules):
    """Version 2."""

    spent = 0.88
    has_aa = True
    by_block = True

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[Interval]:
        """Intervals of paired differences."""
        return _pooled(rows, weights, alpha, noise)


def _pooled(rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], alpha: float, noise: Sequence[float]) -> list[Interval]:
    """A two-sided interval of error rate `alpha` for each contrast `weights` of the variants.

    Shapes: rows [blocks, variants], weights [contrasts, variants], noise [A/A pairs].

    `noise` holds the difference of each A/A pair, whose true mean is zero. The deviation of a
    launch is pooled over both: (k - 1)(n - 1) degrees of freedom from n blocks of k variants, and one from each A/A pair. The A/A speaks
    for one variant alone. So where a contrast varies more over the blocks than the A/A says, its own deviation is used if that gives
    the wider interval; a contrast with a number (weights that do not add up to zero) always has its own where it is wider. Pairs that come
    out quiet by luck are thus held to the machine's noise, and a noisier candidate to its own.

    Raises:
        ValueError: fewer than two blocks, or a value that is not finite.

    Source: randomised complete blocks: D. C. Montgomery, Design and Analysis of Experiments, chapter 4.
    """
    import numpy as np

    y = np.asarray(rows, dtype=float)
    n, k = y.shape
    if n < 2:
        raise ValueError(f"an interval needs at least 2 blocks, found {n}")
    if not np.isfinite(y).all():
        raise ValueError("a value is not finite")
    residual = y - y.mean(axis=0) - y.mean(axis=1, keepdims=True) + y.mean()
    freedom = (k - 1) * (n - 1) + len(noise)
    # A difference of two launches has twice the variance of one.
    launch = math.sqrt((float((residual**2).sum()) + math.fsum(d * d for d in noise) / 2) / freedom)
    aa = statistics.aa_deviation(noise)
    t, t_own = statistics.t_quantile(alpha, freedom), statistics.t_quantile(alpha, n - 1)
    out = []
    for weight in weights:
        differences = y @ np.asarray(weight, dtype=float)
        mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
        shared = math.sqrt(math.fsum(w * w for w in weight)) * launch
        used = max(shared, t_own / t * deviation) if _is_noisier(deviation, weight, aa) else shared
        half = t * used / math.sqrt(n)
        out.append(Interval(mean, mean - half, mean + half, deviation, used, max(shared, deviation), freedom))
    return out


def _is_noisier(deviation: float, weight: Sequence[float], aa: float) -> bool:
    """Whether a contrast with the deviation `deviation` over its blocks varies more than A/A pairs with the deviation `aa` say, or may do
    so.

    What the variants of a block share is in neither the A/A nor the pooled deviation, and does not cancel against a number.
    """
    return deviation > math.sqrt(math.fsum(w * w for w in weight) / 2) * aa or math.fsum(weight) != 0


# The rules of records that name none, or version 1: they replay by what decided them.
# What differs from version 2 (`RulesV2`): each look has an equal part of the error rate; the deviation of the pairs is floored
# at that of the A/A, not pooled with it; a drift is a slope, and a step change none; a median of the pairs with another sign than their
# mean leaves the claim open.

_OP_WORDS = {">=": "at least", "<=": "at most", "within": "equal within"}


class RulesV1(RulesV2):
    """Version 1."""

    balanced_noise = False
    not_steady = "step time still drifts"

    def level(self, looks: Sequence[int], alpha: float, blocks: int) -> float:
        """An equal part for each look."""
        return alpha / len(looks)

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[Interval]:
        """Intervals whose deviation is at least that of the A/A."""
        return _simultaneous(rows, weights, alpha, aa_deviation(noise))

    def unsteady(self, label: str, launches: Sequence[Sequence[float]], alpha: float, tolerance: float) -> str:
        """By the slope alone."""
        trend = _trend(launches, alpha)
        return (
            ""
            if trend.steady(tolerance)
            else f"{label} {100 * trend.slope:+.3f} % per step [{100 * trend.low:.3f}, {100 * trend.high:.3f}]"
        )

    def fragile(self, curve: Curve, op: str) -> bool:
        """Whether the median of the pairs has another sign than their mean."""
        c = curve.contrasts[0]
        return op == ">=" and _hodges_lehmann(c.differences) * (c.mean or 0.0) < 0

    def claimed(self, expect: Expect, kind: str) -> str:
        """A pair's claim without its subject."""
        if kind != "pair":
            return in_words(expect, kind)
        margin = expect.margin or Quantity(value=0.0, unit="percent")
        unit = {"percent": " %", "ratio": " times"}.get(margin.unit, f" {margin.unit}")
        return f"{_OP_WORDS.get(expect.op, expect.op)} {margin.value:g}{unit}"

    def pair_figures(self, curve: Curve, used: float, alpha: float, claim: tuple[str, float] | None) -> dict[str, Any]:
        """Pairs needed to settle the nearest margin, even one that is settled; and two figures that decided nothing, which records of
        version 1 hold.
        """
        c, n = curve.contrasts[0], curve.blocks
        mean = c.mean or 0.0
        figures = {
            "hodges_lehmann": _hodges_lehmann(c.differences),
            "sign_flip_p": sign_flip_p(c.differences) if n <= 16 else None,
            "mde": least_effect(n, used, alpha),
        }
        if claim is not None:
            nearest = math.copysign(claim[1], mean) if claim[0] == "within" else claim[1]
            figures["pairs_needed"] = pairs_needed(mean - nearest, used, alpha)
        return figures


def _simultaneous(rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], alpha: float, floor: float = 0.0) -> list[Interval]:
    """Two-sided intervals of several contrasts that hold together with error rate `alpha` for each of them.

    `rows` holds one value per block and variant. Each interval is `mean -+ q / sqrt(n)` for n blocks of k variants, with the error rate
    shared among the m contrasts: Bonferroni's inequality, which needs nothing of how they hang together. q is the largest of three:
    t(1 - alpha / 2m, f) |w| times the pooled deviation of a launch, which has f = (k - 1)(n - 1) degrees of freedom; for a variant that
    is noisier than the rest, t(1 - alpha / 2m, n - 1) times the contrast's own deviation over the blocks, which has no more than n - 1;
    and t(1 - alpha / 2m, f) |w| / sqrt(2) times the A/A deviation `floor` of a difference of two launches. `used` is q / t(1 - alpha / 2m,
    f). With two variants this is the paired t interval.

    Raises:
        ValueError: fewer than two blocks, or a value that is not finite.

    Source: O. J. Dunn, Multiple comparisons among means, JASA 56 (1961); pooled deviation of randomised complete blocks: D. C. Montgomery,
    Design and Analysis of Experiments, chapter 4.
    """
    import numpy as np

    y = np.asarray(rows, dtype=float)
    n, k = y.shape
    if n < 2:
        raise ValueError(f"an interval needs at least 2 blocks, found {n}")
    if not np.isfinite(y).all():
        raise ValueError("a value is not finite")
    residual = y - y.mean(axis=0) - y.mean(axis=1, keepdims=True) + y.mean()
    freedom = (k - 1) * (n - 1)
    pooled = math.sqrt(float((residual**2).sum()) / freedom)
    t, t_own = (t_quantile(alpha, f) for f in (freedom, n - 1))
    out = []
    for weight in weights:
        differences = y @ np.asarray(weight, dtype=float)
        mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
        length = math.sqrt(math.fsum(w * w for w in weight))
        shared = max(length * pooled, length / math.sqrt(2) * floor)
        used = max(shared, t_own / t * deviation)
        half = t * used / math.sqrt(n)
        out.append(Interval(mean, mean - half, mean + half, deviation, used, max(shared, deviation), freedom))
    return out


def _hodges_lehmann(differences: Sequence[float]) -> float:
    """Median of all pairwise means: where the effect lies if single launches are not to be trusted."""
    import numpy as np

    walsh = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(differences, 2)]
    return float(np.median(walsh))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of the mean under random signs; it cannot fall below 2 / 2^n."""
    import numpy as np

    n = len(differences)
    d = np.abs(np.asarray(differences, dtype=float))
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    reached = abs(math.fsum(differences)) * (1 - 1e-12)
    return float(np.mean(np.abs(signs @ d) >= reached))


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


def _trend(launches: Sequence[Sequence[float]], alpha: float) -> Trend:
    """One Theil-Sen test per variant, on the step-by-step mean over its launches, and one of whether the launches have that slope in
    common.

    A test per launch would reject at its error rate once per launch, so a series of twenty launches would nearly always fail.
    A t test over per-launch slopes alone would be worse: launches read the same data in the same order, so a chance pattern of step sizes
    gives every launch the same slope, and agreement would pass for proof. Averaged over launches, that pattern is one noise series, as
    the interval assumes. The interval is widened by sqrt((1 + r) / (1 - r)) for the lag-one correlation r of the residuals, because
    slow noise looks like drift to a test that believes in independent steps. Few steps tell little of r and too low a value of it, so it
    is the larger of the mean profile's and of the launches' own, averaged and freed of that bias. Two variants are tested, so each spends
    half. Fewer than four steps show no drift.

    No estimate from so few steps tells a correlation of 0.9 from a drift: alone, that test rejects in 8 to 12 of 100 variants there, where
    2.5 are promised. But noise of the host is each launch's own, and a drift is what launches have in common. So the interval also covers
    that of the launches' mean slope, a t interval. Both have to exclude zero for a drift, so this one may take twice the error rate: 0.3 to
    2.2 of 100 at any correlation up to 0.9. It needs three launches; the t quantile of two would hide nearly any drift.

    Raises:
        ValueError: no launch, or launches of unequal length.
    """
    import numpy as np

    if not launches or len({len(x) for x in launches}) != 1:
        raise ValueError("a trend needs launches with equally many timed steps")
    rows = [np.asarray(x, dtype=float) / np.median(x) for x in launches]
    profile = np.mean(rows, axis=0)
    n = len(profile)
    if n < 4:
        return Trend(0.0, -math.inf, math.inf, n)
    slope, low, high = _slope(profile, alpha)
    correlation = (n * math.fsum(_lag_one(row) for row in rows) / len(rows) + 2) / (n - 4) if n > 4 else 0.0
    r = min(0.9, max(0.0, correlation, _lag_one(profile)))
    widen = math.sqrt((1 + r) / (1 - r))
    low, high = slope - (slope - low) * widen, slope + (high - slope) * widen
    if len(rows) >= AGREEING_LAUNCHES:
        slopes = np.array([_slope(row, alpha)[0] for row in rows])
        mean, half = float(slopes.mean()), t_quantile(2 * alpha, len(slopes) - 1) * float(slopes.std(ddof=1)) / math.sqrt(len(slopes))
        low, high = min(low, mean - half), max(high, mean + half)
    return Trend(slope, low, high, n)


def _slope(profile: np.ndarray, alpha: float) -> tuple[float, float, float]:
    """The slope per step and its interval, by Theil and Sen where so few steps have an order that is rare enough, else by least squares.

    All of n steps are in order by chance once in n! / 2 times: of four, once in twelve, which would pass for a drift at any error rate.
    """
    import numpy as np
    from scipy.stats import linregress, theilslopes

    at = np.arange(len(profile))
    if 2 / math.factorial(min(len(profile), 20)) <= alpha:
        slope, _, low, high = (float(v) for v in theilslopes(profile, at, alpha=1 - alpha))
        return slope, low, high
    line = linregress(at, profile)
    half = t_quantile(alpha, len(profile) - 2) * float(line.stderr)
    return float(line.slope), float(line.slope) - half, float(line.slope) + half


def _lag_one(values: np.ndarray) -> float:
    """Correlation of neighbours around the straight line that fits best. On average it is (2 + 4 r) / n too low for noise of correlation
    r.
    """
    import numpy as np

    at = np.arange(len(values))
    residual = values - np.polynomial.Polynomial.fit(at, values, 1)(at)
    power = float(residual @ residual)
    return float(residual[1:] @ residual[:-1]) / power if power > 0 else 0.0
