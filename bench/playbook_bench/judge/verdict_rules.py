"""What turns launches into intervals and says whether step time is steady. The rules have a version, which a record names in its plan.

A record replays by what decided it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from playbook_bench.judge import design, statistics

VERSION = 3


class Rules:
    """The rules of today. A later version is a class that overrides what differs, and older ones keep deciding their records."""

    spent = 0.76
    """The part of the error rate that the looks spend. Their levels are those of normal deviates, which the statistics of few launches, and
    of noise with a period, exceed more often, by up to 1.3 times (`tools/simulate/series.py`)."""
    has_aa = False
    """Whether launches of one variant against itself say how much launches differ, and values are compared with the first of their block.
    Since version 3 the launches that are compared say it, and all values are compared with one, so that each launch keeps its own noise."""

    def level(self, looks: Sequence[int], alpha: float, blocks: int) -> float:
        """The error rate of the interval after so many blocks: that of the look there, or of the next look if there is none."""
        rates = statistics.levels(tuple(looks), self.spent * alpha)
        return next((rate for look, rate in zip(looks, rates, strict=True) if look >= blocks), rates[-1])

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[design.Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[statistics.Interval]:
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
            out.append(statistics.Interval(mean, mean - half, mean + half, deviation, used, deviation, common))
        return out


# What differs from today's (`verdict_rules.Rules`): pairs of neighbouring launches, whose noise is pooled with that of an A/A; drift and
# carry-over are not fitted; more of the error rate is spent.


class RulesV2(Rules):
    """Version 2."""

    spent = 0.88
    has_aa = True

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[design.Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[statistics.Interval]:
        """Intervals of paired differences.

        `noise` holds the difference of each A/A pair, whose true mean is zero. The deviation of a launch is pooled over both: one degree of
        freedom from each A/A pair, and (k - 1)(n - 1) from n blocks of k variants. The A/A speaks for one variant alone. So where a
        contrast varies more over the blocks than the A/A says, its own deviation is used if that gives the wider interval; a contrast with
        a number (weights that do not add up to zero) always has its own where it is wider. Pairs that come out quiet by luck are thus held
        to the machine's noise, and a noisier candidate to its own.

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
            out.append(statistics.Interval(mean, mean - half, mean + half, deviation, used, max(shared, deviation), freedom))
        return out


def _is_noisier(deviation: float, weight: Sequence[float], aa: float) -> bool:
    """Whether a contrast with the deviation `deviation` over its blocks varies more than A/A pairs with the deviation `aa` say, or may do
    so.

    What the variants of a block share is in neither the A/A nor the pooled deviation, and does not cancel against a number.
    """
    return deviation > math.sqrt(math.fsum(w * w for w in weight) / 2) * aa or math.fsum(weight) != 0
