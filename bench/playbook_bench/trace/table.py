"""From spans and operations to the table of time per range.

A collector's file is read into a `Timeline` (trace_nsys, trace_kineto). An operation belongs to the innermost range that encloses its
launching call on the launching thread: Nsight Systems' rule. The backward pass runs on autograd's thread, inside ranges named
`<part>.bwd`; that thread works for the main thread, so what the main thread waits in (`backward`) gives the phase.

Units: times inside this module are integer nanoseconds; the table is in milliseconds per step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Literal, NamedTuple

from playbook.errors import PlaybookError
from playbook.kernels import Interval, length, subtract, union
from playbook.records.case import MODEL_RANGES
from playbook.records.trace import Coverage, Phase, RangeRow, TraceTable, UnattributedOp

BACKWARD = ".bwd"
STEP = "step"
CONTAINERS = frozenset({STEP, "forward", "backward"})
_TOWERS = frozenset({"vision", "decoder"})
UNATTRIBUTED = "(unattributed)"
MAX_DEPTH = 32
NS_PER_MS = 1_000_000
_WORST_LISTED = 8

Kind = Literal["compute", "communication", "copy"]
RangePath = tuple[str, ...]
_PRIORITY: dict[str, int] = {"compute": 0, "communication": 1, "copy": 2}


class Span(NamedTuple):
    """A named range on one host thread."""

    thread: int
    name: str
    start: int
    end: int


class Op(NamedTuple):
    """One piece of device work (or of host work, where there is no device), with the call that launched it."""

    thread: int
    launch_ns: int
    start: int
    end: int
    kind: Kind
    name: str
    forward_path: RangePath = ()
    """The forward range that a collector found by other means, for backward work outside every `.bwd` range."""
    group: str = ""
    """Of a collective: its process group, where the trace names it."""


@dataclass
class Timeline:
    """What a collector saw of one rank."""

    collector: Literal["nsys", "kineto"]
    measures: Literal["gpu", "host"]
    """What `busy` means: the union of device work, or of operator time on the host's threads."""
    spans: list[Span] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    unlaunched: list[Op] = field(default_factory=list)
    """Device work whose launching call was not recorded: it belongs to no range, and its `launch_ns` is its start."""
    marks: list[Span] = field(default_factory=list)
    """Ranges that libraries opened, of steps and of waits for data; they name no part of the step."""
    device_marks: list[Span] = field(default_factory=list)
    """Ranges as the device ran them, by stream: from the first to the last operation that was launched in them."""
    slow: list[Span] = field(default_factory=list)
    """Operators of the host that took milliseconds by themselves, not by an operator in them."""
    rank: int | None = None
    notes: list[str] = field(default_factory=list)


class Place(NamedTuple):
    """Where a moment of the program belongs."""

    phase: Phase
    path: RangePath
    """Names of the enclosing parts, outermost first; empty where no part encloses the moment."""


class Stacks:
    """For each thread, which ranges are open at a moment. Ranges need not nest: a backward range may end in another operator."""

    def __init__(self, spans: Iterable[Span]) -> None:
        by_thread: defaultdict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_thread[span.thread].append(span)
        self._times: dict[int, list[int]] = {}
        self._names: dict[int, list[RangePath]] = {}
        self.entered: list[tuple[Span, RangePath]] = []
        """Each span with the names open when it began, itself the last."""
        for thread, members in by_thread.items():
            self._sweep(thread, members)

    def _sweep(self, thread: int, spans: list[Span]) -> None:
        """Follow the begins and ends of a thread's ranges, and note which are open after each moment."""
        spans.sort(key=lambda s: (s.start, -s.end))
        # At one moment, ends come before starts: a range that ends where another begins does not enclose it.
        edges = sorted([(s.start, 1, i) for i, s in enumerate(spans)] + [(s.end, 0, i) for i, s in enumerate(spans)])
        open_: dict[int, str] = {}
        times: list[int] = []
        names: list[RangePath] = []
        for at, starts, i in edges:
            if starts:
                open_[i] = spans[i].name
            else:
                del open_[i]
            stack = tuple(islice(reversed(open_.values()), MAX_DEPTH))[::-1]
            if starts:
                self.entered.append((spans[i], stack))
            if times and times[-1] == at:
                names[-1] = stack
            else:
                times.append(at)
                names.append(stack)
        self._times[thread], self._names[thread] = times, names

    def at(self, thread: int, moment: int) -> RangePath:
        """The names of the ranges open on `thread` at `moment`, outermost first."""
        i = bisect_right(self._times.get(thread, []), moment) - 1
        return self._names[thread][i] if i >= 0 else ()

    def cut(self, thread: int, interval: Interval) -> list[Interval]:
        """The interval in pieces during which the open ranges of `thread` do not change."""
        times = self._times.get(thread, [])
        start, end = interval
        inner = times[bisect_right(times, start) : bisect_right(times, end)]
        edges = [start, *(t for t in inner if t < end), end]
        return list(pairwise(edges))


def main_thread(spans: Sequence[Span]) -> int | None:
    """The thread that runs the steps; where no range is named step, the one with the most ranges."""
    steps = Counter(s.thread for s in spans if s.name == STEP)
    every = steps or Counter(s.thread for s in spans)
    return every.most_common(1)[0][0] if every else None


def close_backward(spans: Sequence[Span]) -> list[Span]:
    """The spans that last, with every `.bwd` range ended no later than the `backward` range it began in.

    A part whose input needs no gradient opens a backward range that nothing closes; it must not swallow the next step.
    """
    outer = sorted((s.start, s.end) for s in spans if s.name == "backward")
    starts = [s for s, _ in outer]
    out = []
    for span in spans:
        if span.name.endswith(BACKWARD):
            i = bisect_right(starts, span.start) - 1
            if i >= 0 and outer[i][0] <= span.start < outer[i][1] < span.end:
                span = span._replace(end=outer[i][1])
        if span.end > span.start:
            out.append(span)
    return out


def _parts(open_ranges: RangePath) -> RangePath:
    """The parts among open ranges; a part inside itself counts once."""
    names = [n.removesuffix(BACKWARD) for n in open_ranges if n not in CONTAINERS]
    return tuple(n for i, n in enumerate(names) if i == 0 or n != names[i - 1])


def place(open_ranges: RangePath, main: RangePath, forward_path: RangePath) -> Place:
    """Phase and path of a moment, from the ranges open on its own thread and on the main thread."""
    parts = _parts(open_ranges)
    in_backward = "backward" in open_ranges or "backward" in main or any(n.endswith(BACKWARD) for n in open_ranges)
    if in_backward:
        last = max((i for i, n in enumerate(open_ranges) if n == "backward" or n.endswith(BACKWARD)), default=-1)
        if any(n in MODEL_RANGES for n in open_ranges[last + 1 :]):
            # A forward range entered during the backward pass: activation recomputation. It starts wherever the first saved tensor is
            # asked for, so the part around it in the backward pass says nothing; only the tower does.
            inside = _parts(open_ranges[last + 1 :])
            tower = tuple(n for n in parts[:1] if n in _TOWERS and n not in inside)
            return Place("recompute", tower + inside)
        return Place("backward", parts or forward_path)
    if "forward" in open_ranges or "forward" in main or any(n in MODEL_RANGES for n in open_ranges):
        return Place("forward", parts)
    return Place("other", parts)


def build(timeline: Timeline) -> TraceTable:
    """The table of a timeline.

    Raises:
        PlaybookError: the trace holds neither ranges nor operations.
    """
    spans = close_backward(timeline.spans)
    if not spans or not timeline.ops:
        missing = "operations" if spans else "ranges"
        raise PlaybookError(
            f"the trace holds no {missing}; expected both. "
            "Trace a run with profile.nvtx under nsys -t cuda,nvtx, or with profile.kineto, and let it end by itself"
        )
    stacks = Stacks(spans)
    main = main_thread(spans)
    assert main is not None
    notes = list(timeline.notes)
    window, num_steps = _window(spans, timeline.ops, main, notes)
    ops, places = _placed(timeline.ops, stacks, main, window)
    table = _Table(ops, places, window, num_steps)
    table.enter(stacks, main)
    return table.result(timeline, notes)


def _window(spans: Sequence[Span], ops: Sequence[Op], main: int, notes: list[str]) -> tuple[Interval, int]:
    """From the first step's begin until the last step and the work it launched have ended; and the number of steps."""
    steps = [s for s in spans if s.name == STEP and s.thread == main]
    if not steps:
        notes.append("no range is named 'step': the whole trace counts as one step")
        everything: list[Span | Op] = [*spans, *ops]
        return (min(e.start for e in everything), max(e.end for e in everything)), 1
    first, last = min(s.start for s in steps), max(s.end for s in steps)
    return (first, max([last, *(o.end for o in ops if first <= o.launch_ns < last)])), len(steps)


def _placed(ops: Sequence[Op], stacks: Stacks, main: int, window: Interval) -> tuple[list[Op], list[Place]]:
    """The operations inside the window, clipped to it, and where each belongs."""
    inside: list[Op] = []
    places: list[Place] = []
    for op in ops:
        start, end = max(op.start, window[0]), min(op.end, window[1])
        if end <= start:
            continue
        inside.append(op._replace(start=start, end=end))
        above = stacks.at(main, op.launch_ns) if op.thread != main else ()
        places.append(place(stacks.at(op.thread, op.launch_ns), above, op.forward_path))
    return inside, places


def exclusive(ops: Sequence[Op]) -> list[int]:
    """Each operation's share of the busy time, such that the shares add up to the union.

    A moment at which several run goes to computation before communication before copies, and then to the earliest begun.
    """
    shares = [0] * len(ops)
    together: list[int] = []
    until = 0
    for i in sorted(range(len(ops)), key=lambda i: ops[i].start):
        if together and ops[i].start >= until:
            _divide(ops, together, shares)
            together = []
        until = max(until, ops[i].end) if together else ops[i].end
        together.append(i)
    _divide(ops, together, shares)
    return shares


def _divide(ops: Sequence[Op], together: list[int], shares: list[int]) -> None:
    """The shares of operations that overlap, in order of their begins."""
    if len(together) == 1:
        shares[together[0]] = ops[together[0]].end - ops[together[0]].start
        return
    edges = sorted({t for i in together for t in (ops[i].start, ops[i].end)})
    running: list[tuple[int, int, int]] = []
    following = 0
    for at, end in pairwise(edges):
        while following < len(together) and ops[together[following]].start <= at:
            i = together[following]
            heapq.heappush(running, (_PRIORITY[ops[i].kind], ops[i].start, i))
            following += 1
        while running and ops[running[0][2]].end <= at:
            heapq.heappop(running)
        if running:
            shares[running[0][2]] += end - at


class _Table:
    """The sums behind the rows, in nanoseconds over all steps."""

    def __init__(self, ops: list[Op], places: list[Place], window: Interval, num_steps: int) -> None:
        """Sum up operations by place. `ops` and `places` belong together; `window` is in nanoseconds."""
        self.ops, self.places, self.window, self.num_steps = ops, places, window, num_steps
        self.shares = exclusive(ops)
        compute = union((o.start, o.end) for o in ops if o.kind == "compute")
        comm = [i for i, o in enumerate(ops) if o.kind == "communication"]
        self.exposed = {i: subtract([(ops[i].start, ops[i].end)], _near(compute, ops[i])) for i in comm}
        self.comm_ms = self._ms(length(union((ops[i].start, ops[i].end) for i in comm)))
        self.exposed_ms = self._ms(length(union(x for placed in self.exposed.values() for x in placed)))
        self.inside: defaultdict[Place, list[int]] = defaultdict(list)
        """Operations per row; an operation counts in each part around it."""
        for i, placed in enumerate(places):
            for depth in range(1, len(placed.path) + 1):
                self.inside[Place(placed.phase, placed.path[:depth])].append(i)
            if not placed.path:
                self.inside[placed].append(i)
        self.count: Counter[Place] = Counter()
        self.host: Counter[Place] = Counter()

    def _ms(self, ns: int) -> float:
        return ns / NS_PER_MS / self.num_steps

    def enter(self, stacks: Stacks, main: int) -> None:
        """Count the ranges entered inside the window, and their time on the host."""
        for span, stack in stacks.entered:
            start, end = max(span.start, self.window[0]), min(span.end, self.window[1])
            inside_itself = len(stack) > 1 and stack[-2] == span.name
            if span.name in CONTAINERS or inside_itself or end <= start:
                continue
            above = stacks.at(main, span.start) if span.thread != main else ()
            key = place(stack, above, ())
            self.count[key] += 1
            self.host[key] += end - start

    def row(self, key: Place) -> RangeRow:
        """One row of the table."""
        members = self.inside.get(key, [])
        ops = [self.ops[i] for i in members]
        return RangeRow(
            path="/".join(key.path) or UNATTRIBUTED,
            phase=key.phase,
            count=self.count[key] / self.num_steps,
            num_ops=len(ops) / self.num_steps,
            host_ms=self._ms(self.host[key]),
            busy_ms=self._ms(length(union((o.start, o.end) for o in ops))),
            sum_ms=self._ms(sum(o.end - o.start for o in ops)),
            self_ms=self._ms(sum(self.shares[i] for i in members if self.places[i].path == key.path)),
            exposed_comm_ms=self._ms(length(union(x for i in members for x in self.exposed.get(i, ())))),
        )

    def rows(self) -> list[RangeRow]:
        """Every range of every phase; `(unattributed)` is there for forward and backward even when it is zero."""
        phases: list[Phase] = ["forward", "backward", "recompute", "other"]
        keys = {*self.inside, *self.count, Place("forward", ()), Place("backward", ())}
        return [self.row(k) for k in sorted(keys, key=lambda k: (phases.index(k.phase), not k.path, k.path))]

    def coverage(self, phases: set[str]) -> float | None:
        """Share of the phases' busy time that lies in a named part."""
        total = sum(s for s, p in zip(self.shares, self.places, strict=True) if p.phase in phases)
        named = sum(s for s, p in zip(self.shares, self.places, strict=True) if p.phase in phases and p.path)
        return named / total if total else None

    def unattributed(self) -> list[UnattributedOp]:
        """The largest operations that no part encloses."""
        busy: Counter[tuple[str, Phase]] = Counter()
        count: Counter[tuple[str, Phase]] = Counter()
        for op, placed, share in zip(self.ops, self.places, self.shares, strict=True):
            if not placed.path:
                busy[op.name, placed.phase] += share
                count[op.name, placed.phase] += 1
        return [
            UnattributedOp(name=n[:200], phase=p, count=count[n, p] / self.num_steps, busy_ms=self._ms(ns))
            for (n, p), ns in busy.most_common(_WORST_LISTED)
        ]

    def result(self, timeline: Timeline, notes: list[str]) -> TraceTable:
        """The whole table."""
        busy, span = sum(self.shares), self.window[1] - self.window[0]
        return TraceTable(
            collector=timeline.collector,
            measures=timeline.measures,
            num_steps=self.num_steps,
            span_ms=self._ms(span),
            busy_ms=self._ms(busy),
            idle_ms=self._ms(span - busy),
            communication_ms=self.comm_ms,
            exposed_comm_ms=self.exposed_ms,
            coverage=Coverage(
                forward=self.coverage({"forward"}),
                backward=self.coverage({"backward", "recompute"}),
                total=self.coverage({"forward", "backward", "recompute", "other"}),
            ),
            rows=self.rows(),
            unattributed=self.unattributed(),
            notes=notes,
        )


def _near(intervals: list[Interval], op: Op) -> list[Interval]:
    """The stretch of sorted intervals that may touch `op`."""
    first = bisect_right(intervals, (op.start, op.start)) - 1
    last = bisect_right(intervals, (op.end, op.end))
    return intervals[max(0, first) : last]
