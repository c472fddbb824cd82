"""Reads evidence and traces: typed, and checked against their own hash and for contradictions.

Terminal, site, MCP server, search, linter, skills and replay read records here and nowhere else. This module alone decides which record
speaks for a claim and what makes its verdict stale. A record with `problems` is `altered`: it is shown as that and never as a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from playbook.cards.model import Card, Claim, MechanismCheck, by_claim
from playbook.cards.scope import unmet
from playbook.errors import FileError, Finding, PlaybookError
from playbook.files import read_bytes
from playbook.records.consistency import contradictions
from playbook.records.evidence import SCHEMA_VERSION, ClaimRef, Evidence, Measured, Run, stored_sha
from playbook.records.machine import Here, TrainerPathsOf, kind, revision_changes, told_apart, updates_since
from playbook.records.trace import TRACE_VERSION, TraceResult
from playbook.yaml_files import did_you_mean

Claims = Mapping[str, tuple[str, Claim | MechanismCheck]]
"""Claims by id, each with the id of its card, as `playbook.cards.model.by_claim` gives them."""
EVIDENCE, TRACE = SCHEMA_VERSION, TRACE_VERSION
MODELS: Mapping[str, type[Evidence] | type[TraceResult]] = {
    SCHEMA_VERSION: Evidence,
    TRACE_VERSION: TraceResult,
}
MAX_BYTES = 64_000_000
UNTESTED = "untested"
_STATUSES = ("confirmed", "refuted", "inconclusive", "not_applicable", "error", "stale", UNTESTED)
DECIDED = ("confirmed", "refuted")
"""Statuses that settle a claim."""
FROM = "@"
"""Between a machine's name and that of who measured there, in the name of a folder of imported records: `h100x8@acme`."""


@dataclass(frozen=True)
class Present:
    """The state of today, against which verdicts are found stale. A field that is None is not compared."""

    revisions: Mapping[str, int] = field(default_factory=dict)
    """The performance revision of each of the trainer's paths today; a path that is missing here makes nothing stale."""
    here: Here | None = None
    """The reader's machine, where there is one: a page of the site is for every reader."""
    case_changes: Callable[[Measured], list[str]] | None = None
    """A function of the harness that lists how a record's test differs from today's."""
    paths: TrainerPathsOf = lambda config, ranks: ()
    """A function of the trainer that names the paths of a run. Its backend's is one, whatever this names."""


@dataclass(frozen=True)
class Record:
    """One file of evidence, or of a trace."""

    path: Path
    content: Evidence | TraceResult
    problems: tuple[str, ...] = ()
    """Why the record counts for nothing: its content does not match its hash, or contradicts itself. Empty for a sound record."""
    present: Present = field(default_factory=Present)
    foreign: bool = False
    """Whether none of the cards that were read has its claim, or its runs were on another backend than the claim is about. One of the
    cards may have another claim of the same id."""
    assumed_gib: int | None = None
    """Host memory in GiB that is assumed for an older record without it: that of newer records from otherwise equal machines, if they
    agree."""
    machine: str = "unknown"
    """Label of its machine: the name, what sets it apart from other machines of that name, and who measured there if the record was
    imported."""

    @property
    def altered(self) -> bool:
        """Whether it counts for nothing."""
        return bool(self.problems)

    @property
    def id(self) -> str:
        """The record's own id."""
        return self.content.evidence_id if isinstance(self.content, Evidence) else self.content.trace_id

    @property
    def schema(self) -> str:
        """Its `schema_version`, which tells evidence from traces."""
        return self.content.schema_version

    @property
    def origin(self) -> str | None:
        """Who measured it, where it was imported; None for records of this repository or folder."""
        return self.path.parent.name.partition(FROM)[2] or None

    @cached_property
    def data(self) -> dict[str, Any]:
        """The record as plain data, for what shows any of its fields."""
        return self.content.model_dump(mode="json")

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
        return "altered" if self.altered else self.content.derived.verdict.status if isinstance(self.content, Evidence) else ""

    @property
    def claim_ref(self) -> ClaimRef | None:
        """The claim as it stood when it was tested."""
        return self.content.measured.claim if isinstance(self.content, Evidence) else None

    @cached_property
    def claim(self) -> str | None:
        """The claim it speaks for, if any."""
        return self.claim_ref.id if self.claim_ref and not self.foreign else None

    @property
    def about(self) -> str:
        """What was tested, for a person: the id of the claim, whichever card's it is, else of the case."""
        if not isinstance(self.content, Evidence):
            return self.content.case
        case = self.content.measured.case
        return self.claim_ref.id if self.claim_ref else case.id if case else ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The kind of its machine, and who measured there: records of two kinds never speak for each other."""
        machine = self.content.measured.machine if isinstance(self.content, Evidence) else self.content.machine
        *identity, memory = kind(machine)
        return (*identity, self.assumed_gib if memory is None else memory, self.origin)

    @property
    def gpus(self) -> int:
        """GPUs of its machine."""
        return int(self.kind[0])

    @property
    def backends(self) -> tuple[str, ...]:
        """The trainer's backends that its runs were on; none for what launches no run of the trainer."""
        return _backends(self.content.measured) if isinstance(self.content, Evidence) else ()

    @property
    def variants(self) -> list[str]:
        """The variants of a trace: baseline and candidate, the values of a sweep or the cells of an interaction."""
        return list(self.content.variants) if isinstance(self.content, TraceResult) else []

    @property
    def measures(self) -> str:
        """Whose busy time a trace holds: `gpu` or `host`."""
        traced = self.content.variants.values() if isinstance(self.content, TraceResult) else ()
        return next((v.table.measures for v in traced if v.table), "gpu")

    @property
    def created(self) -> str:
        """When it was written, in ISO format."""
        return self.content.created

    @property
    def runs(self) -> list[Run]:
        """Its launches."""
        return self.content.measured.runs if isinstance(self.content, Evidence) else []

    @property
    def measured(self) -> str:
        """When its last run started, in ISO format; when it was written where it has no runs."""
        return max((r.started for r in self.runs), default="") or self.created

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return self.content.derived.verdict.sentence if isinstance(self.content, Evidence) else ""

    @property
    def precedence(self) -> tuple[int, str, str, str]:
        """Sort key: of two records on a claim, the one with the larger key speaks for it.

        A verdict beats an error, which beats `not_applicable`; then the last measured, then the last judged.
        """
        settles = {"not_applicable": 0, "error": 1}.get(self.status, 2)
        return settles, self.measured, self.created, self.id

    @cached_property
    def _moved(self) -> list[str]:
        """What has moved on since in the trainer and in the reader's libraries."""
        if not isinstance(self.content, Evidence):
            return []
        updates = updates_since(self._strict, self.present.here) if self.present.here else []
        return revision_changes(self.content.measured, self.present.revisions, self.present.paths) + updates

    @cached_property
    def _edits(self) -> list[str]:
        return self.present.case_changes(self.content.measured) if self.present.case_changes and isinstance(self.content, Evidence) else []

    def reasons(self, today: date, claim: Claim | MechanismCheck | None) -> Iterator[str]:
        """Why the verdict no longer speaks for today, what is dear to find out last; none while it does.

        `claim` is the one that it settled, as it stands today.
        """
        if not isinstance(self.content, Evidence):
            return
        yield from _expired(self.content.expires, today)
        if claim and self.claim_ref and claim_changes(self.claim_ref, claim) not in ([], ["statement"]):
            yield "the claim has changed since"  # other words alone are no other test
        yield from self._moved
        if self._edits:
            yield f"its test has been edited since: {', '.join(self._edits)}"

    def stale(self, today: date, claim: Claim | MechanismCheck | None) -> str | None:
        """The reasons in one line, or None."""
        return "; ".join(self.reasons(today, claim)) or None

    def other_words(self, claim: Claim | MechanismCheck | None) -> str | None:
        """The claim's statement as it was tested, where today's is worded otherwise."""
        then = self.claim_ref
        return then.statement if then and claim and then.id == claim.id and then.statement != claim.statement else None

    @property
    def _strict(self) -> Mapping[str, Any]:
        """The environment of the first run whose environment is known."""
        environments = self.content.measured.strict if isinstance(self.content, Evidence) else {}
        return next((environments[r.strict_sha] for r in self.runs if r.strict_sha in environments), {})


def claim_changes(then: ClaimRef, claim: Claim | MechanismCheck) -> list[str]:
    """Which parts of a claim a record has otherwise than today's card: metric, expect, comparison, statement."""
    return [part for part in ("metric", "expect", "comparison", "statement") if getattr(then, part) != getattr(claim, part)]


def _backends(measured: Measured) -> tuple[str, ...]:
    """The trainer's backends that a record's runs were on; a command has none."""
    command = measured.case is not None and measured.case.content.command
    return () if command else tuple(sorted({str(c.get("backend", "torch")) for c in measured.configs.values()}))


def speaks_for(measured: Measured, card: str, claim: Claim | MechanismCheck) -> bool:
    """Whether the claim of a record is this claim of this card, and its runs were on a backend that the claim is about.

    Cards from elsewhere may number theirs alike. A claim that has moved from another card is known by its words and its test.
    """
    then, ran = measured.claim, " ".join(_backends(measured))
    about = claim.scope.get("backend") if isinstance(claim, Claim) else None
    if then is None or then.id != claim.id or (ran and about and unmet({"backend": about}, {"backend": ran})):
        return False
    return then.card == card or not claim_changes(then, claim)


def _expired(expires: str, today: date) -> list[str]:
    try:
        until = date.fromisoformat(expires)
    except ValueError:  # a day that no month has
        return ["without expiry date"]
    return [f"expired on {until}"] if until < today else []


class RecordReader:
    """Reads folders of records, and reads a file again only once it has changed: a server answers many questions from the same files."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Record]] = {}
        self._last: tuple[Any, list[Record]] = None, []

    def read(self, folders: Sequence[Path], cards: Mapping[str, Card] | None = None, present: Present | None = None) -> list[Record]:
        """Every record below the folders, newest first. Of several copies of one id, the first unaltered one counts. With `cards`, a
        record on a claim of any other card speaks for no claim.

        Raises:
            FileError: a file that is no record, with its path; none is skipped.
        """
        by_id: dict[tuple[str, str], Record] = {}
        findings: list[Finding] = []
        for path in _files(folders):
            try:
                record = self._record(path)
            except ValueError as e:
                findings.append(Finding(str(path), 1, 1, str(e)))
                continue
            first = by_id.setdefault((record.schema, record.id), record)
            if first.altered or (first.origin and not record.origin):
                by_id[record.schema, record.id] = record
        if findings:
            raise FileError(findings)
        # The same records in the same light are the same answer, with what has been found out about each since.
        inputs = list(by_id.values()), cards, present
        if self._last[0] != inputs:
            claims = None if cards is None else by_claim(cards)
            records = _with_memory(by_id.values())
            # An altered record names no machine: else one with a foreign name, or another host's memory, would rename those of sound
            # records.
            labels = _labels(records) | _labels([r for r in records if not r.altered])
            named = [replace(r, present=present or Present(), foreign=_foreign(r, claims), machine=labels[r.kind]) for r in records]
            self._last = inputs, sorted(named, key=lambda r: (r.created, r.id), reverse=True)
        return self._last[1]

    def _record(self, path: Path) -> Record:
        """The record in a file."""
        try:
            about = path.stat()
        except OSError as e:
            raise ValueError(f"cannot be read: {e.strerror or e}") from e
        stamp = about.st_mtime_ns, about.st_size
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = stamp, _record(path)
        return self._known[path][1]


def read(folders: Sequence[Path], cards: Mapping[str, Card] | None = None, present: Present | None = None) -> list[Record]:
    """As `RecordReader.read`, once.

    Raises:
        FileError: a file that is no record, with its path; none is skipped.
    """
    return RecordReader().read(folders, cards, present)


def read_file(path: Path, claims: Claims | None = None, present: Present | None = None) -> Record:
    """The record in one file. With `claims`, a record on any other claim speaks for no claim.

    Raises:
        ValueError: the file is no record. The message has no subject: put the file's path before it.
    """
    record = _record(path)
    return replace(record, present=present or Present(), foreign=_foreign(record, claims), machine=_labels([record])[record.kind])


def _record(path: Path) -> Record:
    try:
        content, sha = parse(path)
    except OSError as e:
        raise ValueError(f"cannot be read: {e.strerror or e}") from e
    problems = [] if content.sha256 == sha else [f"its content has the hash {sha[:16]}, and carries {content.sha256[:16] or 'none'}"]
    if isinstance(content, Evidence):
        problems += contradictions(content)
    return Record(path, content, tuple(problems))


def parse(path: Path) -> tuple[Evidence | TraceResult, str]:
    """The content of a file, typed by its `schema_version`, and the hash that it should carry.

    Raises:
        OSError: it cannot be read.
        ValueError: the file is no record. The message has no subject: put the file's path before it.
    """
    try:
        raw = read_bytes(path, MAX_BYTES)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"is too large; at most {MAX_BYTES} bytes are read")
        data = _plain(raw)
    except (RecursionError, ValueError) as e:
        raise ValueError(f"is no readable record ({str(e)[:120]}); remove it, or restore it from the run's results") from e
    version = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
    model = MODELS.get(version) if isinstance(version, str) else None
    if model is None:
        raise ValueError(f"has schema_version {str(version)[:40]!r}; expected one of {', '.join(MODELS)}")
    try:
        return model.model_validate(data), stored_sha(data)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise ValueError(f"has {'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from e
    except (RecursionError, ValueError) as e:  # a lone surrogate, which no hash covers
        raise ValueError(f"is no readable record ({str(e)[:120]})") from e


def _plain(raw: bytes) -> Any:
    """JSON as plain data: by pydantic's reader, in half the time, and by Python's where that refuses it, for its messages and what it
    alone takes.
    """
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError:
        return json.loads(raw, parse_constant=_not_finite)


def _not_finite(text: str) -> float:
    """Refuse NaN and Infinity. A number too large for a float is refused by the model, or when the content is hashed."""
    raise ValueError(f"{text} is not a finite number")


def _with_memory(records: Iterable[Record]) -> list[Record]:
    """The records, those that do not know their host's memory with that of the others of such a machine, where these agree."""
    every = list(records)
    memories: dict[tuple[Any, ...], set[int]] = {}
    for *identity, memory, origin in (r.kind for r in every if not r.altered):
        memories.setdefault((*identity, origin), set()).update([memory] if memory is not None else [])
    out = []
    for r in every:
        *identity, memory, origin = r.kind
        alike = memories.get((*identity, origin), set())
        out.append(replace(r, assumed_gib=next(iter(alike))) if memory is None and len(alike) == 1 else r)
    return out


def _labels(records: Iterable[Record]) -> dict[tuple[Any, ...], str]:
    """For each kind of machine, a name that no other kind has on which something ran: what was only computed sets no other apart."""
    names: dict[str, dict[tuple[Any, ...], str]] = {}
    ran: dict[str, set[tuple[Any, ...]]] = {}
    for r in records:
        content = r.content.measured if isinstance(r.content, Evidence) else r.content
        name = content.machine.name
        names.setdefault(name, {})[r.kind] = f"{FROM}{r.origin}" if r.origin else ""
        # By the kind, and not by the machine of one of its records, which may not know the memory that it is taken to have.
        ran.setdefault(name, set()).update([] if isinstance(content, Measured) and not content.runs else [r.kind[:-1]])
    return {k: told_apart(name, k[:-1], ran[name]) + by for name, alike in names.items() for k, by in alike.items()}


def _foreign(record: Record, claims: Claims | None) -> bool:
    then = record.claim_ref
    if claims is None or then is None or not isinstance(record.content, Evidence):
        return False
    home = claims.get(then.id)
    return home is None or not speaks_for(record.content.measured, *home)


def _files(folders: Iterable[Path]) -> list[Path]:
    """Records lie in `<folder>/<machine>/` and `<folder>/traces/`; a trace's reports, one level deeper, are no records."""
    return sorted(p for f in folders for p in [*f.glob("*.json"), *f.glob("*/*.json")] if p.is_file() and not p.name.startswith("."))


def verdicts(records: Iterable[Record], claim: str) -> list[Record]:
    """For each kind of machine, the record that speaks for a claim; confirmed and refuted ones first. Altered records do not count."""
    chosen: dict[tuple[Any, ...], Record] = {}
    for r in records:
        if r.claim == claim and r.schema == EVIDENCE and not r.altered:
            chosen[r.kind] = max(chosen.get(r.kind, r), r, key=lambda each: each.precedence)
    return sorted(chosen.values(), key=lambda r: (r.status not in DECIDED, -r.gpus, r.machine))


def standings(records: Iterable[Record], claim: Claim | MechanismCheck, today: date) -> set[str]:
    """The statuses of a claim over all machines: for each the status of the record that speaks, or `stale`; `untested` where there is
    none.
    """
    newest = verdicts(records, claim.id)
    return {"stale" if r.stale(today, claim) else r.status for r in newest} or {UNTESTED}


def with_status(cards: Mapping[str, Card], records: Iterable[Record], today: date, status: str) -> frozenset[str]:
    """Ids of the claims and mechanism checks that have this status on at least one machine.

    Raises:
        PlaybookError: there is no such status.
    """
    if status not in _STATUSES:
        raise PlaybookError(f"status '{status[:40]}' is not known{did_you_mean(status[:40], _STATUSES)}")
    every = list(records)
    return frozenset(i for i, (_, claim) in by_claim(cards).items() if status in standings(every, claim, today))


def earlier(records: Iterable[Record], claim: str) -> list[Record]:
    """Every record on a claim, newest first, altered ones included."""
    return [r for r in records if r.schema == EVIDENCE and r.claim == claim]


def traces(records: Iterable[Record], case: str | None) -> list[Record]:
    """The newest trace of a case on each profile, those of GPUs first; altered ones do not count."""
    chosen: dict[str, Record] = {}
    for r in records:
        if isinstance(r.content, TraceResult) and not r.altered and r.content.case == case:
            profile = r.content.profile
            chosen[profile] = max(chosen.get(profile, r), r, key=lambda each: each.created)
    return [r for _, r in sorted(chosen.items(), key=lambda each: (each[1].measures != "gpu", each[0]))]
