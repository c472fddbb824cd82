"""The design of a series: in which order variants are launched, and what their launches say of the difference between two of them.

A launch is modelled as the level of its variant, plus a linear drift over the series (with more than two variants, a level of its block),
plus what the launch before it leaves behind (first-order carry-over: heat, caches, memory), plus noise of its own variant. All are fitted
together by least squares, so a drift or a carry-over of any size moves no difference. The variance of a difference is that of its two
variants, each from its own residuals, with Satterthwaite's degrees of freedom: a candidate that is noisier than the baseline is held to its
own noise.

The order is drawn from the seed and kept where the model can tell its terms apart and where noise of no period looks like the variants:
what repeats every few launches (a cron job, a neighbour) then disturbs the difference hardly more than noise without a period.

Sources: B. Jones and M. G. Kenward, Design and Analysis of Cross-Over Trials, chapter 5 (carry-over); B. L. Welch, Biometrika 34 (1947),
and F. E. Satterthwaite, Biometrics Bulletin 2 (1946) (unequal variances). Error rates: tools/simulate/series.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_LEAST_EFFICIENCY = 0.8
"""What drift and carry-over may cost: the variance of a difference without them over that with them, at every look."""
_MOST_ALIAS = 2.6
"""How many times more than noise without a period that of the worst period may disturb a difference, at a look after 4 pairs."""
_MORE_ALIAS = 0.075
"""What each pair more adds to it: a longer order has a sharper spectrum."""
_TRIES, _RESTARTS = 40, 12
"""Orders that are drawn for the launches up to a look, and whole orders of two variants; where none is good enough, as with more variants,
the best of them counts."""
_DIGITS = 9
"""Of what orders are chosen by, so that every machine draws the same."""
_PERIODS = 60
"""Frequencies at which an order is asked, from 30 launches a period to 2."""


@dataclass(frozen=True)
class Launch:
    """One launch of a series, as the model sees it."""

    variant: int
    """Index of its variant."""
    block: int
    """Which launch of its variant it is, from 0. Launches of more than two variants come in such blocks."""
    before: int | None
    """That of the launch before it; None where no variant of the comparison ran."""
    at: float
    """Its place in the series."""


@dataclass(frozen=True)
class Estimate:
    """A difference between variants. Shapes: those of the values it was made from, without the last."""

    value: np.ndarray
    standard_error: np.ndarray
    degrees_of_freedom: np.ndarray


@dataclass(frozen=True)
class Fit:
    """Least squares of one order of launches: what each launch counts in each variant's level."""

    variant_of: np.ndarray
    """Index of each launch's variant. Shape [launches]."""
    level_weights: np.ndarray
    """Weights of each variant's level. Shape [variants, launches]."""
    carry: np.ndarray | None
    """Weights of what a launch of each variant leaves behind, against the mean of all; None where it is not fitted. Shape as
    `level_weights`.
    """
    residual_projection: np.ndarray
    """Projects values on what the model leaves over. Shape [launches, launches]."""

    def estimate_weighted_sum(self, launch_values: Any, weights: np.ndarray) -> Estimate:
        """The sum of `launch_values` weighted by `weights`, with its standard error, each variant's noise estimated apart, and
        Satterthwaite's degrees of freedom (all of them where the variance is 0). Shapes: [..., launches], [launches].
        """
        import numpy as np  # start-up time: commands that judge nothing import this module too

        y = np.asarray(launch_values, dtype=float)
        membership = np.eye(len(self.level_weights))[self.variant_of]
        variant_dof = np.diag(self.residual_projection) @ membership
        residual_sums_of_squares = (y @ self.residual_projection) ** 2 @ membership
        if len(self.level_weights) == 2:
            variant_variance = residual_sums_of_squares / variant_dof
        else:
            # In blocks, what is left over of a launch is noise of the other variants too: MINQUE, C. R. Rao, JMVA 1 (1971).
            mixing = membership.T @ self.residual_projection**2 @ membership
            variant_variance = np.maximum(residual_sums_of_squares @ np.linalg.inv(mixing), 0.0)
        variance_terms = variant_variance * (weights**2 @ membership)
        variance, satterthwaite_denominator = variance_terms.sum(axis=-1), (variance_terms**2 / variant_dof).sum(axis=-1)
        total_dof = np.full(y.shape[:-1], float(variant_dof.sum()))
        freedom = np.divide(variance**2, satterthwaite_denominator, out=total_dof, where=satterthwaite_denominator > 0)
        return Estimate(value=y @ weights, standard_error=np.sqrt(variance), degrees_of_freedom=freedom)

    def contrast(self, values: Any, weights: Sequence[float]) -> Estimate:
        """The contrast `weights` of the variants' levels."""
        import numpy as np

        return self.estimate_weighted_sum(values, np.asarray(weights, dtype=float) @ self.level_weights)


def fit(launches: Sequence[Launch], variants: int, nuisance: bool = True) -> Fit:
    """The model of these launches: with carry-over and drift or blocks where that leaves a degree of freedom for each variant's noise, else
    without carry-over, else with neither.

    Without `nuisance`, plain means: for values that are compared with a number, where a drift is noise.
    """
    import numpy as np

    n = len(launches)
    of = np.array([launch.variant for launch in launches])
    membership = np.eye(variants)[of]
    at = np.array([launch.at for launch in launches], dtype=float)
    slow = (at - at.mean())[:, None] if variants == 2 else _summing_to_zero([launch.block for launch in launches])
    code = np.vstack([_summing_to_zero(range(variants)), np.zeros((1, variants - 1))])
    after = code[[variants if launch.before is None else launch.before for launch in launches]]
    for terms in ([slow, after], [slow], []) if nuisance else ([],):
        x = np.hstack([membership, *terms])
        if not terms or (n - x.shape[1] >= variants and np.linalg.matrix_rank(x) == x.shape[1]):
            break
    inverse = np.linalg.pinv(x)
    carry = code[:-1] @ inverse[variants + slow.shape[1] :] if len(terms) == 2 and variants > 1 else None
    return Fit(of, inverse[:variants], carry, np.eye(n) - x @ inverse)


def _summing_to_zero(of: Sequence[int]) -> np.ndarray:
    """A column for each level but the last, which is what makes the sum of all zero."""
    import numpy as np

    levels = sorted(set(of))
    code = np.vstack([np.eye(len(levels))[:-1, :-1], -np.ones((1, len(levels) - 1))])
    return code[[levels.index(level) for level in of]]


def contrast(rows: Sequence[Sequence[float]], launches: Sequence[Launch], weights: Sequence[float]) -> Estimate:
    """The contrast `weights` of variants, from a value for each block and variant and the launches in their order.

    Weights that do not add up to zero compare with a number: drift and carry-over are not fitted then.

    Raises:
        ValueError: fewer than two blocks, or a value that is not finite.
    """
    if len(rows) < 2:
        raise ValueError(f"an interval needs at least 2 blocks, found {len(rows)}")
    model = fit(launches, len(weights), nuisance=abs(math.fsum(weights)) < 1e-9)
    return model.contrast(_values(rows, launches), weights)


def carry_over(rows: Sequence[Sequence[float]], launches: Sequence[Launch], one: int, other: int) -> Estimate | None:
    """How much larger the value of a launch is after one of variant `other` than after one of variant `one`; None where there are too few
    launches to tell.
    """
    model = fit(launches, len(rows[0]))
    return None if model.carry is None else model.estimate_weighted_sum(_values(rows, launches), model.carry[other] - model.carry[one])


def _values(rows: Sequence[Sequence[float]], launches: Sequence[Launch]) -> list[float]:
    values = [rows[launch.block][launch.variant] for launch in launches]
    if not all(map(math.isfinite, values)):
        raise ValueError("a value is not finite")
    return values


def order(seed: int, variants: int, looks: Sequence[int]) -> list[int]:
    """Indices of variants in the order of their launches, each as often as the others up to every look. The launch before the first is of
    the last variant.

    Up to the first look and from look to look, pairs come in any order; more than two variants come in blocks that hold each once.
    """
    draw = random.Random(seed)
    best: tuple[int, float, list[int]] = (-1, 0.0, [])
    for _ in range(_RESTARTS if variants == 2 else 1):
        drawn: list[int] = []
        good, before, worst = 0, 0, math.inf
        for look in looks:
            tries = ([*drawn, *_more(draw, variants, look - before)] for _ in range(_TRIES))
            drawn, efficiency, alias = _first_or_best(tries, variants, look)
            good, before, worst = good + _is_good(efficiency, alias, look), look, min(worst, efficiency)
        best = max(best, (good, worst, drawn))
        if good == len(looks):
            break
    return best[2]


def _first_or_best(tries: Iterator[list[int]], variants: int, look: int) -> tuple[list[int], float, float]:
    best: tuple[list[int], float, float] = ([], -math.inf, 1.0)
    for drawn in tries:
        efficiency, alias = quality(drawn, variants)
        if _is_good(efficiency, alias, look):
            return drawn, efficiency, alias
        if efficiency / alias > best[1] / best[2]:
            best = drawn, efficiency, alias
    return best


def _is_good(efficiency: float, alias: float, look: int) -> bool:
    return efficiency >= _LEAST_EFFICIENCY and alias <= _MOST_ALIAS + _MORE_ALIAS * (look - 4)


def _more(draw: random.Random, variants: int, blocks: int) -> list[int]:
    every = list(range(variants))
    if variants == 2:
        return draw.sample(every * blocks, 2 * blocks)
    return list(itertools.chain.from_iterable(draw.sample(every, variants) for _ in range(blocks)))


def launched(drawn: Sequence[int], variants: int) -> list[Launch]:
    """An order as launches that follow one of the last variant."""
    before = itertools.pairwise([variants - 1, *drawn])
    return [Launch(v, drawn[:i].count(v), b, i) for i, (b, v) in enumerate(before)]


def quality(drawn: Sequence[int], variants: int) -> tuple[float, float]:
    """Of the worst difference between two variants: how efficient the order is for it, and how much noise of the worst period disturbs
    it.
    """
    import numpy as np

    model = fit(launched(drawn, variants), variants)
    n = len(drawn)
    turns = np.exp(-1j * np.outer(np.linspace(math.tau / 30, math.pi, _PERIODS), np.arange(n)))
    efficiency, alias = math.inf, 0.0
    for a, b in itertools.combinations(range(variants), 2):
        w = model.level_weights[b] - model.level_weights[a]
        power = float(w @ w)
        efficiency = min(efficiency, 2 * variants / n / power)
        alias = max(alias, float((np.abs(turns @ w) ** 2).max()) / power)
    return round(efficiency, _DIGITS), round(alias, _DIGITS)
