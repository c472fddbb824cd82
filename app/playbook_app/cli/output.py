"""Output of the commands: lines, tables, JSON, cards as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from playbook.errors import Finding
from playbook.text import count, plain

if TYPE_CHECKING:
    from playbook.cards.model import Card, Claim


USAGE = 2
_ANY_WIDTH = 1 << 16
_FOLDED = 20
"""The narrowest that a folded column may be."""


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(plain(text) + "\n")


def complain(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(plain(text) + "\n")


def print_json(data: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items())


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table without lines. Each row is one line; on a terminal the last column is folded where there is room for it."""
    from rich.console import Console  # takes as long as the whole of `playbook --help`
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [[plain(", ".join(v) if isinstance(v := row[c], list) else str(v)) for c in columns] for row in rows]
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    before_last = sum(max(map(len, column)) + 2 for column in list(zip(columns, *cells, strict=True))[:-1])
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal or console.width < before_last + _FOLDED:
        console.width = _ANY_WIDTH
    with console.capture() as shown:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in shown.get().splitlines()))


def print_findings(findings: Sequence[Finding], head: Mapping[str, Any], read: str, *, strict: bool, as_json: bool) -> None:
    """Print findings, and leave with exit code 2 where there are any; warnings count only if `strict`."""
    keys = ("file", "line", "column", "rule", "warning", "message")
    if as_json:
        print_json({**head, "findings": [{k: getattr(f, k) for k in keys} for f in findings]})
    for finding in findings:
        complain(f"{finding}")
    if any(strict or not f.warning for f in findings):
        raise typer.Exit(USAGE)
    if not as_json:
        say(f"{read}: {count(len(findings), 'warning') if findings else 'no findings'}")


def print_trace(trace: Mapping[str, Any]) -> None:
    """Time per range of one variant, in milliseconds per step, with what the figures cover."""
    figures = ("host_ms", "busy_ms", "self_ms", "exposed_comm_ms")
    rows = [{**row, "count": f"{row['count']:g}", **{k: f"{row[k]:.2f}" for k in figures}} for row in trace["rows"]]
    print_table(rows, ("path", "phase", "count", *figures))
    shares = ", ".join(f"{k} {v:.0%}" for k, v in trace["coverage"].items() if v is not None)
    say(
        f"{trace['span_ms']:.1f} ms a step over {count(trace['num_steps'], 'step')}; busy is {trace['measures']} time; in named parts: {shares}"
    )
    for note in trace["notes"]:
        say(f"note: {note}")


def print_walls(found: Mapping[str, Any]) -> None:
    """The wall in one sentence; then the time by class of kernels and how it lies in the step, which the sentence rests on."""
    say(found["sentence"])
    idle = {
        name: found[key]
        for name, key in (
            ("idle", "idle"),
            ("  for the host", "host_idle"),
            ("  for data", "data_wait"),
            ("exposed communication", "exposed"),
        )
    }
    rows = [
        {"time of a step": c["name"], "ms": f"{c['ms']:.2f}", "share": f"{c['share']:.1%}", "count": f"{c['count']:g}"}
        for c in found["classes"]
    ]
    rows += [
        {"time of a step": name, "ms": f"{share * found['span_ms']:.2f}", "share": f"{share:.1%}", "count": ""}
        for name, share in idle.items()
        if share is not None
    ]
    print_table(rows, ("time of a step", "ms", "share", "count"))
    say(f"{found['span_ms']:.1f} ms a step over {count(found['num_steps'], 'step')}, by {found['collector']}")
    for note in found["notes"]:
        say(f"note: {note}")


def card_lines(card: Card, status: Mapping[str, Mapping[str, Any]], bases: Sequence[str]) -> Iterable[str]:
    """A card as text, with the status of its claims and what each of its rules rests on."""
    from playbook.cards.sizes import note

    yield f"{card.id}: {card.title}"
    yield card.summary
    for claim in card.claims:
        yield from claim_lines(claim, status)
    if card.decide:
        yield "\ndecide"
    for rule, basis in zip(card.decide, bases, strict=True):
        never = f"; avoid {_pairs(rule.avoid)}" if rule.avoid else ""
        mark = "" if basis == "measured" else f"  [{basis}]"
        yield f"  when {_pairs(rule.when)}: set {_pairs(rule.set)}{never}  (because {', '.join(rule.because)}){mark}"
        for line in filter(None, (rule.note, note(rule))):
            yield f"    {line}"
    for dispute in card.disputes:
        yield f"\nin dispute: {dispute.subject}\n  {', '.join(dispute.claims)}; {dispute.stands} stands: {dispute.why}"
    if card.pitfalls:
        yield "\npitfalls"
    for pitfall in card.pitfalls:
        yield f"  {pitfall.symptom}\n    cause: {pitfall.cause}\n    fix: {pitfall.fix}"
    if card.interactions:
        yield "\ninteractions"
    for words in card.interactions:
        yield f"  {words}"


def claim_lines(claim: Claim, status: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """A claim as text, with its status and that of its mechanism check."""
    yield f"\n{claim.id}  {status[claim.id]['status']}  {claim.statement}"
    yield from _verdict_lines(status[claim.id])
    yield f"  why: {claim.mechanism}"
    yield f"  scope: {_pairs(claim.scope) or 'any'}    case: {claim.case}    label: {claim.label}"
    for source in claim.sources:
        yield f"  source: {source.title}, {source.origin}, {source.section or 'whole'}, {source.date}"
    check = claim.mechanism_check
    if check:
        yield f"  {check.id}  {status[check.id]['status']}  {check.statement}"
        yield from (f"  {line}" for line in _verdict_lines(status[check.id]))


def _verdict_lines(status: Mapping[str, Any]) -> Iterable[str]:
    """One line for the verdict of each machine."""
    return (f"  {v['sentence']}  [on {v['machine']}, {v['evidence']}]" for v in status["verdicts"])
