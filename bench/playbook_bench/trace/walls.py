"""What holds a step back, from the trace of any trainer: which wall it runs into, by stated thresholds, and what changed between two
traces.

Source: idle time is the host's where the next kernel was launched only after the device had run dry, the test of HolisticTraceAnalysis
(https://hta.readthedocs.io, "Idle Time Breakdown", host wait), here on the union of all streams.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from playbook.errors import PlaybookError
from playbook.kernels import Interval, collective, kernel_class, length, subtract, union
from playbook_bench.trace.table import NS_PER_MS, STEP, Op, Span, Timeline, exclusive

Wall = Literal[
    "data wait", "host-bound", "idle of unknown cause", "exposed communication", "memory-bound kernels", "compute-bound", "mixed", "no GPU"
]

THRESHOLDS: dict[Wall, float] = {
    # The GPU is idle while the host fetches data. A tenth of the step is worth a data loader's settings, and is above what tracing itself
    # adds.
    "data wait": 0.10,
    # It is idle because the next kernel was not launched yet. Tracing adds 2 to 8 % to a step that the GPU bounds (1 to 3 us for each
    # operator), so a smaller share may be the profiler's own.
    "host-bound": 0.10,
    # It is idle, no data is fetched and the next kernel had been launched before, or its launch is not in the trace: as much as of the idle
    # time whose cause is known.
    "idle of unknown cause": 0.10,
    # Collectives run and nothing is computed. Above the skew that ranks have when each hides what it can: a collective also waits for the
    # slowest rank.
    "exposed communication": 0.15,
}
"""Shares of the step from which on a cause outside the kernels is a wall."""
BUSY = 0.80
"""Share of the step in which kernels compute: from here on the kernels are what there is to shorten, and below it no single cause above its
threshold says enough."""
MOST = 0.50
"""Share of the computing time that a class of kernels needs to name the wall: more than all others together."""

_STEP = re.compile(r"^(ProfilerStep#\d+|(train(ing)?[ _]?)?(step|iteration)([ _:#]*\d+)?)$", re.IGNORECASE)
_DATA = re.compile(
    r"^data$|enumerate\(DataLoader\)|data_?(loader|loading|wait)|(get|next|fetch)_batch|batch[-_ ]generator|collate", re.IGNORECASE
)
_UPDATE = re.compile(r"adam|sgd|lamb(?!da)|(^|_)lion|adagrad|adafactor|PointwiseOp\w*Functor", re.IGNORECASE)
"""Kernels of optimizers: fused ones by name, those of torch's lists by their last operation, `addcdiv`."""
_FEWEST_UPDATES = 2
"""Fewer mark no step: a trace may begin or end in the middle of one."""
_LAUNCH_NS = 10_000
"""From a launching call's begin to its kernel's, at most, where the device has nothing else to do: 5 us, and as much again for the
profiler."""
_UNKNOWN = -(1 << 63)
"""The launch of an operation whose call was not recorded: before everything, so that no idle time is laid to the host for it."""
_FEW = 2
"""So many operators of the host may be named as what the GPU waits for: a forward one and its backward."""
_PRODUCTS = frozenset({"products", "grouped products", "attention"})


@dataclass(frozen=True)
class ClassTime:
    """Time of one class of kernels. Units: milliseconds for each step; where streams overlap, computation counts first, so that the classes
    add up to the busy time.
    """

    name: str
    ms: float
    share: float
    """Of the step."""
    count: float


@dataclass(frozen=True)
class HostOperator:
    """An operator of the host that takes milliseconds by itself, while the GPU has nothing to do."""

    name: str
    share: float
    """Of the step: the idle time that passes in it."""
    count: float
    """Slow calls in a step."""
    longest_ms: float


@dataclass(frozen=True)
class Walls:
    """Where the time of a step went, and which wall that is. Shares are of the step, 0 to 1; None: this trace cannot tell."""

    wall: Wall
    sentence: str
    collector: str
    num_steps: int
    span_ms: float
    busy: float
    idle: float
    host_idle: float | None
    """Idle because the host had not launched the next kernel, data waits excluded."""
    data_wait: float | None
    unknown_idle: float | None
    """Idle for neither reason: what ends it was launched before it began, or its launch is not in the trace."""
    communication: float
    exposed: float
    computing: float
    collectives: dict[str, float]
    """What is exposed by kind of collective, the largest first; where several run at once, each counts in whole."""
    groups: dict[str, float]
    """The same by kind and process group, where the trace names groups."""
    classes: tuple[ClassTime, ...]
    waits_for: tuple[HostOperator, ...]
    """The host's operators in which most of that idle time passes, where it is so few of them: the longest in sum first."""
    beyond: tuple[Wall, ...]
    """All walls above their thresholds, the largest first."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Tail:
    """The last steps of a run, as its log tells them: what counts of a trace in which no range marks a step."""

    num_steps: int
    seconds: float


@dataclass(frozen=True)
class Stretch:
    """The whole steps of a trace: what ran in them, clipped to them, by its begin."""

    ops: list[Op]
    near: list[Op]
    """With what begins at their end, which tells why the time before it was idle."""
    window: Interval
    num_steps: int
    notes: tuple[str, ...]


def stretch(trace: Timeline, tail: Tail | None = None) -> Stretch:
    """A trace's marked steps; else as much of its end as `tail` says; else all of it.

    Raises:
        PlaybookError: nothing ran in it.
    """
    ops = [*trace.ops, *(op._replace(launch_ns=_UNKNOWN) for op in trace.unlaunched)]
    notes = [note for note in trace.notes if "left out" not in note]
    if not any(op.end > op.start for op in ops):
        raise PlaybookError(
            "the trace holds no operations; expected kernels of some steps. Trace with nsys -t cuda,nvtx or torch.profiler while the run "
            "makes steps" + "".join(f" ({note})" for note in notes if "cut off" in note)
        )
    if trace.unlaunched:
        notes.append(
            f"{len(trace.unlaunched)} operations have no recorded launching call: idle time before them does not count as the host's"
        )
    window, num_steps = _window(trace, ops, _steps(trace), tail, notes)
    near = sorted((_clipped(op, window) for op in ops if op.end > window[0] and op.start <= window[1]), key=_begin)
    return Stretch(near[: bisect_left(near, window[1], key=lambda op: op.start)], near, window, num_steps, tuple(notes))


def walls(trace: Timeline, tail: Tail | None = None) -> Walls:
    """The walls of a trace, of its steps as `stretch` finds them.

    Raises:
        PlaybookError: nothing ran in it.
    """
    return of_stretch(trace, stretch(trace, tail))


def of_stretch(trace: Timeline, part: Stretch) -> Walls:
    """The walls of a trace's steps."""
    ops, near, window, num_steps, notes = part.ops, part.near, part.window, part.num_steps, list(part.notes)
    span = window[1] - window[0]
    busy = union((op.start, op.end) for op in ops)
    compute, sent = (union((op.start, op.end) for op in ops if op.kind == kind) for kind in ("compute", "communication"))
    idle = subtract([window], busy)
    data = _data(trace, window)
    if data is None:
        notes.append("no range tells when data was fetched: a wait for it counts as the host's")
    if trace.measures == "host":
        waited = length(data or []) / span
        host = unknown = None
        waits_for: tuple[HostOperator, ...] = ()
    else:
        of_data = [piece for gap in idle for piece in _inside(gap, data or [])]
        by_host = [gap for gap in idle if _starved(gap, near)]
        waited = length(of_data) / span
        of_host = subtract(by_host, union(of_data))
        host = None if not trace.ops else length(of_host) / span
        waits_for = _waits_for(trace.slow, of_host, span, num_steps)
        unknown = max(0.0, length(idle) / span - waited - (host or 0.0))
    exposed = subtract(sent, compute)
    collectives = _exposed(((collective(op.name), op) for op in ops), compute, span)
    groups = _exposed(((f"{collective(op.name)} {op.group}", op) for op in ops if op.group), compute, span)
    classes = _classes(ops, span, num_steps)
    shares = {"busy": length(busy) / span, "exposed": length(exposed) / span, "computing": length(compute) / span}
    beyond = _beyond(
        trace.measures,
        {"data wait": waited, "host-bound": host, "idle of unknown cause": unknown, "exposed communication": shares["exposed"]},
    )
    wall = beyond[0] if beyond else _kernels(trace.measures, shares["computing"], classes)
    return Walls(
        wall=wall,
        sentence=_SENTENCES["slow operators" if wall == "host-bound" and waits_for else wall].format(
            waited=waited,
            host=host,
            unknown=unknown,
            named=" and ".join(
                f"{each.count:.3g} slow {'call' if each.count == 1 else 'calls'} of {each.name} (up to {each.longest_ms:.0f} ms)"
                for each in waits_for
            ),
            largest=classes[0].name if classes else "nothing",
            idle=1 - shares["busy"],
            **shares,
        ),
        collector=trace.collector,
        num_steps=num_steps,
        span_ms=span / NS_PER_MS / num_steps,
        busy=shares["busy"],
        idle=1 - shares["busy"],
        host_idle=host,
        data_wait=None if data is None else waited,
        unknown_idle=unknown,
        communication=length(sent) / span,
        exposed=shares["exposed"],
        computing=shares["computing"],
        collectives=collectives,
        groups=groups,
        classes=classes,
        waits_for=waits_for,
        beyond=tuple(beyond),
        notes=tuple(notes),
    )


def _clipped(op: Op, window: Interval) -> Op:
    if window[0] <= op.start and op.end <= window[1]:
        return op
    return op._replace(start=max(op.start, window[0]), end=min(op.end, window[1]))


def _begin(op: Op) -> tuple[int, int]:
    return op.start, op.launch_ns


def _steps(trace: Timeline) -> list[Span]:
    """Steps by our own ranges, by torch.profiler's marks, or by a common name; of the thread that has the most."""
    for candidates in ([s for s in trace.spans if s.name == STEP], trace.marks, trace.spans):
        named = [s for s in candidates if _STEP.match(s.name) and s.end > s.start]
        threads = Counter(s.thread for s in named)
        if threads:
            return [s for s in named if s.thread == threads.most_common(1)[0][0]]
    return []


def _window(trace: Timeline, ops: Sequence[Op], steps: Sequence[Span], tail: Tail | None, notes: list[str]) -> tuple[Interval, int]:
    """Whole steps by the GPU's own marks, or what stands for them; and their number.

    The host runs ahead: its mark of a step's begin may lie in the work of the step before. On the GPU a step begins with the first kernel
    that was launched in it, so that from the first of these begins to the last lie whole steps, one fewer than there are marks.
    """
    begins = [] if trace.measures == "host" else _begins(trace, ops, steps)
    if len(begins) > 1 and begins[-1] > begins[0]:
        return (begins[0], begins[-1]), len(begins) - 1
    if steps:
        first, last = min(s.start for s in steps), max(s.end for s in steps)
        return (first, max([last, *(op.end for op in ops if first <= op.launch_ns < last)])), len(steps)
    first, last = min(op.start for op in ops), max(op.end for op in ops)
    if tail is None and len(ends := _updates(ops)) > _FEWEST_UPDATES:
        notes.append("no range marks a step: a step lasts from the end of one optimizer update to the end of the next")
        return (ends[0], ends[-1]), len(ends) - 1
    if tail is None:
        notes.append("no range marks a step: shares are of the whole trace, from its first operation to its last")
        return (first, last), 1
    notes.append(f"no range marks a step: shares are of the last {tail.seconds:.3g} s, which the log gives to {tail.num_steps} steps")
    return (max(first, last - max(1, round(tail.seconds * 1e9))), last), tail.num_steps


def _begins(trace: Timeline, ops: Sequence[Op], steps: Sequence[Span]) -> list[int]:
    """When the GPU began each step: with the first kernel launched in it, or where launches are not in the trace, by the profiler's marks
    on the busiest stream.
    """
    hosts = sorted((s.start, s.end) for s in steps)
    starts = [s for s, _ in hosts]
    first: dict[int, int] = {}
    for op in ops:
        i = bisect_right(starts, op.launch_ns) - 1
        if op.kind == "compute" and i >= 0 and op.launch_ns < hosts[i][1]:
            first[i] = min(op.start, first.get(i, op.start))
    if len(first) == len(hosts):
        return sorted(first.values())
    streams: defaultdict[int, list[Span]] = defaultdict(list)
    for mark in trace.device_marks:
        if _STEP.match(mark.name):
            streams[mark.thread].append(mark)
    marks = max(streams.values(), key=lambda m: sum(s.end - s.start for s in m), default=[])
    return sorted(s.start for s in marks) if len(marks) > len(first) else sorted(first.values())


def _updates(ops: Sequence[Op]) -> list[int]:
    """When each update of the parameters ended: the last of the optimizer's kernels before other products or attention."""
    ends: list[int] = []
    updating = False
    for op in sorted((op for op in ops if op.kind == "compute"), key=_begin):
        if _UPDATE.search(op.name):
            ends = [*ends[:-1], max(op.end, ends[-1])] if updating else [*ends, op.end]
            updating = True
        elif updating and kernel_class(op.name) in _PRODUCTS:
            updating = False
    return ends


def _data(trace: Timeline, window: Interval) -> list[Interval] | None:
    """When some thread of the rank fetched data; None where no range tells."""
    ranges = [s for s in (*trace.spans, *trace.marks) if _DATA.search(s.name)]
    return union((max(s.start, window[0]), min(s.end, window[1])) for s in ranges) if ranges else None


def _inside(gap: Interval, stretches: Sequence[Interval]) -> list[Interval]:
    """The parts of a gap that lie in sorted stretches."""
    first = max(0, bisect_left(stretches, gap) - 1)
    last = bisect_left(stretches, gap[1], key=lambda stretch: stretch[0])
    return [(max(start, gap[0]), min(end, gap[1])) for start, end in stretches[first:last] if end > gap[0]]


def _starved(gap: Interval, ops: Sequence[Op]) -> bool:
    """Whether the operation that ends an idle gap was launched after the gap began, or ran as soon as a launch can; a gap that nothing ends
    is the host's too.
    """
    i = bisect_left(ops, (gap[1], _UNKNOWN), key=_begin)
    return i >= len(ops) or ops[i].start > gap[1] or ops[i].launch_ns > min(gap[0], gap[1] - _LAUNCH_NS)


def _waits_for(slow: Iterable[Span], idle: list[Interval], span: int, num_steps: int) -> tuple[HostOperator, ...]:
    """The operators, at most `_FEW`, in which more than half of the host's idle time passes, the longest in sum first; none, where it
    takes more of them.
    """
    calls: dict[str, list[tuple[int, int]]] = {}
    for each in slow:
        if passed := length(_inside((each.start, each.end), idle)):
            calls.setdefault(each.name, []).append((passed, each.end - each.start))
    found = [
        HostOperator(name, sum(passed for passed, _ in each) / span, len(each) / num_steps, max(took for _, took in each) / NS_PER_MS)
        for name, each in calls.items()
    ]
    most = sorted((each for each in found if each.share * span > _LEAST * length(idle)), key=lambda each: -each.share)[:_FEW]
    return tuple(most) if sum(each.share for each in most) * span > MOST * length(idle) else ()


def _exposed(named: Iterable[tuple[str, Op]], compute: list[Interval], span: int) -> dict[str, float]:
    """Shares of the step in which the collectives of a name run and nothing is computed."""
    kinds: dict[str, list[Interval]] = {}
    for name, op in named:
        if op.kind == "communication":
            kinds.setdefault(name, []).append((op.start, op.end))
    shares = {kind: length(subtract(union(runs), compute)) / span for kind, runs in kinds.items()}
    return dict(sorted(((k, v) for k, v in shares.items() if v), key=lambda item: -item[1]))


def _classes(ops: Sequence[Op], span: int, num_steps: int) -> tuple[ClassTime, ...]:
    """Classes, the largest first."""
    time: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for op, share in zip(ops, exclusive(ops), strict=True):
        kind = {"communication": "collectives", "copy": "copies"}.get(op.kind) or kernel_class(op.name)
        time[kind] += share
        count[kind] += 1
    return tuple(ClassTime(name, ns / NS_PER_MS / num_steps, ns / span, count[name] / num_steps) for name, ns in time.most_common())


def _beyond(measures: str, shares: Mapping[Wall, float | None]) -> list[Wall]:
    """Walls outside the kernels that are above their thresholds, the largest first."""
    over = [(share, wall) for wall, share in shares.items() if share is not None and share > THRESHOLDS[wall]]
    return [wall for _, wall in sorted(over, reverse=True) if measures == "gpu" or wall == "data wait"]


def _kernels(measures: str, computing: float, classes: Sequence[ClassTime]) -> Wall:
    """What bounds the kernels, by their names: a trace holds no counters."""
    if measures == "host":
        return "no GPU"
    of_compute = {c.name: c.share for c in classes if c.name not in ("collectives", "copies")}
    total = sum(of_compute.values())
    if computing < BUSY or not total:
        return "mixed"
    if sum(share for name, share in of_compute.items() if name in _PRODUCTS) > MOST * total:
        return "compute-bound"
    return "memory-bound kernels" if of_compute.get("elementwise", 0.0) > MOST * total else "mixed"


_SENTENCES: dict[str, str] = {
    "data wait": "Data wait: for {waited:.0%} of the step the host fetches data and the GPU has nothing to do; try more loader workers, "
    "prefetching, or cheaper collation.",
    "slow operators": "Host-bound: for {host:.0%} of the step the GPU waits because the next kernel is not launched yet, most of that in "
    "{named}; an operator that takes so long prepares or compiles, often for a shape that it has not met: let fewer shapes come (pack "
    "rows, pad to a multiple), or choose another kernel.",
    "host-bound": "Host-bound: for {host:.0%} of the step the GPU waits because the next kernel is not launched yet; try CUDA graphs, "
    "torch.compile, fused kernels, or larger micro-batches.",
    "idle of unknown cause": "Idle of unknown cause: for {unknown:.0%} of the step the GPU has nothing to do, though no data is fetched "
    "and the next kernel was launched before, or its launch is not in the trace; trace more steps, with the host's calls, or look for "
    "waits between streams and for other ranks.",
    "exposed communication": "Exposed communication: for {exposed:.0%} of the step collectives run and nothing is computed; try overlap, "
    "or another layout or dispatcher.",
    "memory-bound kernels": "Memory-bound kernels: computing takes {computing:.0%} of the step, most of it in elementwise kernels; try "
    "fusion, by torch.compile or fused norms, rotary and optimizer.",
    "compute-bound": "Compute-bound: computing takes {computing:.0%} of the step, most of it in products; what is left is fewer FLOPs "
    "(recomputation, padding) or faster ones (FP8).",
    "no GPU": "No GPU in this trace: the host works for {busy:.0%} of the step, most in {largest}, and waits for data for {waited:.0%}.",
    "mixed": "Mixed: no single cause is above its threshold (idle {idle:.0%}, exposed communication {exposed:.0%}, computing "
    "{computing:.0%}; the largest class is {largest}).",
}
"""The answer in one sentence, by wall, with the share behind it and what to try."""


_IDLE = {"idle for the host": "host_idle", "idle for data": "data_wait", "idle of unknown cause": "unknown_idle"}
_NAMED = 3
_LEAST = 0.05
"""Of the largest part of a difference: what is smaller is not named in the sentence."""


# The difference between two traces: the time of classes of operations and of causes of idle time, which together are the whole step.


@dataclass(frozen=True)
class Part:
    """One class of operations, or one cause of idle time. Units: milliseconds of a step; operations of a step."""

    name: str
    before_ms: float
    after_ms: float
    change_ms: float
    before_count: float
    after_count: float


@dataclass(frozen=True)
class Difference:
    """Two steps; the parts add up to them, the largest change first."""

    sentence: str
    before_ms: float
    after_ms: float
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def difference(before: Walls, after: Walls) -> Difference:
    """What changed from one trace to the other."""
    first, second = _parts(before), _parts(after)
    parts = []
    for name in {**first, **second}:
        (ms, count), (then_ms, then_count) = (side.get(name, (0.0, 0.0)) for side in (first, second))
        parts.append(Part(name, ms, then_ms, then_ms - ms, count, then_count))
    parts.sort(key=lambda p: -abs(p.change_ms))
    notes = [f"{which}: {note}" for which, w in (("before", before), ("after", after)) for note in w.notes]
    return Difference(_difference_sentence(before, after, parts), before.span_ms, after.span_ms, tuple(parts), tuple(notes))


def _parts(walls: Walls) -> dict[str, tuple[float, float]]:
    """Time and number of operations by class, and idle time by cause, that no two share."""
    parts = {c.name: (c.ms, c.count) for c in walls.classes}
    causes = {name: share for name, key in _IDLE.items() if (share := getattr(walls, key))}
    unexplained = max(0.0, walls.idle - sum(causes.values()))
    if unexplained * walls.span_ms > 1e-6:
        causes["idle"] = unexplained
    return parts | {name: (share * walls.span_ms, 0.0) for name, share in causes.items()}


def _difference_sentence(before: Walls, after: Walls, parts: list[Part]) -> str:
    change = after.span_ms - before.span_ms
    most = max((abs(p.change_ms) for p in parts), default=0.0)
    named = [f"{p.name} {p.change_ms:+.2f}" for p in parts[:_NAMED] if p.change_ms and abs(p.change_ms) >= _LEAST * most]
    kind = "longer" if change > 0 else "shorter"
    took = f"The step takes {abs(change):.2f} ms ({change / before.span_ms:+.1%}) {kind}: {before.span_ms:.2f} to {after.span_ms:.2f} ms"
    return f"{took}; in ms, {', '.join(named)}." if named else f"{took}."
