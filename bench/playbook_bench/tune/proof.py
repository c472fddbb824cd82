"""When a change counts as proven, so that a whole tuning keeps a useless one with a chance of at most `alpha`.

A change is proven on launches made for nothing else. The set of all changes, and the set without each of them, are launched equally
often, in an order drawn at random. If a change does nothing, each of its labels could as well stand at any other of its two variants'
launches, whatever the noise: heavy tails, drift, two modes. The share of orders that would look at least as good is an exact p value
(Fisher). A linear drift is taken out first, which costs nothing of that. A change is looked at twice; the product of both p values counts
at the second look (Bauer and Köhne).

A set is taken only where every change in it is proven, each at the whole level of its round. A set that holds a useless change is then
taken with a chance of at most that level, however many changes it has: an intersection-union test (Berger). The levels of all rounds, of
which each tests a new set on new launches, add up to `alpha`. What chose the changes before a round cannot matter, since no launch is used
for both.

Equal labels alone would not do where a change makes a run noisier and not slower. So the interval of `judge.design`, with each variant's
own deviation, has to lie above zero too.

Sources: R. A. Fisher, The Design of Experiments, 1935, chapter 2; P. Bauer and K. Köhne, Biometrics 50 (1994), equation 4; R. L. Berger,
Technometrics 24 (1982), theorem 1. Error rates: tools/simulate/tunings.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from playbook_bench.judge import design
from playbook_bench.judge.statistics import t_quantile

if TYPE_CHECKING:
    import numpy as np

_FIRST_ROUND = 0.64
"""Part of `alpha` that the first round may spend; each further one spends this part of what is left."""
_FIRST_LOOK = 0.6
"""Part of a round's chance that a first look may spend."""
_FUTILE = 0.1
"""A change whose p value is above it at the first look is given up."""
_FEWEST, _MOST = 3, 8
"""Launches of the set without a change in a look. Two would not tell that variant's own noise."""
_MOST_OF_SET = 24
"""Launches of the whole set in a look."""
_WIDEST = 0.7
"""Half of the interval that a look should leave, in gains of its change."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Levels:
    """What each change in a round is held to."""

    first: float
    """The p value at the first look."""
    product: float
    """The product of both p values at the second."""


def levels(alpha: float, round_: int) -> Levels:
    """The levels of a round, counted from 0.

    Most is for the first look, by which nearly all are settled. The rest gives `product` by Bauer and Köhne: first + product x
    ln(futile / first) is the whole.
    """
    part = alpha * _FIRST_ROUND * (1 - _FIRST_ROUND) ** round_
    first = _FIRST_LOOK * part
    return Levels(first, (part - first) / math.log(_FUTILE / first))


def sizes(bound: Levels, log_gains: Sequence[float], noise: float) -> tuple[int, ...]:
    """How often a look launches the whole set, then the set without each change: the fewest in all by which each can pass.

    A change can pass where the best of all orders is rare enough, and where the interval is narrow enough beside what it looked like
    before, at this deviation of a launch on the logarithmic scale.
    """
    return min(
        ((whole, *(_least(bound.first, whole, gain, noise) for gain in log_gains)) for whole in range(_FEWEST, _MOST_OF_SET)), key=sum
    )


def _least(first: float, whole: int, log_gain: float, noise: float) -> int:
    """Launches without a change, beside so many of the whole set."""
    for n in range(_FEWEST, _MOST):
        half = t_quantile(2 * first, n - 1.0) * noise * math.sqrt(1 / n + 1 / whole)
        if math.comb(whole + n, n) * first >= 1 and half <= _WIDEST * log_gain:
            return n
    return _MOST


def drawn(seed: int, sizes: Sequence[int]) -> list[int]:
    """An order in which each set is launched as often as `sizes` says; every order is as likely as any other."""
    order = [which for which, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(order)
    return order


@dataclass(frozen=True)
class Look:
    """The launches of one look: the logarithm of each one's cost, and which of them had the change."""

    log_costs: Sequence[float]
    changed: Sequence[bool]
    position: Sequence[float]
    """Places in the order of all launches."""

    @property
    def p(self) -> float:
        """The share of all orders of the labels in which the change looks at least as good as in the one that was drawn."""
        import numpy as np  # start-up time: commands that judge nothing import this module too

        n, k = len(self.log_costs), sum(self.changed)
        drift = np.column_stack([np.ones(n), np.asarray(self.position, dtype=float)])
        free = np.eye(n) - drift @ np.linalg.pinv(drift)
        labels = np.vstack([np.asarray(self.changed, dtype=float), _labels(n, k)])
        lengths = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", labels, free, labels), 1e-12))
        gains = -(labels @ (free @ np.asarray(self.log_costs, dtype=float))) / lengths
        return float(np.mean(gains[1:] >= gains[0] - _ROUNDING))


@cache
def _labels(launches: int, changed: int) -> np.ndarray:
    """Every way to name so many of the launches. Shape [ways, launches]."""
    import numpy as np

    rows = np.zeros((math.comb(launches, changed), launches))
    for row, places in zip(rows, itertools.combinations(range(launches), changed), strict=True):
        row[list(places)] = 1.0
    return rows


@dataclass(frozen=True)
class Effect:
    """How much faster a run is with a change, as a share: 0.05 is 5 % more steps in the same time."""

    value: float
    low: float
    high: float


def estimate_speedup(looks: Sequence[Look], tail_probability: float) -> Effect:
    """Speed-up of the change over all its looks, cost without / cost with - 1, and its confidence interval.

    The true speed-up lies above the interval with probability `tail_probability`, and below it with the same. What a launch leaves behind
    is not fitted: most launches before are of other sets.
    """
    rows = [(int(changed), at) for look in looks for changed, at in zip(look.changed, look.position, strict=True)]
    launches = [design.Launch(variant=which, block=0, before=None, at=at) for which, at in rows]  # variant 0 is without the change
    estimate = design.fit(launches, 2).contrast([v for look in looks for v in look.log_costs], (1.0, -1.0))
    half_width = t_quantile(2 * tail_probability, float(estimate.degrees_of_freedom)) * float(estimate.standard_error)
    log_speedup = float(estimate.value)
    return Effect(*(math.expm1(x) for x in (log_speedup, log_speedup - half_width, log_speedup + half_width)))


def proven(looks: Sequence[Look], bound: Levels) -> bool | None:
    """Whether a change is proven by its first or second look; None where a second look may still prove it."""
    first = looks[0].p
    if first <= bound.first:
        clear = True
    elif first > _FUTILE:
        return False
    elif len(looks) == 1:
        return None
    else:
        clear = first * looks[1].p <= bound.product
    if clear and estimate_speedup(looks, bound.first).low > 0:
        return True
    return None if len(looks) == 1 else False
