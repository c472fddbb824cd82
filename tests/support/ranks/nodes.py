"""Where the ranks of a test go: on a GPU each, or, as many as PLAYBOOK_NODES says, all on one GPU.

NCCL refuses two ranks on one GPU of one host. Ranks that call themselves hosts of their own it connects by sockets, which makes of one machine
as many nodes of one GPU. They take the GPU in turns: what they compute is what nodes would, and how long they take says nothing.
"""

from __future__ import annotations

import os

import torch


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
    if _nodes() and ranks > 1:
        alone = {"NCCL_HOSTID": f"node-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
        return {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1", **alone}
    return {"RANK": str(rank), "LOCAL_RANK": str(first + rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def _nodes() -> int:
    return int(os.environ.get("PLAYBOOK_NODES", "0"))
