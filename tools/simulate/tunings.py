"""How often a tuning keeps what does not help, and what it finds: tunings drawn at random go through the product's own procedure; prints Markdown tables.

    python tools/simulate/tunings.py [--tunings 2000]

Twelve knobs, of which none to four help by 1 to 20 %, evenly drawn; the others do nothing. Launches vary on logarithms by the noise that is named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest, norm

from playbook_bench.tune.procedure import Choice, Observation, Settings, Setup, Tuning

KNOBS = [f"knob{i}" for i in range(12)]
ALPHA = 0.05
FINAL = 10
"""Launches of the final comparison: two that are discarded and four pairs."""
CLEAR = 0.05
"""Gains from which on they should be found."""
POWER = 0.9

Draw = Callable[[int], float]
"""The noise of the n-th launch."""


def normal(rng: np.random.Generator, noise: float) -> Draw:
    return lambda n: float(rng.normal(0, noise))


def heavy(rng: np.random.Generator, noise: float) -> Draw:
    """Student's t with 3 degrees of freedom: one launch of 70 is off by more than three deviations."""
    return lambda n: float(rng.standard_t(3)) * noise / math.sqrt(3)


def drifting(rng: np.random.Generator, noise: float) -> Draw:
    """Normal noise, a line of 4 deviations over 50 launches, and a wave of 1.5 deviations every 20."""
    sign, phase = rng.choice([-1, 1]), rng.uniform(0, math.tau)
    return lambda n: float(rng.normal(0, noise)) + noise * (sign * 4 * n / 50 + 1.5 * math.sin(phase + math.tau * n / 20))


def bimodal(rng: np.random.Generator, noise: float) -> Draw:
    """Three launches of ten are in a slow mode, which tends to last; the deviation is that of the other kinds."""
    gap, state = 0.98 * noise / math.sqrt(0.3 * 0.7), [rng.random() < 0.3]

    def draw(n: int) -> float:
        if rng.random() < 0.5:
            state[0] = bool(rng.random() < 0.3)
        return float(gap * state[0]) + float(rng.normal(0, 0.2 * noise))

    return draw


KINDS: Mapping[str, Callable[[np.random.Generator, float], Draw]] = {
    "normal": normal,
    "heavy tails": heavy,
    "drifting": drifting,
    "two modes": bimodal,
}
LEVELS = (0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Truth:
    """A run's twelve knobs: by how much each helps, as a share."""

    gains: Mapping[str, float]

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Truth:
        helping = rng.choice(12, size=rng.integers(0, 5), replace=False)
        return cls({KNOBS[i]: float(rng.uniform(0.01, 0.20)) for i in helping})

    def log_seconds(self, settings: Settings) -> float:
        return -math.fsum(math.log1p(self.gains.get(knob, 0.0)) for knob, _ in settings)


@dataclass(frozen=True)
class Tuned:
    """What came out of one tuning."""

    truth: Truth
    chosen: frozenset[str]
    launches: int

    @property
    def false(self) -> bool:
        return bool(self.chosen - self.truth.gains.keys())


def tuned(truth: Truth, draw: Draw, seed: int, seeming: Truth | None = None) -> Tuned:
    """By the product's procedure. The race sees `seeming` where that is given."""
    tuning = Tuning(Setup([Choice(k, ("off", "on")) for k in KNOBS], [(k, "on") for k in KNOBS], seed, ALPHA))
    while (due := tuning.due) is not None:
        shown = truth if seeming is None or due.why == "proof" else seeming
        tuning.add(Observation("ok", math.exp(shown.log_seconds(due.settings) + draw(len(tuning.launched)))))
    chosen = frozenset(decision.knob for decision in tuning.kept)
    return Tuned(truth, chosen, len(tuning.launched) + FINAL * bool(chosen))


def greedy(truth: Truth, draw: Draw) -> Tuned:
    """One launch each; what is faster than the best so far stays."""
    settings: Settings = ()
    best, n = draw(0), 0
    for n, knob in enumerate(KNOBS, 1):
        trial = (*settings, (knob, "on"))
        if (value := truth.log_seconds(trial) + draw(n)) < best:
            settings, best = trial, value
    return Tuned(truth, frozenset(k for k, _ in settings), n + 1)


def least(truth: Truth, noise: float) -> float:
    """The launches without which nobody could do it who knew the noise, and that it is normal, and needed each knob's answer alone.

    The start and every knob once; for each gain, as many as a test of known noise needs for a twelfth of the chance and the power; the final comparison.
    """
    z = float(norm.isf(ALPHA / len(KNOBS)) + norm.isf(1 - POWER))
    more = math.fsum(max(1.0, (z * noise / math.log1p(gain)) ** 2) - 1 for gain in truth.gains.values())
    return 1 + len(KNOBS) + more + FINAL * bool(truth.gains)


def tunings(kind: str, noise: float, count: int, seed: int = 1) -> Iterator[tuple[Tuned, Tuned]]:
    """Tunings by the procedure and, on the same truth and noise of its own, greedy ones."""
    for i in range(count):
        rng = np.random.default_rng([seed, list(KINDS).index(kind), round(noise * 1e4), i])
        truth = Truth.drawn(rng)
        yield tuned(truth, KINDS[kind](rng, noise), i), greedy(truth, KINDS[kind](rng, noise))


def misled(kind: str, noise: float, seed: int) -> bool:
    """Whether a useless change is kept that stands beside three clear ones and looks like them in the race: what the proof is worth by itself.

    Of all sets this one is the most likely to be taken: every change in it has to be proven, and only one of them can fail.
    """
    rng = np.random.default_rng([7, list(KINDS).index(kind), round(noise * 1e4), seed])
    truth = Truth(dict.fromkeys(KNOBS[:3], 20 * noise))
    return tuned(truth, KINDS[kind](rng, noise), seed, Truth({**truth.gains, KNOBS[3]: 20 * noise})).false


def all_help(noise: float, seed: int) -> Tuned:
    """A tuning of which every knob helps, by 1 to 10 %, under normal noise: the longest that there is."""
    rng = np.random.default_rng([11, round(noise * 1e4), seed])
    return tuned(Truth(dict(zip(KNOBS, np.linspace(0.01, 0.10, len(KNOBS)).tolist(), strict=True))), normal(rng, noise), seed)


class Overlapping(Truth):
    """The first knob gains 8 % alone and nothing once two that are tried later are in, as a compiler beside fused kernels."""

    def log_seconds(self, settings: Settings) -> float:
        fused = sum(knob in dict(settings) for knob in KNOBS[6:8])
        shared = max(0.08 * (KNOBS[0] in dict(settings)), 0.04 * fused) + 0.004 * fused
        return super().log_seconds(settings) + math.log1p(-shared)


def overlapping(noise: float, seed: int) -> Tuned:
    """A tuning of which two knobs do the work of a third, and five others help."""
    rng = np.random.default_rng([13, round(noise * 1e4), seed])
    return tuned(Overlapping(dict(zip(KNOBS[1:6], (0.09, 0.16, 0.03, 0.09, 0.01), strict=True))), normal(rng, noise), seed)


def row(noise: float, kind: str, both: Sequence[tuple[Tuned, Tuned]]) -> list[str]:
    mine, plain = zip(*both, strict=True)
    clear = [(t, k) for t in mine for k, gain in t.truth.gains.items() if gain >= CLEAR]
    every = [(t, k) for t in mine for k in t.truth.gains]
    per = [sum(k in t.chosen for t, k in pairs) / max(1, len(pairs)) for pairs in (clear, every)]
    wrong = [sum(t.false for t in side) for side in (mine, plain)]
    count = len(both)
    bound = binomtest(wrong[0], count, alternative="less").proportion_ci(0.95).high
    launches = [float(np.mean([t.launches for t in side])) for side in (mine, plain)]
    floor = float(np.mean([least(t.truth, noise) for t in mine]))
    return [
        kind,
        f"{100 * noise:g} %",
        f"{100 * wrong[0] / count:.1f} % (< {100 * bound:.1f})",
        f"{100 * per[0]:.1f} %",
        f"{100 * per[1]:.1f} %",
        f"{launches[0]:.1f}",
        f"{floor:.1f}",
        f"{100 * wrong[1] / count:.0f} %",
        f"{launches[1]:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="How often a tuning keeps what does not help, by simulation.")
    parser.add_argument("--tunings", type=int, default=2000, help="for each kind of noise, spread over its sizes")
    count = parser.parse_args().tunings // len(LEVELS)
    head = [
        "noise",
        "of a launch",
        "tunings with a false keep",
        "gains >= 5 % found",
        "all gains found",
        "launches",
        "least",
        "greedy: false keeps",
        "launches",
    ]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    wrong = [0, 0]
    for kind in KINDS:
        for noise in LEVELS:
            both = list(tunings(kind, noise, count))
            wrong = [before + sum(pair[i].false for pair in both) for i, before in enumerate(wrong)]
            print(f"| {' | '.join(row(noise, kind, both))} |", flush=True)
    print("\n| noise of 1 % | tunings misled by the race that keep a useless change |\n|---|---|")
    for kind in KINDS:
        wrongly = sum(misled(kind, 0.01, i) for i in range(count * len(LEVELS)))
        print(f"| {kind} | {100 * wrongly / count / len(LEVELS):.2f} % |", flush=True)
    for name, draw in {"all twelve help by 1 to 10 %": all_help, "two of eight do the work of a third": overlapping}.items():
        print(f"\n| noise of a launch | launches where {name} | at most | kept |\n|---|---|---|---|")
        for noise in (0.0007, 0.002, 0.005, 0.01):
            found = [draw(noise, i) for i in range(max(20, count // 5))]
            launches, kept = [t.launches for t in found], float(np.mean([len(t.chosen) for t in found]))
            print(f"| {100 * noise:g} % | {np.mean(launches):.0f} | {max(launches)} | {kept:.1f} |", flush=True)
    every = count * len(KINDS) * len(LEVELS)
    bound = binomtest(wrong[0], every, alternative="less").proportion_ci(0.95).high
    print(f"\nFalse keeps in {wrong[0]} of {every:,} tunings (at most {100 * bound:.2f} %, at 95 %); of greedy ones in {wrong[1]:,}.")


if __name__ == "__main__":
    main()
