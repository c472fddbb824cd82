"""Tests claims and stores the evidence. In this order: tasks, what the machine lacks, a series for each case, a verdict for each claim, its record, a trace."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from playbook.cards import load as cards
from playbook.errors import StoreError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Evidence, Machine
from playbook.records.trace import TraceResult
from playbook_bench import metrics
from playbook_bench.launch import local
from playbook_bench.launch.forked import closing
from playbook_bench.machine import detect, occupied, requirements
from playbook_bench.run import applicability, series, settle, store, tracing
from playbook_bench.run.journal import Journal
from playbook_bench.run.options import Options
from playbook_bench.run.series import Silent
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import Task, tasks_of, tasks_of_card
from playbook_bench.variants import checkout

EXIT_CODES = {"confirmed": 0, "measured": 0, "refuted": 1, "inconclusive": 3, "not_applicable": 4, "error": 5}


class Progress(series.Progress, Protocol):
    """What `run` and `bench_run` report to: the events of a series, and each verdict."""

    def machine(self, machine: Machine) -> None:
        """Called once, before anything runs."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """A claim has its verdict."""
        ...

    def traced(self, trace: TraceResult) -> None:
        """The variants of the claims that were last finished have been traced."""
        ...


class Quiet(Silent):
    """No progress at all."""

    def machine(self, machine: Machine) -> None:
        """Nothing."""

    def finished(self, outcome: Outcome) -> None:
        """Nothing."""

    def traced(self, trace: TraceResult) -> None:
        """Nothing."""


def run(targets: Sequence[str], options: Options | None = None, progress: Progress | None = None) -> list[Outcome]:
    """Test the claims of cards: `CARD` or `CARD/CLAIM` each. One evidence record per claim.

    Raises:
        PlaybookError: a target, card or case is invalid, or evidence cannot be written.
        Interrupted: Ctrl-C or SIGTERM, after every run has been ended.
    """
    tasks = [task for target in targets for task in tasks_of(target)]
    options = options or Options()
    if options.campaign:
        tasks = [task for task in tasks if task.asked]
    # Each record names the command for its own claim; a card from elsewhere is only found by its path.
    from_file = any(t.endswith((".yaml", ".yml")) for t in targets)
    return _confirm(tasks, {}, options, progress or Quiet(), ["confirm", *targets] if from_file else [])


def bench_run(
    case_id: str | Case, options: Options | None = None, progress: Progress | None = None, command: str | None = None
) -> list[Outcome]:
    """Run one case, by id or path: a verdict for each claim that names it, or the effect alone where none does. `command` is the command line that repeats it.

    Raises:
        PlaybookError, Interrupted: as `run`.
    """
    options, progress = options or Options(), progress or Quiet()
    if isinstance(case_id, Case):
        return _confirm([Task(None, case_id.id)], {case_id.id: case_id}, options, progress, [], command)
    case = load_case(case_id)
    tasks = [t for card in cards.load_all().values() for t in tasks_of_card(card) if t.case == case.id] or [Task(None, case_id)]
    return _confirm(tasks, {case.id: case, case_id: case}, options, progress, ["bench", "run", case_id], command)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The exit code for the claims that were asked for: 5 if any failed, else 1 if any is refuted, else 3 if any is inconclusive, else 0; 4 only when none applies."""
    codes = {EXIT_CODES[o.status] for o in outcomes if o.asked}
    return next((code for code in (5, 1, 3) if code in codes), 4 if codes == {4} else 0)


def _confirm(
    tasks: Sequence[Task], known: Mapping[str, Case], options: Options, progress: Progress, words: Sequence[str], command: str | None = None
) -> list[Outcome]:
    """Every task, grouped by case so that claims of one case share its runs; verdicts come back in the order of the tasks.

    Records name the `command`, or the one of these `words`, or else one for each claim.
    """
    machine = detect.over_nodes(detect.detect(), options.nodes)
    # A profile that is mistyped, or of other hardware, is a mistake and no verdict.
    restricted = requirements.restrict(machine, options.profile)
    progress.machine(machine)
    cases = applicability.checked(tasks, known, machine, options.profile)
    code = checkout.code_of(options.launcher, any(case.command for case in cases.values()))
    command = command or (options.command(words) if words else "")
    asked = [command, *sorted(task.name for task in tasks), options.profile, options.pairs, options.seed, options.forks]
    journal = options.journal or options.journal_of(map(str, asked), code)
    groups = _groups(tasks, cases) if options.campaign else sorted(_groups(tasks, cases), key=lambda group: group.is_timed(machine))
    earlier = [journal.outcomes(group.tasks, group.case, options.profile, options.pairs) if journal else [] for group in groups]
    tested: list[_Tested] = []
    began = datetime.now(UTC).isoformat()
    with local.interruptible(resumes=journal is not None), closing(options.launcher):
        if options.nodes == 1 and (warning := occupied.claim(restricted)):
            progress.note(warning)
        for name, record in options.untraced.items():
            _trace(load_case(name), [record], options, progress)
        for group, outcomes in zip(groups, earlier, strict=True):
            # A case's first launch may take as long as this command's launches usually did, and would be cut by whoever gave the budget.
            if options.campaign and options.deadline is not None and time.monotonic() + _usual_s(tested, began) >= options.deadline:
                break
            for outcome in outcomes:
                progress.finished(outcome)
            tested.append(_Tested(outcomes) if outcomes else _test(group, machine, journal, options, progress, command))
    if options.journal is None and journal and not any(each.unfinished for each in tested):
        journal.remove()
    if problems := [each.problem for each in tested if each.problem]:
        raise StoreError(problems[-1])
    placed = {i: o for group, each in zip(groups, tested, strict=False) for i, o in zip(group.places, each.outcomes, strict=True)}
    return [placed[i] for i in sorted(placed)]


@dataclass(frozen=True)
class _Group:
    """The claims that one case settles, or that have none, with their places among those of the command."""

    case: Case | None
    tasks: list[Task]
    places: list[int]

    def is_timed(self, machine: Machine) -> bool:
        """Whether it needs a whole series. Those come last, so that a short budget still settles everything that is cheap."""
        if self.case is None or self.case.kind not in LAUNCHED_KINDS:
            return False
        named = [task.claim.metric if task.claim else self.case.metric or "" for task in self.tasks]
        return any(not metrics.on(name, gpus=bool(machine.gpus)).deterministic for name in named)


def _groups(tasks: Sequence[Task], cases: Mapping[str, Case]) -> list[_Group]:
    found = {name: _Group(cases[name] if name else None, [], []) for name in dict.fromkeys(task.case for task in tasks)}
    for place, task in enumerate(tasks):
        found[task.case].tasks.append(task)
        found[task.case].places.append(place)
    return list(found.values())


@dataclass(frozen=True)
class _Tested:
    """What has become of a group."""

    outcomes: list[Outcome]
    unfinished: bool = False
    """Whether some of its series is left to run."""
    problem: str = ""
    """Why a record could not be stored."""


def _test(group: _Group, machine: Machine, journal: Journal | None, options: Options, progress: Progress, command: str) -> _Tested:
    """Test one case's claims. Each verdict is shown before it is stored."""
    tasks, case = group.tasks, group.case
    records = [applicability.record_of(task, case, machine, options.profile) for task in tasks]
    outcomes, unfinished, problem = [], False, ""
    for task, settled in zip(tasks, settle.claims(records, case, machine, journal, options, progress), strict=True):
        line = command or options.repeated(settled.measured)
        evidence = store.evidence_of(settled.measured, settled.derived, line, settled.seconds)
        progress.finished(Outcome(evidence, store.place(evidence, options.results), task.asked))
        path, lost = store.keep(evidence, options.results)
        outcomes.append(Outcome(evidence, path, task.asked))
        unfinished |= settled.cut or outcomes[-1].status == "error"  # a failure is no verdict: whoever has mended its cause runs it again
        problem = lost or problem
    if journal and not unfinished:
        journal.settle({task.name: outcome.path for task, outcome in zip(tasks, outcomes, strict=True)})
    if case is not None and options.trace and not unfinished:
        _trace(case, [outcome.evidence for outcome in outcomes], options, progress)
    return _Tested(outcomes, unfinished, problem)


def _trace(case: Case, records: Sequence[Evidence], options: Options, progress: Progress) -> None:
    if trace := tracing.follow_up(case, records, options, progress.note):
        progress.traced(trace)


def _usual_s(tested: Sequence[_Tested], began: str) -> float:
    """How long this command's launches usually took; 0 before the first."""
    runs = [run for each in tested for outcome in each.outcomes for run in outcome.evidence.measured.runs]
    return statistics.median([run.wall_s for run in runs if run.started > began] or [0.0])
