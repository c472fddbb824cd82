"""`playbook evidence`: records of verdicts, and where a claim stands by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook.cli_text import complain, print_json, print_table, say
from playbook.errors import PlaybookError

if TYPE_CHECKING:
    from playbook.cards import Card, Claim, MechanismCheck
    from playbook.moved import Here
    from playbook_bench.records import Evidence

ALTERED = "altered"
"""Status of a record whose content is not the one that was sealed."""

evidence_app = typer.Typer(no_args_is_help=True, help="Evidence: records of verdicts.")


@evidence_app.command("list")
def evidence_list(
    results: Annotated[Path | None, typer.Option(help="Where evidence lies; .playbook/results, if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")] = False,
) -> None:
    """List the records: those of this folder's runs and those in the repository."""
    from playbook_bench import store

    if results is not None and not results.is_dir():
        raise PlaybookError(f"--results is {results}, which is no folder; name one that `playbook confirm` has written to")
    found = store.records_with_seal(_folders(results))
    claims, mine = _claims(), here()
    rows = [_row(path, e, claims.get(_key(e)), mine) | ({} if sealed else {"status": ALTERED}) for path, e, sealed in found]
    columns = ("evidence", "claim", "status", "machine", "created", "sentence")
    print_json(rows) if as_json else print_table([as_shown(r) for r in rows], columns)


@evidence_app.command("show")
def evidence_show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")] = False,
) -> None:
    """Show one record: what was claimed, what was found, what it rests on."""
    from playbook_bench import report, store
    from playbook_bench.confirm import Outcome

    evidence, sealed = store.load_with_seal(file)
    if as_json:
        print_json(evidence.model_dump(mode="json"))
        return
    if not sealed:
        complain(f"{file} was altered after it was sealed; it counts for nothing")
    out = report.console()
    claim = evidence.measured.claim
    say(f"{evidence.evidence_id}  {evidence.created}  {evidence.measured.machine.description}  expires {evidence.expires}")
    if claim is not None:
        say(f"{claim.card}/{claim.id}: {claim.statement}")
    report.print_outcome(Outcome(evidence, file), out)
    for condition in evidence.derived.gates:
        say(f"  {'ok' if condition.ok else 'BROKEN':<7}{condition.name}  {condition.detail}".rstrip())
    if stale := _stale(evidence, _claims().get(_key(evidence)), here()):
        say(f"stale    {', '.join(stale)}")
    say(f"repeat   {evidence.command}")


@evidence_app.command("accept")
def evidence_accept(file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence file.")]) -> None:
    """Copy a record that replays into bench/results/, to be committed."""
    from playbook_bench import store

    say(str(store.accept(file)))


def standing(cards: Mapping[str, Card]) -> dict[str, list[tuple[Path, Evidence]]]:
    """The records that speak for each claim of these cards, one of each machine, the last measured first."""
    from playbook.cards import by_claim
    from playbook_bench import store

    return store.standing(_folders(None), by_claim(cards))


def here() -> Here:
    """This machine, with which verdicts from one like it are compared."""
    from playbook_bench import preflight

    return preflight.here()


def status_of(claim: Claim | MechanismCheck, found: Mapping[str, Sequence[tuple[Path, Evidence]]], mine: Here) -> dict[str, Any]:
    """Where a claim stands, by its newest evidence, and on each machine (`verdicts`), for a reader on a machine like `mine`."""
    keys = ("status", "sentence", "evidence", "machine", "created", "path", "stale")
    rows = [{k: row[k] for k in keys} for row in (_row(path, e, claim, mine) for path, e in found.get(claim.id, ()))]
    for row in rows:
        if row["stale"]:
            row["sentence"] += f"; stale: {', '.join(row['stale'])}"
    first = rows[0] if rows else {"status": "untested", "sentence": None, "evidence": None, "stale": []}
    return {**first, "verdicts": rows}


def as_shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a table, whose status says when it no longer counts, and names the machines where they disagree."""
    each = [(_word(v), v["machine"]) for v in row.get("verdicts", ())]
    if len({word for word, _ in each}) > 1:
        return {**row, "status": "; ".join(f"{word} on {machine}" for word, machine in each)}
    return {**row, "status": _word(row)}


def _word(row: Mapping[str, Any]) -> str:
    return f"{row['status']}, stale" if row.get("stale") else str(row["status"])


def _claims() -> dict[tuple[str, str], Claim | MechanismCheck]:
    """The claims and mechanism checks of today's cards, by card and id."""
    from playbook.validate import load_all

    every = ((card.id, c) for card in load_all().values() for claim in card.claims for c in (claim, claim.mechanism_check))
    return {(card, c.id): c for card, c in every if c is not None}


def _key(evidence: Evidence) -> tuple[str, str]:
    """Card and id of the claim that was tested; of no claim where a case was run alone."""
    claim = evidence.measured.claim
    return (claim.card, claim.id) if claim else ("", "")


def _stale(evidence: Evidence, claim: Claim | MechanismCheck | None, mine: Here) -> list[str]:
    """Why a verdict no longer speaks for the present; `claim` is the one that it settled, as it stands today."""
    from playbook.cards import reworded
    from playbook_bench import preflight, store
    from playbook_bench.edited import edited

    then = evidence.measured.claim
    changed = claim is not None and then is not None and reworded(then.model_dump(mode="json"), claim)
    edits = edited(evidence.measured)
    return [
        *(["the claim has changed since"] if changed else []),
        *([f"its test has been edited since: {', '.join(edits)}"] if edits else []),
        *store.staleness(evidence, preflight.performance_revision(), mine),
    ]


def _row(path: Path, evidence: Evidence, claim: Claim | MechanismCheck | None, mine: Here) -> dict[str, Any]:
    measured, verdict = evidence.measured, evidence.derived.verdict
    return {
        "evidence": evidence.evidence_id,
        "claim": measured.claim.id if measured.claim else None,
        "card": measured.claim.card if measured.claim else None,
        "case": measured.case.id if measured.case else None,
        "status": verdict.status,
        "stale": _stale(evidence, claim, mine),
        "sentence": verdict.sentence,
        "machine": measured.machine.name,
        "created": evidence.created,
        "expires": evidence.expires,
        "path": str(path),
    }


def _folders(results: Path | None) -> list[Path]:
    from playbook.paths import data_root
    from playbook_bench import store

    return [results or store.DEFAULT_RESULTS, data_root("results")]
