"""What PyTorch dumps of itself: the flight recorder (of a run that hangs, which rank never came to which collective) and snapshots of
memory (what was allocated at the peak, by the planner's parts and by the lines that asked for it).

Source: the dump of `torch.distributed`, version 2 (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_DUMP_ON_TIMEOUT`): one file for each rank, whose
entries number a group's collectives by `collective_seq_id`. A collective that a rank has and another member of its group has not is what
they wait for.
Source: the format of `torch.cuda.memory._dump_snapshot`. What was allocated before the record began is known by its free, or by its block
at the end. A part is told by the functions that an allocation was made in; an allocation without them is `unrecorded`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from playbook.errors import PlaybookError
from playbook.text import GIB

_MAX_ENTRIES = 200_000
"""Of one dump."""
_DONE = "completed"
_RANK = re.compile(r"(\d{1,6})(?:\.\w+)*$")
_LISTED = 8


class _Call(NamedTuple):
    """One entry of a dump."""

    group: str
    sequence: int
    name: str
    what: str
    """Name, sizes and type, which all ranks must have alike."""
    done: bool
    started: bool
    sent: bool
    """To or from one peer."""
    where: str


@dataclass(frozen=True)
class RankStanding:
    """How far one rank came. `dump`: whether it left one."""

    rank: int
    dump: bool
    last: str
    """The last collective that it called."""
    open: tuple[str, ...]
    """What it called and is not done, the first first."""
    where: str
    """The line that called the first open one, or else the last."""


@dataclass(frozen=True)
class Hang:
    """Why a run stands still."""

    sentence: str
    cause: str
    """`missing`, `different`, `not started`, `inside`, `peers` or `none`."""
    group: str
    collective: str
    ranks: tuple[int, ...]
    """Whom to look at: who is missing, calls something else, has not started it, or all inside."""
    waiting: tuple[int, ...]
    standings: tuple[RankStanding, ...]
    notes: tuple[str, ...]


class _Open(NamedTuple):
    """The first collective of a group that is not done everywhere."""

    group: str
    sequence: int
    calls: dict[int, _Call]
    missing: tuple[int, ...]


def is_dump(document: Any) -> bool:
    """Whether a document is a dump of the flight recorder."""
    return isinstance(document, dict) and isinstance(document.get("entries"), list) and "version" in document and "pg_config" in document


def hang(dumps: Sequence[tuple[str, Mapping[str, Any]]], notes: Iterable[str] = ()) -> Hang:
    """Which rank and which collective, from the dumps of a run's ranks by the names of their files.

    Raises:
        PlaybookError: the dumps name no collective.
    """
    by_rank = _numbered(dumps)
    calls = {rank: _calls(dump) for rank, dump in by_rank.items()}
    if not any(calls.values()):
        raise PlaybookError("the flight recorder's dumps hold no collective; set TORCH_FR_BUFFER_SIZE above zero before the run starts")
    members = _members(by_rank, calls)
    open_ = _opened(calls, members)
    everyone = sorted({*by_rank, *(r for each in members.values() for r in each)})
    standings = tuple(_standing(rank, calls.get(rank)) for rank in everyone)
    remarks = [*notes, *(f"rank {s.rank} left no dump" for s in standings if not s.dump)][: _LISTED * 2]
    cause, chosen, ranks = _cause(open_, calls)
    if chosen is None:
        peers = tuple(rank for rank, each in calls.items() if any(c.sent and not c.done for c in each))
        if not peers:
            return Hang("No collective is open: every call of every rank is done.", "none", "", "", (), (), standings, tuple(remarks))
        named = "; ".join(f"rank {s.rank} in {s.open[0]}" for s in standings if s.rank in peers and s.open)
        return Hang(f"Ranks wait for peers to send or to receive: {named}.", "peers", "", "", peers, peers, standings, tuple(remarks))
    waiting = tuple(rank for rank, call in chosen.calls.items() if not call.done and rank not in ranks)
    call = next(iter(chosen.calls.values()))
    label = f"{call.name} {chosen.sequence} of {chosen.group}"
    sentence = _sentence(cause, label, ranks, waiting, chosen, {s.rank: s for s in standings})
    return Hang(sentence, cause, chosen.group, label, ranks, waiting, standings, tuple(remarks))


def _numbered(dumps: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[int, Mapping[str, Any]]:
    """By the number at the end of their files' names, else by order."""
    stated = [int(m[1]) if (m := _RANK.search(name.rpartition("/")[2])) else -1 for name, _ in dumps]
    numbers = stated if len(set(stated)) == len(dumps) and min(stated, default=-1) >= 0 else list(range(len(dumps)))
    return dict(sorted(zip(numbers, (d for _, d in dumps), strict=True)))


def _text(value: Any, most: int = 120) -> str:
    return "".join(c for c in value[:most] if c.isprintable()) if isinstance(value, str) else ""


def _bounded(value: Any, bits: int = 64) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits else None


def _group(entry: Mapping[str, Any]) -> str:
    """The description of a group and its name, which all its ranks share."""
    named = entry.get("process_group")
    words = [_text(w) for w in named[:2]] if isinstance(named, list | tuple) else []
    name, about = [*words, "", ""][:2]
    return " ".join(w for w in (about if about != "undefined" else "", f"#{name}" if name else "") if w) or "a group"


def _calls(dump: Mapping[str, Any]) -> list[_Call]:
    """The calls of one rank, in order; entries without a number are left out."""
    out = []
    for entry in dump["entries"][:_MAX_ENTRIES]:
        if not isinstance(entry, dict):
            continue
        sent = entry.get("is_p2p") is True
        number = _bounded(entry.get("p2p_seq_id" if sent else "collective_seq_id"), 62)  # -1 of 64 bits is no number
        name = _text(entry.get("profiling_name"))
        if number is None or not name:
            continue
        state = _text(entry.get("state"))
        done = state == _DONE or entry.get("retired") is True
        what = f"{name} {_sizes(entry.get('input_sizes'))} {_sizes(entry.get('input_dtypes'))}".rstrip()
        out.append(_Call(_group(entry), number, name, what, done, done or state == "started", sent, _where(entry.get("frames"))))
    return out


def _sizes(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) > 1 << 12:
        return ""
    flat = [
        v if isinstance(v, int | str) else [n for n in v[:8] if isinstance(n, int)] if isinstance(v, list | tuple) else "?"
        for v in value[:4]
    ]
    return "".join(c for c in str(flat)[:120] if c.isprintable())


def _where(frames: Any) -> str:
    """The innermost line outside torch."""
    valid = [f for f in frames[:64] if isinstance(f, dict)] if isinstance(frames, list | tuple) else []
    outside = [f for f in valid if "/torch/" not in _text(f.get("filename"), 400)]
    for frame in (outside or valid)[:1]:
        return f"{_text(frame.get('filename'), 400).rpartition('/')[2]}:{_bounded(frame.get('line'), 62) or 0} {_text(frame.get('name'))}"
    return ""


def _members(by_rank: Mapping[int, Mapping[str, Any]], calls: Mapping[int, list[_Call]]) -> dict[str, set[int]]:
    """The ranks of each group: those that called something in it, and those that the dumps' configuration lists."""
    members: defaultdict[str, set[int]] = defaultdict(set)
    for rank, each in calls.items():
        for call in each:
            members[call.group].add(rank)
    for dump in by_rank.values():
        listed = dump.get("pg_config")
        for config in listed.values() if isinstance(listed, dict) else ():
            if isinstance(config, dict):
                group = _group({"process_group": (config.get("name"), config.get("desc"))})
                ranks = re.findall(r"\d{1,6}", _text(config.get("ranks"), 1 << 16))
                if group in members:
                    members[group].update(map(int, ranks))
    return dict(members)


def _opened(calls: Mapping[int, list[_Call]], members: Mapping[str, set[int]]) -> list[_Open]:
    """For each group its first collective that is not done on all ranks. What a rank's buffer has dropped is done."""
    out = []
    for group, ranks in members.items():
        by_sequence = {rank: {c.sequence: c for c in reversed(calls.get(rank, [])) if c.group == group and not c.sent} for rank in ranks}
        last = {rank: max(each, default=-1) for rank, each in by_sequence.items()}
        sequences = sorted({c.sequence for each in by_sequence.values() for c in each.values()})
        for sequence in sequences:
            present = {rank: each[sequence] for rank, each in sorted(by_sequence.items()) if sequence in each}
            missing = tuple(sorted(rank for rank in ranks if last[rank] < sequence))
            if any(not c.done for c in present.values()):
                out.append(_Open(group, sequence, present, missing))
                break
    return out


def _cause(open_: Sequence[_Open], calls: Mapping[int, list[_Call]]) -> tuple[str, _Open | None, tuple[int, ...]]:
    """The cause, its collective, and the ranks to look at: first where ranks call different things, then where one is missing that itself
    waits nowhere.
    """
    for each in open_:
        kinds: defaultdict[str, list[int]] = defaultdict(list)
        for rank, call in each.calls.items():
            kinds[call.what].append(rank)
        if len(kinds) > 1:
            return "different", each, tuple(sorted(kinds.values(), key=len)[0])
    stuck = {rank for rank, each in calls.items() if any(not c.done for c in each)}
    lacking = sorted((each for each in open_ if each.missing), key=lambda each: len(stuck.intersection(each.missing)))
    if lacking:
        first = lacking[0]
        free = tuple(rank for rank in first.missing if rank not in stuck)
        return "missing", first, free or first.missing
    for each in open_:
        late = tuple(rank for rank, call in each.calls.items() if not call.started)
        if late and len(late) < len(each.calls):
            return "not started", each, late
    return ("inside", open_[0], tuple(open_[0].calls)) if open_ else ("none", None, ())


def _standing(rank: int, calls: list[_Call] | None) -> RankStanding:
    if not calls:
        return RankStanding(rank, calls is not None, "", (), "")
    waits = [c for c in calls if not c.done]
    shown = tuple(f"{c.name} {c.sequence} of {c.group}" for c in waits[:_LISTED])
    last = calls[-1]
    return RankStanding(rank, True, f"{last.name} {last.sequence} of {last.group}", shown, (waits[0] if waits else last).where)


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:_LISTED])) + (f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else "")
    return f"rank{'s' if len(numbers) != 1 else ''} {listed}"


def _sentence(
    cause: str, label: str, ranks: Sequence[int], waiting: Sequence[int], chosen: _Open, standings: Mapping[int, RankStanding]
) -> str:
    """The answer in words: what `ranks` did, at which collective (`label`), and who waits for them."""
    who = _ranks(ranks).capitalize()
    match cause:
        case "different":
            other = {rank: call for rank, call in chosen.calls.items() if rank not in ranks}
            usual = next(iter(other.values())).what if other else ""
            return (
                f"{who} call{'s' if len(ranks) == 1 else ''} {chosen.calls[ranks[0]].what} as collective {chosen.sequence} of "
                f"{chosen.group}, where {_ranks(list(other))} call{'s' if len(other) == 1 else ''} {usual}."
            )
        case "missing":
            first = standings[ranks[0]]
            did = (
                f"rank {first.rank} left no dump"
                if not first.dump
                else f"the last call of rank {first.rank} is {first.last or 'none'}{f' at {first.where}' if first.where else ''}"
            )
            return f"{who} never came to {label}, in which {_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}; {did}."
        case "not started":
            return (
                f"{who} called {label} and {'has' if len(ranks) == 1 else 'have'} not started it: earlier work of the GPU is not done; "
                f"{_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in it."
            )
        case _:
            return f"All members have come to {label} and none gets out of it: look at the network and the GPUs of {_ranks(ranks)}."


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


def read_snapshot(document: Mapping[str, Any]) -> Snapshot:
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


def _size(value: Any) -> int:
    size = _bounded(value)
    return size if size is not None and size < _MAX_SIZE else 0


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    for each in value[:_MAX_EVENTS] if isinstance(value, list | tuple) else ():
        if isinstance(each, dict):
            yield each


def _blocks(segments: Any) -> dict[int, dict[int, _Allocation]]:
    """What is allocated at the end, by device and address. Older snapshots give a block no address: it lies behind the one before."""
    out: dict[int, dict[int, _Allocation]] = {}
    for segment in _dicts(segments):
        at, device = _bounded(segment.get("address")) or 0, _bounded(segment.get("device")) or 0
        for block in _dicts(segment.get("blocks")):
            address = _bounded(block.get("address"))
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
        action, address = event.get("action"), _bounded(event.get("addr"))
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


def _end_of(value: Any) -> str:
    return "".join(c for c in value[-160:] if c.isprintable()) if isinstance(value, str) else ""


def _part(frames: Any) -> tuple[str, str]:
    """The planner's part of an allocation, and the innermost line outside torch."""
    lines = [(_end_of(f.get("filename")), _bounded(f.get("line")) or 0, _end_of(f.get("name"))) for f in _dicts(frames)][:_FRAMES]
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
    segments = [s for s in _dicts(document["segments"]) if (_bounded(s.get("device")) or 0) == device]
    peak, reserved = sum(parts.values()), sum(_size(s.get("total_size")) for s in segments)
    notes = (
        []
        if recorded
        else ["no history was recorded: what is allocated at the end counts; torch.cuda.memory._record_memory_history() keeps it"]
    )
    traces = document.get("device_traces")
    events = traces[device] if isinstance(traces, list) and device < len(traces) else []
    if refused := next((event for event in _dicts(events) if event.get("action") == "oom"), None):
        free = _size(refused.get("device_free"))
        notes.append(f"out of memory: {_size(refused.get('size')) / GIB:.2f} GiB were asked for, and the GPU had {free / GIB:.2f} left")
    largest, most = parts.most_common(1)[0]
    site = sites[0]
    sentence = (
        f"The peak is {peak / GIB:.2f} GiB on GPU {device}: {largest} {most / peak:.0%} of it; most at one line, {site.size / GIB:.2f} GiB,"
        f" by {site.where} ({site.part})."
    )
    return Snapshot(sentence, device, peak, reserved, dict(parts.most_common()), sites, tuple(notes))
