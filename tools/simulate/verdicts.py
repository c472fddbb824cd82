"""How often verdicts err, and what they find: series drawn at random go through the product's own rules; prints Markdown tables.

    python tools/simulate/verdicts.py [--series 2000]

Launches are normal on logarithms. Effects are in standard deviations of a pair's difference, s. Version 1 are the rules that records
without a version replay by; those of version 3 are in `series.py`, and test steadiness as version 2 does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.stats import binomtest

from playbook_bench.judge import statistics
from playbook_bench.judge.effects import ClaimRule, decide
from playbook_bench.judge.verdict import RULES
from playbook_bench.judge.verdict_rules import Rules

ALPHA, AA_PAIRS = 0.05, 4
VERSIONS = (1, 2)
PAIR = [(-1.0, 1.0)]
LAUNCHES = 4


def answer(rules: Rules, looks: Sequence[int], look: int, differences: np.ndarray, noise: np.ndarray) -> bool | None:
    """What a claim `>= 0` gets at one look."""
    rows = np.column_stack([np.zeros(look), differences[:look]])
    (interval,) = rules.intervals(rows.tolist(), [], PAIR, rules.level(looks, ALPHA, look), noise.tolist())
    return decide(ClaimRule(">=", ["baseline", "candidate"], 0.0), [(interval.low, interval.high)])


def settle(rules: Rules, looks: Sequence[int], differences: np.ndarray, noise: np.ndarray) -> tuple[bool | None, int]:
    """A claim `>= 0` on one series: its answer, and the pairs that it took."""
    for look in looks:
        if (status := answer(rules, looks, look, differences, noise)) is not None:
            return status, look
    return None, looks[-1]


def pairs(rng: np.random.Generator, count: int, shape: int, noisier: float, outliers: float) -> np.ndarray:
    """Differences of pairs with standard deviation `noisier`; a share of launches, two to a pair, is off by five of theirs."""
    out = rng.normal(0, noisier, (count, shape))
    for sign in (1, -1):
        out += sign * 5 * noisier / math.sqrt(2) * (rng.random((count, shape)) < outliers)
    return out


def series(
    version: int, looks: Sequence[int], effect: float, count: int, noisier: float = 1.0, outliers: float = 0.0
) -> tuple[float, float, float]:
    """Shares confirmed and refuted at a margin of zero, and the mean number of pairs."""
    rng = np.random.default_rng(1)
    noise = pairs(rng, count, AA_PAIRS, 1.0, outliers)
    differences = pairs(rng, count, looks[-1], noisier, outliers) + effect
    settled = [settle(RULES[version], looks, d, n) for d, n in zip(differences, noise, strict=True)]
    statuses = [s for s, _ in settled]
    return statuses.count(True) / count, statuses.count(False) / count, float(np.mean([n for _, n in settled]))


def steps(rng: np.random.Generator, count: int, number: int, rho: float, shared: float, spread: float = 0.03) -> np.ndarray:
    """Step times of four launches: noise whose neighbours correlate by `rho`, and a share of the variance that the data give to all of
    them."""
    draw = rng.normal(size=(count, LAUNCHES, number))
    noise = draw.copy()
    for i in range(1, number):
        noise[..., i] = rho * noise[..., i - 1] + math.sqrt(1 - rho**2) * draw[..., i]
    data = rng.normal(size=(count, 1, number))
    return 1 + spread * (math.sqrt(1 - shared) * noise + math.sqrt(shared) * data)


def unsteady(version: int, number: int, rho: float, shared: float, shape: np.ndarray | float, count: int) -> float:
    """The share of variants that are called unsteady."""
    rows = steps(np.random.default_rng(2), count, number, rho, shared) * shape
    alpha = statistics.STEADY_ALPHA / 2
    return sum(bool(RULES[version].unsteady("", row.tolist(), alpha, 0.0)) for row in rows) / count


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def percent(share: float) -> str:
    """One decimal."""
    return f"{100 * share:.1f}"


def interval(share: float, count: int) -> str:
    """As `percent`, with the exact 95 % interval (Clopper and Pearson)."""
    ends = binomtest(round(share * count), count).proportion_ci()
    return f"{percent(share)} [{percent(ends.low)}, {percent(ends.high)}]"


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="How often verdicts err, and what they find, by simulation.")
    parser.add_argument("--series", type=int, default=2000, help="series for each figure")
    count = parser.parse_args().series
    three, two, early = (4, 8, 12), (4, 8), (2, 4, 8)

    def error(looks: tuple[int, ...], noisier: float, outliers: float) -> list[str]:
        out = [", ".join(map(str, looks)), f"{noisier:g}", f"{100 * outliers:g} %"]
        for version in VERSIONS:
            confirmed, refuted, _ = series(version, looks, 0.0, count, noisier, outliers)
            out += [percent(confirmed), percent(refuted), interval(confirmed + refuted, count)]
        return out

    settings = [(looks, noisier, 0.0) for looks in (three, two) for noisier in (0.5, 1.0, 1.5, 2.0, 4.0)]
    settings += [(early, noisier, 0.0) for noisier in (1.0, 2.0, 4.0)] + [(three, noisier, 0.05) for noisier in (1.0, 2.0)]
    head = ["looks", "noise of pairs / of A/A", "launches off by 5 s"]
    head += [f"v{v}: {what}" for v in VERSIONS for what in ("confirmed", "refuted", "decided")]
    table("The effect lies at the margin: verdicts in % of series", head, (error(*s) for s in settings))

    def power(looks: tuple[int, ...], effect: float, outliers: float) -> list[str]:
        found = [series(version, looks, effect, count, outliers=outliers) for version in VERSIONS]
        return [", ".join(map(str, looks)), f"{effect:g} s", f"{100 * outliers:g} %"] + [
            x for c, _, n in found for x in (percent(c), f"{n:.1f}")
        ]

    head = ["looks", "beyond the margin", "launches off by 5 s", *(f"v{v}: {what}" for v in VERSIONS for what in ("confirmed, %", "pairs"))]
    settings = [(looks, effect, 0.0) for looks in (three, two) for effect in (0.75, 1.0, 1.25, 1.5, 2.0)]
    settings += [(looks, effect, 0.0) for looks in (two, early) for effect in (4.0, 8.0)] + [(three, 1.0, 0.05)]
    table("The claim is true: confirmed, and pairs on average", head, (power(*s) for s in settings))

    few = max(100, count // 5)
    table(
        "Steady step times that are called unsteady, in % of variants (2.5 are promised)",
        ["timed steps", "correlation of neighbours", "variance shared by launches", *(f"v{v}" for v in VERSIONS)],
        (
            [str(n), f"{rho:g}", f"{shared:g}", *(percent(unsteady(v, n, rho, shared, 1.0, 2 * few)) for v in VERSIONS)]
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
        ["change", "timed steps", *(f"v{v}" for v in VERSIONS)],
        (
            [name, str(n), *(percent(unsteady(v, n, 0.6, 0.33, shape((np.arange(n) + 0.5) / n), few)) for v in VERSIONS)]
            for name, shape in shapes.items()
            for n in (8, 20, 40)
        ),
    )


if __name__ == "__main__":
    main()
