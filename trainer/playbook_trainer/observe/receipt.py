"""The receipt: what one observed step really did, seen from outside the code that did it.

Collectives are intercepted at the c10d operators, whoever issued them; saved activations at autograd's hooks; ranges as they open.
Nothing here reads the configuration, so a feature that is configured and did not run leaves no trace.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from playbook.kernels import COMMUNICATION, length, subtract, union
from playbook_trainer.observe.ranges import BACKWARD, listening

# c10d operator to the name that cases use, and the share of a tensor that leaves the rank: which tensor, and the factor for n ranks.
_OPS: dict[str, str] = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "broadcast_": "broadcast",
}

# Operators whose number tells which implementation ran, by the counter that a case asks for.
_COUNTED: dict[str, str] = {
    "_grouped_mm": "grouped_products",
    "_flash_attention_forward": "flash_attentions",
    "_scaled_dot_product_flash_attention": "flash_attentions",
    "_scaled_dot_product_cudnn_attention": "cudnn_attentions",
    "_scaled_mm": "scaled_products",
    "_scaled_mm_v2": "scaled_products",
    "_scaled_grouped_mm": "scaled_grouped_products",
}
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_TALLIED = (
    "graph_replays",
    "loss_chunks",
    "balance_losses",
    "fp8_linear_products",
    "fp8_expert_products",
    "offloaded_activation_bytes",
    "offloaded_gradient_bytes",
)


class Observer:
    """Records ranges, collectives and saved activations of the step that runs inside `observing`."""

    def __init__(self, model: nn.Module, group_names: dict[str, str]) -> None:
        self.model, self.group_names = model, group_names
        self.ranges: Counter[str] = Counter()
        # Each name is reported, so that a case may require that something did not happen.
        self.counters: Counter[str] = Counter(dict.fromkeys([*_COUNTED.values(), "float32_products", *_TALLIED], 0))
        self.kernels: Counter[str] = Counter()
        """Of a step of its own, since it is slow under observation: see `kernels.watching`."""
        self.collectives: dict[tuple[str, str, str, str], list[float]] = {}
        self.stack: list[str] = []
        self.saved = _Saved(model)

    def push(self, name: str) -> None:
        """Open a range."""
        self.ranges[name] += 1
        self.stack.append(name)

    def pop(self, name: str) -> None:
        """A range closed; the innermost of that name, since spans of the backward pass need not nest."""
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] == name:
                del self.stack[i]
                return

    def tally(self, name: str, amount: int) -> None:
        """Add to a counter."""
        self.counters[name] += amount

    def record(self, op: str, group: str, num_bytes: float) -> None:
        """Count a collective with its bytes."""
        inside = self.stack[-1] if self.stack else ""
        backward = inside.endswith(BACKWARD) or "backward" in self.stack
        key = (op, group, inside.removesuffix(BACKWARD), "backward" if backward else "forward")
        entry = self.collectives.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] += num_bytes

    def count(self, name: str, result: Any) -> None:
        """One operator ran. A product counts as float32 where its result is, since products of 16-bit factors may be summed into float32.

        Those of the loss are left out: the head's gradient is summed in float32 whatever the rest of the model does.
        """
        if name in _COUNTED:
            self.counters[_COUNTED[name]] += 1
        elif name in _PRODUCTS and isinstance(result, Tensor) and result.dtype == torch.float32 and "loss" not in self.stack:
            self.counters["float32_products"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Ranges, kernels and collectives, as the receipt holds them."""
        rows = [
            {"op": op, "group": group, "inside": inside, "phase": phase, "count": int(count), "bytes": int(num_bytes)}
            for (op, group, inside, phase), (count, num_bytes) in sorted(self.collectives.items())
        ]
        return {"ranges": dict(sorted(self.ranges.items())), "kernels": dict(sorted(self.kernels.items())), "collectives": rows}


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A block whose operators, collectives and saved tensors are recorded by `observer`. It is slower than a plain step and never timed."""
    with listening(observer), _Operators(observer), torch.autograd.graph.saved_tensors_hooks(observer.saved.pack, _Saved.unpack):
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = _name(func)
        if namespace == "c10d":
            self._note(name, args)
        result = func(*args, **(kwargs or {}))
        if namespace == "aten":
            self.observer.count(name, result)
        return result

    def _note(self, name: str, args: Any) -> None:
        if name not in _OPS:
            return
        group = _group(args)
        axis = self.observer.group_names.get(group.group_name, "world")
        self.observer.record(_OPS[name], axis, _sent_bytes(_OPS[name], args, group.size(), group.rank()))


@functools.cache
def _name(func: Any) -> tuple[str, str]:
    """Namespace and name without overload; reading them off an operator takes longer than running it."""
    return func.namespace, func.overloadpacket.__name__


def _group(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue  # a ReduceOp travels as the same type
    raise AssertionError("a c10d operator without a process group")


def _sent_bytes(op: str, args: Any, n: int, rank: int) -> float:
    """Bytes that leave this rank, by the algorithm-independent count of each collective.

    Source: bus-bandwidth factors of nccl-tests, doc/PERFORMANCE.md: (n-1)/n per tensor, twice that for all-reduce.
    """
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Tensor)]
    if not tensors:
        return 0.0
    sizes = [t.numel() * t.element_size() for t in tensors]
    if op == "all_to_all":
        splits = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], int)]
        sent = tensors[1] if len(tensors) > 1 else tensors[0]
        if len(splits) == 2 and sent.shape[0]:
            away = sent.shape[0] - splits[1][rank]
            return away * sent.numel() / sent.shape[0] * sent.element_size()
        return sent.numel() * sent.element_size() * (n - 1) / n
    whole = max(sizes)
    return whole * {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n, "recv": 0.0}.get(op, 1.0)


class _Held:
    """A saved tensor; when the graph drops it, its bytes are given back."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Saved:
    """Peak bytes of tensors that autograd keeps for the backward pass, each storage counted once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        owners = [m for m in model.modules() if m._parameters]
        # Between steps, what FSDP shards is no plain tensor or has no memory; inside one, gathered parameters come and go.
        self.gathering = [m for m in owners if not _stay(m)]
        self.fixed = _storages(m for m in owners if _stay(m))
        self.live: dict[int, tuple[int, int]] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Held:
        handle = _Held(tensor)
        # Hooks see the subclass that autograd saved; only plain tensors hold memory of their own here.
        if not isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if size and key not in self.fixed and (key in self.live or key not in _storages(self.gathering)):
                count, _ = self.live.get(key, (0, size))
                if count == 0:
                    self.now += size
                    self.peak = max(self.peak, self.now)
                self.live[key] = (count + 1, size)
                weakref.finalize(handle, self._drop, key)
        return handle

    def _drop(self, key: int) -> None:
        count, size = self.live[key]
        if count == 1:
            del self.live[key]
            self.now -= size
        else:
            self.live[key] = (count - 1, size)

    @staticmethod
    def unpack(handle: _Held) -> Tensor:
        return handle.tensor


def _stay(module: nn.Module) -> bool:
    """Whether all parameters of its own have memory already."""
    params = [p for p in module._parameters.values() if p is not None]
    return all(type(p) is nn.Parameter and p.untyped_storage().size() > 0 for p in params)


def _storages(modules: Iterable[nn.Module]) -> set[int]:
    """Where the parameters of these modules lie at this moment; shards of FSDP and 8-bit weights are of other types and hold no memory of
    their own.
    """
    params = (p for m in modules for p in m._parameters.values())
    return {p.untyped_storage().data_ptr() for p in params if type(p) is nn.Parameter}


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds between steps."""

    def held(t: Tensor) -> int:
        local = t.to_local() if isinstance(t, DTensor) else t
        return local.numel() * local.element_size()

    params = list(model.parameters())
    sizes = {
        "param_bytes_per_rank": sum(held(p) for p in params),
        "grad_bytes_per_rank": sum(held(p.grad) for p in params if p.grad is not None),
        "optimizer_bytes_per_rank": sum(
            held(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.numel() > 1
        ),
    }
    return {**sizes, "state_bytes_per_rank": sum(sizes.values())}


_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_COPIES, _TO_HOST = ("Memcpy", "Memset"), "Memcpy DtoH"
_NAME_LENGTH = 120
# Part of the name of NCCL's kernel to the name of the collective; point-to-point transfers and all-to-all share one.
_COLLECTIVES = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce", "SendRecv": "send_recv"}


@dataclass(frozen=True)
class GpuEvent:
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
def watching_kernels() -> Iterator[Kernels]:
    """Count the kernels that run on this rank's GPU inside the block. The counts are filled in when the block ends."""
    kernels = Kernels()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield kernels
        torch.cuda.synchronize()
    counted = count_kernels(list(gpu_events(profiler)))
    kernels.names, kernels.counters = counted.names, counted.counters


def gpu_events(profiler: torch.profiler.profile) -> Iterator[GpuEvent]:
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
            yield GpuEvent(e.name(), begin / 1000, (begin + e.duration_ns()) / 1000, e.device_type() == gpu)


def count_kernels(events: Sequence[GpuEvent]) -> Kernels:
    """Kernels by name (without template arguments and long tails), graph launches, copies to the host, and shares of time:
    computing, hidden collectives.
    """
    kernels = [e for e in events if e.on_gpu and not e.name.startswith(_COPIES)]
    names = Counter(e.name.split("<")[0][:_NAME_LENGTH] for e in kernels)
    counters: dict[str, float] = {
        "graph_launches": sum(e.name in _GRAPH_LAUNCHES for e in events if not e.on_gpu),
        "copies_to_host": sum(e.name.startswith(_TO_HOST) for e in events if e.on_gpu),
    }
    return Kernels(names, counters | _computing_percent([e for e in events if e.on_gpu]) | _hidden_percent(kernels))


def _computing_percent(on_gpu: Sequence[GpuEvent]) -> dict[str, float]:
    """`gpu_computing_percent`: the share of the step during which the GPU does anything but communicate.
    What is missing waits for other ranks or the host.
    """
    if not on_gpu:
        return {}
    work = union([(e.begin, e.end) for e in on_gpu if not _communicates(e)])
    whole = max(e.end for e in on_gpu) - min(e.begin for e in on_gpu)
    return {"gpu_computing_percent": round(100 * length(work) / whole, 1)} if whole > 0 else {}


def _hidden_percent(kernels: Sequence[GpuEvent]) -> dict[str, float]:
    """Of the time of each kind of collective, the percentage during which another kernel computes:
    `hidden_percent_all_gather` and so on.
    """
    work = union([(e.begin, e.end) for e in kernels if not _communicates(e)])
    out = {}
    for part, name in _COLLECTIVES.items():
        spans = union([(e.begin, e.end) for e in kernels if e.name.startswith("nccl") and part in e.name])
        total = length(spans)
        if total > 0:
            out[f"hidden_percent_{name}"] = round(100 * (total - length(subtract(spans, work))) / total, 1)
    return out


def _communicates(event: GpuEvent) -> bool:
    return COMMUNICATION.search(event.name.split("(", 1)[0]) is not None
