"""Which ranks work together: one object with an axis for each kind of parallelism.

Ranks are numbered pp (slowest), dp, cp, tp (fastest). Data and context ranks of one pipeline stage and tensor rank form the
flat axis dp_cp; expert parallelism cuts it into groups of ep neighbours, and edp joins the ranks that hold the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from playbook_trainer.config import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism as this rank sees it."""

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    """The process group; None where size is 1 and nothing needs one."""
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Axes:
    """Every axis of the layout."""

    world: Axis = field(default_factory=lambda: Axis("world"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    edp: Axis = field(default_factory=lambda: Axis("edp"))
    dp_cp: Axis = field(default_factory=lambda: Axis("dp_cp"))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp.rank == self.pp.size - 1

    def group_names(self) -> dict[str, str]:
        """Process-group names as c10d reports them, to the axis they serve."""
        axes = (self.world, self.dp, self.cp, self.tp, self.pp, self.ep, self.edp, self.dp_cp)
        return {a.group.group_name: a.name for a in axes if a.group is not None}


def groups(world: int, sizes: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every group, axis by axis; pure, so that layouts can be tested without processes."""
    tp, pp, cp, ep = sizes.tp, sizes.pp, sizes.cp, sizes.ep
    dp = world // (tp * pp * cp)

    def rank(p: int, d: int, c: int, t: int) -> int:
        return ((p * dp + d) * cp + c) * tp + t

    out: dict[str, list[tuple[int, ...]]] = {k: [] for k in ("dp", "cp", "tp", "pp", "ep", "edp", "dp_cp")}
    out["tp"] = [tuple(rank(p, d, c, t) for t in range(tp)) for p in range(pp) for d in range(dp) for c in range(cp)]
    out["cp"] = [tuple(rank(p, d, c, t) for c in range(cp)) for p in range(pp) for d in range(dp) for t in range(tp)]
    out["dp"] = [tuple(rank(p, d, c, t) for d in range(dp)) for p in range(pp) for c in range(cp) for t in range(tp)]
    out["pp"] = [tuple(rank(p, d, c, t) for p in range(pp)) for d in range(dp) for c in range(cp) for t in range(tp)]
    for p in range(pp):
        for t in range(tp):
            flat = tuple(rank(p, d, c, t) for d in range(dp) for c in range(cp))
            out["dp_cp"].append(flat)
            out["ep"] += [flat[i : i + ep] for i in range(0, len(flat), ep)]
            out["edp"] += [flat[i::ep] for i in range(ep)]
    return out


def build(world: int, rank: int, sizes: ParallelConfig) -> Axes:
    """The axes of this rank; creates the process groups, in the same order on every rank."""
    axes: dict[str, Axis] = {"world": Axis("world", world, rank, dist.group.WORLD if world > 1 else None, tuple(range(world)))}
    for name, members in groups(world, sizes).items():
        for ranks in members:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                axes[name] = Axis(name, len(ranks), ranks.index(rank), group, ranks)
    return Axes(**axes)
