"""A record judged again: replayed, or taken into the repository."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from playbook.cards.load import load_all
from playbook.cards.model import by_claim
from playbook.errors import ConfigError, Finding, PlaybookError, StoreError
from playbook.paths import data_root, default_results, in_package
from playbook.records.case import LAUNCHED_KINDS
from playbook.records.evidence import Derived, Evidence, Measured
from playbook.records.read import FROM, Claims, Record, claim_changes
from playbook_bench import statements
from playbook_bench.judge import verdict
from playbook_bench.run import schedule, store

_FIGURE_TOLERANCE = 1e-9
_COMPUTED_TOLERANCE = 0.1
"""Relative. An arithmetic statement is computed by today's code, whose estimates may have moved; its counts and its verdict may not."""
_FRACTION = re.compile(r"\d+\.\d+(e[-+]?\d+)?")
_ORIGIN = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def derive(measured: Measured) -> Derived:
    """The verdict of a record and its figures; an arithmetic statement or an invariant is computed, for it has no runs.

    Raises:
        ConfigError: the claim's metric, margin or function cannot be applied.
    """
    case = measured.case.content if measured.case and not measured.missing else None
    computed = statements.run(case) if case and case.kind in ("arithmetic", "invariant") else None
    return verdict.derive(measured, computed)


def replay(path: Path) -> tuple[bool, list[str]]:
    """Derive verdict and figures again from what was measured; (same, what differs).

    Raises:
        StoreError: the file cannot be read, is no evidence record, or its runs cannot be judged.
        ConfigError: as `derive`.
    """
    evidence, differences = store.load_checked(path)
    try:
        rederived = _derive(path, evidence.measured)
    except PlaybookError:
        if differences:
            return False, differences
        raise
    tolerance = _FIGURE_TOLERANCE if evidence.measured.runs else _COMPUTED_TOLERANCE
    differences += _differences(evidence.derived.model_dump(mode="json"), rederived.model_dump(mode="json"), "derived", tolerance)
    return not differences, differences


def unsound(records: Iterable[Record]) -> list[Finding]:
    """What is wrong with records that are read as evidence: altered, in contradiction with themselves, or with a verdict that their runs do
    not give.

    Statements that are computed, and not measured, are left to `playbook bench replay`: some of them train.
    """
    findings = []
    for record in records:
        evidence, lines = record.content, list(record.problems)
        if isinstance(evidence, Evidence):
            case = evidence.measured.case
            lines += schedule.contradictions(evidence.measured)
            if not lines and (case is None or case.content.kind in LAUNCHED_KINDS):
                try:
                    rederived = _derive(record.path, evidence.measured)
                    lines = _differences(evidence.derived.model_dump(mode="json"), rederived.model_dump(mode="json"), "derived")
                except PlaybookError as e:
                    lines = [str(e)]
        findings += [Finding(str(record.path), 1, 1, f"{line}; restore the file, or run the case again") for line in lines[:3]]
    return findings


def _derive(path: Path, measured: Measured) -> Derived:
    """What follows from a record that may come from anybody: figures that no run gives, such as negative tokens, are one message."""
    try:
        return derive(measured)
    except (ValueError, ArithmeticError, LookupError) as e:
        raise StoreError(f"{path} holds runs that cannot be judged: {e}; expected them as the harness wrote them") from e


def _differences(a: Any, b: Any, where: str, tolerance: float = _FIGURE_TOLERANCE) -> list[str]:
    """What differs, a line for each value; a fraction, also one inside a text, may be off by the relative `tolerance`."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [d for k in sorted(a.keys() | b.keys()) for d in _differences(a.get(k), b.get(k), f"{where}.{k}", tolerance)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in _differences(x, y, f"{where}[{i}]", tolerance)]
    if isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=tolerance, abs_tol=_FIGURE_TOLERANCE):
        return []
    if isinstance(a, str) and isinstance(b, str) and a != b and _FRACTION.sub("", a) == _FRACTION.sub("", b):
        fractions = [[float(m.group()) for m in _FRACTION.finditer(text)] for text in (a, b)]
        if not [d for x, y in zip(*fractions, strict=True) for d in _differences(x, y, where, tolerance)]:
            return []
    return [] if a == b else [f"{where}: recorded {a!r}, derived {b!r}"]


def accept(path: Path) -> Path:
    """Copy a record that replays into `bench/results/<machine>/`.

    Raises:
        StoreError: it does not replay, is of another claim than today's, is dated in the future, or is there already; or there is no
        repository here that could take it.
    """
    folder = data_root("results")
    if in_package(folder):
        raise StoreError(
            f"playbook runs from an installed copy, whose records ({folder}) are no repository's, and an upgrade would remove them; "
            "accept it with the playbook of a checkout: pip install -e"
        )
    origin = path.resolve().parent.name.partition(FROM)[2]
    evidence = _admissible(path, words=not origin)
    target = folder / _folder(evidence, origin) / f"{evidence.evidence_id}.json"
    store.write_once(target, path.read_text(encoding="utf-8"), "accept it with the playbook of a checkout that you may write to")
    return target


def take_in(path: Path, origin: str, results: Path | None = None) -> Path:
    """Copy a record from elsewhere that replays into `<results>/<machine>@<origin>/`; every reader then shows whose it is.

    It speaks for machines of its own kind under that name, and never instead of a record that was measured here.

    Raises:
        ConfigError: the origin is no name.
        StoreError: as `accept`.
    """
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(f"--from is '{origin[:40]}'; expected small letters, digits and -, at most 32, such as acme-b200")
    evidence = _admissible(path, words=False)  # records of others may be older than a card's words; readers show those that were tested
    target = (results or default_results()) / _folder(evidence, origin) / f"{evidence.evidence_id}.json"
    store.write_once(target, path.read_text(encoding="utf-8"))
    return target


def _folder(evidence: Evidence, origin: str) -> str:
    return evidence.measured.machine.name + (f"{FROM}{origin}" if origin else "")


def of_another_claim(evidence: Evidence, claims: Claims, words: bool = True) -> str:
    """What sets the claim that was tested apart from the claim of that card and id as it stands today; "" where nothing does, or there is
    no such claim.

    With `words` off, a statement that is worded otherwise does not count.
    """
    then = evidence.measured.claim
    card, claim = claims.get(then.id, ("", None)) if then else ("", None)
    parts = claim_changes(then, claim) if then and claim and then.card == card else []
    parts = [part for part in parts if words or part != "statement"]
    return f"{card}/{then.id} has another {' and '.join(parts)} today" if then and parts else ""


def _admissible(path: Path, words: bool) -> Evidence:
    """The record, once it agrees with its hash, with itself, with its runs and with the claim as it stands, and is of no later day than
    today.

    `words` asks for today's statement of the claim, too.

    Raises:
        StoreError: it does not.
    """
    replays, differences = replay(path)
    if not replays:
        raise StoreError(f"{path} does not replay: {'; '.join(differences[:3])}")
    evidence = store.load(path)
    if changed := of_another_claim(evidence, by_claim(load_all()), words):
        raise StoreError(f"{path} is a verdict on another claim: {changed}; test the claim as it stands: {evidence.command}")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    if evidence.created > f"{tomorrow:%Y-%m-%dT%H:%M:%SZ}" or evidence.expires > f"{tomorrow + timedelta(days=store.EXPIRY_DAYS):%Y-%m-%d}":
        raise StoreError(
            f"{path} was made {evidence.created} and expires {evidence.expires}: later than it can; set the clock and run it again"
        )
    return evidence
