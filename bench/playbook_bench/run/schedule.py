"""The order of runs, fixed before the data: burn-in, A/A, then blocks of ABBA or BAAB; more than two variants take blocks of their own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.records.evidence import Plan, Role, Variant
from playbook_bench.judge.verdict_rules import VERSION

PAIR: tuple[Variant, Variant] = ("baseline", "candidate")
AA_PAIRS = 4
"""Pairs of a stored A/A; its deviation floors the pairs' own."""
FRESH_AA_PAIRS = 1
"""A/A pairs of a series that has a stored A/A: they show whether the machine is as quiet as it was."""


@dataclass(frozen=True)
class RunSpec:
    """One launch to come."""

    variant: Variant
    role: Role
    pair: int | None = None


def check_limits(pairs: int | None, budget_s: float | None) -> None:
    """Check `--pairs` and `--budget`.

    Raises:
        ConfigError: a limit leaves room for nothing.
    """
    if pairs is not None and pairs < 1:
        raise ConfigError(f"--pairs is {pairs}; expected at least 1")
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise ConfigError(f"--budget is {budget_s:g} s; expected more than 0, and an end")


def plan(case: Case, seed: int, pairs_limit: int | None, budget_s: float | None) -> Plan:
    """Looks, error rate and limits. A limit never changes how the error rate is spent."""
    return Plan(rules=VERSION, seed=seed, looks=list(case.budget.pairs), pairs_limit=pairs_limit, budget_s=budget_s)


def burn_in(variants: Iterable[Variant] = PAIR) -> list[RunSpec]:
    """One run of each variant, discarded: it fills the compile caches and warms the machine."""
    return [RunSpec(variant, "burn_in") for variant in variants]


def aa(pairs: int, first: int = 0, variant: Variant = "baseline") -> list[RunSpec]:
    """One variant against itself; pairs are numbered from `first`."""
    return [RunSpec(variant, "aa", pair) for pair in range(first, first + pairs) for _ in range(2)]


def blocks(seed: int) -> Iterator[str]:
    """ABBA or BAAB without end, drawn by the seed. Either order cancels a linear drift over its two pairs."""
    draw = random.Random(seed)
    while True:
        yield draw.choice(("ABBA", "BAAB"))


def measured(seed: int) -> Iterator[tuple[str, list[RunSpec]]]:
    """Pairs of adjacent runs without end, each with its half of a block."""
    number = 0
    for block in blocks(seed):
        for half in (block[:2], block[2:]):
            yield half, [RunSpec("baseline" if letter == "A" else "candidate", "measure", number) for letter in half]
            number += 1


def rounds(seed: int, variants: Sequence[Variant]) -> Iterator[tuple[str, list[RunSpec]]]:
    """Blocks without end, each with every variant once: a random order, then the same order reversed.

    A block and its reverse cancel a linear drift in every comparison of variants, as A B B A does for two. Randomised complete blocks:
    D. C. Montgomery, Design and Analysis of Experiments, chapter 4.
    """
    draw = random.Random(seed)
    order: list[Variant] = []
    for number in itertools.count():
        order = order[::-1] if number % 2 else draw.sample(list(variants), len(variants))
        yield " ".join(order), [RunSpec(v, "measure", number) for v in order]


def last_pair(looks: Sequence[int], limit: int | None) -> int:
    """After how many pairs the series ends at the latest: the last look within the limit, or the limit itself before the first look."""
    if limit is None:
        return looks[-1]
    return max((look for look in looks if look <= limit), default=max(1, limit))


def launches(looks: Sequence[int], limit: int | None, aa_pairs: int, variants: int = 2) -> int:
    """Launches up to the first look, burn-in and A/A included: what a reader may expect."""
    return variants + 2 * aa_pairs + variants * min(looks[0], last_pair(looks, limit))
