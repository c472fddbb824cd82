"""Kineto's Chrome trace (torch.profiler) as a Timeline.

Kernels carry the correlation of the call that launched them. On a machine without GPU there are only operators on the host's threads;
the time in which at least one runs is then what `busy` means. Backward work outside every `.bwd` range is traced to the forward
operator that autograd recorded the same sequence number for.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from playbook.errors import PlaybookError
from playbook.kernels import communicates, union
from playbook_bench.trace.containers import Document, Unpacked, files
from playbook_bench.trace.table import CONTAINERS, Kind, Op, RangePath, Span, Stacks, Timeline, close_backward, main_thread

_MAX_EVENTS = 4_000_000
"""Events that are kept: those of the host and the device, without flows and Python functions."""
_SLOW_NS = 5_000_000
"""From here on an operator of the host has done something else than launch: a launch takes 5 to 20 us."""
_EVALUATE = "autograd::engine::evaluate_function: "
# Annotations that the profiler, the optimizer base class and the process groups add; they name no part of the step.
_FOREIGN = re.compile(r"^(ProfilerStep#|Optimizer\.|enumerate\(|gloo:|nccl:|c10d::|autograd::|## )")
_DETAIL = re.compile(r" \(.*\)$", re.DOTALL)
_DEVICE = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_MAX_US = 10**16
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_LAUNCH = {"cuda_runtime", "cuda_driver"}
_MOST_NAMED = 64
_MOST_RANKS = 4096
_READ = {*_DEVICE, *_HOST, "gpu_user_annotation"}
_LABEL = re.compile(r"\[([^\]]{1,60})\] |(rank[-_ ]?\d{1,6})\b", re.IGNORECASE)
"""What tools that merge traces write before the number of a process: `[TP03] 7`, `rank3 7`."""
_NUMBERED = re.compile(r"(?:tp|rank)[-_ ]?(\d{1,6})", re.IGNORECASE)
_Key = tuple[str, str | int]
"""How a rank of a merged trace is told: by `rank` in an event's arguments, by a label, or by its process (`pid`)."""
_GROUP = ("Process Group Description", "Process Group Name", "Process Group Ranks", "Group size")


class Event(NamedTuple):
    """One operator of the host, checked. `number` and `forward`: autograd's sequence number and number of the forward thread."""

    name: str
    thread: int
    start: int
    end: int
    number: int | None
    forward: int | None


class _Launched(NamedTuple):
    """One piece of device work, and the number of the call that launched it."""

    name: str
    start: int
    end: int
    kind: Kind
    correlation: int | None
    group: str


class _Recorded:
    """What is kept of one rank's events. Names are shared between events, so that many fit."""

    def __init__(self, names: dict[str, str]) -> None:
        self.operators: list[Event] = []
        self.annotations: list[Span] = []
        self.marks: list[Span] = []
        """Annotations as the device ran them, by stream."""
        self.device: list[_Launched] = []
        self.calls: dict[int, tuple[int, int]] = {}
        """Thread and begin of the launching call of each correlation."""
        self.flows: dict[tuple[str, int], tuple[int, int]] = {}
        """The two ends of each forward-to-backward flow by (end, id), as thread and time."""
        self.processes: set[str] = set()
        self.devices: set[str] = set()
        self._names = names

    @property
    def size(self) -> int:
        """How many events are kept."""
        return len(self.operators) + len(self.device) + len(self.calls)

    def add(self, other: _Recorded) -> None:
        """Take over what is kept of another process of the same rank, which is empty then: memory holds it once."""
        for kind in ("operators", "annotations", "marks", "device"):
            getattr(self, kind).extend(getattr(other, kind))
            getattr(other, kind).clear()
        self.calls |= {number: min(call, self.calls.get(number, call), key=lambda c: c[1]) for number, call in other.calls.items()}
        self.flows |= other.flows
        self.processes |= other.processes
        self.devices |= other.devices

    def called(self, category: str, span: Span, args: dict[str, Any]) -> None:
        """What the host did, and ranges."""
        if category in _LAUNCH:
            number = _int(args.get("correlation"))
            # A runtime call may contain a driver call of the same correlation: the outer one, which began first, is the launch.
            if number is not None and (number not in self.calls or span.start < self.calls[number][1]):
                self.calls[number] = (span.thread, span.start)
        elif category == "cpu_op":
            number, forward = _int(args.get("Sequence number")), _int(args.get("Fwd thread id"))
            self.operators.append(Event(span.name, span.thread, span.start, span.end, number, forward))
        else:
            (self.annotations if category == "user_annotation" else self.marks).append(span)

    def ran(self, category: str, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        """What the device did."""
        kind: Kind = "copy" if _DEVICE[category] == "copy" else _kind(name)
        if category == "kernel" and "device" in args and len(self.devices) < _MOST_NAMED:
            self.devices.add(str(args["device"])[:40])
        group = self._group(args) if kind == "communication" else ""
        self.device.append(_Launched(name, start, end, kind, _int(args.get("correlation")), group))

    def _group(self, args: dict[str, Any]) -> str:
        """The process group of a collective, as its kernel's arguments describe it: what it is for, its name, and its ranks."""
        words, name, ranks, size = (str(args.get(key, ""))[:200] for key in _GROUP)
        label = " ".join(word for word in (words if words != "undefined" else "", f"#{name}" if name else "", ranks or size) if word)
        return self._names.setdefault(label, label)


class _Reader:
    """The events of a file, kept by the rank that they are of."""

    def __init__(self) -> None:
        self.ranks: dict[_Key, _Recorded] = {}
        self.process_names: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._damaged = self._all = 0

    def read(self, events: Iterator[Any], name: str) -> None:
        """Keep what counts.

        Raises:
            PlaybookError: too many events, or hardly one has a time.
        """
        for event in events:
            self._all += 1
            if not isinstance(event, dict):
                self._damaged += 1
                continue
            self._keep(event)
            if self._all % 1024 == 0 and sum(each.size for each in self.ranks.values()) > _MAX_EVENTS:
                raise PlaybookError(f"{name}: has more than {_MAX_EVENTS:,} operators and kernels; trace fewer steps (profile.steps)")
        if self._damaged and self._damaged * 2 > self._all:
            raise PlaybookError(
                f"{name}: {self._damaged} of {self._all} events have no usable time; expected the Chrome trace that torch.profiler writes"
            )

    def _of(self, e: dict[str, Any]) -> _Recorded:
        """What is kept of the rank that an event is of."""
        args, pid = e.get("args"), e.get("pid")
        number = _int(args.get("rank")) if isinstance(args, dict) else None
        label = _LABEL.match(pid) if isinstance(pid, str) else None
        key: _Key = ("rank", number) if number is not None else ("label", label[1] or label[2]) if label else ("pid", str(pid)[:40])
        if key not in self.ranks and len(self.ranks) >= _MOST_RANKS:
            key = ("pid", "")
        return self.ranks.setdefault(key, _Recorded(self._names))

    def _keep(self, e: dict[str, Any]) -> None:
        """Keep one event if it is an operator, an annotation, device work, the call that launched it, or an end of a flow."""
        kind, category = e.get("ph"), e.get("cat")
        if kind == "M" and e.get("name") == "process_name" and isinstance(e.get("args"), dict) and len(self.process_names) < _MOST_RANKS:
            self.process_names[str(e.get("pid"))[:40]] = str(e["args"].get("name"))[:40]
        if kind in ("s", "f") and category == "fwdbwd":
            number, moment, tid = _int(e.get("id")), _ns(e.get("ts")), _int(e.get("tid"))
            if number is not None and moment is not None and tid is not None:
                self._of(e).flows[str(kind), number] = (tid, moment)
            return
        if kind != "X" or not isinstance(category, str) or not isinstance(e.get("name"), str):
            return
        start, duration = _ns(e.get("ts")), _ns(e.get("dur", 0))
        if start is None or duration is None or duration < 0:
            self._damaged += 1
            return
        if category not in _READ:
            return
        rank, thread = self._of(e), _int(e.get("tid"))
        if category in _HOST and "pid" in e and len(rank.processes) < _MOST_NAMED:
            rank.processes.add(str(e["pid"])[:40])
        name = self._names.setdefault(e["name"], e["name"][:300])
        args = e["args"] if isinstance(e.get("args"), dict) else {}
        if category in _DEVICE:
            rank.ran(category, name, start, start + duration, args)
        elif thread is not None:
            rank.called(category, Span(thread, name, start, start + duration), args)

    def split(self) -> list[tuple[str, int | None, _Recorded]]:
        """The ranks of the file with a name and, where it is told, a number: several where tools that merge traces left what tells them
        apart.

        That is a rank or a label on everything that ran, or a process for each rank with both its host's and its GPU's work.
        What one rank leaves otherwise, of its own process and of its GPU, belongs together.
        """
        full = {key: each for key, each in self.ranks.items() if each.size}
        stated = all(kind != "pid" for kind, _ in full)
        alone = all(each.device and each.calls for each in full.values())
        if len(full) > 1 and (stated or alone):
            return [(f"{kind} {value}", self._number(kind, value), each) for (kind, value), each in full.items()]
        whole, *others = sorted(self.ranks.values(), key=lambda each: -len(each.operators) - len(each.calls)) or [_Recorded(self._names)]
        for each in others:
            whole.add(each)
        return [("", None, whole)]

    def _number(self, kind: str, value: str | int) -> int | None:
        if isinstance(value, int):
            return value
        match = _NUMBERED.fullmatch(self.process_names.get(value, "") if kind == "pid" else value)
        return int(match[1]) if match else None


def read(path: Path) -> Timeline:
    """The trace of one rank.

    Raises:
        PlaybookError: unreadable, too large, not JSON, no Chrome trace, or of several ranks.
    """
    streams = files(path)  # the file is open as long as this is held
    stream = next(streams)
    (_, timeline), *others = of_document(Document(stream), stream)
    if others:
        raise PlaybookError(
            f"{stream.name}: holds the traces of {len(others) + 1} ranks; expected the trace of one rank, as it was written"
        )
    return timeline


def of_document(document: Document, stream: Unpacked) -> list[tuple[str, Timeline]]:
    """The same of each rank in a document, whose `head` then says what else it holds, with a name where several were merged into one file.

    Raises:
        PlaybookError: too large, not JSON, or no Chrome trace.
    """
    reader = _Reader()
    reader.read(document.events(), stream.name)
    ranks = reader.split()
    about = document.head.get("distributedInfo")
    stated = _int(about.get("rank")) if isinstance(about, dict) else None
    cut = document.cut or stream.cut
    return [(name, _timeline(rank, stream.name, number if len(ranks) > 1 else stated, cut)) for name, number, rank in ranks]


def _timeline(recorded: _Recorded, name: str, number: int | None, cut: bool) -> Timeline:
    """One rank's work, checked. `cut`: its file is cut off."""
    # FSDP2 annotates each of its steps per module: together they are one range, and so are calls that differ in their details.
    spans = [
        span._replace(name="fsdp" if span.name.startswith("FSDP::") else _DETAIL.sub("", span.name))
        for span in recorded.annotations
        if _is_range(span.name)
    ]
    _check_one_rank(recorded, spans, name)
    stacks = Stacks(close_backward(spans))
    amount = f"{len(recorded.device):,} operations of the GPU" if recorded.device else f"{len(recorded.operators):,} operators"
    timeline = _device_timeline(spans, stacks, recorded) if recorded.device else _host_timeline(spans, stacks, recorded)
    timeline.marks = [span for span in recorded.annotations if not _is_range(span.name)]
    timeline.device_marks, timeline.rank = recorded.marks, number
    if cut:
        timeline.notes.append(f"the file is cut off: what is whole of it counts, {amount}")
    return timeline


def _check_one_rank(recorded: _Recorded, spans: list[Span], name: str) -> None:
    """Threads, flows and correlations are numbers of one process: in a trace merged from several, work of one would lie in ranges of
    another.
    """
    merged = "as where traces of several ranks were merged; expected the trace of one rank, as it was written"
    processes = sorted(recorded.processes)
    if len(processes) > 1:
        named = ", ".join(processes[:4])
        raise PlaybookError(
            f"{name}: holds the work of {len(processes)} processes (pid {named}); expected the trace of one rank, as it was written"
        )
    devices = recorded.devices - {"None"}
    if len(devices) > 1:
        raise PlaybookError(f"{name}: holds kernels of {len(devices)} GPUs, {merged}")
    steps = sorted((s.start, s.end) for s in spans if s.name == "step")
    if any(after[0] < before[1] for before, after in itertools.pairwise(steps)):
        raise PlaybookError(f"{name}: holds two steps at the same time, {merged}")


def _is_range(name: str) -> bool:
    return not _FOREIGN.match(name)


def _is_host_work(name: str) -> bool:
    """Whether an operator is work of the host: the nodes of autograd, and Python functions in it, only contain others and wait."""
    return "::" in name and "autograd::" not in name


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


def _device_timeline(spans: list[Span], stacks: Stacks, recorded: _Recorded) -> Timeline:
    """The timeline of a trace with a device: each kernel and copy in the range that its launch stood in. Times in ns."""
    backward_to_forward = _BackwardToForward(recorded.operators, stacks, recorded.flows) if spans else None
    ops: list[Op] = []
    unlaunched: list[Op] = []
    recorded.device.reverse()
    while recorded.device:  # each goes as its operation comes, so that memory holds them once
        e = recorded.device.pop()
        call = None if e.correlation is None else recorded.calls.get(e.correlation)
        if call is None:
            unlaunched.append(Op(thread=0, launch_ns=e.start, start=e.start, end=e.end, kind=e.kind, name=e.name, group=e.group))
        else:
            ops.append(
                Op(
                    thread=call[0],
                    launch_ns=call[1],
                    start=e.start,
                    end=e.end,
                    kind=e.kind,
                    name=e.name,
                    forward_path=backward_to_forward.forward_path(*call) if backward_to_forward else (),
                    group=e.group,
                )
            )
    notes = [f"{len(unlaunched)} operations have no recorded launching call and are left out"] if unlaunched else []
    return Timeline("kineto", "gpu", spans, ops, unlaunched, slow=_slow(recorded.operators), notes=notes)


def _slow(operators: Iterable[Event]) -> list[Span]:
    """Operators that took `_SLOW_NS` and contain none that did: launching kernels takes microseconds."""
    long = sorted(
        (e for e in operators if e.end - e.start >= _SLOW_NS and _is_host_work(e.name)), key=lambda e: (e.thread, e.start, -e.end)
    )
    following = itertools.zip_longest(long, long[1:])
    alone = [e for e, after in following if after is None or after.thread != e.thread or after.start >= e.end]
    return [Span(e.thread, e.name, e.start, e.end) for e in alone]


def _kind(name: str) -> Kind:
    return "communication" if communicates(name) else "compute"


def _host_timeline(spans: list[Span], stacks: Stacks, recorded: _Recorded) -> Timeline:
    """The timeline of a trace without a device.

    Busy time of each thread's operators, cut wherever a range or an outermost operator begins or ends; there an op's launch is its start.
    Gloo's spans count on the main thread. Times in ns.
    """
    backward_to_forward = _BackwardToForward(recorded.operators, stacks, recorded.flows)
    main = main_thread(spans)
    by_thread: defaultdict[int, list[Event]] = defaultdict(list)
    for e in recorded.operators:
        if _is_host_work(e.name):
            by_thread[e.thread].append(e)
    ops: list[Op] = []
    for thread, members in by_thread.items():
        outer = _outermost(members)
        for start, end in union((e.start, e.end) for e in members):
            for first, last in _cut(outer, stacks, thread, (start, end)):
                name = outer[max(0, bisect_right(outer, first, key=lambda e: e.start) - 1)].name
                path = backward_to_forward.forward_path(thread, first)
                ops.append(Op(thread=thread, launch_ns=first, start=first, end=last, kind=_kind(name), name=name, forward_path=path))
    for span in recorded.annotations:
        # Gloo works on threads of its own while the main thread waits: its time belongs where the main thread is.
        if span.name.startswith("gloo:"):
            thread = span.thread if main is None else main
            ops.append(Op(thread=thread, launch_ns=span.start, start=span.start, end=span.end, kind="communication", name=span.name))
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


class _BackwardToForward:
    """From backward work to the forward operator of the same sequence number.

    Autograd gives every differentiable operator a number, and the wrapper that evaluates its backward carries that number and the
    forward thread's number. The same number occurs on operators that record nothing; the one that began last is the differentiable one.
    """

    def __init__(self, events: list[Event], stacks: Stacks, flows: dict[tuple[str, int], tuple[int, int]]) -> None:
        """Index forward operators by thread and number, and the wrappers of backward work by thread, both in order of time."""
        self._stacks = stacks
        self._wrappers: defaultdict[int, list[Event]] = defaultdict(list)
        self._forward: defaultdict[tuple[int, int | None], list[int]] = defaultdict(list)
        for e in sorted((e for e in events if e.number is not None and e.number >= 0), key=lambda e: e.start):
            if e.name.startswith(_EVALUATE):
                self._wrappers[e.thread].append(e)
            elif not e.forward:
                self._forward[e.thread, e.number].append(e.start)
        self._threads = self._learn(flows)

    def _learn(self, flows: dict[tuple[str, int], tuple[int, int]]) -> dict[int | None, int]:
        """Autograd's number of each forward thread, to the thread's number in the trace."""
        threads: dict[int | None, int] = {}
        for (end, number), (thread, moment) in flows.items():
            source = flows.get(("s", number))
            wrapper = self._wrapper(thread, moment) if end == "f" else None
            if source is not None and wrapper is not None and wrapper.forward is not None:
                threads.setdefault(wrapper.forward, source[0])
        return threads

    def _wrapper(self, thread: int, moment: int) -> Event | None:
        wrappers = self._wrappers.get(thread, [])
        i = bisect_right(wrappers, moment, key=lambda e: e.start) - 1
        # A wrapper may contain another one (double backward): the innermost that still runs is the nearest before.
        for k in range(i, max(i - 8, -1), -1):
            if wrappers[k].end >= moment:
                return wrappers[k]
        return None

    def forward_path(self, thread: int, moment: int) -> RangePath:
        """The forward parts whose backward runs on `thread` at `moment`; empty where that cannot be told."""
        wrapper = self._wrapper(thread, moment)
        source = self._threads.get(wrapper.forward) if wrapper else None
        if wrapper is None or source is None:
            return ()
        starts = self._forward.get((source, wrapper.number), [])
        i = bisect_right(starts, wrapper.start) - 1
        return tuple(n for n in self._stacks.at(source, starts[i]) if n not in CONTAINERS) if i >= 0 else ()
