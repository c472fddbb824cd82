"""What collectives between the GPUs of one machine take, for `playbook calibrate`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

SIZES = tuple(1 << power for power in range(16, 31, 2))
"""Bytes of the whole tensor: 64 KiB to 1 GiB."""
_WINDOW_S, _WINDOWS = 0.02, 5
_SLOWEST_BYTES_PER_S = 50e9
"""Every rank has to repeat a collective equally often, so the repeats are chosen by its size alone."""


def rows(degree: int, device: str = "cuda", sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """A row for each operation and size between `degree` ranks, one for each GPU: bytes of the whole tensor, and seconds of one call.

    An all-gather collects the whole tensor, a reduce-scatter and an all-reduce sum it, an all-to-all sends each rank's own tensor in equal parts, and
    a send carries it from each rank to the next, all at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        multiprocessing.spawn(_rank, (degree, device, tuple(sizes), str(out)), nprocs=degree)
        yield from json.loads(out.read_text(encoding="utf-8"))


def _rank(rank: int, degree: int, device: str, sizes: Sequence[int], out: str) -> None:
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{out}.store", degree)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=degree)
    found = []
    for size in sizes:
        whole = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        part = torch.zeros(size // 2 // degree, dtype=torch.bfloat16, device=device)
        other = torch.zeros_like(whole)
        for name, run in _operations(rank, degree, whole, part, other).items():
            taken = torch.tensor([_seconds(run, size, cuda)], dtype=torch.float64, device=device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            found.append({"kind": "collective", "operation": name, "ranks": degree, "bytes": size, "seconds": float(taken)})
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _operations(rank: int, degree: int, whole: Tensor, part: Tensor, other: Tensor) -> dict[str, Callable[[], Any]]:
    def send() -> None:
        ahead, behind = (rank + 1) % degree, (rank - 1) % degree
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, whole, ahead), dist.P2POp(dist.irecv, other, behind)])
        for request in requests:
            request.wait()

    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send": send,
    }


def _seconds(run: Callable[[], Any], size: int, cuda: bool) -> float:
    """Median time of one call; on a GPU calls follow one another without waiting for the host."""
    repeats = max(3, min(100, int(_WINDOW_S * _SLOWEST_BYTES_PER_S / size))) if cuda else 1
    run()
    found = []
    for _ in range(_WINDOWS):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / repeats)
    return statistics.median(found)
