"""The rules of records of version 2: they replay by what decided them.

What differs from today's (`verdict_rules.Rules`): pairs of neighbouring launches, whose noise is pooled with that of an A/A; drift and carry-over
are not fitted; more of the error rate is spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from playbook_bench.judge import statistics
from playbook_bench.judge.design import Launch
from playbook_bench.judge.statistics import Interval
from playbook_bench.judge.verdict_rules import Rules


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
    launch is pooled over both: (k - 1)(n - 1) degrees of freedom from n blocks of k variants, and one from each A/A pair. The A/A speaks for
    one variant alone. So where a contrast varies more over the blocks than the A/A says, its own deviation is used if that gives
    the wider interval; a contrast with a number (weights that do not add up to zero) always has its own where it is wider. Pairs that come out quiet by luck are thus held to the machine's noise, and a noisier candidate to its own.

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
        mean, own = float(differences.mean()), float(differences.std(ddof=1))
        shared = math.sqrt(math.fsum(w * w for w in weight)) * launch
        used = max(shared, t_own / t * own) if _is_noisier(own, weight, aa) else shared
        half = t * used / math.sqrt(n)
        out.append(Interval(mean, mean - half, mean + half, own, used, max(shared, own), freedom))
    return out


def _is_noisier(own: float, weight: Sequence[float], aa: float) -> bool:
    """Whether a contrast with the deviation `own` over its blocks varies more than A/A pairs with the deviation `aa` say, or may do so.

    What the variants of a block share is in neither the A/A nor the pooled deviation, and does not cancel against a number.
    """
    return own > math.sqrt(math.fsum(w * w for w in weight) / 2) * aa or math.fsum(weight) != 0
