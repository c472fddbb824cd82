"""Output of the commands: lines, tables, JSON."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from playbook.errors import ExitCode, Finding
from playbook.text import GIB, count, plain

_GAP = 2
_READABLE = 20
"""The narrowest that a folded column of text may be."""
_NAME = re.compile(r" *(?:[^ ]+(?: [^ ]+)?  +)?")
"""What a line begins with: a name, and two blanks or more before its words."""


_COMMAND = re.compile(r"(?:playbook|nsys|python3?|pip|torchrun|srun) |--[a-z]")
"""What a command, or flags of one, begin with."""
_UNIT = re.compile(r"(?<=[0-9]) (?=%)")


def say(text: str) -> None:
    """Print a line; on a terminal, one that is wider is folded between its words, a command so that it can be copied."""
    lines = plain(text).split("\n")
    if sys.stdout.isatty():
        lines = [part for line in lines for part in folded(line, shutil.get_terminal_size().columns)]
    sys.stdout.write("\n".join(lines) + "\n")


def folded(line: str, width: int) -> list[str]:
    """A line in lines of at most so many columns, the later ones below its words behind a name in front; a longer word stays whole.

    Each of several commands gets a line; one that is longer goes on behind a backslash, as a shell reads it. One with quotes, or behind
    prose, stays whole.
    """
    if len(line) <= width:
        return [line]
    name = _NAME.match(line)
    head = name[0] if name and len(name[0]) < width // 2 else ""
    indent, text = " " * len(head), line[len(head) :]
    if not _COMMAND.match(text):
        return [line] if "playbook " in text else _wrapped(line, width, indent)
    if "'" in text or '"' in text:
        return [line]
    lines: list[str] = []
    for command in text.split("; "):
        pieces = _wrapped(f"{indent if lines else head}{command}", width - 2, indent)
        lines += [*(f"{piece} \\" for piece in pieces[:-1]), pieces[-1]]
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Text in lines of at most so many columns, words and percentages whole; a name that no line holds goes on after an underscore."""
    whole = " ".join(part for word in _UNIT.sub("\u00a0", text).split(" ") for part in _parts(word, width))
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _parts(word: str, width: int) -> list[str]:
    cut = word.rfind("_", 0, width) + 1
    return [word[:cut], *_parts(word[cut:], width)] if len(word) > width and cut else [word]


def complain(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(plain(text) + "\n")


def print_json(data: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], spare: Sequence[str] = (), wide: bool = False) -> None:
    """A table without lines, a line for each row.

    On a terminal that is too narrow, cells are folded between their words, and where that does not do, the `spare` columns go, in their
    order; not where it is to be `wide`.
    """
    shown = {c: [c, *(plain(", ".join(v) if isinstance(v := row[c], list) else str(v)) for row in rows)] for c in columns}
    limit = shutil.get_terminal_size().columns
    left_out = []
    if narrow := sys.stdout.isatty() and not wide:
        for c in spare:
            if sum(map(_least, shown.values())) + _GAP * (len(shown) - 1) + _READABLE > limit:
                left_out.append(c)
                del shown[c]
    widths = [max(map(len, cells)) for cells in shown.values()]
    if narrow:
        room = limit - _GAP * (len(shown) - 1)
        least, words = ([width(cells) for cells in shown.values()] for width in (_least, _longest_word))
        parts = [_longest_word([cell.replace("_", "_ ") for cell in cells]) for cells in shown.values()]
        for floor in (least, [*least[:-1], words[-1]], words, parts):  # the last column is prose where any is
            widths = _fitting(widths, floor, room)
    for line in zip(*shown.values(), strict=True):
        cells = [_wrapped(c, w) or [""] if narrow else [c] for c, w in zip(line, widths, strict=True)]
        for pieces in itertools.zip_longest(*cells, fillvalue=""):
            sys.stdout.write((" " * _GAP).join(p.ljust(w) for p, w in zip(pieces, widths, strict=True)).rstrip() + "\n")
    if left_out:
        say(f"left out for want of room: {', '.join(left_out)}; --wide shows all")


def _least(cells: Sequence[str]) -> int:
    """The least width of a column: its longest word, and enough of a text that it can be read."""
    return max(_longest_word(cells), min(_READABLE, max(map(len, cells))))


def _longest_word(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _fitting(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit into the room if they can: the widest column that may be narrower gives first."""
    out = list(widths)
    while sum(out) > room and (more := [i for i, width in enumerate(out) if width > least[i]]):
        out[max(more, key=out.__getitem__)] -= 1
    return out


def print_findings(
    findings: Sequence[Finding],
    head: Mapping[str, Any],
    read: str,
    *,
    strict: bool,
    as_json: bool,
    keys: Sequence[str] = ("file", "line", "column", "rule", "warning", "message"),
) -> None:
    """Print findings, with these keys of each in the JSON, and leave with exit code 2 where there are any; warnings count only if
    `strict`.
    """
    if as_json:
        print_json({**head, "findings": [{k: getattr(f, k) for k in keys} for f in findings]})
    for finding in findings:
        complain(f"{finding}")
    if any(strict or not f.warning for f in findings):
        raise typer.Exit(ExitCode.USAGE)
    if not as_json:
        say(f"{read}: {count(len(findings), 'warning') if findings else 'no findings'}")


def _print_answer(sentence: str, notes: Sequence[str], *tables: tuple[Sequence[Mapping[str, Any]], Sequence[str]]) -> None:
    """A sentence, the tables that it rests on, each as rows and columns, and notes."""
    say(sentence)
    for place, (rows, columns) in enumerate(tables):
        if place:
            say("")
        print_table(rows, columns)
    for note in notes:
        say(f"note: {note}")


def print_trace(trace: Mapping[str, Any]) -> None:
    """Time per range of one variant, in milliseconds per step, with what the figures cover."""
    figures = ("host_ms", "busy_ms", "self_ms", "exposed_comm_ms")
    rows = [{**row, "count": f"{row['count']:g}", **{k: f"{row[k]:.2f}" for k in figures}} for row in trace["rows"]]
    print_table(rows, ("path", "phase", "count", *figures))
    shares = ", ".join(f"{k} {v:.0%}" for k, v in trace["coverage"].items() if v is not None)
    say(
        f"{trace['span_ms']:.1f} ms a step over {count(trace['num_steps'], 'step')}; busy is {trace['measures']} time; in named parts:"
        f" {shares}"
    )
    for note in trace["notes"]:
        say(f"note: {note}")


def print_walls(walls: Mapping[str, Any]) -> None:
    """The wall in one sentence; then the time by class of kernels and how it lies in the step, which the sentence rests on, and the table
    of the trace's `ranges` where it has any.
    """
    say(walls["sentence"])
    shares = {
        "idle": walls["idle"],
        "  for the host": walls["host_idle"],
        "  for data": walls["data_wait"],
        "  of unknown cause": walls["unknown_idle"],
        "exposed communication": walls["exposed"],
        **{f"  {name}": share for name, share in (walls["groups"] or walls["collectives"]).items()},
    }
    rows = [
        {"time of a step": c["name"], "ms": f"{c['ms']:.2f}", "share": f"{c['share']:.1%}", "count": f"{c['count']:g}"}
        for c in walls["classes"]
    ]
    rows += [
        {"time of a step": name, "ms": f"{share * walls['span_ms']:.2f}", "share": f"{share:.1%}", "count": ""}
        for name, share in shares.items()
        if share is not None
    ]
    print_table(rows, ("time of a step", "ms", "share", "count"))
    say(f"{walls['span_ms']:.1f} ms a step over {count(walls['num_steps'], 'step')}, by {walls['collector']}")
    for note in walls["notes"]:
        say(f"note: {note}")
    if ranges := walls.get("ranges"):
        say("\nby range")
        print_trace(ranges)


_GROUPS_SHOWN = 12


def print_ranks(ranks: Mapping[str, Any]) -> None:
    """Which rank holds up the others; then the ranks, and their collectives by group, in milliseconds of a step."""
    columns = ("span_ms", "computing_ms", "waiting_ms", "transfer_ms", "exposed_ms", "host_idle_ms", "data_wait_ms")
    rows = [
        {"rank": r["rank"], **{c[:-3].replace("_", " "): "?" if r[c] is None else f"{r[c]:.2f}" for c in columns}, "wall": r["wall"]}
        for r in ranks["ranks"]
    ]
    sent = ("count", "ms", "waiting_ms", "transfer_ms", "exposed_ms")
    groups = [
        {
            "collective": g["collective"],
            "group": g["group"] or "?",
            "ranks": len(g["ranks"]),
            **{c.removesuffix("_ms"): f"{g[c]:.4g}" for c in sent},
        }
        for g in ranks["collectives"][:_GROUPS_SHOWN]
    ]
    _print_answer(ranks["sentence"], ranks["notes"], (rows, tuple(rows[0])), (groups, tuple(groups[0])))


def print_difference(difference: Mapping[str, Any], before: str, after: str) -> None:
    """Where the time of a step went between two traces of these names, in milliseconds of a step."""
    rows = [
        {
            "time of a step": part["name"], "before": f"{part['before_ms']:.2f}", "after": f"{part['after_ms']:.2f}",
            "change": f"{part['change_ms']:+.2f}",
            "operations": f"{part['before_count']:g} to {part['after_count']:g}" if part["before_count"] or part["after_count"] else "",
        }
        for part in difference["parts"]
    ]  # fmt: skip
    columns = ("time of a step", "before", "after", "change", "operations")
    _print_answer(f"From {before} to {after}: {difference['sentence']}", difference["notes"], (rows, columns))


def print_hang(hang: Mapping[str, Any]) -> None:
    """Which rank and which collective a run hangs in; then how far each rank came."""
    rows = [
        {"rank": s["rank"], "waits in": next(iter(s["open"]), "-" if s["dump"] else "no dump"), "last call": s["last"], "at": s["where"]}
        for s in hang["standings"]
    ]
    _print_answer(hang["sentence"], hang["notes"], (rows, ("rank", "waits in", "last call", "at")))


def print_snapshot(snapshot: Mapping[str, Any]) -> None:
    """What holds a GPU's peak: by part, with the planner's figures where there are any, then by line."""
    planned = snapshot.get("planned", {})
    rows = [
        {
            "part": part, "GiB": f"{snapshot['parts'].get(part, 0) / GIB:.2f}",
            "of peak": f"{snapshot['parts'].get(part, 0) / snapshot['peak']:.0%}",
            "planned GiB": f"{planned.get(part, 0) / GIB:.2f}",
        }
        for part in {**snapshot["parts"], **planned}
    ]  # fmt: skip
    sites = [{"at": s["where"], "part": s["part"], "GiB": f"{s['size'] / GIB:.2f}", "allocations": s["count"]} for s in snapshot["sites"]]
    columns = ("part", "GiB", "of peak", *(["planned GiB"] if planned else []))
    _print_answer(snapshot["sentence"], snapshot["notes"], (rows, columns), (sites, ("at", "part", "GiB", "allocations")))
