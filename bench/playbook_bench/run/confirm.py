"""Tests claims and stores the evidence. In this order: tasks, what the machine lacks, a series for each case, a verdict for each claim, its
record, a trace.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from playbook.cards import load as cards
from playbook.errors import ExitCode, StoreError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Derived, Evidence, Machine, Measured, Seconds
from playbook_bench import metrics
from playbook_bench.judge import effects, verdict
from playbook_bench.judge.statistics import OUT_OF_REACH
from playbook_bench.launch import local
from playbook_bench.launch.forked import closing
from playbook_bench.machine import detect, requirements
from playbook_bench.run import schedule, series, store, targets, tracing
from playbook_bench.run.journal import Journal, cut_by_time
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.replay import derive
from playbook_bench.run.series import Series
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import Task, tasks_of, tasks_of_card
from playbook_bench.variants import checkout
from playbook_bench.variants.resolve import resolve_all

EXIT_CODES = {
    "confirmed": ExitCode.DONE,
    "measured": ExitCode.DONE,
    "refuted": ExitCode.REFUTED,
    "inconclusive": ExitCode.UNDECIDED,
    "not_applicable": ExitCode.INAPPLICABLE,
    "error": ExitCode.FAILED,
}


def run(targets: Sequence[str], options: Options | None = None, progress: Progress | None = None) -> list[Outcome]:
    """Test the claims of cards: `CARD` or `CARD/CLAIM` each. One evidence record per claim.

    Raises:
        PlaybookError: a target, card or case is invalid, or evidence cannot be written.
        Interrupted: Ctrl-C or SIGTERM, after every run has been ended.
    """
    tasks = [task for target in targets for task in tasks_of(target)]
    options = options or Options()
    if options.campaign:
        tasks = [task for task in tasks if task.counts]
    # Each record names the command for its own claim; a card from elsewhere is only found by its path.
    from_file = any(t.endswith((".yaml", ".yml")) for t in targets)
    return _confirm(tasks, {}, options, progress or Progress(), ["confirm", *targets] if from_file else [])


def bench_run(
    case_id: str | Case, options: Options | None = None, progress: Progress | None = None, command: str | None = None
) -> list[Outcome]:
    """Run one case, by id or path: a verdict for each claim that names it, or the effect alone where none does. `command` is the command
    line that repeats it.

    Raises:
        PlaybookError, Interrupted: as `run`.
    """
    options, progress = options or Options(), progress or Progress()
    if isinstance(case_id, Case):
        tasks, cases, words = [Task(None, case_id.id)], {case_id.id: case_id}, []
    else:
        case = load_case(case_id)
        tasks = [t for card in cards.load_all().values() for t in tasks_of_card(card) if t.case == case.id] or [Task(None, case_id)]
        cases, words = {case.id: case, case_id: case}, ["bench", "run", case_id]
    return _confirm(tasks, cases, options, progress, words, command)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The exit code for the claims that were asked for: 5 if any failed, else 1 if any is refuted, else 3 if any is inconclusive, else 0; 4
    only when none applies.
    """
    codes = {EXIT_CODES[o.status] for o in outcomes if o.counts}
    return next((code for code in (5, 1, 3) if code in codes), 4 if codes == {4} else 0)


def _confirm(
    tasks: Sequence[Task],
    loaded: Mapping[str, Case],
    options: Options,
    progress: Progress,
    words: Sequence[str],
    command: str | None = None,
) -> list[Outcome]:
    """Every task, grouped by case so that claims of one case share its runs; verdicts come back in the order of the tasks.

    Records name the `command`, or the one of these `words`, or else one for each claim.
    """
    machine = detect.over_nodes(detect.detect(), options.nodes)
    # A profile that is mistyped, or of other hardware, is a mistake and no verdict.
    restricted = requirements.restrict(machine, options.profile)
    progress.machine(machine)
    cases = targets.checked(tasks, loaded, machine, options.profile)
    code = checkout.code_of(options.launcher, any(case.command for case in cases.values()))
    command = command or (options.command(words) if words else "")
    identity = [command, *sorted(task.name for task in tasks), options.profile, options.pairs, options.seed, options.forks]
    journal = options.journal or options.journal_of(map(str, identity), code)
    groups = _groups(tasks, cases) if options.campaign else sorted(_groups(tasks, cases), key=lambda group: group.is_timed(machine))
    earlier = [journal.outcomes(group.tasks, group.case, options.profile, options.pairs) if journal else [] for group in groups]
    tested: list[_TestedGroup] = []
    began = datetime.now(UTC).isoformat()
    with local.interruptible(resumes=journal is not None), closing(options.launcher):
        if options.nodes == 1 and (warning := detect.claim(restricted)):
            progress.note(warning)
        for name, record in options.untraced.items():
            _trace(load_case(name), [record], options, progress)
        for group, outcomes in zip(groups, earlier, strict=True):
            # A case's first launch may take as long as this command's launches usually did, and would be cut by whoever gave the budget.
            if options.campaign and options.deadline is not None and time.monotonic() + _usual_s(tested, began) >= options.deadline:
                break
            for outcome in outcomes:
                progress.finished(outcome)
            tested.append(_TestedGroup(outcomes) if outcomes else _test(group, machine, journal, options, progress, command))
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
    groups = {name: _Group(cases[name] if name else None, [], []) for name in dict.fromkeys(task.case for task in tasks)}
    for place, task in enumerate(tasks):
        groups[task.case].tasks.append(task)
        groups[task.case].places.append(place)
    return list(groups.values())


@dataclass(frozen=True)
class _TestedGroup:
    """What has become of a group."""

    outcomes: list[Outcome]
    unfinished: bool = False
    """Whether some of its series is left to run."""
    problem: str = ""
    """Why a record could not be stored."""


def _test(group: _Group, machine: Machine, journal: Journal | None, options: Options, progress: Progress, command: str) -> _TestedGroup:
    """Test one case's claims. Each verdict is shown before it is stored."""
    tasks, case = group.tasks, group.case
    context = detect.context()  # once: it asks git
    records = [targets.record_of(task, case, machine, options.profile, context) for task in tasks]
    outcomes, unfinished, problem = [], False, ""
    for task, settled in zip(tasks, claims(records, case, machine, journal, options, progress), strict=True):
        line = command or options.repeated(settled.measured)
        evidence = store.evidence_of(settled.measured, settled.derived, line, settled.seconds)
        progress.finished(Outcome(evidence, store.place(evidence, options.results), task.counts))
        path, lost = store.keep(evidence, options.results)
        outcomes.append(Outcome(evidence, path, task.counts))
        unfinished |= settled.cut or outcomes[-1].status == "error"  # a failure is no verdict: whoever has mended its cause runs it again
        problem = lost or problem
    if journal and not unfinished:
        journal.settle({task.name: outcome.path for task, outcome in zip(tasks, outcomes, strict=True)})
    if case is not None and options.trace and not unfinished:
        _trace(case, [outcome.evidence for outcome in outcomes], options, progress)
    return _TestedGroup(outcomes, unfinished, problem)


def _trace(case: Case, records: Sequence[Evidence], options: Options, progress: Progress) -> None:
    if trace := tracing.follow_up(case, records, options, progress.note):
        progress.traced(trace)


def _usual_s(tested: Sequence[_TestedGroup], began: str) -> float:
    """How long this command's launches usually took; 0 before the first."""
    runs = [run for each in tested for outcome in each.outcomes for run in outcome.evidence.measured.runs]
    return statistics.median([run.wall_s for run in runs if run.started > began] or [0.0])


# One series, until each of its claims has a verdict. A claim is judged at the looks, and has the record of the look that settled it.


@dataclass(frozen=True)
class SettledClaim:
    """What a record is made of."""

    measured: Measured
    derived: Derived
    seconds: Seconds = field(default_factory=Seconds)
    cut: bool = False
    """Whether the series is unfinished, so that a second command with the same journal goes on with it."""


def claims(
    records: Sequence[Measured], case: Case | None, machine: Machine, journal: Journal | None, options: Options, progress: Progress
) -> list[SettledClaim]:
    """The verdicts of one case's claims: those that do not apply here at once, the rest from one series of runs."""
    launched = [record for record in records if targets.is_launched(record)]
    judged: Iterator[SettledClaim] = iter(())
    if launched and case is not None and (profile := launched[0].profile) is not None:
        # The case's minutes are for all of its launches, those of before included; `--budget` is for this command.
        with Series.open(
            case.id,
            case,
            profile,
            machine,
            resolve_all(case, profile),
            options,
            progress,
            journal=journal,
            deadline=options.deadline,
            own_s=60 * case.budget.minutes,
        ) as running:
            judged = iter(_by_runs(running, launched, options.settles))
    return [next(judged) if targets.is_launched(record) else SettledClaim(record, derive(record)) for record in records]


def _by_runs(running: Series, records: Sequence[Measured], suffices: Callable[[Measured, Derived], bool]) -> list[SettledClaim]:
    """The verdicts of the claims of a series: discarded launches, then pairs until all of them are settled.

    `suffices` says of an effect without a claim whether it is known well enough to stop.
    """
    settled: dict[int, SettledClaim] = {}
    running.infeasible = frozenset(n for r in records if r.claim for n in effects.variant_names(r.claim.expect.infeasible))
    counted = all(_metric(r, running.case).deterministic for r in records)
    if not (counted and _counted(running, records)):
        _timed(running, records, settled, suffices)
    for i, record in enumerate(records):
        settled.setdefault(i, _judge(running, record))
    return [settled[i] for i in range(len(records))]


def _counted(running: Series, records: Sequence[Measured]) -> bool:
    """Launch each variant once, and a command's twice; False where launches of a command differ in what is counted, which then takes a
    series.

    What was launched counts as discarded there.
    """
    rows = [_metric(record, running.case) for record in records]
    running.oom_is_data = any(metric.name == "fits" for metric in rows)
    twice = bool(running.case.command) and not running.oom_is_data
    running.expected = len(running.variants) * (2 if twice else 1)
    running.progress.series(running.case.id, running.expected)
    if twice and not _burn_in(running):
        return True
    series.measure_pairs(running, lambda s, n: "decided", schedule.once(list(running.variants)))
    noisy = [m.name for m in rows if not metrics.as_measured(m, running.case, running.runs).deterministic]
    if noisy:
        running.progress.note(f"{', '.join(noisy)} differs between launches of one command: comparing it over pairs, as times are")
        running.runs = [r.model_copy(update={"role": "burn_in", "pair": None}) for r in running.runs]
    return not noisy


def _timed(
    running: Series, records: Sequence[Measured], settled: dict[int, SettledClaim], suffices: Callable[[Measured, Derived], bool]
) -> None:
    """Run a series of a metric with noise: discarded launches, then pairs until every claim is settled or out of reach."""
    looks, limit = running.plan.looks, running.plan.pairs_limit
    running.expected = schedule.launches(looks, limit, len(running.variants))
    running.progress.series(running.case.id, running.expected)
    if limit and limit > looks[-1]:
        running.progress.note(
            f"--pairs {limit} is more than the {looks[-1]} at which the case ends (its budget.pairs); {looks[-1]} are run at most"
        )

    def open_claims() -> list[SettledClaim]:
        """The claims without a verdict, as the launches so far have them; those that have one are settled."""
        judged = {i: _judge(running, record) for i, record in enumerate(records) if i not in settled}
        settled.update((i, each) for i, each in judged.items() if _settles(each, suffices))
        return [each for i, each in judged.items() if i not in settled]

    # The first run of each variant shows whether they can be compared and ran what they should; if not, no pair is spent on them.
    if not _burn_in(running) or not open_claims():
        return
    series.note_if_short(running)
    drifted = False

    def enough(_: Series, pairs: int) -> str:
        nonlocal drifted
        if pairs not in looks:
            return ""
        drifted = pairs == looks[0] and not running.plan.extended and not _steady(running)
        if drifted or not (still_open := open_claims()):
            return "decided"
        return "out_of_reach" if pairs < looks[-1] and all(_out_of_reach(each, looks) for each in still_open) else ""

    series.measure_pairs(running, enough)
    if drifted:
        running.progress.note("step time drifts inside the timed window; starting over once with a longer warm-up")
        running.extend()
        running.expected = len(running.launched) + len(running.alive) * looks[0]
        series.measure_pairs(running, enough)


def _settles(judged: SettledClaim, suffices: Callable[[Measured, Derived], bool]) -> bool:
    reason = judged.derived.verdict.reason
    return suffices(judged.measured, judged.derived) if reason == "no_claim" else reason not in ("budget", "power")


def _out_of_reach(judged: SettledClaim, looks: Sequence[int]) -> bool:
    """Whether more launches are not expected to settle a claim on a pair: an exact metric is too near its margin, or, from the second look
    on, it would take over `OUT_OF_REACH` times the pairs of the case.
    """
    found, reason = judged.derived.comparison, judged.derived.verdict.reason
    if found is None or found.design == "deterministic":
        return reason == "power"
    return reason == "budget" and found.pairs > looks[0] and (found.pairs_needed or math.inf) > OUT_OF_REACH * looks[-1]


def _burn_in(running: Series) -> bool:
    """One discarded run per variant that has none. False where the budget is spent or a run fails that must not: the series then ends."""
    for spec in schedule.burn_in(v for v in running.variants if v not in {r.variant for r in running.runs}):
        if not running.has_time_for([spec]):
            return False
        run = running.run(spec)
        if run.outcome != "ok" and not running.tolerates(run):
            return False
    return bool(running.alive)


def _steady(running: Series) -> bool:
    return running.measured().sharing > 0 or verdict.steady(running.plan, running.runs, running.alive)


def _judge(running: Series, record: Measured) -> SettledClaim:
    measured = running.measured().model_copy(update={"claim": record.claim, "context": record.context})
    derived = derive(measured)
    return SettledClaim(measured, derived, series.totals(running.launched), cut_by_time(measured, derived) and not running.own_time)


def _metric(record: Measured, case: Case) -> metrics.Metric:
    return metrics.on(record.claim.metric if record.claim else case.metric or "", gpus=bool(record.machine.gpus))
