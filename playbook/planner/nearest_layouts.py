"""The legal layouts nearest to one that is not: fewest doublings or halvings away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import lcm, log2
from typing import Any

from playbook.planner.plan import DEGREES, Plan
from playbook.planner.shapes import LARGEST

CHOICES = 5
"""Values tried per degree: those nearest to the one asked for, and 1."""

OTHER_GPUS = 1.0
"""Added for another number of GPUs, in doublings: machines are harder to change than degrees."""

UNEVEN = 0.5
"""Added for stages of unlike numbers of layers."""


@dataclass(frozen=True)
class Near:
    """A legal plan, what it changes, and how far that is in doublings."""

    plan: Plan
    changes: dict[str, Any]
    distance: float


def nearest(plan: Plan, count: int = 3) -> list[Near]:
    """Up to `count` legal plans, nearest first; the plan itself where it is legal, none where options alone stand in the way."""
    return list(islice(_legal(plan), count))


@dataclass(frozen=True, order=True)
class _Candidate:
    """Settings of a plan that may be legal, ordered by how near they are; building the plan itself waits until its turn comes."""

    distance: float
    gpus: int
    degrees: tuple[int, ...]
    gbs: int
    uneven: bool | None

    def plan(self, asked: Plan) -> Plan:
        """The plan that these settings make of the one asked for."""
        tp, cp, pp, ep, etp, vpp = self.degrees
        options = replace(asked.options, uneven=self.uneven)
        return replace(asked, gpus=self.gpus, gbs=self.gbs, options=options, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp)


def _legal(plan: Plan) -> Iterator[Near]:
    """All legal candidates, nearest first."""
    for candidate in sorted(_candidates(plan)):
        candidate_plan = candidate.plan(plan)
        if not candidate_plan.broken():
            yield Near(candidate_plan, _changes(plan, candidate_plan), candidate.distance)


def _candidates(plan: Plan) -> Iterator[_Candidate]:
    """Settings whose two grids fill the GPUs, with a global batch that divides."""
    tps, cps, pps, eps, etps, vpps = (_choices(plan, key) for key in DEGREES)
    for size, tp, cp, pp in product(_gpu_choices(plan), tps, cps, pps):
        if size % (tp * cp * pp):
            continue
        for ep, etp, vpp in product(eps, etps, vpps if pp > 1 else [1]):
            if size % (etp * ep * pp) == 0:
                yield _candidate(plan, size, (tp, cp, pp, ep, etp, vpp))


def _candidate(plan: Plan, size: int, degrees: tuple[int, ...]) -> _Candidate:
    """A candidate with a pipeline layout where layers do not divide, and the nearest global batch that does."""
    tp, cp, pp, *_, vpp = degrees
    distance = sum(_apart(getattr(plan, k), v) for k, v in zip(DEGREES, degrees, strict=True))
    distance += _apart(plan.gpus, size) + OTHER_GPUS if size != plan.gpus else 0
    # The interleaved schedule takes micro-batches in groups of pp.
    uneven, batch, rows = plan.options.uneven, plan.gbs, plan.mbs * (size // (tp * cp * pp)) * (pp if vpp > 1 else 1)
    moved = (pp, vpp) != (plan.pp, plan.vpp) or uneven is False
    if plan.shape.layers % (pp * vpp) and not uneven and moved:
        uneven, distance = None if uneven is None else True, distance + UNEVEN
    if batch % rows:
        batch = max(1, round(batch / rows)) * rows
        distance += _apart(plan.gbs, batch)
    return _Candidate(round(distance, 9), size, degrees, batch, uneven)


def _choices(plan: Plan, key: str) -> list[int]:
    """The values of a degree that the model allows, nearest first."""
    shape, stated = plan.shape, int(getattr(plan, key))
    most = max(plan.gpus, 1)
    allowed = {
        "tp": [n for n in range(1, min(shape.heads, most) + 1) if shape.heads % n == 0],
        "cp": [n for n in _powers(most) if n == 1 or plan.seq_len % (2 * n) == 0],
        "pp": [n for n in range(1, min(shape.layers + 2, most) + 1) if most % n == 0 or n == stated],
        "ep": [n for n in range(1, min(shape.experts, most) + 1) if shape.experts % n == 0] or [1],
        "etp": [n for n in _powers(most) if (shape.expert_ffn or 1) % n == 0],
        "vpp": list(range(1, shape.layers + 1)),
    }[key]
    near = sorted(allowed, key=lambda n: (_apart(stated, n), n))[:CHOICES]
    return near if 1 in near else [*near, 1]


def _gpu_choices(plan: Plan) -> list[int]:
    """The GPUs asked for, and the multiples of one copy on either side."""
    unit = lcm(plan.tp * plan.cp * plan.pp, plan.etp * plan.ep * plan.pp)
    below = plan.gpus // unit * unit
    return sorted(n for n in {plan.gpus, below, below + unit} if 0 < n <= LARGEST)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _apart(a: int, b: int) -> float:
    """Doublings between two values, rounded so that values equally far away tie on every platform."""
    return round(abs(log2(a) - log2(b)), 9)


def _changes(plan: Plan, nearest: Plan) -> dict[str, Any]:
    """Settings that differ, by name."""
    changed = {k: getattr(nearest, k) for k in ("gpus", *DEGREES, "gbs") if getattr(nearest, k) != getattr(plan, k)}
    return changed | ({"uneven": True} if nearest.options.uneven and plan.options.uneven is False else {})
