"""The journal of a command: finished runs, and verdicts with their records, so that the same command continues after it was stopped.

A folder belongs to one command. Runs taken before and after a stop form one series only where the machines are the same ones; elsewhere
the series of the case that was under way starts over. A pair that the stop cut in two is run again whole: pairs are adjacent runs.
"""

from __future__ import annotations

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

_SETTLED = "settled.jsonl"
_KEPT_S = 86_400.0
"""Seconds for which a journal without `--journal` is kept for the same command to continue."""


@dataclass(frozen=True)
class Kept:
    """A run of an earlier command, with the environment behind its `strict_sha`."""

    run: Run
    strict: dict[str, Any]


@dataclass
class SeriesJournal:
    """The finished runs of one case, a line each, behind a line that says what they belong to."""

    path: Path
    seed: int
    kept: dict[tuple[Any, ...], list[Kept]] = field(default_factory=dict)
    failed: Mapping[RunOutcome, int] = field(default_factory=dict)
    """How often launches of earlier commands failed, by outcome; they are launched again."""

    def take(self, spec: RunSpec, config_sha: str) -> Kept | None:
        """Take the earlier run that replaces this launch out of the journal; None if there is none."""
        found = self.kept.get((spec.variant, spec.role, spec.pair, config_sha))
        return found.pop(0) if found else None

    def lacking(self, launches: Sequence[tuple[RunSpec, str]]) -> list[RunSpec]:
        """The launches, given with the hashes of their configurations, for which the journal has no earlier run."""
        left = {key: len(found) for key, found in self.kept.items()}
        out = []
        for spec, config_sha in launches:
            key = (spec.variant, spec.role, spec.pair, config_sha)
            left[key] = left.get(key, 0) - 1
            if left[key] < 0:
                out.append(spec)
        return out

    @property
    def spent_s(self) -> float:
        """Seconds of the earlier runs that are not taken yet."""
        return sum(k.run.wall_s for found in self.kept.values() for k in found)

    def add(self, run: Run, strict: Mapping[str, Any]) -> None:
        """Note a run that has just ended.

        Raises:
            StoreError: it cannot be written.
        """
        _append(self.path, {"run": run.model_dump(mode="json"), "strict": strict})

    def note_failure(self, run: Run) -> None:
        """Note that a launch failed; no later command takes it for a run.

        Raises:
            StoreError: as `add`.
        """
        _append(self.path, {"failed": run.outcome})


class Journal:
    """The folder of one command; `place` names the machines that it runs on now, `exported` the variables that its ranks have from it.

    Raises:
        StoreError: the folder cannot be made, another command is using it, or its list of verdicts cannot be read.
    """

    def __init__(self, folder: Path, place: Sequence[str], exported: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.place = list(place)
        self.exported = dict(exported or {})
        try:
            files.make_folder(folder)
            if who := files.take(folder):
                # Their runs would be mixed with these, and disturb them.
                raise StoreError(f"the journal {folder} is in use by {who}; wait until that has ended, or name another folder")
            text = (folder / _SETTLED).read_text(encoding="utf-8") if (folder / _SETTLED).exists() else ""
            whole = _whole_lines(text)
            self.settled = {
                key: Path(os.path.normpath(folder.absolute() / path))
                for line in whole.splitlines()
                for key, path in json.loads(line).items()
            }
            if whole != text:
                store.replace(folder / _SETTLED, whole)  # or the next verdict would be added to half a line
        except (OSError, ValueError, AttributeError, TypeError) as e:
            raise StoreError(f"the journal {folder} cannot be used: {e}; name another folder, or remove it to start over") from e

    def remove(self) -> None:
        """Delete the journal; called when nothing is left to continue."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self, paths: Mapping[str, Path]) -> None:
        """Note where the records of a case's claims lie, relative to the journal: both folders may be moved together."""
        _append(self.folder / _SETTLED, {key: os.path.relpath(path, self.folder) for key, path in paths.items()})

    def series(self, case: Case, profile: str, seed: int, variants: int | None = None) -> SeriesJournal:
        """The journal of a case's series: what it holds from before, or a new one with this seed. `variants` are launched in a block, if not the case's own.

        Raises:
            StoreError: it cannot be written, or its runs had other variables.
        """
        path = self.folder / f"{case.id}.jsonl"
        runs_of = case.model_dump(mode="json", exclude={"budget": {"minutes"}})  # more minutes change no run
        header = {"case": digest(runs_of, 16), "profile": profile, "place": self.place}
        lines = _lines(path)
        if lines and {k: lines[0].get(k) for k in header} == header and isinstance(lines[0].get("seed"), int):
            kept = _whole_groups([k for k in map(_kept, lines[1:]) if k], variants or len(case.variants))
            _check_exported(path, lines[0].get("exported") if kept else None, self.exported)
            failed = [outcome for line in lines[1:] for outcome in get_args(RunOutcome) if line.get("failed") == outcome]
            _rewrite(path, lines[0] | {"exported": self.exported}, kept, failed)
            return SeriesJournal(path, lines[0]["seed"], _by_launch(kept), Counter(failed))
        _rewrite(path, header | {"seed": seed, "exported": self.exported}, [], [])
        return SeriesJournal(path, seed)


def of_command(results: Path, words: Sequence[str], place: Sequence[str], exported: Mapping[str, str]) -> Journal | None:
    """The journal that a command keeps by itself, in `<results>/journal/`; None where the same command is at work there, or the folder cannot be written.

    A command that is stopped leaves it, and the same command goes on from it within a day; one that ends removes it.
    """
    parent = results / "journal"
    folder = parent / digest([*words, *place, sorted(exported.items())], 16)
    for old in parent.glob("*"):
        if time.time() - old.stat().st_mtime > _KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
    try:
        return Journal(folder, place, exported)
    except (OSError, StoreError):
        return None


def answers(measured: Measured, claim: ClaimRef | None, case: Case | None, profile: str | None, pairs: int | None) -> bool:
    """Whether a record of before is about this claim as it stands now, by this case, on this profile and with as many pairs: all may have been mended since."""

    def asked(of: ClaimRef | None) -> dict[str, Any] | None:
        return None if of is None else of.model_dump(mode="json", exclude={"card_sha"})

    was, plan = None if measured.case is None else measured.case.sha, measured.plan
    if profile not in (None, measured.profile) and measured.profile is not None:
        return False
    if plan is not None and plan.stopped == "pairs" and plan.pairs_limit != pairs:
        return False
    return asked(measured.claim) == asked(claim) and was == (None if case is None else digest(case.model_dump(mode="json"), 16))


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


def _whole_lines(text: str) -> str:
    """A file's lines without the last one, where a job that was killed, or a full disk, has left half of it."""
    *lines, last = text.split("\n")
    try:
        json.loads(last)
        lines.append(last)
    except ValueError:
        if last and not last.startswith("{"):
            return text
    return "".join(line + "\n" for line in lines)


def _whole_groups(kept: Sequence[Kept], variants: int) -> list[Kept]:
    """All but the last pair or block, where that was cut."""
    if not kept:
        return []
    last = kept[-1].run
    count = 0
    while count < len(kept) and (kept[-1 - count].run.role, kept[-1 - count].run.pair) == (last.role, last.pair):
        count += 1
    # A variant that does not fit, as its claim says, is not launched again: later blocks are whole without it.
    dead = {k.run.variant for k in kept[:-count] if k.run.outcome != "ok"}
    size = {"aa": 2, "measure": max(1, variants - len(dead))}.get(last.role, 1)
    return list(kept[:-count] if count % size else kept)


def _by_launch(kept: Sequence[Kept]) -> dict[tuple[Any, ...], list[Kept]]:
    found = defaultdict(list)
    for k in kept:
        found[k.run.variant, k.run.role, k.run.pair, k.run.config_sha].append(k)
    return dict(found)


def _kept(line: Mapping[str, Any]) -> Kept | None:
    try:
        strict = line.get("strict")
        return Kept(Run.model_validate(line.get("run")), strict if isinstance(strict, dict) else {})
    except ValidationError:
        return None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, up to the first line that is none: a job that was killed may leave half a line, a machine that lost power anything.

    Raises:
        StoreError: it is there and cannot be read; it is not written anew, for the runs in it may be had again.
    """
    out: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return out
    except OSError as e:
        raise StoreError(f"{path} cannot be read: {e.strerror or e}; try again, or name another folder with --journal") from e
    for line in lines:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(data, dict):
            break
        out.append(data)
    return out


def _rewrite(path: Path, header: Mapping[str, Any], kept: Sequence[Kept], failed: Sequence[RunOutcome]) -> None:
    """Replace a series' file atomically: neither a full disk nor a crash may lose the runs that it held."""
    rows = [
        header,
        *({"failed": outcome} for outcome in failed),
        *({"run": k.run.model_dump(mode="json"), "strict": k.strict} for k in kept),
    ]
    store.replace(path, "".join(json.dumps(row) + "\n" for row in rows))


def _append(path: Path, row: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
    except OSError as e:
        raise StoreError(f"{path} cannot be written: {e.strerror or e}") from e
