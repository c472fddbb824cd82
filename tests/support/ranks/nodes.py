"""Where the ranks of a test go: on a GPU each, or, as many as PLAYBOOK_NODES says, all on one GPU.

How ranks share one is `playbook_bench.launch.local.place`'s matter.
"""

from __future__ import annotations

import os

import torch

from playbook_bench.launch import local


def gpus() -> int:
    """How many ranks can have a GPU, or a turn on one."""
    return _nodes() or torch.cuda.device_count()


def on_gpus_of_their_own() -> bool:
    """Whether no two ranks of a run share a GPU."""
    return not _nodes()


def four_or_two() -> int:
    """The ranks of tests that take what there is."""
    return 4 if gpus() >= 4 else 2


def place(rank: int, ranks: int, first: int = 0) -> dict[str, str]:
    """The variables of a launcher that say where a rank of several runs, on GPUs from `first` on."""
    return local.place(rank, ranks, first, shared=bool(_nodes()))


def _nodes() -> int:
    return int(os.environ.get("PLAYBOOK_NODES", "0"))
