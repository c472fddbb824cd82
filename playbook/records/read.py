"""Evidence and traces as every reader has them (terminal, site, MCP, search, skills): plain data, checked against their own hash.

Which record speaks for a claim, and what makes its verdict stale, is said here alone. A record whose hash does not match its content is
`altered`: it is shown as that and never as a verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from playbook.cards.model import Card, Claim, MechanismCheck, by_claim, reworded, speaks_for
from playbook.errors import FileError, Finding, PlaybookError
from playbook.records.staleness import Here, moved
from playbook.yaml_files import did_you_mean, read_bytes

Claims = Mapping[str, tuple[str, Claim | MechanismCheck]]
"""Claims by id, each with the id of its card, as `playbook.cards.model.by_claim` gives them."""
EVIDENCE, TRACE = "evidence/1", "trace/1"
KNOWN = (EVIDENCE, TRACE, "baseline/1")
MAX_BYTES = 64_000_000
UNTESTED = "untested"
STATUSES = ("confirmed", "refuted", "inconclusive", "not_applicable", "error", "stale", UNTESTED)
_DECIDED = ("confirmed", "refuted")
_TYPES: Mapping[tuple[str, ...], type[str] | type[int] | type[list[Any]] | type[dict[str, Any]]] = {
    ("measured", "case", "id"): str,
    ("measured", "machine", "gpus"): int,
    ("measured", "runs"): list,
    ("measured", "strict"): dict,
    ("measured", "configs"): dict,
}


@dataclass(frozen=True)
class Present:
    """What verdicts are compared with, to say which of them no longer speak for today; what is None is not asked."""

    revisions: Mapping[str, int] = field(default_factory=dict)
    """The performance revision of each of the trainer's backends today; a backend that is missing here makes nothing stale."""
    here: Here | None = None
    """The reader's machine, where there is one: a page of the site is for every reader."""
    edited: Callable[[Any], list[str]] | None = None
    """What says how a record's test differs from today's; the harness knows that."""


@dataclass(frozen=True)
class Record:
    """One evidence or trace file."""

    path: Path
    data: dict[str, Any]
    expected_sha: str
    """The hash of its content, as computed here."""
    present: Present = field(default_factory=Present)
    foreign: bool = False
    """Whether its claim is of a card that is not among those that were read, though one of them may have a claim of that id."""

    @property
    def altered(self) -> bool:
        """Whether the content is not what was written."""
        return bool(self.get("sha256") != self.expected_sha)

    @property
    def id(self) -> str:
        """The record's own id."""
        return str(self.data.get("evidence_id") or self.data.get("trace_id"))

    @property
    def schema(self) -> str:
        """The kind of record."""
        return str(self.data.get("schema_version"))

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value at a path of keys, or `default` where it is missing or null."""
        node: Any = self.data
        for key in keys:
            if not isinstance(node, Mapping) or node.get(key) is None:
                return default
            node = node[key]
        return node

    @property
    def status(self) -> str:
        """The verdict's word; `altered` where the record cannot be trusted."""
        return "altered" if self.altered else str(self.get("derived", "verdict", "status"))

    @property
    def claim(self) -> str | None:
        """The claim it speaks for, if any."""
        found = self.get("measured", "claim", "id")
        return found if isinstance(found, str) and not self.foreign else None

    @property
    def about(self) -> str:
        """What was tested, for a person: the id of the claim, whichever card's it is, else of the case."""
        return str(self.get("measured", "claim", "id") or self.get("measured", "case", "id", default=""))

    @property
    def machine(self) -> str:
        """The machine's name."""
        return str(self.get("measured", "machine", "name", default="unknown"))

    @property
    def variants(self) -> list[str]:
        """What a trace is of: baseline and candidate, the values of a sweep or the cells of an interaction."""
        return list(self.get("variants", default={}))

    @property
    def measures(self) -> str:
        """What the busy time of a trace is of: `gpu` or `host`."""
        return next((str(m) for v in self.variants if (m := self.get("variants", v, "table", "measures"))), "gpu")

    @property
    def created(self) -> str:
        """When it was written, in ISO format."""
        return str(self.get("created", default=""))

    @property
    def measured(self) -> str:
        """When its last run started, in ISO format, or when it was written where it has none: a record that is judged again is no younger for that."""
        runs = self.get("measured", "runs", default=[])
        return max((str(r.get("started", "")) for r in runs if isinstance(r, Mapping)), default="") or self.created

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return str(self.get("derived", "verdict", "sentence", default=""))

    @property
    def precedence(self) -> tuple[int, str, str, str]:
        """Larger for the one of two records on a claim that speaks: one that settles something, then the last measured, then the last judged."""
        settles = {"not_applicable": 0, "error": 1}.get(self.status, 2)
        return settles, self.measured, self.created, self.id

    @cached_property
    def _edits(self) -> list[str]:
        return self.present.edited(self.get("measured", default={})) if self.present.edited else []

    def reasons(self, today: date, claim: Claim | MechanismCheck | None) -> list[str]:
        """Why the verdict no longer speaks for today; empty while it does. `claim` is the one that it settled, as it stands today."""
        runs = [r for r in self.get("measured", "runs", default=[]) if isinstance(r, Mapping)]
        return [
            *_expired(self.get("expires", default=""), today),
            *(["the claim has changed since"] if claim and reworded(self.get("measured", "claim", default={}), claim) else []),
            *_revised(runs, self.get("measured", "configs", default={}), self.present.revisions),
            *([f"its test has been edited since: {', '.join(self._edits)}"] if self._edits else []),
            *(moved(self._strict(runs), self.present.here) if self.present.here else []),
        ]

    def stale(self, today: date, claim: Claim | MechanismCheck | None) -> str | None:
        """The reasons in one line, or None."""
        return "; ".join(self.reasons(today, claim)) or None

    def _strict(self, runs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The environment of the first run whose environment is known."""
        known = self.get("measured", "strict", default={})
        return next((found for r in runs if isinstance(found := known.get(str(r.get("strict_sha"))), Mapping)), {})


def _expired(expires: Any, today: date) -> list[str]:
    until = _day(expires)
    return ["without expiry date"] if until is None else [f"expired on {until}"] if until < today else []


def _revised(runs: Iterable[Mapping[str, Any]], configs: Mapping[str, Any], revisions: Mapping[str, int]) -> list[str]:
    """A line for each backend that has another performance revision today than one of the runs on it."""
    then: dict[str, set[int]] = {}
    for run in runs:
        config, revision = configs.get(str(run.get("config_sha"))), run.get("performance_revision")
        backend = config.get("backend", "torch") if isinstance(config, Mapping) else "torch"
        if isinstance(revision, int) and revision != revisions.get(str(backend), revision):
            then.setdefault(str(backend), set()).add(revision)
    return [
        f"the {backend} backend is at performance revision {revisions[backend]}, the runs at {', '.join(map(str, sorted(found)))}"
        for backend, found in sorted(then.items())
    ]


def read(folders: Sequence[Path], cards: Mapping[str, Card] | None = None, present: Present | None = None) -> list[Record]:
    """Every record below the folders, newest first; the first whole copy of an id counts. With `cards`, a record on a claim of any other card speaks for no claim.

    Raises:
        FileError: a file that is no record, with its path; none is skipped.
    """
    found: dict[tuple[str, str], Record] = {}
    findings: list[Finding] = []
    claims = None if cards is None else by_claim(cards)
    for path in _files(folders):
        try:
            record = read_file(path, claims, present)
        except ValueError as e:
            findings.append(Finding(str(path), 1, 1, str(e)))
            continue
        key = record.schema, record.id
        if record.schema in (EVIDENCE, TRACE) and (key not in found or found[key].altered):
            found[key] = record
    if findings:
        raise FileError(findings)
    return sorted(found.values(), key=lambda r: (r.created, r.id), reverse=True)


def read_file(path: Path, claims: Claims | None = None, present: Present | None = None) -> Record:
    """The record in one file; with `claims`, each with its card, one on any other claim speaks for none.

    Raises:
        ValueError: the file is no record; the message goes behind its path.
    """
    record = replace(_load(path), present=present or Present())
    return record if claims is None else replace(record, foreign=_foreign(record, claims))


def _foreign(record: Record, claims: Claims) -> bool:
    home = claims.get(record.claim or "")
    return record.claim is not None and not (home and speaks_for(record.get("measured", "claim"), *home))


def _files(folders: Iterable[Path]) -> list[Path]:
    """Records lie in `<folder>/<machine>/` and `<folder>/traces/`; a trace's reports, one level deeper, are no records."""
    return sorted(p for f in folders for p in [*f.glob("*.json"), *f.glob("*/*.json")] if p.is_file() and not p.name.startswith("."))


def _load(path: Path) -> Record:
    try:
        raw = read_bytes(path, MAX_BYTES)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"is too large; at most {MAX_BYTES} bytes are read")
        data = json.loads(raw)
    except (OSError, RecursionError, ValueError) as e:
        raise ValueError(f"is no readable record ({str(e)[:120]}); remove it, or restore it from the run's results") from e
    if not isinstance(data, dict) or data.get("schema_version") not in KNOWN:
        kind = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"has schema_version {kind!r}; expected one of {', '.join(KNOWN)}")
    if data["schema_version"] != "baseline/1":
        _check(data)
    return Record(path, data, content_sha(data))


def _check(data: dict[str, Any]) -> None:
    """The few fields without which no page can be made, and the types of those that every reader asks for."""
    key = "evidence_id" if data["schema_version"] == EVIDENCE else "trace_id"
    name = data.get(key)
    if not isinstance(name, str) or not name.isalnum() or len(name) > 64:
        raise ValueError(f"{key} is {str(name)[:40]!r}; expected letters and digits")
    record = Record(Path(), data, "")
    if data["schema_version"] == EVIDENCE and not isinstance(record.get("derived", "verdict", "status"), str):
        raise ValueError("has no derived.verdict.status")
    for where, kind in _TYPES.items():
        value = record.get(*where, default=kind())
        if not isinstance(value, kind):
            raise ValueError(f"has {'.'.join(where)} as {type(value).__name__}; expected {kind.__name__}")
    if data["schema_version"] == TRACE and not isinstance(record.get("variants"), dict):
        raise ValueError("has no variants")


def content_sha(data: Mapping[str, Any]) -> str:
    """The hash that a record should carry: SHA-256 over the canonical JSON of everything but the hash."""
    rest = {k: v for k, v in data.items() if k != "sha256"}
    try:
        line = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(line.encode()).hexdigest()
    except ValueError:  # NaN, or a lone surrogate: nothing that the harness writes
        return "none"


def verdicts(records: Iterable[Record], claim: str) -> list[Record]:
    """The verdict of each machine on a claim, decided ones first, by the record that speaks for the machine. Altered records do not count."""
    chosen: dict[str, Record] = {}
    for r in records:
        if r.schema == EVIDENCE and r.claim == claim and not r.altered:
            chosen[r.machine] = max(chosen.get(r.machine, r), r, key=lambda each: each.precedence)
    return sorted(
        chosen.values(), key=lambda r: (r.status not in _DECIDED, -int(r.get("measured", "machine", "gpus", default=0)), r.machine)
    )


def standings(records: Iterable[Record], claim: Claim | MechanismCheck, today: date) -> set[str]:
    """The statuses of a claim over all machines: that of each newest verdict, `stale` for one that counts no more, or `untested`."""
    found = verdicts(records, claim.id)
    return {"stale" if r.stale(today, claim) else r.status for r in found} or {UNTESTED}


def with_status(cards: Mapping[str, Card], records: Iterable[Record], today: date, status: str) -> frozenset[str]:
    """Ids of the claims and mechanism checks that stand so on some machine.

    Raises:
        PlaybookError: there is no such status.
    """
    if status not in STATUSES:
        raise PlaybookError(f"status '{status[:40]}' is not known{did_you_mean(status[:40], STATUSES)}")
    known = list(records)
    each = [c for card in cards.values() for claim in card.claims for c in (claim, claim.mechanism_check) if c]
    return frozenset(c.id for c in each if status in standings(known, c, today))


def earlier(records: Iterable[Record], claim: str) -> list[Record]:
    """Every record on a claim, newest first, altered ones included."""
    return [r for r in records if r.schema == EVIDENCE and r.claim == claim]


def traces(records: Iterable[Record], case: str | None) -> list[Record]:
    """The newest trace of a case on each profile, those of GPUs first; altered ones do not count."""
    chosen: dict[str, Record] = {}
    for r in records:
        if r.schema == TRACE and not r.altered and r.get("case") == case:
            profile = str(r.get("profile"))
            chosen[profile] = max(chosen.get(profile, r), r, key=lambda each: each.created)
    return sorted(chosen.values(), key=lambda r: (r.measures != "gpu", str(r.get("profile"))))


def _day(stamp: Any) -> date | None:
    try:
        return datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).astimezone(UTC).date()
    except (ValueError, OverflowError):
        return None
