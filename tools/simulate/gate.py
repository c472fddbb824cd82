"""How often the gate's answers are right: series of invented launches, judged by the product's own code. Prints Markdown tables.

    python tools/simulate/gate.py [--series 500] [--seed 1]

Each series has up to twelve pairs of commits in an order that `playbook_bench.judge.design` draws, looked at after 4, 6, 8, 10 and 12. A
launch is log-normal around its commit's speed. What is promised of a slowdown as large as the limit is counted over a hundred times as many
series, in which none is given up as too noisy.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student

from playbook_bench.judge import design, slowdown
from playbook_bench.judge.slowdown import LIMIT, judge_slowdown

LOOKS = (4, 6, 8, 10, 12)
ORDERS = 100
ANSWERS: tuple[slowdown._Answer, ...] = ("pass", "regression", "undecided", "too_noisy")
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def normal(deviation: float) -> Draw:
    """Launches with this deviation."""
    return lambda rng, shape: rng.normal(0.0, deviation, shape)


def outliers(deviation: float) -> Draw:
    """As `normal`, with one launch in twenty that takes a tenth longer."""
    return lambda rng, shape: rng.normal(0.0, deviation, shape) + 0.1 * (rng.random(shape) < 0.05)


def heavy(deviation: float) -> Draw:
    """Student's t with 3 degrees of freedom."""
    return lambda rng, shape: deviation * rng.standard_t(3, shape)


def periodic(deviation: float, launches: int) -> Draw:
    """A sine of so many launches, as strong as the normal noise beside it. Columns are the launches of a series."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        wave = np.sin(2 * math.pi * np.arange(shape[1]) / launches + rng.uniform(0, 2 * math.pi, (shape[0], 1)))
        return rng.normal(0.0, deviation, shape) + deviation * math.sqrt(2) * wave

    return draw


@functools.cache
def launched(draw: int) -> tuple[list[design.Launch], np.ndarray]:
    """An order of launches, and the variant of each."""
    launches = design.launched(design.order(draw, 2, LOOKS), 2)
    return launches, np.array([launch.variant for launch in launches])


def worse(rng: np.random.Generator, of: np.ndarray, count: int, slower: float, baseline: Draw, candidate: Draw) -> np.ndarray:
    """Logarithms of step times. Shape: [series, launches]. Where both commits draw alike, one draw serves both, so that periods go through
    a series."""
    shape = (count, len(of))
    one = baseline(rng, shape)
    return np.where(of, one if candidate is baseline else candidate(rng, shape), one) + math.log1p(slower) * of


def answers(seed: int, count: int, slower: float, baseline: Draw, candidate: Draw) -> tuple[Counter[slowdown._Answer], float]:
    """How often each answer comes, and after how many pairs on average."""
    rng, counts, spent = np.random.default_rng(seed), Counter[slowdown._Answer](), 0
    for number in range(count):
        launches, of = launched(number % ORDERS)
        (y,) = worse(rng, of, 1, slower, baseline, candidate)
        answer, look = "undecided", LOOKS[0]
        for look in LOOKS:
            estimate = design.fit(launches[: 2 * look], 2).contrast(y[: 2 * look], (-1.0, 1.0))
            answer = judge_slowdown(estimate, look, math.log1p(LIMIT), LOOKS).answer
            if answer != "undecided":
                break
        counts[answer] += 1
        spent += look
    return counts, spent / count


def promised(seed: int, count: int, baseline: Draw, candidate: Draw) -> tuple[int, int, int]:
    """Of series with a slowdown as large as the limit: how many pass, how many are regressions, and all of them."""
    rng, limit, each = np.random.default_rng(seed), math.log1p(LIMIT), max(1, count // ORDERS)
    passed, failed = 0, 0
    for number in range(ORDERS):
        launches, of = launched(number)
        y = worse(rng, of, each, LIMIT, baseline, candidate)
        open_ = np.ones(each, dtype=bool)
        for look in LOOKS:
            estimate = design.fit(launches[: 2 * look], 2).contrast(y[:, : 2 * look], (-1.0, 1.0))
            reach = [
                student.isf(slowdown._rate(error, LOOKS, look), estimate.degrees_of_freedom) * estimate.standard_error
                for error in (slowdown._REGRESSION_ERROR, slowdown._PASS_ERROR)
            ]
            fails, passes = open_ & (estimate.value - reach[0] > limit), open_ & (estimate.value + reach[1] < limit)
            passed, failed, open_ = passed + int(passes.sum()), failed + int(fails.sum()), open_ & ~passes & ~fails
    return passed, failed, each * ORDERS


def share(count: int, of: int) -> str:
    """A share in percent, with its exact 95 % interval (Clopper and Pearson) and the counts."""
    ends = binomtest(count, of).proportion_ci()
    return f"{100 * count / of:.3f} % [{100 * ends.low:.3f}, {100 * ends.high:.3f}], {count} of {of}"


def rows() -> Sequence[tuple[str, float, Draw, Draw]]:
    """What is simulated: a name, the planted slowdown, launches of the baseline and of the candidate."""
    plain = [
        (f"{100 * s:+g} %, launches vary by {100 * d:g} %", s, d)
        for s in (0.0, LIMIT, 0.05)
        for d in (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
    ]
    one = outliers(0.005)
    return [
        *((name, s, draw, draw) for name, s, d in plain for draw in (normal(d),)),
        ("+5 %, 1 %, the candidate 4 times noisier", 0.05, normal(0.01), normal(0.04)),
        ("+5 %, 3 %, the candidate 3 times noisier", 0.05, normal(0.03), normal(0.09)),
        ("+0 %, 0.5 %, one launch in 20 is 10 % longer", 0.0, one, one),
        ("+5 %, 0.5 %, one launch in 20 is 10 % longer", 0.05, one, one),
    ]


def limits() -> Sequence[tuple[str, Draw, Draw]]:
    """Noise for which the promise is counted."""
    alike = [
        ("normal, 0.5 %", normal(0.005)),
        ("normal, 1 %", normal(0.01)),
        ("normal, 3 %", normal(0.03)),
        ("Student's t with 3 degrees of freedom, 1 %", heavy(0.01)),
        ("one launch in 20 is 10 % longer, 0.5 %", outliers(0.005)),
        ("a period of 3 launches, 1 %", periodic(0.01, 3)),
        ("a period of 8 launches, 1 %", periodic(0.01, 8)),
    ]
    unlike = [(f"1 %, the {who} {n} times noisier", n, who) for n in (2, 4) for who in ("candidate", "baseline")]
    return [
        *((name, draw, draw) for name, draw in alike),
        *(
            (name, normal(0.01 if who == "candidate" else 0.01 * n), normal(0.01 if who == "baseline" else 0.01 * n))
            for name, n, who in unlike
        ),
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"| slowdown, noise of a launch | {' | '.join(a.replace('_', ' ') for a in ANSWERS)} | pairs on average |\n|---|{'---:|' * 5}")
    for number, (name, slower, baseline, candidate) in enumerate(rows()):
        counts, pairs = answers(arguments.seed + number, arguments.series, slower, baseline, candidate)
        shares = " | ".join(f"{100 * counts[a] / arguments.series:.1f} %" for a in ANSWERS)
        print(f"| {name} | {shares} | {pairs:.1f} |", flush=True)
    print("\n| noise, a slowdown as large as the limit | passes: 0.1 % are promised | regressions: 2.5 % are promised |\n|---|---|---|")
    for number, (name, baseline, candidate) in enumerate(limits()):
        passed, failed, every = promised(arguments.seed + number, 100 * arguments.series, baseline, candidate)
        print(f"| {name} | {share(passed, every)} | {share(failed, every)} |", flush=True)


if __name__ == "__main__":
    main()
