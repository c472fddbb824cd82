"""Check, run and read performance claims about training large models.

Exit codes: 0 confirmed, passed or done; 1 refuted, or a regression; 2 usage, an invalid file or a finding; 3 inconclusive;
4 not applicable on this machine; 5 a run failed, or a replay differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook import __version__
from playbook.errors import FileError, PlaybookError, StoreError

# Everything else is imported inside the commands, so that `playbook --help` stays quick and free of torch.
if TYPE_CHECKING:
    from pydantic import BaseModel

    from playbook.cards import Card, Claim

USAGE = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)
cards_app = typer.Typer(no_args_is_help=True, help="Cards: what is claimed, in which scope, why, and where it stands.")
bench_app = typer.Typer(no_args_is_help=True, help="Cases: run one, list them, replay a record, measure the noise, trace.")
evidence_app = typer.Typer(no_args_is_help=True, help="Evidence: records of verdicts.")
schemas_app = typer.Typer(no_args_is_help=True, help="JSON Schemas of the files.")
site_app = typer.Typer(no_args_is_help=True, help="The documentation site.")
for name, sub in (("cards", cards_app), ("bench", bench_app), ("evidence", evidence_app), ("schemas", schemas_app), ("site", site_app)):
    app.add_typer(sub, name=name)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: runs the command and exits with its code; a user's mistake is a message, not a traceback."""
    try:
        code = app(list(sys.argv[1:] if argv is None else argv), prog_name="playbook", standalone_mode=True)
    except PlaybookError as e:
        sys.stderr.write(f"{e}\n" if isinstance(e, FileError) else f"error: {e}\n")
        code = USAGE
    except BrokenPipeError:
        # The reader left (`playbook cards list | head`); there is nobody to tell.
        sys.stderr.close()
        code = 0
    sys.exit(code or 0)


@app.command()
def version() -> None:
    """Print the version."""
    _say(__version__)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False})
def train(
    config: Annotated[str, typer.Argument(help="A configuration, such as trainer/configs/qwen3_moe_tiny.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, such as train.steps=50.")] = None,
) -> None:
    """Train: one rank alone, or this rank of a torchrun launch."""
    from playbook_trainer.__main__ import main as run

    raise typer.Exit(run([config, *(overrides or [])]))


# --- cards -----------------------------------------------------------------------------------------------------------------------


@cards_app.command("check")
def cards_check(
    paths: Annotated[list[Path] | None, typer.Argument(help="Cards, or folders of cards; all that ship, if none is given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check cards, their cases and the trainer keys that those use; findings as file:line:column."""
    from playbook.cli_check import check_all

    cards, cases, findings = check_all(paths or [])
    if as_json:
        rows = [{"file": f.file, "line": f.line, "column": f.column, "message": f.message} for f in findings]
        _json({"cards": len(cards.loaded), "cases": len(cases), "findings": rows})
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    if findings:
        raise typer.Exit(USAGE)
    if not as_json:
        claims = sum(1 for _ in cards.claims())
        _say(f"{_count(len(cards.loaded), 'card')}, {_count(claims, 'claim')}, {_count(len(cases), 'case')}: no findings")


@cards_app.command("list")
def cards_list(
    claims: Annotated[bool, typer.Option("--claims", help="One line per claim, with its status.")] = False, as_json: AsJson = False
) -> None:
    """List the cards, or their claims."""
    from playbook.validate import load_all

    cards = load_all().values()
    if claims:
        rows = [{"id": c.id, "card": card.id, "kind": c.kind, **_status(c.id), "statement": c.statement} for card in cards for c in card.claims]
        columns = ("id", "card", "status", "statement")
    else:
        rows = [
            {"id": c.id, "claims": [claim.id for claim in c.claims], "phase": c.phase, "wall": c.wall, "title": c.title, "symptoms": c.symptoms}
            for c in cards
        ]
        columns = ("id", "claims", "phase", "wall", "title")
    _json(rows) if as_json else _table(rows, columns)


@cards_app.command("show")
def cards_show(card_id: Annotated[str, typer.Argument(metavar="ID", help="A card's id.")], as_json: AsJson = False) -> None:
    """Show one card, with where its claims stand."""
    from playbook.document import did_you_mean
    from playbook.validate import load_all

    cards = load_all()
    if card_id not in cards:
        raise PlaybookError(f"card '{card_id}' does not exist{did_you_mean(card_id, cards)}")
    card = cards[card_id]
    status = {i: _status(i) for c in card.claims for i in (c.id, c.mechanism_check.id if c.mechanism_check else None) if i}
    if as_json:
        _json({**card.model_dump(mode="json"), "status": status})
    else:
        _say("\n".join(_card_lines(card, status)))


def _card_lines(card: Card, status: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield f"{card.id}: {card.title}"
    yield card.summary
    for claim in card.claims:
        yield from _claim_lines(claim, status)
    if card.decide:
        yield "\ndecide"
    for rule in card.decide:
        yield f"  when {_pairs(rule.when)}: set {_pairs(rule.set)}  (because {', '.join(rule.because)})"
        if rule.note:
            yield f"    {rule.note}"
    if card.pitfalls:
        yield "\npitfalls"
    for pitfall in card.pitfalls:
        yield f"  {pitfall.symptom}\n    cause: {pitfall.cause}\n    fix: {pitfall.fix}"


def _claim_lines(claim: Claim, status: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield f"\n{claim.id}  {status[claim.id]['status']}  {claim.statement}"
    if status[claim.id]["sentence"]:
        yield f"  {status[claim.id]['sentence']}  [{status[claim.id]['evidence']}]"
    yield f"  why: {claim.mechanism}"
    yield f"  scope: {_pairs(claim.scope) or 'any'}    case: {claim.case}    label: {claim.label}"
    for source in claim.sources:
        yield f"  source: {source.title}, {source.origin}, {source.section or 'whole'}, {source.date}"
    check = claim.mechanism_check
    if check:
        yield f"  {check.id}  {status[check.id]['status']}  {check.statement}"


# --- output ----------------------------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items())


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Plain columns without lines; the last one is as wide as it needs."""
    cells = [[c for c in columns], *([", ".join(v) if isinstance(v := row[c], list) else str(v) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        _say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
