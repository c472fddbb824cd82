"""Where claims stand: by the records of this folder and of the repository, for a reader on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from playbook.cards.load import load_all
from playbook.cards.model import Card, Claim, MechanismCheck
from playbook.paths import data_root, default_results
from playbook.records.evidence import Measured
from playbook.records.machine import Here
from playbook.records.read import UNTESTED, Claims, Present, Record, RecordReader, verdicts
from playbook.records.standing import Stock, in_words
from playbook_bench.machine import detect
from playbook_trainer import revision

_KEYS = ("status", "stands", "sentence", "evidence", "machine", "created", "path", "stale", "origin", "tested_as")
"""What `verdict_row` says of a verdict; of an untested claim all of it is there too, as null."""


def records_here(
    cards: Mapping[str, Card], machine: Here | None, results: Path | None = None, reader: RecordReader | None = None
) -> list[Record]:
    """This folder's records, or those of `results`, and the repository's, newest first, for a reader on a machine like `mine`.

    Raises:
        FileError: as `playbook.records.read.RecordReader.read`.
    """
    return (reader or RecordReader()).read([results or default_results(), data_root("results")], cards, present(machine))


def present(machine: Here | None) -> Present:
    """What this version of the playbook compares verdicts with."""
    return Present(revision.numbers(), machine, _case_changes, revision.paths)


def _case_changes(measured: Measured) -> list[str]:
    """As the harness says it; its modules are read once a verdict is asked about, which half of the commands never do."""
    from playbook_bench.judge.receipt import case_changes

    return case_changes(measured)


def here() -> Here:
    """This machine, with which verdicts from one like it are compared."""
    return detect.here()


def status_of(claim: Claim | MechanismCheck, records: Sequence[Record]) -> dict[str, Any]:
    """Where a claim stands, by the first of `verdicts`, and on each machine."""
    rows = [verdict_row(r, claim) for r in verdicts(records, claim.id)]
    for each in rows:
        if each["stale"]:
            each["sentence"] += f"; stale: {'; '.join(each['stale'])}"
    untested: dict[str, Any] = {**dict.fromkeys(_KEYS), "status": UNTESTED, "stale": []}
    return {**(rows[0] if rows else untested), "verdicts": rows}


def as_shown(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a table, whose status says of each verdict whether it still counts, and what it rests on."""
    return {**verdict, "status": "; ".join(dict.fromkeys(v["stands"] for v in verdict.get("verdicts", (verdict,)))) or verdict["status"]}


def claim_of(record: Record, claims: Claims) -> Claim | MechanismCheck | None:
    """The claim that a record speaks for, as it stands today."""
    return claims[record.claim][1] if record.claim and record.claim in claims else None


def verdict_row(record: Record, claim: Claim | MechanismCheck | None, reasons: int | None = None) -> dict[str, Any]:
    """A record as a row; of the reasons why it is stale, the first so many, or all."""
    stale = list(islice(record.reasons(today(), claim), reasons))
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


def stock_here() -> Stock:
    """Cards and evidence for an export: records of this folder and of the repository."""
    cards = load_all()
    return Stock(cards, records_here(cards, None), today())


def today() -> date:
    """The day by which verdicts are stale or not."""
    return datetime.now(UTC).date()
