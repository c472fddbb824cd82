"""Which ranks work together: one object with an axis for each kind of parallelism.

The ranks of a pipeline stage form two grids, one over the other, so that experts are laid out independently of attention (parallel
folding):

    attention   dp (slowest), cp, tp (fastest)
    experts     edp (slowest), ep, etp (fastest)

Ranks are numbered pp first, then by the attention grid. Dense parameters are sharded over dp x cp, those of an expert over edp. With
`dp_replicate` the ranks of dp x cp form copies of the model (the slower part of dp counts the copies) and sharding stays inside each. A
copy of the experts may span several of them; then experts have fewer copies, down to one.
Source: Megatron-LM, `megatron/core/parallel_state.py`, order tp-cp-ep-dp-pp; MoE Parallel Folding, arXiv 2504.14960.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from playbook_trainer.config.tree import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One parallel dimension: its size, this rank's place in it, and its process group."""

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    """The process group; None where size is 1 and nothing needs one."""
    ranks: tuple[int, ...] = (0,)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Put the sum over the ranks, or what else `op` says, in the place of `x`; nothing where there is one rank."""
        if self.size > 1:
            dist.all_reduce(x, op=op, group=self.group)

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank, in their order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class Axes:
    """All parallel dimensions of this rank."""

    world: Axis = field(default_factory=lambda: Axis("world"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    etp: Axis = field(default_factory=lambda: Axis("etp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    edp: Axis = field(default_factory=lambda: Axis("edp"))
    dp_cp: Axis = field(default_factory=lambda: Axis("dp_cp"))
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    """Ranks with the same shard of the dense parameters."""
    shard: Axis = field(default_factory=lambda: Axis("dp_cp"))
    """Ranks that the dense parameters are sharded over."""
    edp_replicate: Axis = field(default_factory=lambda: Axis("edp_replicate"))
    edp_shard: Axis = field(default_factory=lambda: Axis("edp"))
    sequence_parallel: bool = False
    """Whether activations outside tensor-parallel regions are cut over tp along the tokens."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp.rank == self.pp.size - 1

    @property
    def expert_tokens_cut(self) -> bool:
        """Whether each tp rank routes a share of the tokens; else they have all in common and hold the same columns of each expert."""
        return self.tp.size > 1 and (self.sequence_parallel or self.etp.size != self.tp.size)

    def group_names(self) -> dict[str, str]:
        """Process-group names as c10d reports them, to the axis they serve."""
        axes = (getattr(self, name) for name in ("world", *_NAMES))
        return {a.group.group_name: a.name for a in axes if a.group is not None}


_NAMES = ("tp", "cp", "dp", "pp", "dp_cp", "etp", "ep", "edp", "replicate", "shard", "edp_replicate", "edp_shard")
_ALIASES = {"replicate": "dp_cp", "shard": "dp_cp", "edp_replicate": "edp", "edp_shard": "edp"}
"""Axes that need no group of their own where they have the ranks of another."""


def groups(world: int, sizes: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every group, axis by axis; pure, so that layouts can be tested without processes."""
    tp, pp, cp, ep, etp = sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.etp or sizes.tp
    dp, edp = world // (tp * pp * cp), world // (etp * ep * pp)
    copies, expert_copies = sizes.copies(dp * cp, edp)
    ranks = torch.arange(world)
    attention = ranks.view(pp, dp, cp, tp)
    dense = ranks.view(pp, copies, dp * cp // copies, tp)
    experts = ranks.view(pp, edp, ep, etp)
    sparse = ranks.view(pp, expert_copies, edp // expert_copies, ep, etp)
    return {
        "tp": _along(attention, 3),
        "cp": _along(attention, 2),
        "dp": _along(attention, 1),
        "pp": _along(attention, 0),
        "dp_cp": _along(attention, 1, 2),
        "etp": _along(experts, 3),
        "ep": _along(experts, 2),
        "edp": _along(experts, 1),
        "replicate": _along(dense, 1),
        "shard": _along(dense, 2),
        "edp_replicate": _along(sparse, 1),
        "edp_shard": _along(sparse, 2),
    }


def _along(grid: Tensor, *dims: int) -> list[tuple[int, ...]]:
    """The ranks that differ in `dims` only, for every choice of the rest."""
    last = list(range(grid.dim() - len(dims), grid.dim()))
    lines = grid.movedim(dims, last).flatten(grid.dim() - len(dims))
    return [tuple(line) for line in lines.reshape(-1, lines.shape[-1]).tolist()]


def build(world: int, rank: int, sizes: ParallelConfig) -> Axes:
    """The axes of this rank; creates the process groups, in the same order on every rank."""
    members = groups(world, sizes)
    axes: dict[str, Axis] = {"world": Axis("world", world, rank, dist.group.WORLD if world > 1 else None, tuple(range(world)))}
    for name in _NAMES:
        alias = _ALIASES.get(name)
        if alias is not None and members[name] == members[alias]:
            axes[name] = axes[alias]
            continue
        for ranks in members[name]:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                axes[name] = Axis(name, len(ranks), ranks.index(rank), group, ranks)
    return Axes(**axes, sequence_parallel=sizes.sequence_parallel and sizes.tp > 1)
