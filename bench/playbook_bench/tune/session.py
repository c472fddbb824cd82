"""A tuning on this machine: launches what the procedure asks for, keeps each observation at once, and ends with a comparison on fresh
launches.

The folder of a tuning holds its journal, a sealed line for each event, and its record. The same tuning goes on from the journal; the
record replays.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from playbook import __version__, files
from playbook.errors import ConfigError, StoreError
from playbook.records.evidence import Run, digest
from playbook.records.machine import kind
from playbook_bench.judge.effects import percent
from playbook_bench.launch import local
from playbook_bench.launch.forked import closing
from playbook_bench.machine import detect, requirements
from playbook_bench.run import ab, confirm, store
from playbook_bench.run.journal import Journal, SealedLines
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.series import Series
from playbook_bench.tune.knobs import Ranked
from playbook_bench.tune.procedure import Event, Hurry, Launch, Setup, Tuning
from playbook_bench.tune.record import SCHEMA, decision_row, event_of, plain
from playbook_bench.tune.subject import CASE_ID, Launcher, Subject

_JOURNAL, _FINAL = "events.jsonl", "final"
_DISCARDED = 2
"""Launches of the final comparison, one of each side."""

Ended = Literal["complete", "budget", "interrupted", "failed"]


@dataclass(frozen=True)
class Plan:
    """All that a tuning is made of."""

    subject: Subject
    setup: Setup
    goal: str
    metric: str
    command: str
    """The command line that repeats it."""
    never: Sequence[Ranked] = ()
    """Candidates that are not launched, since they cannot run."""

    @property
    def key(self) -> str:
        """What tells one tuning from another: a resumed command has to ask for the same."""
        asked = [self.subject.case.model_dump(mode="json"), self.subject.profile, plain(self.setup), self.goal]
        return digest([*asked, self.subject.knobs.in_effect()], 16)

    @property
    def final_pairs(self) -> int:
        """Of launches, at the first look of the final comparison."""
        return self.subject.case.budget.pairs[0]


@dataclass
class Session:
    """A tuning with what it launched and what came of it."""

    plan: Plan
    folder: Path
    tuning: Tuning
    ended: Ended = "budget"
    seconds: float = 0.0
    """Of all launches, those of earlier commands included."""
    final: ab.AbAnswer | None = None
    """The final set against the start, on launches of its own."""
    record: str = ""
    """Path of the final comparison's record."""
    sentence: str = ""
    """What that comparison says in words."""
    events: list[dict[str, Any]] = field(default_factory=list)
    start: Run | None = None
    """The first launch of the start, of an earlier command."""


def run(plan: Plan, options: Options, progress: Progress, *, resume: bool) -> Session:
    """Tune up to the end, the budget, or Ctrl-C. `resume` goes on from the journal where there is one, and leaves off at the end of the
    budget instead of leaving candidates out.

    Raises:
        ConfigError: the settings cannot be resolved.
        StoreError: the journal cannot be used, is of another place, or cannot be written.
        LaunchError: a launch cannot be started.
    """
    folder = options.results / "tune" / plan.key
    machine = detect.detect()
    header = {
        "schema": SCHEMA,
        "key": plan.key,
        "machine": list(kind(requirements.restrict(machine, plan.subject.profile))),
        "packages": detect.versions(),
        "exported": detect.exported(),
        "seed": plan.setup.seed,
        "forks": options.forks,
    }
    journal, session = _open_journal(folder, header, plan, resume=resume)
    case, profile, seeded = plan.subject.case, plan.subject.profile, replace(options, seed=plan.setup.seed)
    progress.machine(machine)
    try:
        with local.interruptible(resumes=True), closing(options.launcher):
            if warning := detect.claim(requirements.restrict(machine, profile)):
                progress.note(warning)
            with Series.open(CASE_ID, case, profile, machine, {}, seeded, progress, deadline=options.deadline) as running:
                _launched(session, running, journal, options.deadline, leaves_out=not resume)
        if session.tuning.problem:
            session.ended = "failed"
        elif session.tuning.due is None:
            session.ended = "complete"
            if session.tuning.kept:
                _compare(session, options, progress)
    except local.Interrupted:
        session.ended = "interrupted"
    return session


def _open_journal(folder: Path, header: Mapping[str, Any], plan: Plan, *, resume: bool) -> tuple[SealedLines, Session]:
    """The tuning's journal and a session in which its events were replayed.

    Without `resume` the folder is emptied first. A journal whose tuning ended in a problem starts anew. Another machine of the same kind
    goes on: launches are compared in a drawn order, and what its host adds is noise.

    Raises:
        StoreError: another command uses the folder, the journal belongs to another tuning, a line in its middle cannot be read, or an event
        is not the one that was due.
    """
    _take(folder)
    if not resume:
        _empty(folder)
    journal = SealedLines(folder / _JOURNAL)
    rows = journal.read() if resume else []
    session = Session(plan, folder, Tuning(plan.setup))
    then = rows[0] if rows else header
    if differ := [f"{k}: {_difference(then.get(k), header[k])}" for k in header if then.get(k) != header[k]]:
        raise StoreError(f"the tuning in {folder} was begun with another {'; another '.join(differ)}; leave out --resume to begin again")
    for row in rows[1:]:
        _replay_event(session, row)
    if not rows or session.tuning.problem:  # its cause may be mended by now
        rows, session = [dict(header)], Session(plan, folder, Tuning(plan.setup))
    journal.replace(rows)
    return journal, session


def _take(folder: Path) -> None:
    """Keep other commands out of the folder.

    Raises:
        StoreError: one is at work in it, or there can be no file in it.
    """
    try:
        files.make_folder(folder)
        who = files.take(folder)
    except OSError as e:
        raise StoreError(f"{folder} cannot be used: {e.strerror or e}; name another folder with --results") from e
    if who:
        raise StoreError(f"the same tuning goes on in {folder}, by {who}; wait until that has ended, or give another --seed")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != files.LOCK:
            path.unlink(missing_ok=True)


def _difference(then: Any, now: Any) -> str:
    """What differs, then and now; of variables and versions, those alone."""
    if not isinstance(then, dict):
        return f"{then}, now {now}"
    return ", ".join(
        f"{k} {then.get(k, 'unset')}, now {now.get(k, 'unset')}" for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)
    )


def _replay_event(session: Session, row: Mapping[str, Any]) -> None:
    """Add an event of a journal or a record.

    Raises:
        StoreError: it is not what was due.
    """
    due, number = session.tuning.due, len(session.events) + 1
    try:
        event, seconds = event_of(row), float(row.get("seconds") or 0.0)
        if row.get("run") is not None:
            session.start = session.start or Run.model_validate(row["run"])
    except (ValidationError, TypeError, ValueError) as e:
        why = e.errors(include_url=False)[0]["msg"] if isinstance(e, ValidationError) else e
        raise StoreError(f"event {number} of {session.folder} cannot be read: {why}; begin again without --resume") from e
    if due is None or row.get("launch") != plain(due):
        raise StoreError(f"event {number} of {session.folder} is not of the launch that was due; begin again without --resume")
    session.tuning.add(event)
    session.seconds += seconds
    session.events.append({**row, **({"seconds": seconds} if seconds else {})})


def _launched(session: Session, running: Series, journal: SealedLines, deadline: float | None, *, leaves_out: bool) -> None:
    """Launch what is due until nothing is, or the time is up."""
    tuning, launcher = session.tuning, Launcher(session.plan.subject, running, session.plan.metric)
    if session.start is not None:
        running.launched.append(session.start)  # the guards compare with it, and it says how many steps a launch has
    running.progress.series(CASE_ID, len(session.events) + expected(tuning))
    while (due := tuning.due) is not None:
        running.expected = len(running.launched) + expected(tuning)
        usual = _usual(session)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < usual:
            return
        if left is not None and leaves_out and not tuning.hurried and due.why == "candidate":
            needed = usual * (tuning.to_end + _DISCARDED + 2 * session.plan.final_pairs)
            if left < needed and not any(launch.why == "candidate" for launch, _ in tuning.launched):
                least, seed = math.ceil(session.seconds + needed + usual), session.plan.setup.seed
                raise ConfigError(
                    f"--budget leaves {left:.0f} s after the start's {len(tuning.launched)} launches; expected at least {needed:.0f}: one "
                    f"candidate, its proof and the comparison, at {usual:.1f} s a launch; give at least {least}s, or "
                    f"--resume --seed {seed}, which goes on from here as often as asked"
                )
            if left < needed:
                _note(session, journal, due, Hurry(), None)
                continue
        observation, run = launcher.launch(due, _in_words(due, tuning))
        _note(session, journal, due, observation, run)


def _in_words(due: Launch, tuning: Tuning) -> str:
    """What a launch tries."""
    if due.candidate:
        return "=".join(due.candidate)
    without = [knob for knob, _ in tuning.best if knob not in dict(due.settings)]
    if due.why in ("candidate", "proof") and without:
        return f"without {without[0]}"
    return {"best": "best so far", "proof": "all that looked better"}.get(due.why, "start")


def _note(session: Session, journal: SealedLines, due: Launch, event: Event, run: Run | None) -> None:
    row: dict[str, Any] = {"launch": plain(due), "observation": "hurry" if isinstance(event, Hurry) else plain(event)}
    if run is not None:
        row["seconds"] = run.wall_s
        if due.why == "warm_up" and run.outcome == "ok":
            row["run"] = run.model_dump(mode="json")
    journal.add(row)
    session.events.append(row)
    session.seconds += float(row.get("seconds") or 0.0)
    session.tuning.add(event)


def _usual(session: Session) -> float:
    """Seconds that three of four launches stay below; 0 before the first."""
    seconds = sorted(row["seconds"] for row in session.events if row.get("seconds")) or [0.0]
    return float(seconds[3 * len(seconds) // 4])


def expected(tuning: Tuning) -> int:
    """Launches to come, as far as one can tell: each waiting candidate once, and a round."""
    return 5 * len(tuning.waiting) // 4 + max(1, tuning.to_end)


def _compare(session: Session, options: Options, progress: Progress) -> None:
    """The final set against the start, as any two commands are compared."""
    plan = session.plan
    case = plan.subject.with_settings(session.tuning.best)
    case = case.model_copy(update={"budget": case.budget.model_copy(update={"minutes": ab.ALL_DAY_MINUTES}), "metric": plan.metric})
    journal = Journal(session.folder / _FINAL, detect.place(), detect.exported())
    settled = replace(
        options,
        profile=plan.subject.profile,
        seed=plan.setup.seed,
        journal=journal,
        settles=lambda measured, derived: ab.answer(derived, 0.0).verdict != "undecided",
    )
    (outcome,) = confirm.bench_run(case, settled, progress, plan.command)
    session.final = ab.answer(outcome.evidence.derived, 0.0)
    session.record, session.sentence = str(outcome.path), outcome.evidence.derived.verdict.sentence
    if session.final.verdict == "undecided" and outcome.evidence.measured.plan and outcome.evidence.measured.plan.stopped == "budget":
        session.ended = "budget"


# --- the answer ----------------------------------------------------------------------------------------------------------------------


def answer(session: Session) -> dict[str, Any]:
    """What came out, as plain data (`tune/1`)."""
    tuning, plan, final = session.tuning, session.plan, session.final
    complete = tuning.due is None
    rows = list(tuning.decisions.values())
    return {
        "schema": "tune/1",
        "goal": plan.goal,
        "kept": [decision_row(d) for d in rows if d.kept],
        "refused": [decision_row(d) for d in rows if not d.kept],
        "never": [{"knob": row.knob, "value": row.value, "reason": row.why} for row in plan.never],
        "undecided": [] if complete else [{"knob": k, "value": v} for k, v in plan.setup.candidates if (k, v) not in tuning.decisions],
        "final": None
        if final is None
        else {
            "verdict": final.verdict,
            "effect_percent": {"value": percent(final.effect), "low": percent(final.low), "high": percent(final.high)},
            "pairs": final.pairs,
            "record": session.record,
            "sentence": session.sentence,
        },
        "false_keep_percent": percent(plan.setup.alpha),
        "noise_percent": None if math.isnan(tuning.noise) else percent(tuning.noise),
        "provable_percent": None if math.isnan(tuning.noise) else percent(tuning.provable),
        "launches": len(tuning.launched),
        "seconds": round(session.seconds, 1),
        "ended": session.ended,
        "problem": tuning.problem,
        "settings": dict(tuning.best) if complete else {},
        "run": plan.subject.in_words(tuning.best) if complete else "",
        "command": plan.command,
    }


def write_record(session: Session) -> Path:
    """Write the record of a tuning into its folder: setup, events and answer, sealed.

    Raises:
        StoreError: it cannot be written.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "playbook": __version__,
        "case": session.plan.subject.case.model_dump(mode="json"),
        "profile": session.plan.subject.profile,
        "knobs": session.plan.subject.knobs.model_dump(mode="json"),
        "setup": plain(session.plan.setup),
        "events": session.events,
        "answer": answer(session),
    }
    path = session.folder / "record.json"
    store.replace(path, json.dumps({**content, "sha256": digest(content)}, indent=1) + "\n")
    return path
