"""The journal of a command: finished runs, and verdicts with their records, so that the same command continues after it was stopped.

A folder belongs to one command. Runs taken before and after a stop form one series only where the machines are the same ones; elsewhere
the series of the case that was under way starts over. A pair that the stop cut in two is run again whole: pairs are adjacent runs.
Each line is sealed together with the one before it, like a record: what was changed since is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from playbook import files
from playbook.errors import StoreError
from playbook.records.case import Case
from playbook.records.evidence import ClaimRef, Derived, Measured, Run, RunOutcome, digest
from playbook_bench.run import store
from playbook_bench.run.schedule import RunSpec
from playbook_bench.run.targets import Task

_SETTLED = "settled.jsonl"
_SEAL = "sha256"
_JOURNAL_LIFE_S = 86_400.0
"""Seconds for which a journal without `--journal` is kept for the same command to continue."""


class SealedLines:
    """A file of JSON objects, one a line, each with a hash of itself and of the hash before it: a line that was changed, moved or left out
    is noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable_midway = False
        """Whether the file was read up to a line that nobody would leave who was stopped while writing one."""
        self._lines_follow = False
        """Whether lines stand behind the one up to which the file was read."""
        self._last_seal = ""

    def read(self) -> list[dict[str, Any]]:
        """The objects up to the first line that is not valid. Sets `unreadable_midway` unless that line is a torn last one. A missing
        file has no rows.

        Raises:
            StoreError: the file is there and cannot be read, or a line is not the one that was written there.
        """
        out: list[dict[str, Any]] = []
        self._last_seal, self.unreadable_midway, self._lines_follow = "", False, False
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return out
        except OSError as e:
            raise StoreError(f"{self.path} cannot be read: {e.strerror or e}; try again, or name another folder with --journal") from e
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                self.unreadable_midway = number < len(lines) or not line.startswith(b"{")
                break
            if not isinstance(row, dict) or _SEAL not in row:
                self.unreadable_midway = True
                break
            seal = row.pop(_SEAL)
            if seal != digest([self._last_seal, row]):
                raise StoreError(f"line {number} of {self.path} was altered, or the one before it; remove the folder to start over")
            self._last_seal = seal
            out.append(row)
        self._lines_follow = len(lines) > len(out) + 1
        return out

    def add(self, row: Mapping[str, Any]) -> None:
        """Put a line at the end; the file has been read, or written, before.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(self._sealed(row))
        except OSError as e:
            raise StoreError(f"{self.path} cannot be written: {e.strerror or e}") from e

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the file atomically: neither a full disk nor a crash may lose the lines that it held.

        Raises:
            StoreError: it cannot be written, or it was read up to an unreadable line, and the lines behind that one would be lost.
        """
        if self._lines_follow:
            raise StoreError(f"a line in the middle of {self.path} cannot be read; mend the line, or remove the file to start over")
        self._last_seal = ""
        store.replace(self.path, "".join(map(self._sealed, rows)))

    def _sealed(self, row: Mapping[str, Any]) -> str:
        self._last_seal = digest([self._last_seal, row])
        return json.dumps({**row, _SEAL: self._last_seal}) + "\n"


@dataclass(frozen=True)
class EarlierRun:
    """A run of an earlier command, with the environment behind its `strict_sha`."""

    run: Run
    strict: dict[str, Any]


@dataclass
class SeriesJournal:
    """The finished runs of one case, a line each, behind a line that says what they belong to."""

    lines: SealedLines
    seed: int
    runs: dict[tuple[Any, ...], list[EarlierRun]] = field(default_factory=dict)
    failed: Mapping[RunOutcome, int] = field(default_factory=dict)
    """How often launches of earlier commands failed, by outcome; they are launched again."""

    def take(self, spec: RunSpec, config_sha: str) -> EarlierRun | None:
        """Take the earlier run that replaces this launch out of the journal; None if there is none."""
        runs = self.runs.get((spec.variant, spec.role, spec.pair, config_sha))
        return runs.pop(0) if runs else None

    def lacking(self, launches: Sequence[tuple[RunSpec, str]]) -> list[RunSpec]:
        """The launches, given with the hashes of their configurations, for which the journal has no earlier run."""
        available = {key: len(runs) for key, runs in self.runs.items()}
        out = []
        for spec, config_sha in launches:
            key = (spec.variant, spec.role, spec.pair, config_sha)
            available[key] = available.get(key, 0) - 1
            if available[key] < 0:
                out.append(spec)
        return out

    @property
    def spent_s(self) -> float:
        """Seconds of the earlier runs that are not taken yet."""
        return sum(k.run.wall_s for runs in self.runs.values() for k in runs)

    def add(self, run: Run, strict: Mapping[str, Any]) -> None:
        """Note a run that has just ended.

        Raises:
            StoreError: it cannot be written.
        """
        self.lines.add({"run": run.model_dump(mode="json"), "strict": strict})

    def note_failure(self, run: Run) -> None:
        """Note that a launch failed; no later command takes it for a run.

        Raises:
            StoreError: as `add`.
        """
        self.lines.add({"failed": run.outcome})


class Journal:
    """The folder of one command; `place` names the machines that it runs on now, `exported` the variables that its ranks have from it.

    Raises:
        StoreError: the folder cannot be made, another command is using it, or its list of verdicts cannot be read.
    """

    def __init__(self, folder: Path, place: Sequence[str], exported: Mapping[str, str] | None = None) -> None:
        """Take the folder for this process, and read the verdicts that it holds.

        Raises:
            StoreError: as the class says.
        """
        self.folder = folder
        self.place = list(place)
        self.exported = dict(exported or {})
        try:
            files.make_folder(folder)
            if who := files.take(folder):
                # Their runs would be mixed with these, and disturb them.
                raise StoreError(f"the journal {folder} is in use by {who}; wait until that has ended, or name another folder")
            self._settled = SealedLines(folder / _SETTLED)
            rows = self._settled.read()
            if self._settled.unreadable_midway:
                raise ValueError(f"line {len(rows) + 1} of {_SETTLED} is not a journal's")
            self.settled = {key: Path(os.path.normpath(folder.absolute() / path)) for row in rows for key, path in row.items()}
            if rows:
                self._settled.replace(rows)  # or the next verdict would be added to half a line
        except (OSError, ValueError, AttributeError, TypeError) as e:
            raise StoreError(f"the journal {folder} cannot be used: {e}; name another folder, or remove it to start over") from e

    def remove(self) -> None:
        """Delete the journal; called when nothing is left to continue."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self, paths: Mapping[str, Path]) -> None:
        """Note where the records of a case's claims lie, relative to the journal: both folders may be moved together."""
        self._settled.add({key: os.path.relpath(path, self.folder) for key, path in paths.items()})

    def outcomes(self, tasks: Sequence[Task], case: Case | None, profile: str | None, pairs: int | None) -> list[store.Outcome]:
        """One case's outcomes as the stopped command left them; none unless it had settled all of these claims and their records are still
        there.
        """
        paths = [self.settled.get(task.name) for task in tasks]
        stored = [store.Outcome(store.load(p), p, t.counts) for p, t in zip(paths, tasks, strict=True) if p is not None and p.is_file()]
        current = [answers(o.evidence.measured, t.claim, case, profile, pairs) for o, t in zip(stored, tasks, strict=False)]
        return stored if len(current) == len(tasks) and all(current) else []

    def series(self, case: Case, profile: str, seed: int, variants: int | None = None) -> SeriesJournal:
        """The journal of a case's series: what it holds from before, or a new one with this seed. `variants` are launched in a block, if
        not the case's own.

        Raises:
            StoreError: it cannot be written, or its runs had other variables.
        """
        path = self.folder / f"{case.id}.jsonl"
        runs_of = case.model_dump(mode="json", exclude={"budget": {"minutes"}})  # more minutes change no run
        header = {"case": digest(runs_of, 16), "profile": profile, "place": self.place}
        lines = SealedLines(path)
        rows = lines.read()
        if rows and {k: rows[0].get(k) for k in header} == header and isinstance(rows[0].get("seed"), int):
            earlier = _whole_groups([k for k in map(_earlier_run, rows[1:]) if k], variants or len(case.variants))
            _check_exported(path, rows[0].get("exported") if earlier else None, self.exported)
            failed = [outcome for row in rows[1:] for outcome in get_args(RunOutcome) if row.get("failed") == outcome]
            runs = [{"run": k.run.model_dump(mode="json"), "strict": k.strict} for k in earlier]
            lines.replace([rows[0] | {"exported": self.exported}, *({"failed": outcome} for outcome in failed), *runs])
            return SeriesJournal(lines, rows[0]["seed"], _by_launch(earlier), Counter(failed))
        lines.replace([header | {"seed": seed, "exported": self.exported}])
        return SeriesJournal(lines, seed)


def of_command(results: Path, words: Sequence[str], place: Sequence[str], exported: Mapping[str, str]) -> Journal | None:
    """The journal that a command keeps by itself, in `<results>/journal/`; None where the same command is at work there, or the folder
    cannot be written.

    A command that is stopped leaves it, and the same command goes on from it within a day; one that ends removes it.
    """
    parent = results / "journal"
    folder = parent / digest([*words, *place, sorted(exported.items())], 16)
    for old in parent.glob("*"):
        if time.time() - old.stat().st_mtime > _JOURNAL_LIFE_S:
            shutil.rmtree(old, ignore_errors=True)
    try:
        return Journal(folder, place, exported)
    except (OSError, StoreError):
        return None


def answers(measured: Measured, claim: ClaimRef | None, case: Case | None, profile: str | None, pairs: int | None) -> bool:
    """Whether a record of before is about this claim as it stands now, by this case, on this profile and with as many pairs: all may have
    been mended since.
    """

    def content(of: ClaimRef | None) -> dict[str, Any] | None:
        return None if of is None else of.model_dump(mode="json", exclude={"card_sha"})

    was, plan = None if measured.case is None else measured.case.sha, measured.plan
    if profile not in (None, measured.profile) and measured.profile is not None:
        return False
    if plan is not None and plan.stopped == "pairs" and plan.pairs_limit != pairs:
        return False
    return content(measured.claim) == content(claim) and was == (None if case is None else digest(case.model_dump(mode="json"), 16))


def cut_by_time(measured: Measured, derived: Derived) -> bool:
    """Whether the budget ended the series, so that the same command can continue it."""
    plan = measured.plan
    before_pairs = not (plan and plan.order) and derived.verdict.reason == "budget"
    return before_pairs or (plan is not None and plan.stopped == "budget")


def _check_exported(path: Path, then: Any, now: Mapping[str, str]) -> None:
    """Runs with `CUDA_LAUNCH_BLOCKING` and runs without it form no series. A journal from before variables were noted has no `then`."""
    if not isinstance(then, dict) or then == now:
        return
    differ = [f"{k}={then[k]}" if k in then else f"no {k}" for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)]
    raise StoreError(
        f"the runs in {path} had {', '.join(differ)}; set the environment as it was then, or name another folder with --journal"
    )


def _whole_groups(runs: Sequence[EarlierRun], variants: int) -> list[EarlierRun]:
    """All but the last pair or block, where that was cut."""
    if not runs:
        return []
    last = runs[-1].run
    count = sum(1 for _ in itertools.takewhile(lambda k: (k.run.role, k.run.pair) == (last.role, last.pair), reversed(runs)))
    # A variant that does not fit, as its claim says, is not launched again: later blocks are whole without it.
    dead = {k.run.variant for k in runs[:-count] if k.run.outcome != "ok"}
    size = {"aa": 2, "measure": max(1, variants - len(dead))}.get(last.role, 1)
    return list(runs[:-count] if count % size else runs)


def _by_launch(runs: Sequence[EarlierRun]) -> dict[tuple[Any, ...], list[EarlierRun]]:
    by_launch = defaultdict(list)
    for k in runs:
        by_launch[k.run.variant, k.run.role, k.run.pair, k.run.config_sha].append(k)
    return dict(by_launch)


def _earlier_run(line: Mapping[str, Any]) -> EarlierRun | None:
    try:
        strict = line.get("strict")
        return EarlierRun(Run.model_validate(line.get("run")), strict if isinstance(strict, dict) else {})
    except ValidationError:
        return None
