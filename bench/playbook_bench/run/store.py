"""Evidence on disk: one file per verdict, written once, whole or not at all, and checked when read."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from playbook import files
from playbook.errors import StoreError
from playbook.records.consistency import contradictions
from playbook.records.evidence import Derived, Evidence, Measured, Seconds, seal
from playbook.records.read import parse
from playbook_bench.run import schedule

EXPIRY_DAYS = 180
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True)
class Outcome:
    """A claim's verdict and where its evidence lies."""

    evidence: Evidence
    path: Path
    counts: bool = True
    """Whether it counts for the exit code. A mechanism check that ran because its claim was named does not."""

    @property
    def name(self) -> str:
        """The claim's id, or the case's where no claim was tested."""
        measured = self.evidence.measured
        return measured.claim.id if measured.claim else measured.case.id if measured.case else ""

    @property
    def status(self) -> str:
        """The verdict in one word."""
        return self.evidence.derived.verdict.status


def new_id(now: float | None = None) -> str:
    """A ULID: 48 bits of milliseconds and 80 random bits, so that names sort by time and two harnesses never meet."""
    value = (int((time.time() if now is None else now) * 1000) << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def evidence_of(measured: Measured, derived: Derived, command: str, seconds: Seconds) -> Evidence:
    """A sealed record, created now."""
    now = datetime.now(UTC)
    return seal(
        Evidence(
            evidence_id=new_id(now.timestamp()),
            created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            expires=(now + timedelta(days=EXPIRY_DAYS)).strftime("%Y-%m-%d"),
            command=command,
            measured=measured,
            derived=derived,
            seconds=seconds,
        )
    )


def write(evidence: Evidence, results: Path) -> Path:
    """Write the record to `<results>/<machine>/<id>.json`.

    Raises:
        StoreError: it cannot be written; nothing half-written stays behind.
    """
    text, path = render(evidence), place(evidence, results)
    write_once(path, text)
    return path


def keep(evidence: Evidence, results: Path) -> tuple[Path, str]:
    """Write a record, into the temporary folder where `results` cannot take it. Returns its path and what went wrong, or ""."""
    try:
        return write(evidence, results), ""
    except StoreError as e:
        path = write(evidence, Path(tempfile.mkdtemp(prefix="playbook-evidence-")))
        return path, f"{e}; the verdict above stands, and its record is {path}"


def place(evidence: Evidence, results: Path) -> Path:
    """Where a record goes: `<results>/<machine>/<id>.json`."""
    return results / evidence.measured.machine.name / f"{evidence.evidence_id}.json"


def render(evidence: Evidence) -> str:
    """The record as text: a line per field and per run, so that a person can page through it."""
    data = evidence.model_dump(mode="json")
    measured = data.pop("measured")
    lines = [f" {json.dumps(k)}: {_line(v)}," for k, v in data.items()]
    inner = ",\n".join(f"  {json.dumps(k)}: {_runs(v) if k == 'runs' else _line(v)}" for k, v in measured.items())
    return "{\n" + "\n".join(lines) + '\n "measured": {\n' + inner + "\n }\n}\n"


def _runs(runs: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(f"   {_line(r)}" for r in runs) + "\n  ]" if runs else "[]"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def write_once(path: Path, text: str, instead: str = "choose another folder with --results") -> None:
    """Make a file that did not exist, atomically: readers see all of it or nothing, and no other file is ever replaced.

    `instead` is what a user can do where the folder cannot be written.

    Raises:
        StoreError: the disk is full, the folder cannot be written, or the file exists.
    """
    try:
        files.make_folder(path.parent)
        files.create(path, text)
    except FileExistsError as e:
        raise StoreError(f"{path} exists; a record is written once and never replaced") from e
    except OSError as e:
        raise StoreError(f"{path} cannot be written: {e.strerror or e}; free some space or {instead}") from e


def replace(path: Path, text: str) -> None:
    """Write a file that may replace an older one, atomically.

    Raises:
        StoreError: it cannot be written; the older one stays as it was.
    """
    try:
        files.make_folder(path.parent)
        files.replace(path, text)
    except OSError as e:
        raise StoreError(f"{path} cannot be written: {e.strerror or e}; free some space or choose another folder") from e


def load(path: Path) -> Evidence:
    """The record in a file, whether or not it agrees with its hash and with itself; `replay` says that.

    Raises:
        StoreError: the file cannot be read or is no evidence record.
    """
    return _load(path)[0]


def load_checked(path: Path) -> tuple[Evidence, list[str]]:
    """The record, and why it counts for nothing: it is not as it was sealed, or contradicts itself.

    Raises:
        StoreError: as `load`.
    """
    evidence, sha = _load(path)
    altered = [] if sha == evidence.sha256 else ["sha256: the content is not the one that was sealed"]
    return evidence, [*altered, *contradictions(evidence), *schedule.contradictions(evidence.measured)]


def _load(path: Path) -> tuple[Evidence, str]:
    """A file as a record, and the hash that its content has.

    Raises:
        StoreError: the file cannot be read, or holds something else.
    """
    name = f"{path} is no evidence record"
    try:
        content, sha = parse(path)
    except FileNotFoundError as e:
        raise StoreError(
            f"{path} cannot be read: {e.strerror}; name the file of a record, `playbook evidence list --json` has their paths"
        ) from e
    except OSError as e:
        raise StoreError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise StoreError(f"{name}: it {e}") from e
    if not isinstance(content, Evidence):
        raise StoreError(f"{name}: it is of {content.schema_version}")
    return content, sha
