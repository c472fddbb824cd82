"""The traces of several ranks of one run: who waits for whom in the collectives, and what each group's communication costs.

Source: a collective ends on all ranks at about the same time, and begins on each when that rank reaches it. The rank that came last has the
shortest kernel, and its duration is what the transfer takes; what the kernel lasts longer elsewhere is waiting for that rank. Clocks of the
ranks are not compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from playbook.errors import PlaybookError
from playbook.kernels import collective, length, subtract, union
from playbook_bench.trace.table import NS_PER_MS, Timeline
from playbook_bench.trace.walls import Stretch, Walls, of_stretch, stretch

_HOLDS_UP = 0.05
"""Share of the step by which the least and the most waiting rank must differ for one to hold up the others: GPUs of one kind differ in
clocks by a few percent."""
_RANK = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_TELLING = 0.5
"""Share of a difference that its largest part must have to be named as its cause."""

_Key = tuple[str, str]


@dataclass(frozen=True)
class _RankSummary:
    """One rank's part: its walls, and the durations of its collectives by kind and group, in order. Units: nanoseconds."""

    name: str
    rank: int | None
    walls: Walls
    sent: Mapping[_Key, list[int]]
    exposed: Mapping[_Key, int]


@dataclass(frozen=True)
class RankTime:
    """What one rank does in a step. Units: milliseconds of a step."""

    rank: int
    name: str
    span_ms: float
    computing_ms: float
    waiting_ms: float
    """In collectives, for ranks that come later."""
    transfer_ms: float
    exposed_ms: float
    host_idle_ms: float | None
    data_wait_ms: float | None
    wall: str


@dataclass(frozen=True)
class Group:
    """One kind of collective of one process group, the mean over its ranks. Units: milliseconds of a step."""

    collective: str
    group: str
    ranks: tuple[int, ...]
    count: float
    ms: float
    waiting_ms: float
    transfer_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Ranks:
    """Several ranks of one run."""

    sentence: str
    waits_least: int
    holds_up: bool
    """Whether the others wait so much longer that the rank that waits least holds them up."""
    span_ms: float
    ranks: tuple[RankTime, ...]
    collectives: tuple[Group, ...]
    notes: tuple[str, ...]


def summary(name: str, timeline: Timeline) -> _RankSummary:
    """What the comparison needs of a rank, so that its timeline can go.

    Raises:
        PlaybookError: nothing ran in it.
    """
    part = stretch(timeline)
    return _RankSummary(name, timeline.rank, of_stretch(timeline, part), *_collectives(part))


def _collectives(part: Stretch) -> tuple[dict[_Key, list[int]], dict[_Key, int]]:
    compute = union((op.start, op.end) for op in part.ops if op.kind == "compute")
    runs: defaultdict[_Key, list[tuple[int, int]]] = defaultdict(list)
    for op in part.ops:
        if op.kind == "communication":
            runs[collective(op.name), op.group].append((op.start, op.end))
    sent = {key: [end - start for start, end in each] for key, each in runs.items()}
    return sent, {key: length(subtract(union(each), compute)) for key, each in runs.items()}


def compare(summaries: Iterable[_RankSummary], notes: Iterable[str] = ()) -> Ranks:
    """The ranks beside one another.

    Raises:
        PlaybookError: they have no GPU.
    """
    by_rank = _numbered(list(summaries))
    if any(s.walls.wall == "no GPU" for s in by_rank.values()):
        raise PlaybookError(
            "ranks are compared by their GPUs' collectives, and there is a trace without GPU; trace a run on GPUs, each rank into its "
            "own file"
        )
    remarks = list(notes)
    waiting, transfer = _waits(by_rank, remarks)
    ranks = tuple(_rank(n, s, waiting[n], transfer[n]) for n, s in by_rank.items())
    least = min(ranks, key=lambda r: (r.waiting_ms, r.rank))
    span = median(r.span_ms for r in ranks)
    holds = max(r.waiting_ms for r in ranks) - least.waiting_ms > _HOLDS_UP * span
    return Ranks(_sentence(least, ranks, holds, by_rank), least.rank, holds, span, ranks, _groups(by_rank), tuple(dict.fromkeys(remarks)))


def _numbered(summaries: list[_RankSummary]) -> dict[int, _RankSummary]:
    """By the rank that the trace states, else by the one in the file's name, else by order."""
    stated = [s.rank if s.rank is not None else int(m[1]) if (m := _RANK.search(s.name.rpartition("/")[2])) else -1 for s in summaries]
    numbers = stated if len(set(stated)) == len(summaries) and min(stated) >= 0 else list(range(len(summaries)))
    return dict(sorted(zip(numbers, summaries, strict=True)))


def _members(by_rank: Mapping[int, _RankSummary]) -> dict[_Key, list[int]]:
    members: defaultdict[_Key, list[int]] = defaultdict(list)
    for n, s in by_rank.items():
        for key in s.sent:
            members[key].append(n)
    return dict(members)


def _least(by_rank: Mapping[int, _RankSummary], key: _Key, members: list[int]) -> tuple[float, bool]:
    """What the transfers of a group take in a step, in nanoseconds: the shortest of each collective, or where ranks have not equally many,
    the shortest sum.
    """
    runs = [by_rank[n].sent[key] for n in members]
    steps = [by_rank[n].walls.num_steps for n in members]
    if len({len(r) for r in runs}) == 1 and len(set(steps)) == 1:
        return sum(map(min, zip(*runs, strict=True))) / steps[0], True
    return min(sum(r) / s for r, s in zip(runs, steps, strict=True)), False


def _waits(by_rank: Mapping[int, _RankSummary], notes: list[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Milliseconds of a step that each rank waits in its collectives, and that it transfers."""
    waiting, transfer = dict.fromkeys(by_rank, 0.0), dict.fromkeys(by_rank, 0.0)
    for key, members in _members(by_rank).items():
        least, matched = _least(by_rank, key, members)
        if not matched:
            notes.append(f"{key[0]} {key[1]}: ranks have not equally many in their steps: their sums are compared".replace(" :", ":"))
        if not key[1]:
            notes.append("collectives name no process group: those of a kind are compared over all ranks")
        for n in members:
            waiting[n] += (sum(by_rank[n].sent[key]) / by_rank[n].walls.num_steps - least) / NS_PER_MS
            transfer[n] += least / NS_PER_MS
    if not any(transfer.values()):
        raise PlaybookError("no rank's trace holds a collective, which tells who waits for whom; trace steps with communication")
    return waiting, transfer


def _rank(number: int, s: _RankSummary, waiting: float, transfer: float) -> RankTime:
    w = s.walls
    idle = [None if share is None else share * w.span_ms for share in (w.host_idle, w.data_wait)]
    return RankTime(number, s.name, w.span_ms, w.computing * w.span_ms, waiting, transfer, w.exposed * w.span_ms, idle[0], idle[1], w.wall)


def _groups(by_rank: Mapping[int, _RankSummary]) -> tuple[Group, ...]:
    """The most exposed first."""
    out = []
    for key, members in _members(by_rank).items():
        runs = [(by_rank[n].sent[key], by_rank[n].exposed[key], by_rank[n].walls.num_steps) for n in members]
        least, ms = _least(by_rank, key, members)[0] / NS_PER_MS, fmean(sum(r) / s for r, _, s in runs) / NS_PER_MS
        count, exposed = fmean(len(r) / s for r, _, s in runs), fmean(e / s for _, e, s in runs) / NS_PER_MS
        out.append(Group(*key, tuple(members), count, ms, ms - least, least, exposed))
    return tuple(sorted(out, key=lambda g: -g.exposed_ms))


def _sentence(least: RankTime, ranks: tuple[RankTime, ...], holds: bool, by_rank: Mapping[int, _RankSummary]) -> str:
    most = max(ranks, key=lambda r: r.waiting_ms)
    if not holds:
        return (
            f"No rank holds up the others: they wait {least.waiting_ms:.1f} (rank {least.rank}) to {most.waiting_ms:.1f} ms"
            f" (rank {most.rank}) of a step for one another."
        )
    middle = median(r.waiting_ms for r in ranks if r is not least)
    return (
        f"Rank {least.rank} holds up the others: it waits least, {least.waiting_ms:.1f} ms of a step in collectives, where the others wait"
        f" {middle:.1f} for it; {_cause(least, ranks, by_rank)}."
    )


def _cause(least: RankTime, ranks: tuple[RankTime, ...], by_rank: Mapping[int, _RankSummary]) -> str:
    """What it does longer than the median of the others."""
    others = [r for r in ranks if r is not least]
    longer = {
        "computes": least.computing_ms - median(r.computing_ms for r in others),
        "is idle for its host": (least.host_idle_ms or 0.0) - median(r.host_idle_ms or 0.0 for r in others),
        "waits for data": (least.data_wait_ms or 0.0) - median(r.data_wait_ms or 0.0 for r in others),
    }
    what = max(longer, key=lambda k: longer[k])
    if longer[what] <= 0:
        return "what it does longer is not in its trace"
    if what != "computes":
        return f"it {what} {longer[what]:.1f} ms longer"
    times = {n: {c.name: c.ms for c in s.walls.classes if c.name != "collectives"} for n, s in by_rank.items()}
    more = {c: ms - median(times[r.rank].get(c, 0.0) for r in others) for c, ms in times[least.rank].items()}
    largest = max(more, key=lambda c: more[c])
    where = f", most of it in {largest}" if more[largest] > _TELLING * longer[what] else ""
    return f"it computes {longer[what]:.1f} ms longer{where}"
