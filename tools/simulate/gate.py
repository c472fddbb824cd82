"""How often the gate's answers are right: series of invented launches, judged by the product's own code. Prints Markdown tables.

    python tools/simulate/gate.py [--series 2000]

Each series has an A/A of four pairs and up to twelve pairs of commits, looked at after 4, 8 and 12. A launch is log-normal around its commit's speed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import binomtest

from playbook_bench.judge.slowdown import LIMIT, Answer, judge_slowdown
from playbook_bench.run.schedule import last_pair

LOOKS = (4, 8, 12)
ANSWERS: tuple[Answer, ...] = ("pass", "regression", "undecided", "too_noisy")
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(deviation: float) -> Draw:
    """Launches with this deviation."""
    return lambda rng, n: rng.normal(0.0, deviation, n)


def outliers(deviation: float) -> Draw:
    """As `normal`, with one launch in twenty that takes a tenth longer."""
    return lambda rng, n: rng.normal(0.0, deviation, n) + 0.1 * (rng.random(n) < 0.05)


def series(rng: np.random.Generator, slower: float, baseline: Draw, candidate: Draw) -> tuple[Answer, int]:
    """The answer of one series, and after how many pairs it came."""
    most = last_pair(LOOKS, None)
    worse = math.log1p(slower) + candidate(rng, most) - baseline(rng, most)
    for look in LOOKS:
        found = judge_slowdown(list(worse[:look]), math.log1p(LIMIT), LOOKS)
        if found.answer != "undecided":
            return found.answer, look
    return "undecided", most


def rows() -> Sequence[tuple[str, float, Draw, Draw]]:
    """What is simulated: a name, the planted slowdown, launches of the baseline and of the candidate."""
    plain = [
        (f"{100 * s:+g} %, launches vary by {100 * d:g} %", s, normal(d), normal(d))
        for s in (0.0, LIMIT, 0.05)
        for d in (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
    ]
    return [
        *plain,
        *(
            (f"+3 %, {100 * d:g} %, the candidate {k} times noisier", LIMIT, normal(d), normal(k * d))
            for d in (0.005, 0.01)
            for k in (2, 4)
        ),
        ("+5 %, 1 %, the candidate 4 times noisier", 0.05, normal(0.01), normal(0.04)),
        ("+5 %, 3 %, the candidate 3 times noisier", 0.05, normal(0.03), normal(0.09)),
        ("+0 %, 0.5 %, one launch in 20 is 10 % longer", 0.0, outliers(0.005), outliers(0.005)),
        ("+5 %, 0.5 %, one launch in 20 is 10 % longer", 0.05, outliers(0.005), outliers(0.005)),
    ]


def share(count: int, of: int) -> str:
    """A share in percent, with its exact 95 % interval (Clopper and Pearson) and the counts."""
    found = binomtest(count, of).proportion_ci()
    return f"{100 * count / of:.3f} % [{100 * found.low:.3f}, {100 * found.high:.3f}], {count} of {of}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=2000)
    number = parser.parse_args().series
    out = sys.stdout
    out.write(
        f"| slowdown, noise of a launch | {' | '.join(a.replace('_', ' ') for a in ANSWERS)} | pairs on average |\n|---|{'---:|' * 5}\n"
    )
    told: list[tuple[str, float, Counter[Answer]]] = []
    for seed, (name, slower, baseline, candidate) in enumerate(rows()):
        rng = np.random.default_rng(seed)
        found = [series(rng, slower, baseline, candidate) for _ in range(number)]
        counts = Counter(answer for answer, _ in found)
        told.append((name, slower, counts))
        shares = " | ".join(f"{100 * counts[a] / number:.2f} %" for a in ANSWERS)
        out.write(f"| {name} | {shares} | {sum(pairs for _, pairs in found) / number:.1f} |\n")
        out.flush()
    at_limit, five = ([c for _, s, c in told if s == slower] for slower in (LIMIT, 0.05))
    found_at = [c for name, _, c in told if name == "+5 %, launches vary by 0.5 %"]
    out.write("\n| what is promised | share of series, 95 % interval |\n|---|---|\n")
    for what, rows_of, answer in (
        ("+5 % where launches vary by 0.5 % is a regression, in 99 %", found_at, "regression"),
        ("+5 % passes, at any noise, in 0.1 % at most", five, "pass"),
        ("the limit passes, at any noise, in 0.1 %", at_limit, "pass"),
        ("the limit is a regression, at any noise, in 2.5 % at most", at_limit, "regression"),
    ):
        out.write(f"| {what} | {share(sum(c[answer] for c in rows_of), len(rows_of) * number)} |\n")


if __name__ == "__main__":
    main()
