"""`playbook evidence`: records of verdicts, and where a claim stands by them."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from playbook.cards.load import load_all
from playbook.cards.model import Claim, MechanismCheck, Quantity, by_claim
from playbook.errors import PlaybookError, tables_wanted
from playbook.paths import data_root, default_results
from playbook.records.evidence import Comparison, Evidence, to_frame
from playbook.records.read import Record, read, read_file, verdicts
from playbook.records.standing import in_words
from playbook.yaml_files import did_you_mean
from playbook_app.cli.options import AsJson, Wide, commands
from playbook_app.cli.output import complain, print_json, print_table, say
from playbook_app.services.standing import as_shown, claim_of, here, present, records_here, today, verdict_row
from playbook_bench.run import report, store

_CLAIM = re.compile(r"[A-Z][0-9]{1,3}(?:\.[a-z])?")
_RECORD = re.compile(r"01[0-9A-Z]{24}")
_WIDTH = 49
_WIDEST = 100.0
"""A line that spans more than hundredfold shows nothing."""

app = commands()


@app.command("list")
def evidence_list(
    claim: Annotated[
        str | None, typer.Argument(metavar="CLAIM", help="Only records of this claim, such as W9; of all, if not given.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """List the records, newest first: those of this folder's runs and those in the repository."""
    if results is not None and not results.is_dir():
        raise PlaybookError(f"--results is {results}, which is no folder; name one that `playbook confirm` has written to")
    cards = load_all()
    claims = by_claim(cards)
    if claim is not None and claim not in claims:
        raise PlaybookError(f"no card has a claim '{claim[:40]}'{did_you_mean(claim, claims)}; `playbook cards list --claims` has all")
    recorded = [
        (r, r.content) for r in records_here(cards, here(), results) if isinstance(r.content, Evidence) and claim in (None, r.claim)
    ]
    # The table says whether a verdict is stale, and one reason is enough for that.
    rows = [
        {
            **verdict_row(r, claim_of(r, claims), reasons=None if as_json else 1),
            "claim": r.claim_ref.id if r.claim_ref else None,
            "card": r.claim_ref.card if r.claim_ref else None,
            "case": content.measured.case.id if content.measured.case else None,
            "expires": content.expires,
        }
        for r, content in recorded
    ]
    columns = ("evidence", "claim", "status", "created", "sentence")
    print_json(rows) if as_json else print_table([as_shown(r) for r in rows], columns, ("created",), wide)


@app.command("show")
def evidence_show(
    file: Annotated[str, typer.Argument(metavar="FILE|CLAIM", help="An evidence file, a record's id, or a claim such as W9.")],
    as_json: AsJson = False,
) -> None:
    """Show one record: what was claimed, what was found, what it rests on.

    Of a claim, the record that speaks for it; the others are named.
    """
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
    if stale := record.stale(today(), claim_today) if record else _stale(path):
        say(f"stale    {stale}")
    say(f"repeat   {evidence.command}")
    say(f"verify   playbook bench replay {path}")
    for other in others:
        say(f"also     {in_words(other, list(other.reasons(today(), None)))}: {other.sentence}  [{other.id}]")


def _chosen(named: str) -> tuple[Record | None, Claim | MechanismCheck | None, list[Record]]:
    """The record that an id or a claim means, the claim that it speaks for, and the records of other machines on that; no record where a
    file is named.

    Raises:
        PlaybookError: it is no file, and there is no such record or claim, or none on the claim.
    """
    claim = named.rsplit("/", 1)[-1]
    if not (_CLAIM.fullmatch(claim) or _RECORD.fullmatch(named)) or Path(named).is_file():
        return None, None, []
    cards = load_all()
    claims = by_claim(cards)
    records = records_here(cards, here())
    if _RECORD.fullmatch(named):
        if matches := [r for r in records if r.id == named]:
            return matches[0], claim_of(matches[0], claims), []
        raise PlaybookError(f"there is no record {named}; `playbook evidence list --json` has their paths")
    if claim not in claims:
        raise PlaybookError(f"there is no claim {claim}; `playbook cards list --claims` shows them all")
    matches = verdicts(records, claim)
    if not matches:
        raise PlaybookError(f"nothing was measured on {claim} yet; test it with: playbook confirm {claims[claim][0]}/{claim}")
    return matches[0], claims[claim][1], matches[1:]


def drawn(comparison: Comparison | None, margin: Quantity | None) -> list[str]:
    """An effect's interval on a line, with the place of no effect and of the margin; nothing where the effect is no percentage with an
    interval.
    """
    if (
        comparison is None
        or comparison.scale != "log_ratio"
        or comparison.low is None
        or comparison.high is None
        or comparison.design == "deterministic"
    ):
        return []
    margin_effect = (
        None
        if margin is None or margin.unit not in ("percent", "ratio")
        else margin.value / 100
        if margin.unit == "percent"
        else margin.value - 1
    )
    ends = [0.0, comparison.low, comparison.high, *([] if margin_effect is None else [margin_effect])]
    least, most = min(ends), max(ends)
    if not 0 < most - least < _WIDEST:
        return []

    def place(value: float) -> int:
        return round((value - least) / (most - least) * (_WIDTH - 1))

    line = [" "] * _WIDTH
    for i in range(place(comparison.low), place(comparison.high) + 1):
        line[i] = "="
    for value, mark in ((0.0, "|"), (margin_effect, "M"), (comparison.effect, "o")):
        if value is not None:
            line[place(value)] = mark
    key = "| no effect, = interval, o estimate" + (f", M margin {100 * margin_effect:+.3g} %" if margin_effect is not None else "")
    return [f"      {100 * least:+.3g} % [{''.join(line)}] {100 * most:+.3g} %", f"      {key}"]


@app.command("accept")
def evidence_accept(file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file.")]) -> None:
    """Copy a record that replays into bench/results/, to be committed."""
    say(str(_take_in(file)))


@app.command("import")
def evidence_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file from someone else's cluster.")],
    origin: Annotated[str, typer.Option("--from", metavar="NAME", help="Who measured it; shown with every verdict, as in h100x8@NAME.")],
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
) -> None:
    """Take in a record from someone else's cluster, once it replays; it never speaks for a machine of yours."""
    say(str(_take_in(file, origin, results)))


def _take_in(file: Path, origin: str | None = None, results: Path | None = None) -> Path:
    """Where a record that replays goes: into the repository, or one from elsewhere among the results.

    Replaying takes numpy, which readers do without.
    """
    from playbook_bench.run import replay

    return replay.accept(file) if origin is None else replay.take_in(file, origin, results or default_results())


@app.command("table")
def evidence_table(
    form: Annotated[Literal["csv", "markdown", "parquet"], typer.Option("--format", help="Of the table.")] = "csv",
    steps: Annotated[bool, typer.Option("--steps", help="A row for each step, instead of each launch.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file; parquet needs one.")] = None,
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
) -> None:
    """All launches on record as a table, for pandas, a spreadsheet or a report; altered records are left out."""
    if form == "parquet" and output is None:
        raise PlaybookError("parquet is no text for a terminal; name a file with --output")
    if form != "csv":
        with tables_wanted():
            import_module("pyarrow" if form == "parquet" else "tabulate")
    records = read([results or default_results(), data_root("results")])
    evidence = (r.content for r in reversed(records) if isinstance(r.content, Evidence) and not r.altered)
    frame = to_frame(evidence, per="step" if steps else "launch")
    try:
        if form == "parquet":
            frame.to_parquet(output, index=False)
        else:
            text = frame.to_csv(index=False) if form == "csv" else frame.to_markdown(index=False) + "\n"
            output.write_text(text, encoding="utf-8") if output else sys.stdout.write(text)
    except OSError as e:
        raise PlaybookError(f"{output} cannot be written: {e.strerror or e}; name another file") from e


def _stale(path: Path) -> str | None:
    """Why the verdict in a file no longer speaks for the present, on this machine."""
    claims = by_claim(load_all())
    record = read_file(path, claims, present(here()))
    return record.stale(today(), claim_of(record, claims))
