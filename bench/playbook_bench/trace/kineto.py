"""Kineto's Chrome trace (torch.profiler) as a Timeline.

Kernels carry the correlation of the call that launched them. On a machine without GPU there are only operators on the host's threads;
the time in which at least one runs is then what `busy` means. Backward work outside every `.bwd` range is traced to the forward
operator that autograd recorded the same sequence number for.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from playbook.errors import PlaybookError
from playbook.intervals import union
from playbook.kernel_names import COMMUNICATION
from playbook_bench.trace.table import CONTAINERS, Kind, Op, Path_, Span, Stacks, Timeline, close_backward, main_thread

MAX_BYTES = 512 * 1024 * 1024
_EVALUATE = "autograd::engine::evaluate_function: "
# Annotations that the profiler, the optimizer base class and the process groups add; they name no part of the step.
_FOREIGN = re.compile(r"^(ProfilerStep#|Optimizer\.|enumerate\(|gloo:|nccl:|c10d::|autograd::|## )")
_DETAIL = re.compile(r" \(.*\)$", re.DOTALL)
_FSDP = "FSDP::"
_DEVICE = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_MAX_US = 10**16
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_LAUNCH = {"cuda_runtime", "cuda_driver"}


class Event(NamedTuple):
    """One event of the trace, checked."""

    category: str
    name: str
    thread: int
    start: int
    end: int
    args: dict[str, Any]


def read(path: Path) -> Timeline:
    """The trace of one rank.

    Raises:
        PlaybookError: unreadable, too large, not JSON, or no Chrome trace.
    """
    document = _parse(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise PlaybookError(f"{path}: has no list 'traceEvents'; expected the Chrome trace that torch.profiler writes")
    complete, forward_threads = _events(events, path)
    annotations = [e for e in complete if e.category == "user_annotation"]
    spans = [Span(e.thread, _range_name(e.name), e.start, e.end) for e in annotations if _is_range(e)]
    _check_one_rank(events, spans, path)
    stacks = Stacks(close_backward(spans))
    device = [e for e in complete if e.category in _DEVICE]
    if device:
        found = _device_timeline(spans, stacks, complete, device, forward_threads)
    else:
        found = _host_timeline(spans, stacks, complete, forward_threads)
    found.marks = [Span(e.thread, e.name, e.start, e.end) for e in annotations if not _is_range(e)]
    return found


def _check_one_rank(raw: list[Any], spans: list[Span], path: Path) -> None:
    """Threads, flows and correlations are numbers of one process: in a trace merged from several, work of one would lie in ranges of another."""
    merged = "as where traces of several ranks were merged; expected the trace of one rank, as it was written"
    work = [e for e in raw if isinstance(e, dict) and e.get("ph") == "X" and isinstance(e.get("cat"), str)]
    processes = sorted({str(e["pid"])[:40] for e in work if e["cat"] in _HOST and "pid" in e})
    if len(processes) > 1:
        named = ", ".join(processes[:4])
        raise PlaybookError(
            f"{path}: holds the work of {len(processes)} processes (pid {named}); expected the trace of one rank, as it was written"
        )
    devices = {str(e["args"].get("device")) for e in work if e["cat"] == "kernel" and isinstance(e.get("args"), dict)}
    if len(devices - {"None"}) > 1:
        raise PlaybookError(f"{path}: holds kernels of {len(devices - {'None'})} GPUs, {merged}")
    steps = sorted((s.start, s.end) for s in spans if s.name == "step")
    if any(after[0] < before[1] for before, after in itertools.pairwise(steps)):
        raise PlaybookError(f"{path}: holds two steps at the same time, {merged}")


def _is_range(event: Event) -> bool:
    return not _FOREIGN.match(event.name)


def _range_name(name: str) -> str:
    """The name without what differs from call to call. FSDP2 annotates each of its steps per module: together they are one range."""
    return "fsdp" if name.startswith(_FSDP) else _DETAIL.sub("", name)


def _works(name: str) -> bool:
    """Whether an operator is work of the host: the nodes of autograd, and Python functions in it, only contain others and wait."""
    return "::" in name and "autograd::" not in name


def _parse(path: Path) -> Any:
    try:
        with path.open("rb") as f:
            packed = f.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise PlaybookError(f"{path}: cannot be read ({e.strerror or e}); expected a Chrome trace, plain or gzip") from e
    except (EOFError, zlib.error) as e:
        raise PlaybookError(f"{path}: is a damaged gzip file ({e})") from e
    if len(raw) > MAX_BYTES:
        raise PlaybookError(f"{path}: is larger than {MAX_BYTES >> 20} MiB unpacked; trace fewer steps (profile.steps)")
    try:
        return json.loads(raw)
    except RecursionError as e:
        raise PlaybookError(f"{path}: is nested too deeply to be a Chrome trace") from e
    except ValueError as e:
        if isinstance(e, json.JSONDecodeError) and e.msg == "Extra data":
            raise PlaybookError(
                f"{path}: goes on behind its end, as where several processes wrote into one file; trace anew, each rank into its own"
            ) from e
        raise PlaybookError(f"{path}: is not valid JSON ({str(e)[:120]}); the run may have ended before the trace was written") from e


def _ns(value: Any) -> int | None:
    """Microseconds, as a number or as text, in nanoseconds; None where it is neither."""
    if isinstance(value, str):
        try:
            value = float(value) if len(value) < 40 else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_US:
        return None
    return round(value * 1000)


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _events(raw: list[Any], path: Path) -> tuple[list[Event], dict[tuple[str, int], tuple[int, int]]]:
    """The complete events, and the two ends of each forward-to-backward flow by (end, id), as thread and time."""
    out: list[Event] = []
    flows: dict[tuple[str, int], tuple[int, int]] = {}
    damaged = 0
    for e in raw:
        if not isinstance(e, dict):
            damaged += 1
            continue
        kind, start, thread = e.get("ph"), _ns(e.get("ts")), _int(e.get("tid"))
        if kind in ("s", "f") and e.get("cat") == "fwdbwd":
            number = _int(e.get("id"))
            if number is not None and start is not None and thread is not None:
                flows[str(kind), number] = (thread, start)
            continue
        if kind != "X" or not isinstance(e.get("cat"), str) or not isinstance(e.get("name"), str):
            continue
        duration, args = _ns(e.get("dur", 0)), e.get("args")
        if start is None or duration is None or duration < 0:
            damaged += 1
            continue
        if thread is None and e["cat"] not in _DEVICE:
            continue
        out.append(Event(e["cat"], e["name"][:300], thread or 0, start, start + duration, args if isinstance(args, dict) else {}))
    if damaged and damaged * 2 > len(raw):
        raise PlaybookError(
            f"{path}: {damaged} of {len(raw)} events have no usable time; expected the Chrome trace that torch.profiler writes"
        )
    return out, flows


def _device_timeline(
    spans: list[Span], stacks: Stacks, events: list[Event], device: list[Event], flows: dict[tuple[str, int], tuple[int, int]]
) -> Timeline:
    calls: dict[int, Event] = {}
    for e in events:
        correlation = _int(e.args.get("correlation"))
        if e.category in _LAUNCH and correlation is not None:
            known = calls.get(correlation)
            if known is None or e.start < known.start:
                calls[correlation] = e
    climb = _Climb(events, stacks, flows)
    ops: list[Op] = []
    unlaunched: list[Op] = []
    for e in device:
        call = calls.get(_int(e.args.get("correlation")) or -1)
        kind: Kind = "copy" if _DEVICE[e.category] == "copy" else _kind(e.name)
        if call is None:
            unlaunched.append(Op(0, e.start, e.start, e.end, kind, e.name))
            continue
        ops.append(Op(call.thread, call.start, e.start, e.end, kind, e.name, climb.hint(call.thread, call.start)))
    notes = [f"{len(unlaunched)} operations have no recorded launching call and are left out"] if unlaunched else []
    return Timeline("kineto", "gpu", spans, ops, unlaunched, notes=notes)


def _kind(name: str) -> Kind:
    return "communication" if COMMUNICATION.search(name) else "compute"


def _host_timeline(spans: list[Span], stacks: Stacks, events: list[Event], flows: dict[tuple[str, int], tuple[int, int]]) -> Timeline:
    """Operator time on the host's threads, in pieces during which the open ranges do not change."""
    climb = _Climb(events, stacks, flows)
    main = main_thread(spans)
    by_thread: defaultdict[int, list[Event]] = defaultdict(list)
    for e in events:
        if e.category == "cpu_op" and _works(e.name):
            by_thread[e.thread].append(e)
    ops: list[Op] = []
    for thread, members in by_thread.items():
        outer = _outermost(members)
        for start, end in union((e.start, e.end) for e in members):
            for piece in _cut(outer, stacks, thread, (start, end)):
                name = outer[max(0, bisect_right(outer, piece[0], key=lambda e: e.start) - 1)].name
                ops.append(Op(thread, piece[0], *piece, _kind(name), name, climb.hint(thread, piece[0])))
    for e in events:
        # Gloo works on threads of its own while the main thread waits: its time belongs where the main thread is.
        if e.category == "user_annotation" and e.name.startswith("gloo:"):
            ops.append(Op(e.thread if main is None else main, e.start, e.start, e.end, "communication", e.name))
    notes = ["no GPU in this trace: busy is host time, the union of operator time on the rank's threads"]
    return Timeline("kineto", "host", spans, ops, notes=notes)


def _outermost(events: list[Event]) -> list[Event]:
    """The operators that no other operator of the thread contains, in order."""
    out: list[Event] = []
    for e in sorted(events, key=lambda e: (e.start, -e.end)):
        if not out or e.end > out[-1].end:
            out.append(e)
    return out


def _cut(outer: list[Event], stacks: Stacks, thread: int, interval: tuple[int, int]) -> list[tuple[int, int]]:
    """The interval, cut where a range begins or ends and where another outermost operator begins."""
    first = bisect_right(outer, interval[0], key=lambda e: e.start)
    last = bisect_right(outer, interval[1] - 1, key=lambda e: e.start)
    edges = [interval[0], *sorted({e.start for e in outer[first:last]}), interval[1]]
    return [piece for a, b in itertools.pairwise(edges) for piece in stacks.cut(thread, (a, b)) if piece[1] > piece[0]]


class _Climb:
    """From backward work to the forward operator of the same sequence number.

    Autograd gives every differentiable operator a number, and the wrapper that evaluates its backward carries that number and the
    forward thread's number. The same number occurs on operators that record nothing; the one that began last is the differentiable one.
    """

    def __init__(self, events: list[Event], stacks: Stacks, flows: dict[tuple[str, int], tuple[int, int]]) -> None:
        self._stacks = stacks
        self._wrappers: defaultdict[int, list[Event]] = defaultdict(list)
        self._forward: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for e in events:
            number = _int(e.args.get("Sequence number"))
            if e.category != "cpu_op" or number is None or number < 0:
                continue
            if e.name.startswith(_EVALUATE):
                self._wrappers[e.thread].append(e)
            elif not _int(e.args.get("Fwd thread id")):
                self._forward[e.thread, number].append(e.start)
        for wrappers in self._wrappers.values():
            wrappers.sort(key=lambda e: e.start)
        for starts in self._forward.values():
            starts.sort()
        self._threads = self._learn(flows)

    def _learn(self, flows: dict[tuple[str, int], tuple[int, int]]) -> dict[int, int]:
        """Autograd's number of each forward thread, to the thread's number in the trace."""
        known: dict[int, int] = {}
        for (end, number), (thread, moment) in flows.items():
            source = flows.get(("s", number))
            wrapper = self._wrapper(thread, moment) if end == "f" else None
            forward = _int(wrapper.args.get("Fwd thread id")) if wrapper else None
            if source is not None and forward is not None:
                known.setdefault(forward, source[0])
        return known

    def _wrapper(self, thread: int, moment: int) -> Event | None:
        wrappers = self._wrappers.get(thread, [])
        i = bisect_right(wrappers, moment, key=lambda e: e.start) - 1
        # A wrapper may contain another one (double backward): the innermost that still runs is the nearest before.
        for k in range(i, max(i - 8, -1), -1):
            if wrappers[k].end >= moment:
                return wrappers[k]
        return None

    def hint(self, thread: int, moment: int) -> Path_:
        """The forward parts whose backward runs on `thread` at `moment`; empty where that cannot be told."""
        wrapper = self._wrapper(thread, moment)
        if wrapper is None:
            return ()
        number, forward = _int(wrapper.args.get("Sequence number")), _int(wrapper.args.get("Fwd thread id"))
        if number is None or forward is None:
            return ()
        source = self._threads.get(forward)
        starts = self._forward.get((source, number), []) if source is not None else []
        i = bisect_right(starts, wrapper.start) - 1
        if i < 0 or source is None:
            return ()
        return tuple(n for n in self._stacks.at(source, starts[i]) if n not in CONTAINERS)
