"""When a change counts as proven, so that a whole tuning keeps a useless one with a chance of at most `alpha`.

A change is proven on launches made for nothing else. The set of all changes, and the set without each of them, are launched equally
often, in an order drawn at random. If a change does nothing, each of its labels could as well stand at any other of its two variants'
launches, whatever the noise: heavy tails, drift, two modes. The share of orders that would look at least as good is an exact p value
(Fisher). A linear drift is taken out first, which costs nothing of that. A change is looked at twice; the product of both p values counts
at the second look (Bauer and Köhne).

The chance is shared by Bonferroni: over the rounds, of which each tests a new set on new launches and has its own part of `alpha`, and
over the changes in a round. What chose the changes before a round cannot matter, since no launch is used for both.

Equal labels alone would not do where a change makes a run noisier and not slower. So the interval of `judge.design`, with each variant's
own deviation, has to lie above zero too.

Sources: R. A. Fisher, The Design of Experiments, 1935, chapter 2; P. Bauer and K. Köhne, Biometrics 50 (1994), equation 4. Error rates:
tools/simulate/tunings.py.
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
"""Part of `alpha` that the first round may spend; each further one spends this part of what is left. Four changes are then settled by 5
launches of each set.
"""
_FIRST_LOOK = 0.5
"""Part of a change's chance that its first look may spend."""
_FUTILE = 0.1
"""A change whose p value is above it at the first look is given up."""
_FEWEST, _MOST = 4, 9
"""Launches of each set in a look."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Levels:
    """What one change in a round is held to."""

    first: float
    """The p value at the first look."""
    product: float
    """The product of both p values at the second."""
    launches: int
    """Of each set, in a look: the fewest with which the first look can be passed."""


def levels(alpha: float, round_: int, changes: int) -> Levels:
    """The levels of each of `changes` in a round, counted from 0.

    Most of a change's part is for the first look, by which nearly all are settled. The rest gives `product` by Bauer and Köhne: first +
    product x ln(futile / first) is the whole.
    """
    part = alpha * _FIRST_ROUND * (1 - _FIRST_ROUND) ** round_ / changes
    first = _FIRST_LOOK * part
    count = next((n for n in range(_FEWEST, _MOST) if 1 / math.comb(2 * n, n) <= first), _MOST)
    return Levels(first, (part - first) / math.log(_FUTILE / first), count)


def drawn(seed: int, sets: int, launches: int) -> list[int]:
    """An order in which each of `sets` is launched so often; every order is as likely as any other."""
    order = [which for which in range(sets) for _ in range(launches)]
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

    The true speed-up lies above the interval with probability `tail_probability`, and below it with the same.
    """
    launches: list[design.Launch] = []
    for look in looks:
        for changed, position in zip(look.changed, look.position, strict=True):
            variant, last = int(changed), launches[-1] if launches else None  # variant 0 is without the change
            previous_variant = last.variant if last and last.at == position - 1 else None
            block = sum(x.variant == variant for x in launches)
            launches.append(design.Launch(variant=variant, block=block, before=previous_variant, at=position))
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
