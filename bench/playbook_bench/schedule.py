"""The order of runs, fixed before the data: burn-in, A/A, then blocks of ABBA or BAAB."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playbook_bench.case import Case
from playbook_bench.records import Plan, Role, Variant

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


def plan(case: Case, seed: int, pairs_limit: int | None, budget_s: float | None) -> Plan:
    """Looks, error rate and limits. A limit never changes how the error rate is spent."""
    return Plan(seed=seed, looks=list(case.budget.pairs), pairs_limit=pairs_limit, budget_s=budget_s)


def burn_in() -> list[RunSpec]:
    """One run of each variant, discarded: it fills the compile caches and warms the machine."""
    return [RunSpec("baseline", "burn_in"), RunSpec("candidate", "burn_in")]


def aa(pairs: int, first: int = 0) -> list[RunSpec]:
    """The baseline against itself; pairs are numbered from `first`."""
    return [RunSpec("baseline", "aa", pair) for pair in range(first, first + pairs) for _ in range(2)]


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


def last_pair(looks: Sequence[int], limit: int | None) -> int:
    """After how many pairs the series ends at the latest: the last look within the limit, or the limit itself before the first look."""
    if limit is None:
        return looks[-1]
    return max((look for look in looks if look <= limit), default=max(1, limit))


def launches(looks: Sequence[int], limit: int | None, aa_pairs: int) -> int:
    """Launches up to the first look, burn-in and A/A included: what a reader may expect."""
    return 2 + 2 * aa_pairs + 2 * min(looks[0], last_pair(looks, limit))
