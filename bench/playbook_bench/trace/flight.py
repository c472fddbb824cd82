"""PyTorch's flight recorder: of a run that hangs, which rank never came to which collective.

Source: the dump of `torch.distributed`, version 2 (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_DUMP_ON_TIMEOUT`): one file for each rank, whose
entries number a group's collectives by `collective_seq_id`. A collective that a rank has and another member of its group has not is what
they wait for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from playbook.errors import PlaybookError

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
    members: tuple[int, ...]


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


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


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
        number = _int(entry.get("p2p_seq_id" if sent else "collective_seq_id"))
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
        return f"{_text(frame.get('filename'), 400).rpartition('/')[2]}:{_int(frame.get('line')) or 0} {_text(frame.get('name'))}"
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
                out.append(_Open(group, sequence, present, missing, tuple(sorted(ranks))))
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
    who = _ranks(ranks)
    who = who[0].upper() + who[1:]
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
