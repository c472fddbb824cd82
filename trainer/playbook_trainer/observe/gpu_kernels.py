"""The GPU kernels of one step, as CUPTI reports them: libraries launch many past torch's operators, where nothing else would see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from playbook.kernels import COMMUNICATION, length, subtract, union

_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_COPIES, _TO_HOST = ("Memcpy", "Memset"), "Memcpy DtoH"
_NAME_LENGTH = 120
# Part of the name of NCCL's kernel to the name of the collective; point-to-point transfers and all-to-all share one.
_COLLECTIVES = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce", "SendRecv": "send_recv"}


@dataclass(frozen=True)
class Event:
    """Something on the GPU's timeline or, for a call of the runtime, on the host's."""

    name: str
    begin: float
    """Microseconds."""
    end: float
    on_gpu: bool = True


@dataclass
class Kernels:
    """Counts of one step on this rank's GPU."""

    names: Counter[str] = field(default_factory=Counter)
    counters: dict[str, float] = field(default_factory=dict)


@contextmanager
def watching() -> Iterator[Kernels]:
    """Count the kernels that run on this rank's GPU inside the block. The counts are filled in when the block ends."""
    found = Kernels()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize()
    counted = count(list(events(profiler)))
    found.names, found.counters = counted.names, counted.counters


def events(profiler: torch.profiler.profile) -> Iterator[Event]:
    """The profiler's events on the GPU and calls of the CUDA runtime, without annotations.

    Read where torch keeps it: `profiler.events()` builds a tree, which takes ten seconds where a step launches 30,000 kernels.
    """
    recorded = profiler.profiler.kineto_results if profiler.profiler else None
    if recorded is None:
        return
    gpu, zero = torch.autograd.DeviceType.CUDA, recorded.trace_start_ns()
    for e in recorded.events():
        if not e.is_user_annotation():
            begin = e.start_ns() - zero  # nanoseconds since 1970 are more digits than a float has
            yield Event(e.name(), begin / 1000, (begin + e.duration_ns()) / 1000, e.device_type() == gpu)


def count(events: Sequence[Event]) -> Kernels:
    """Kernels by name (without template arguments and long tails), graph launches, copies to the host, and shares of time: computing, hidden collectives."""
    kernels = [e for e in events if e.on_gpu and not e.name.startswith(_COPIES)]
    names = Counter(e.name.split("<")[0][:_NAME_LENGTH] for e in kernels)
    counters: dict[str, float] = {
        "graph_launches": sum(e.name in _GRAPH_LAUNCHES for e in events if not e.on_gpu),
        "copies_to_host": sum(e.name.startswith(_TO_HOST) for e in events if e.on_gpu),
    }
    return Kernels(names, counters | _computing_percent([e for e in events if e.on_gpu]) | _hidden_percent(kernels))


def _computing_percent(on_gpu: Sequence[Event]) -> dict[str, float]:
    """`gpu_computing_percent`: the share of the step during which the GPU does anything but communicate. What is missing waits for other ranks or the host."""
    if not on_gpu:
        return {}
    work = union([(e.begin, e.end) for e in on_gpu if not _communicates(e)])
    whole = max(e.end for e in on_gpu) - min(e.begin for e in on_gpu)
    return {"gpu_computing_percent": round(100 * length(work) / whole, 1)} if whole > 0 else {}


def _hidden_percent(kernels: Sequence[Event]) -> dict[str, float]:
    """Of the time of each kind of collective, the percentage during which another kernel computes: `hidden_percent_all_gather` and so on."""
    work = union([(e.begin, e.end) for e in kernels if not _communicates(e)])
    out = {}
    for part, name in _COLLECTIVES.items():
        spans = union([(e.begin, e.end) for e in kernels if e.name.startswith("nccl") and part in e.name])
        total = length(spans)
        if total > 0:
            out[f"hidden_percent_{name}"] = round(100 * (total - length(subtract(spans, work))) / total, 1)
    return out


def _communicates(event: Event) -> bool:
    return COMMUNICATION.search(event.name.split("(", 1)[0]) is not None
