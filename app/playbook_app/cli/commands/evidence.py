"""`playbook evidence`: records of verdicts, and where a claim stands by them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from playbook.errors import PlaybookError
from playbook.paths import data_root, default_results
from playbook_app.cli.options import AsJson, commands
from playbook_app.cli.output import complain, print_json, print_table, say

if TYPE_CHECKING:
    from datetime import date

    from playbook.cards.model import Card, Claim, MechanismCheck, Quantity
    from playbook.records.evidence import Comparison, Evidence, Measured
    from playbook.records.read import Claims, Present, Reader, Record
    from playbook.records.staleness import Here

_CLAIM = re.compile(r"[A-Z][0-9]{1,3}(?:\.[a-z])?")
_RECORD = re.compile(r"01[0-9A-Z]{24}")
_KEYS = ("status", "stands", "sentence", "evidence", "machine", "created", "path", "stale", "origin", "tested_as")
"""What `_row` says of a verdict; of an untested claim all of it is there too, as null."""
_WIDTH = 49
_WIDEST = 100.0
"""A line that spans more than hundredfold shows nothing."""

app = commands()
_evidence_app = commands()
app.add_typer(_evidence_app, name="evidence")


@_evidence_app.command("list")
def evidence_list(
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the records, newest first: those of this folder's runs and those in the repository."""
    from playbook.cards.load import load_all
    from playbook.cards.model import by_claim
    from playbook.records.evidence import Evidence

    if results is not None and not results.is_dir():
        raise PlaybookError(f"--results is {results}, which is no folder; name one that `playbook confirm` has written to")
    cards = load_all()
    claims = by_claim(cards)
    found = [(r, r.content) for r in records_here(cards, here(), results) if isinstance(r.content, Evidence)]
    # The table says whether a verdict is stale, and one reason is enough for that.
    rows = [{**_row(r, _claim_of(r, claims), reasons=None if as_json else 1), **_origin(content)} for r, content in found]
    columns = ("evidence", "claim", "status", "created", "sentence")
    print_json(rows) if as_json else print_table([as_shown(r) for r in rows], columns)


@_evidence_app.command("show")
def evidence_show(
    file: Annotated[str, typer.Argument(metavar="FILE|CLAIM", help="An evidence file, a record's id, or a claim such as W9.")],
    as_json: AsJson = False,
) -> None:
    """Show one record: what was claimed, what was found, what it rests on. Of a claim, the record that speaks for it; the others are named."""
    from playbook.records.evidence import Evidence
    from playbook.records.standing import in_words
    from playbook_bench.run import report, store

    record, claim_today, others = _chosen(file)
    path = record.path if record else Path(file)
    sound = record.content if record and not record.altered else None
    evidence, problems = (sound, []) if isinstance(sound, Evidence) else store.load_checked(path)
    if as_json:
        print_json(evidence.model_dump(mode="json"))
        return
    for problem in problems:
        complain(f"{path} counts for nothing: {problem}")
    out = report.console()
    claim = evidence.measured.claim
    say(f"{evidence.evidence_id}  {evidence.created}  {evidence.measured.machine.description}  expires {evidence.expires}")
    if claim is not None:
        say(f"{claim.card}/{claim.id}: {claim.statement}")
    report.print_outcome(store.Outcome(evidence, path), out)
    for line in drawn(evidence.derived.comparison, claim.expect.margin if claim else None):
        say(line)
    for condition in evidence.derived.gates:
        say(f"  {'ok' if condition.ok else 'BROKEN':<7}{condition.name}  {condition.detail}".rstrip())
    if stale := record.stale(_today(), claim_today) if record else _stale(path):
        say(f"stale    {stale}")
    say(f"repeat   {evidence.command}")
    say(f"verify   playbook bench replay {path}")
    for other in others:
        say(f"also     {in_words(other, list(other.reasons(_today(), None)))}: {other.sentence}  [{other.id}]")


def _chosen(named: str) -> tuple[Record | None, Claim | MechanismCheck | None, list[Record]]:
    """The record that an id or a claim means, the claim that it speaks for, and the records of other machines on that; no record where a file is named.

    Raises:
        PlaybookError: it is no file, and there is no such record or claim, or none on the claim.
    """
    from playbook.cards.load import load_all
    from playbook.cards.model import by_claim
    from playbook.records.read import verdicts

    claim = named.rsplit("/", 1)[-1]
    if not (_CLAIM.fullmatch(claim) or _RECORD.fullmatch(named)) or Path(named).is_file():
        return None, None, []
    cards = load_all()
    claims = by_claim(cards)
    records = records_here(cards, here())
    if _RECORD.fullmatch(named):
        if found := [r for r in records if r.id == named]:
            return found[0], _claim_of(found[0], claims), []
        raise PlaybookError(f"there is no record {named}; `playbook evidence list --json` has their paths")
    if claim not in claims:
        raise PlaybookError(f"there is no claim {claim}; `playbook cards list --claims` shows them all")
    found = sorted(verdicts(records, claim), key=lambda r: r.precedence, reverse=True)
    if not found:
        raise PlaybookError(f"nothing was measured on {claim} yet; test it with: playbook confirm {claims[claim][0]}/{claim}")
    return found[0], claims[claim][1], found[1:]


def drawn(found: Comparison | None, margin: Quantity | None) -> list[str]:
    """An effect's interval on a line, with the place of no effect and of the margin; nothing where the effect is no percentage with an interval."""
    if found is None or found.scale != "log_ratio" or found.low is None or found.high is None or found.design == "deterministic":
        return []
    asked = (
        None
        if margin is None or margin.unit not in ("percent", "ratio")
        else margin.value / 100
        if margin.unit == "percent"
        else margin.value - 1
    )
    ends = [0.0, found.low, found.high, *([] if asked is None else [asked])]
    least, most = min(ends), max(ends)
    if not 0 < most - least < _WIDEST:
        return []

    def place(value: float) -> int:
        return round((value - least) / (most - least) * (_WIDTH - 1))

    line = [" "] * _WIDTH
    for i in range(place(found.low), place(found.high) + 1):
        line[i] = "="
    for value, mark in ((0.0, "|"), (asked, "M"), (found.effect, "o")):
        if value is not None:
            line[place(value)] = mark
    key = "| no effect, = interval, o estimate" + (f", M margin {100 * asked:+.3g} %" if asked is not None else "")
    return [f"      {100 * least:+.3g} % [{''.join(line)}] {100 * most:+.3g} %", f"      {key}"]


@_evidence_app.command("accept")
def evidence_accept(file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file.")]) -> None:
    """Copy a record that replays into bench/results/, to be committed."""
    from playbook_bench.run import replay

    say(str(replay.accept(file)))


@_evidence_app.command("import")
def evidence_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file from someone else's cluster.")],
    origin: Annotated[str, typer.Option("--from", metavar="NAME", help="Who measured it; shown with every verdict, as in h100x8@NAME.")],
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
) -> None:
    """Take in a record from someone else's cluster, once it replays; it never speaks for a machine of yours."""
    from playbook_bench.run import replay

    say(str(replay.take_in(file, origin, results or default_results())))


@_evidence_app.command("table")
def evidence_table(
    form: Annotated[Literal["csv", "markdown", "parquet"], typer.Option("--format", help="Of the table.")] = "csv",
    steps: Annotated[bool, typer.Option("--steps", help="A row for each step, instead of each launch.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file; parquet needs one.")] = None,
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
) -> None:
    """All launches on record as a table, for pandas, a spreadsheet or a report; altered records are left out."""
    from playbook.records.evidence import Evidence
    from playbook.records.read import read
    from playbook.records.table import to_frame

    if form == "parquet" and output is None:
        raise PlaybookError("parquet is no text for a terminal; name a file with --output")
    records = read([results or default_results(), data_root("results")])
    found = (r.content for r in reversed(records) if isinstance(r.content, Evidence) and not r.altered)
    frame = to_frame(found, per="step" if steps else "launch")
    try:
        if form == "parquet":
            frame.to_parquet(output, index=False)
        else:
            text = frame.to_csv(index=False) if form == "csv" else frame.to_markdown(index=False) + "\n"
            output.write_text(text, encoding="utf-8") if output else sys.stdout.write(text)
    except OSError as e:
        raise PlaybookError(f"{output} cannot be written: {e.strerror or e}; name another file") from e


def records_here(cards: Mapping[str, Card], mine: Here | None, results: Path | None = None, reader: Reader | None = None) -> list[Record]:
    """This folder's records, or those of `results`, and the repository's, newest first, for a reader on a machine like `mine`.

    Raises:
        FileError: as `playbook.records.read.Reader.read`.
    """
    from playbook.records.read import Reader

    return (reader or Reader()).read([results or default_results(), data_root("results")], cards, present(mine))


def present(mine: Here | None) -> Present:
    """What this version of the playbook compares verdicts with."""
    from playbook.records.read import Present
    from playbook_trainer.revision import PERFORMANCE_REVISION

    return Present(PERFORMANCE_REVISION, mine, _case_changes)


def _case_changes(measured: Measured) -> list[str]:
    """As the harness says it; its modules are read once a verdict is asked about, which half of the commands never do."""
    from playbook_bench.judge.outdated import case_changes

    return case_changes(measured)


def here() -> Here:
    """This machine, with which verdicts from one like it are compared."""
    from playbook_bench.machine import detect

    return detect.here()


def status_of(claim: Claim | MechanismCheck, records: Sequence[Record]) -> dict[str, Any]:
    """Where a claim stands, by its newest evidence, and on each machine (`verdicts`)."""
    from playbook.records.read import UNTESTED, verdicts

    found = sorted(verdicts(records, claim.id), key=lambda r: r.precedence, reverse=True)
    rows = [_row(r, claim) for r in found]
    for row in rows:
        if row["stale"]:
            row["sentence"] += f"; stale: {'; '.join(row['stale'])}"
    untested: dict[str, Any] = {**dict.fromkeys(_KEYS), "status": UNTESTED, "stale": []}
    return {**(rows[0] if rows else untested), "verdicts": rows}


def as_shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a table, whose status says of each verdict whether it still counts, and what it rests on."""
    return {**row, "status": "; ".join(dict.fromkeys(v["stands"] for v in row.get("verdicts", (row,)))) or row["status"]}


def _stale(path: Path) -> str | None:
    """Why the verdict in a file no longer speaks for the present, on this machine."""
    from playbook.cards.load import load_all
    from playbook.cards.model import by_claim
    from playbook.records.read import read_file

    claims = by_claim(load_all())
    record = read_file(path, claims, present(here()))
    return record.stale(_today(), _claim_of(record, claims))


def _claim_of(record: Record, claims: Claims) -> Claim | MechanismCheck | None:
    """The claim that a record speaks for, as it stands today."""
    return claims[record.claim][1] if record.claim and record.claim in claims else None


def _row(record: Record, claim: Claim | MechanismCheck | None, reasons: int | None = None) -> dict[str, Any]:
    """A record as a row; of the reasons why it is stale, the first so many, or all."""
    from playbook.records.standing import in_words

    stale = list(islice(record.reasons(_today(), claim), reasons))
    return {
        "status": record.status,
        "stands": in_words(record, stale),
        "sentence": "; ".join(record.problems) or record.sentence,
        "evidence": record.id,
        "machine": record.machine,
        "created": record.created,
        "path": str(record.path),
        "stale": stale,
        "origin": record.origin,
        "tested_as": record.other_words(claim),
    }


def _origin(content: Evidence) -> dict[str, Any]:
    """What a list of records says of each beside its verdict."""
    claim, case = content.measured.claim, content.measured.case
    return {
        "claim": claim.id if claim else None,
        "card": claim.card if claim else None,
        "case": case.id if case else None,
        "expires": content.expires,
    }


def _today() -> date:
    from datetime import UTC, datetime

    return datetime.now(UTC).date()
