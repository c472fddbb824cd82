"""How often a series errs under many kinds of noise, and how many launches it takes: prints Markdown tables.

    python tools/simulate/series.py [--series 20000] [--seed 1]

By today's rules, in the orders that `playbook_bench.judge.design` draws, with looks after 4, 6, 8, 10 and 12. A launch is normal on
logarithms; noise is in its standard deviations. Launches count the discarded first one of each variant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from playbook_bench.judge import design, statistics
from playbook_bench.judge.verdict import RULES
from playbook_bench.judge.verdict_rules import VERSION

ALPHA, LOOKS = 0.05, (4, 6, 8, 10, 12)
ORDERS, LONGEST = 200, 34
"""Orders of launches, and launches that noise is drawn for: more than a series takes, as when the published figures were drawn."""
Noise = Callable[[np.random.Generator, int], np.ndarray]
"""Draws so many series of LONGEST launches. Shape: [series, launches]."""


@dataclass(frozen=True)
class Kind:
    """A kind of noise."""

    name: str
    draw: Noise
    carried: float = 0.0
    """What a launch after one of the candidate has more."""
    noisier: tuple[float, float] = (1.0, 1.0)
    """Noise of the baseline and of the candidate."""


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Independent launches."""
    return rng.normal(size=(count, LONGEST))


def periodic(launches: int, size: float = 1.0) -> Noise:
    """A sine of so many launches and a deviation of `size`, at a random phase, beside normal noise."""
    at = 2 * math.pi * np.arange(LONGEST) / launches
    return lambda rng, n: normal(rng, n) + size * math.sqrt(2) * np.sin(at + rng.uniform(0, 2 * math.pi, (n, 1)))


def correlated(rng: np.random.Generator, count: int, rho: float = 0.6) -> np.ndarray:
    """Neighbours correlated by `rho`."""
    out = normal(rng, count)
    for i in range(1, LONGEST):
        out[:, i] = rho * out[:, i - 1] + math.sqrt(1 - rho**2) * out[:, i]
    return out


AT = np.arange(LONGEST)
KINDS = [
    Kind("normal", normal),
    Kind("heavy tails: Student's t, 3 degrees of freedom", lambda rng, n: rng.standard_t(3, (n, LONGEST))),
    Kind("one launch in 20 off by 5", lambda rng, n: normal(rng, n) + 5 * (rng.random((n, LONGEST)) < 0.05)),
    Kind("two levels, 3 apart, 30 % on the slow one", lambda rng, n: 0.3 * normal(rng, n) + 3 * (rng.random((n, LONGEST)) < 0.3)),
    Kind("drift of 0.3 a launch", lambda rng, n: normal(rng, n) + 0.3 * AT),
    Kind("random walk in steps of 0.5", lambda rng, n: normal(rng, n) + np.cumsum(0.5 * normal(rng, n), axis=1)),
    Kind("neighbours correlated by 0.6", correlated),
    Kind("a jump by 3 at a random launch", lambda rng, n: normal(rng, n) + 3 * (rng.integers(2, LONGEST, (n, 1)) <= AT)),
    Kind("period of 3 launches", periodic(3)),
    Kind("period of 8 launches", periodic(8)),
    Kind("carry-over: 2 after the candidate", normal, carried=2.0),
    Kind("candidate 4 times noisier", normal, noisier=(1.0, 4.0)),
    # More periods, and stronger ones.
    *(Kind(f"period of {launches} launches", periodic(launches)) for launches in (2, 4, 5, 6, 12)),
    *(Kind(f"period of {launches} launches, 3 times as strong", periodic(launches, 3.0)) for launches in (3, 6, 8)),
    Kind("baseline 4 times noisier", normal, noisier=(4.0, 1.0)),
]


def values(kind: Kind, noise: np.ndarray, of: np.ndarray, before: np.ndarray, effect: float) -> np.ndarray:
    """Launches of variants `of`, each after one of variant `before`; larger is better. Shape: [series, launches]."""
    return noise * np.where(of, kind.noisier[1], kind.noisier[0]) + effect * of + kind.carried * before


def rates(kind: Kind, effect: float, count: int, seed: int) -> tuple[float, float, float]:
    """Shares of series that are decided for and against the candidate at a margin of zero, and launches on average, by today's rules."""
    rng, rules = np.random.default_rng(seed), RULES[VERSION]
    gains, losses, spent = 0, 0, 0
    each = max(1, count // ORDERS)
    for draw in range(ORDERS):
        launches = design.launched(design.order(draw, 2, LOOKS), 2)
        of, before = (np.array([getattr(launch, name) for launch in launches]) for name in ("variant", "before"))
        y = values(kind, kind.draw(rng, each)[:, 2 : 2 + len(of)], of, before, effect)
        decided, pairs_used, over = np.zeros(each, dtype=int), np.full(each, LOOKS[-1]), np.zeros(each, dtype=bool)
        for look in LOOKS:
            estimate = design.fit(launches[: 2 * look], 2).contrast(y[:, : 2 * look], (-1.0, 1.0))
            beyond = student.ppf(1 - rules.level(LOOKS, ALPHA, look) / 2, estimate.degrees_of_freedom) * estimate.standard_error
            now = np.where(over, 0, np.sign(estimate.value) * (np.abs(estimate.value) > beyond)).astype(int)
            decided += now
            least = statistics.least_effect(statistics.OUT_OF_REACH * LOOKS[-1], math.sqrt(look), rules.level(LOOKS, ALPHA, look))
            ends = ~over & ((now != 0) | (look > LOOKS[0]) & (np.abs(estimate.value) < least * estimate.standard_error))
            pairs_used[ends], over = look, over | ends
        gains, losses, spent = gains + int((decided > 0).sum()), losses + int((decided < 0).sum()), spent + int(pairs_used.sum())
    total = each * ORDERS
    return gains / total, losses / total, 2 + 2 * spent / total


def floor(effect: float, count: int, seed: int) -> float:
    """Launches on average where noise is known, normal and nothing else disturbs, at the same looks."""
    d = np.random.default_rng(seed).normal(effect, math.sqrt(2), (count, LOOKS[-1])).cumsum(axis=1)
    pairs_used, open_ = np.full(count, LOOKS[-1]), np.ones(count, dtype=bool)
    for look, rate in zip(LOOKS, statistics.levels(LOOKS, ALPHA), strict=True):
        now = open_ & (np.abs(d[:, look - 1]) / math.sqrt(2 * look) > norm.isf(rate / 2))
        pairs_used[now], open_ = look, open_ & ~now
    return 2 + 2 * float(pairs_used.mean())


def table(title: str, head: Sequence[str]) -> None:
    """The head of a Markdown table."""
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description="Error rates and launches of a series, by simulation.")
    parser.add_argument("--series", type=int, default=20_000, help="series for each figure")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    count, seed = arguments.series, arguments.seed
    table("No difference: series that are decided, in %", ["noise", "better", "worse", "launches"])
    for kind in KINDS:
        better, worse, spent = rates(kind, 0.0, count, seed)
        print(f"| {kind.name} | {100 * better:.2f} | {100 * worse:.2f} | {spent:.1f} |", flush=True)
    table(
        "A difference: launches on average, and series that find it, in %",
        ["difference", "noise of a launch", "launches", "found", "floor"],
    )
    for noise in (0.003, 0.01, 0.03):
        for share in (0.01, 0.02, 0.05, 0.1, 0.5):
            effect = math.log1p(share) / noise
            better, _, spent = rates(KINDS[0], effect, count // 4, seed)
            print(
                f"| {100 * share:g} % | {100 * noise:g} % | {spent:.1f} | {100 * better:.1f} | {floor(effect, count, seed):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
