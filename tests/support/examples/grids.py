"""The axes of a rank as a layout gives them, without processes."""

from __future__ import annotations

from playbook_trainer.axes import Axes, Axis, groups
from playbook_trainer.config.tree import ParallelConfig


def rank_axes(world: int, rank: int, sizes: ParallelConfig) -> Axes:
    axes = {}
    for name, members in groups(world, sizes).items():
        ranks = next(m for m in members if rank in m)
        axes[name] = Axis(name, len(ranks), ranks.index(rank), None, ranks)
    return Axes(**axes, sequence_parallel=sizes.sequence_parallel and sizes.tp > 1)
