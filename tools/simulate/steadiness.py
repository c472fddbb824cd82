"""How often steady steps are called unsteady, and which changes are found: launches drawn at random; prints Markdown tables.

python tools/simulate/steadiness.py [--variants 400]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence

import numpy as np

from playbook_bench.judge import statistics

LAUNCHES = 4


def steps(rng: np.random.Generator, count: int, number: int, rho: float, shared: float, spread: float = 0.03) -> np.ndarray:
    """Step times of four launches: noise whose neighbours correlate by `rho`, and a share of the variance that the data give to all of
    them."""
    draw = rng.normal(size=(count, LAUNCHES, number))
    noise = draw.copy()
    for i in range(1, number):
        noise[..., i] = rho * noise[..., i - 1] + math.sqrt(1 - rho**2) * draw[..., i]
    data = rng.normal(size=(count, 1, number))
    return 1 + spread * (math.sqrt(1 - shared) * noise + math.sqrt(shared) * data)


def unsteady(number: int, rho: float, shared: float, shape: np.ndarray | float, count: int) -> str:
    """The percentage of variants that are called unsteady."""
    rows = steps(np.random.default_rng(2), count, number, rho, shared) * shape
    changes = [statistics.change(row.tolist(), statistics.STEADY_ALPHA / 2) for row in rows]
    return f"{100 * sum(c is not None and c.certain for c in changes) / count:.1f}"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description="How often steps are called unsteady, by simulation.")
    parser.add_argument("--variants", type=int, default=400, help="variants for each figure")
    count = parser.parse_args().variants
    table(
        "Steady step times that are called unsteady, in % of variants (2.5 are promised)",
        ["timed steps", "correlation of neighbours", "variance shared by launches", "unsteady"],
        (
            [str(n), f"{rho:g}", f"{shared:g}", unsteady(n, rho, shared, 1.0, 2 * count)]
            for n in (8, 20, 40)
            for rho in (0.0, 0.6, 0.9)
            for shared in (0.0, 0.5, 0.95)
        ),
    )
    shapes = {
        "first 70 % at half speed": lambda x: np.where(x < 0.7, 2.0, 1.0),
        "first 50 % at half speed": lambda x: np.where(x < 0.5, 2.0, 1.0),
        "first 20 % at half speed": lambda x: np.where(x < 0.2, 2.0, 1.0),
        "first half 5 % slower": lambda x: np.where(x < 0.5, 1.05, 1.0),
        "drift of 5 %": lambda x: 1 + 0.05 * x,
        "drift of 10 %": lambda x: 1 + 0.1 * x,
        "drift of 20 %": lambda x: 1 + 0.2 * x,
        "one step three times as slow": lambda x: np.where(np.arange(len(x)) == len(x) // 3, 3.0, 1.0),
    }
    table(
        "Called unsteady, in % of variants; step noise 3 %, neighbours correlated by 0.6, a third of it shared",
        ["change", "timed steps", "unsteady"],
        (
            [name, str(n), unsteady(n, 0.6, 0.33, shape((np.arange(n) + 0.5) / n), count)]
            for name, shape in shapes.items()
            for n in (8, 20, 40)
        ),
    )


if __name__ == "__main__":
    main()
