"""PyTorch's memory snapshots: what was allocated at the peak, by the planner's parts and by the lines that asked for it.

Source: the format of `torch.cuda.memory._dump_snapshot`. What was allocated before the record began is known by its free, or by its block
at the end. A part is told by the functions that an allocation was made in; an allocation without them is `unrecorded`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from playbook.errors import PlaybookError
from playbook.text import GIB

UNRECORDED, OTHER = "unrecorded", "other"
_MAX_EVENTS = 5_000_000
_SITES = 10
_FRAMES = 200
_MAX_SIZE = 1 << 50
_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"/optim/|optimizer|_init_group|_multi_tensor_adam|:adamw?$", re.IGNORECASE)),
    ("gathered", re.compile(r"all_gather|unshard|_fsdp_|fully_shard", re.IGNORECASE)),
    ("loss", re.compile(r"cross_entropy|nll_loss|log_softmax|:\w*loss\w*$", re.IGNORECASE)),
    ("activations", re.compile(r":(\w*forward\w*|_call_impl|recompute\w*|unpack_hook)$")),
    ("gradients", re.compile(r":(\w*backward\w*|_engine_run_backward)$|AccumulateGrad|autograd::Engine", re.IGNORECASE)),
    (
        "parameters",
        re.compile(r":(__init__|_apply|to|to_empty|cuda|reset_parameters|from_pretrained|load_state_dict|_load_\w+|materialize\w*)$"),
    ),
)
"""By the file and function of any of an allocation's frames, the first part that fits. What is computed forward inside the backward pass is
computed again: an activation."""


class _Allocation(NamedTuple):
    size: int
    frames: Any


@dataclass(frozen=True)
class AllocationSite:
    """What one line of the program holds at the peak. Units: bytes."""

    where: str
    part: str
    size: int
    count: int


@dataclass(frozen=True)
class Snapshot:
    """What holds a GPU's peak. Units: bytes."""

    sentence: str
    device: int
    peak: int
    """Most that was allocated at once while the record ran."""
    reserved: int
    """What the allocator held of the GPU at the end."""
    parts: dict[str, int]
    sites: tuple[AllocationSite, ...]
    notes: tuple[str, ...]


def is_snapshot(document: Any) -> bool:
    """Whether a document is a memory snapshot."""
    return isinstance(document, dict) and isinstance(document.get("segments"), list)


def read(document: Mapping[str, Any]) -> Snapshot:
    """What holds the peak of the GPU that has most.

    Raises:
        PlaybookError: the snapshot holds no allocation.
    """
    blocks = _blocks(document["segments"])
    traces = document.get("device_traces")
    records = dict(enumerate(traces[:64])) if isinstance(traces, list) else {}
    devices = sorted({*(device for device, each in blocks.items() if each), *(device for device, each in records.items() if each)})
    peaks = {device: _peak(blocks.get(device, {}), records.get(device)) for device in devices}
    device = max(peaks, key=lambda d: sum(a.size for a in peaks[d]), default=None)
    if device is None or not peaks[device]:
        raise PlaybookError(
            "the memory snapshot holds no allocation; expected one of torch.cuda.memory._dump_snapshot, taken while the run had memory"
        )
    return _answer(document, device, peaks[device], bool(records.get(device)))


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64 else None


def _size(value: Any) -> int:
    size = _int(value)
    return size if size is not None and size < _MAX_SIZE else 0


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    for each in value[:_MAX_EVENTS] if isinstance(value, list | tuple) else ():
        if isinstance(each, dict):
            yield each


def _blocks(segments: Any) -> dict[int, dict[int, _Allocation]]:
    """What is allocated at the end, by device and address. Older snapshots give a block no address: it lies behind the one before."""
    out: dict[int, dict[int, _Allocation]] = {}
    for segment in _dicts(segments):
        at, device = _int(segment.get("address")) or 0, _int(segment.get("device")) or 0
        for block in _dicts(segment.get("blocks")):
            address = _int(block.get("address"))
            at = at if address is None else address
            if block.get("state") == "active_allocated":
                out.setdefault(device, {})[at] = _Allocation(
                    _size(block.get("requested_size")) or _size(block.get("size")), block.get("frames")
                )
            at += _size(block.get("size"))
    return out


def _events(trace: Any) -> Iterator[tuple[bool, int, _Allocation]]:
    """Whether it allocates, its address, and what."""
    for event in _dicts(trace):
        action, address = event.get("action"), _int(event.get("addr"))
        if address is not None and action in ("alloc", "free_requested"):
            yield action == "alloc", address, _Allocation(_size(event.get("size")), event.get("frames"))


def _peak(blocks: Mapping[int, _Allocation], trace: Any) -> list[_Allocation]:
    """What is allocated when most is."""
    live: dict[int, _Allocation] = {}
    before: dict[int, _Allocation] = {}
    touched: set[int] = set()
    now = most = 0
    most_at = -1
    for i, (allocates, address, what) in enumerate(_events(trace)):
        if allocates:
            live[address] = what
            now += what.size
        elif address in live:
            now -= live.pop(address).size
        elif address not in touched:
            before[address] = what._replace(frames=None)
            now -= what.size
        touched.add(address)
        if now > most:
            most, most_at = now, i
    before |= {address: block for address, block in blocks.items() if address not in touched}
    at_peak = dict(before)
    for i, (allocates, address, what) in enumerate(_events(trace)):
        if i > most_at:
            break
        if allocates:
            at_peak[address] = what
        else:
            at_peak.pop(address, None)
    return [a for a in at_peak.values() if a.size]


def _text(value: Any) -> str:
    return "".join(c for c in value[-160:] if c.isprintable()) if isinstance(value, str) else ""


def _part(frames: Any) -> tuple[str, str]:
    """The planner's part of an allocation, and the innermost line outside torch."""
    lines = [(_text(f.get("filename")), _int(f.get("line")) or 0, _text(f.get("name"))) for f in _dicts(frames)][:_FRAMES]
    lines = [f for f in lines if f[0] or f[2]]
    if not lines:
        return UNRECORDED, ""
    words = [f"{file}:{name}" for file, _, name in lines]
    part = next((part for part, pattern in _PARTS if any(pattern.search(word) for word in words)), OTHER)
    outside = [f for f in lines if f[0].endswith(".py") and "/torch/" not in f[0]] or [f for f in lines if f[0].endswith(".py")] or lines
    file, line, name = outside[0]
    return part, f"{file.rpartition('/')[2]}:{line} {name[:60]}"


def _answer(document: Mapping[str, Any], device: int, live: list[_Allocation], recorded: bool) -> Snapshot:
    """The answer from the allocations that are live at the peak: bytes by part and by line, and what the GPU had reserved."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    memo: dict[int, tuple[str, str]] = {}
    for each in live:
        key = memo.get(id(each.frames))  # a pickle shares equal stacks
        if key is None:
            key = memo[id(each.frames)] = _part(each.frames)
        sizes[key] += each.size
        counts[key] += 1
    parts: Counter[str] = Counter()
    for (part, _), size in sizes.items():
        parts[part] += size
    sites = tuple(
        AllocationSite(where or "(no stack)", part, size, counts[part, where]) for (part, where), size in sizes.most_common(_SITES)
    )
    segments = [s for s in _dicts(document["segments"]) if (_int(s.get("device")) or 0) == device]
    peak, reserved = sum(parts.values()), sum(_size(s.get("total_size")) for s in segments)
    notes = (
        []
        if recorded
        else ["no history was recorded: what is allocated at the end counts; torch.cuda.memory._record_memory_history() keeps it"]
    )
    traces = document.get("device_traces")
    events = traces[device] if isinstance(traces, list) and device < len(traces) else []
    for event in _dicts(events):
        if event.get("action") == "oom":
            free = _size(event.get("device_free"))
            notes.append(f"out of memory: {_size(event.get('size')) / GIB:.2f} GiB were asked for, and the GPU had {free / GIB:.2f} left")
            break
    largest, most = parts.most_common(1)[0]
    site = sites[0]
    sentence = (
        f"The peak is {peak / GIB:.2f} GiB on GPU {device}: {largest} {most / peak:.0%} of it; most at one line, {site.size / GIB:.2f} GiB,"
        f" by {site.where} ({site.part})."
    )
    return Snapshot(sentence, device, peak, reserved, dict(parts.most_common()), sites, tuple(notes))
