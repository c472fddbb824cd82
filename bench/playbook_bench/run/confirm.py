"""Tests claims and stores the evidence. In this order: targets, preflight, one series per case, a verdict per claim."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from playbook.cards import load as validate
from playbook.cards import model
from playbook.errors import ConfigError, PlaybookError, StoreError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import CaseRef, Derived, Evidence, Machine, Measured, Missing, Seconds, digest
from playbook.records.trace import TraceResult
from playbook_bench import metrics
from playbook_bench.judge import curve_rules, effects, verdict
from playbook_bench.launch import local
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import Launcher
from playbook_bench.launch.slurm import SrunLauncher
from playbook_bench.machine import detect, occupied, requirements
from playbook_bench.run import journal, schedule, series, store, tracing
from playbook_bench.run.journal import Journal, answers, cut_by_time
from playbook_bench.run.options import Options
from playbook_bench.run.replay import derive
from playbook_bench.run.series import Request, Series, Silent
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import Task, tasks_of, tasks_of_card
from playbook_bench.variants import checkout
from playbook_bench.variants.resolve import resolve_all

_TRACED = 1.5
"""How much longer a traced launch may take than a timed one, its table included."""
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
    options = options or Options()
    tasks = [task for target in targets for task in tasks_of(target) if task.asked or not options.campaign]
    # Each record names the command for its own claim; a card from elsewhere is only found by its path.
    from_file = any(t.endswith((".yaml", ".yml")) for t in targets)
    command = _words(["confirm", *targets], options) if from_file else ""
    return _run_all(tasks, options, progress or Quiet(), command)


def bench_run(
    case_id: str | Case, options: Options | None = None, progress: Progress | None = None, command: str | None = None
) -> list[Outcome]:
    """Run one case, by id or path: a verdict for each claim that names it, or the effect alone where none does. `command` is the command line that repeats it.

    Raises:
        PlaybookError, Interrupted: as `run`.
    """
    options = options or Options()
    if isinstance(case_id, Case):
        return _run_all([Task(None, case_id.id)], options, progress or Quiet(), command or "", {case_id.id: case_id})
    case = load_case(case_id)
    tasks = [t for card in validate.load_all().values() for t in tasks_of_card(card) if t.case == case.id] or [Task(None, case_id)]
    return _run_all(
        tasks, options, progress or Quiet(), command or _words(["bench", "run", case_id], options), {case.id: case, case_id: case}
    )


def _words(command: Sequence[str], options: Options, limits: bool = True, fork: bool = True) -> str:
    return shlex.join(["playbook", *command, *options.flags(limits), *["--fork"] * (fork and options.forks)])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The exit code for the claims that were asked for: 5 if any failed, else 1 if any is refuted, else 3 if any is inconclusive, else 0; 4 only when none applies."""
    codes = {EXIT_CODES[o.status] for o in outcomes if o.asked}
    return next((code for code in (5, 1, 3) if code in codes), 4 if codes == {4} else 0)


def _run_all(
    tasks: Sequence[Task], options: Options, progress: Progress, command: str, known: dict[str, Case] | None = None
) -> list[Outcome]:
    """Every task, grouped by case so that claims of one case share its runs; verdicts come back in the order of the tasks."""
    machine = detect.over_nodes(detect.detect(), options.nodes)
    requirements.restrict(machine, options.profile)  # a profile that is mistyped, or of other hardware, is a mistake and no verdict
    progress.machine(machine)
    loaded = dict(known or {})
    for name in {t.case for t in tasks if t.case} - loaded.keys():
        loaded[name] = load_case(name)
    for each in loaded.values():
        if each.kind in LAUNCHED_KINDS and (profile := requirements.choose_profile(each, machine, options.profile)):
            resolve_all(each, profile)  # what is wrong with one case's configuration is said before the runs of another
    for task in tasks:
        _check(task, loaded)
    by_default = options.journal is None
    if by_default:
        options = replace(options, journal=_default_journal(tasks, options, command, list(loaded.values())))
    outcomes: dict[int, Outcome] = {}
    goes_on, lost, began = False, "", datetime.now(UTC).isoformat()
    with local.interruptible(resumes=options.journal is not None), _closing(options.launcher):
        if options.nodes == 1 and (warning := occupied.claim(requirements.restrict(machine, options.profile))):
            progress.note(warning)
        for name, evidence in options.untraced.items():
            _trace(load_case(name), [evidence], options, progress)
        for wanted in sorted(
            dict.fromkeys(t.case for t in tasks), key=lambda name: not options.campaign and _is_timed(tasks, name, loaded, machine)
        ):
            # A case's first launch may take as long as this command's launches usually did, and would be cut by whoever gave the budget.
            usual = statistics.median([r.wall_s for o in outcomes.values() for r in o.evidence.measured.runs if r.started > began] or [0.0])
            if options.campaign and options.deadline is not None and time.monotonic() + usual >= options.deadline:
                break
            group = {i: t for i, t in enumerate(tasks) if t.case == wanted}
            case = loaded[wanted] if wanted else None
            found, left, problem = _run_case(list(group.values()), case, machine, options, progress, command)
            outcomes.update(zip(group, found, strict=True))
            goes_on, lost = goes_on or left, problem or lost
    if by_default and options.journal and not goes_on:
        options.journal.remove()
    if lost:
        raise StoreError(lost)
    return [outcomes[i] for i in sorted(outcomes)]


def _run_case(
    tasks: Sequence[Task], case: Case | None, machine: Machine, options: Options, progress: Progress, command: str
) -> tuple[list[Outcome], bool, str]:
    """Test one case's claims. Returns their outcomes, each printed before it is stored; whether some of the series is left to run; and why a record could not be stored, or ""."""
    outcomes, goes_on, lost = [], False, ""
    if kept := _from_before(tasks, case, options):
        for outcome, task in zip(kept, tasks, strict=True):
            outcomes.append(replace(outcome, asked=task.asked))
            progress.finished(outcomes[-1])
        return outcomes, False, ""
    for task, (measured, derived, seconds, cut) in zip(tasks, _settle(tasks, case, machine, options, progress), strict=True):
        evidence = store.evidence_of(measured, derived, command or _repeat(measured, options), seconds)
        progress.finished(Outcome(evidence, store.place(evidence, options.results), task.asked))
        path, problem = _keep(evidence, options.results)
        outcomes.append(Outcome(evidence, path, task.asked))
        goes_on |= cut or outcomes[-1].status == "error"  # a failure is no verdict: whoever has mended its cause runs it again
        lost = problem or lost
    if options.journal and not goes_on:
        options.journal.settle({_key(task): outcome.path for task, outcome in zip(tasks, outcomes, strict=True)})
    if case is not None and options.trace and not goes_on:
        _trace(case, [o.evidence for o in outcomes], options, progress)
    return outcomes, goes_on, lost


def _trace(case: Case, records: Sequence[Evidence], options: Options, progress: Progress) -> None:
    """Trace the variants once more where a timed verdict from GPUs has been reached: what its effect is made of. A trace changes no verdict."""
    measured = records[0].measured
    if not any(r.timed_on_gpus for r in records) or case.command or isinstance(options.launcher, SrunLauncher):
        return
    took = {r.variant: r.wall_s for r in measured.runs if r.outcome == "ok"}
    needed = _TRACED * sum(took.values())
    if options.deadline is not None and time.monotonic() + needed > options.deadline:
        progress.note(f"no time is left to trace its variants (about {needed:.0f} s): playbook bench trace {case.id} does")
        return
    try:
        found = tracing.run(
            case.id, profile=measured.profile, results=options.results, launcher=options.launcher, progress=progress.note, case=case
        )
    except PlaybookError as e:
        progress.note(f"no trace: {e}")
        return
    progress.traced(found)


def _default_journal(tasks: Sequence[Task], options: Options, command: str, cases: Sequence[Case]) -> Journal | None:
    """The journal of an earlier, stopped command that asked for the same, with the same code on the same machine."""
    asked = [command, *sorted(_key(t) for t in tasks), options.profile, options.pairs, options.seed, options.forks]
    hosts = options.launcher.allocation.hosts if isinstance(options.launcher, SrunLauncher) else detect.place()
    code = checkout.code_of(options.launcher, any(case.command for case in cases))
    if code is None:
        return None
    words = [*map(str, asked), *code]
    return journal.of_command(options.results, words, [*hosts, *["fork"] * options.forks], detect.exported())


def _keep(evidence: Evidence, results: Path) -> tuple[Path, str]:
    """Store a record, in the temporary folder where `results` cannot take it. Returns its path and what went wrong, or ""."""
    try:
        return store.write(evidence, results), ""
    except StoreError as e:
        path = store.write(evidence, Path(tempfile.mkdtemp(prefix="playbook-evidence-")))
        return path, f"{e}; the verdict above stands, and its record is {path}"


@contextlib.contextmanager
def _closing(launcher: Launcher) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(launcher, ForkLauncher):
            launcher.close()


def _from_before(tasks: Sequence[Task], case: Case | None, options: Options) -> list[Outcome]:
    """One case's outcomes as the stopped command left them; none unless it had settled all of its claims and their records are still there."""
    paths = [options.journal.settled.get(_key(t)) for t in tasks] if options.journal else []
    there = [Outcome(store.load(p), p) for p in paths if p is not None and p.is_file()]
    same = [answers(o.evidence.measured, t.claim, case, options.profile, options.pairs) for o, t in zip(there, tasks, strict=False)]
    return there if len(same) == len(tasks) and all(same) else []


def _key(task: Task) -> str:
    return f"{task.claim.card}/{task.claim.id}" if task.claim else task.case or ""


def _repeat(measured: Measured, options: Options) -> str:
    """The command that tests this claim alone."""
    claim = measured.claim
    return _words(
        ["confirm", f"{claim.card}/{claim.id}" if claim else ""], replace(options, profile=measured.profile), False, bool(measured.runs)
    )


def _is_timed(tasks: Sequence[Task], name: str | None, loaded: dict[str, Case], machine: Machine) -> bool:
    """Whether a case needs a whole series. Those come last, so that a short budget still settles everything that is cheap."""
    case = loaded[name] if name else None
    if case is None or case.kind not in LAUNCHED_KINDS:
        return False
    named = [t.claim.metric if t.claim else case.metric or "" for t in tasks if t.case == name]
    return any(not metrics.on(m, gpus=bool(machine.gpus)).deterministic for m in named)


def count_inapplicable(profile: str) -> tuple[int, int]:
    """Number of claims that `profile` cannot test on this machine, and number of all claims. Mechanism checks are not counted."""
    machine = detect.detect()
    tasks = [t for card in validate.load_all().values() for t in tasks_of_card(card) if t.claim and t.claim.mechanism_of is None]
    lacking = 0
    for task in tasks:
        case = load_case(task.case) if task.case else None
        fits = requirements.choose_profile(case, machine, profile) if case and case.profiles else None
        lacking += bool(_preflight(task, case, machine, fits, Options(profile)).missing)
    return lacking, len(tasks)


_Settled = tuple[Measured, Derived, Seconds, bool]
"""What a record is made of, and whether the series is unfinished, so that a second command with the same journal goes on with it."""


def _settle(tasks: Sequence[Task], case: Case | None, machine: Machine, options: Options, progress: Progress) -> list[_Settled]:
    """The verdicts of one case's claims: those that do not apply here at once, the rest from one series of runs."""
    profile = requirements.choose_profile(case, machine, options.profile) if case and case.profiles else None
    records = [_preflight(task, case, machine, profile, options) for task in tasks]
    todo = [i for i, r in enumerate(records) if not r.missing and case is not None and case.kind in LAUNCHED_KINDS]
    settled: dict[int, _Settled] = {i: (r, derive(r), Seconds(), False) for i, r in enumerate(records) if i not in todo}
    if todo and case is not None and profile is not None:
        judged = _run_series([records[i] for i in todo], case, machine, profile, options, progress)
        settled.update(zip(todo, judged, strict=True))
    return [settled[i] for i in range(len(tasks))]


def _preflight(task: Task, case: Case | None, machine: Machine, profile: str | None, options: Options) -> Measured:
    """The record of a claim before any run: what it asks, and what this machine lacks."""
    missing: list[Missing] = []
    kind: str = case.kind if case else task.claim.kind if task.claim else ""
    here = requirements.restrict(machine, profile)
    known = requirements.facts(here)
    if case is not None and (case.requires or case.kind in LAUNCHED_KINDS):
        missing += requirements.unmet_requirements(case.requires, trains=not case.command)
    if case is not None and case.kind in LAUNCHED_KINDS:
        if profile is None:
            wanted = f"profile {options.profile}" if options.profile else f"profile for {machine.name}"
            missing.append(Missing(reason="profile", detail=f"case {case.id} has no {wanted}; it has {', '.join(case.profiles)}"))
        else:
            found = resolve_all(case, profile).values()
            missing += [m for m in dict.fromkeys(m for r in found for m in r.missing()) if m not in missing]
            *_, last = found
            known = last.facts(here)
    if task.claim is not None and kind not in ("arithmetic", "invariant"):
        waive = task.claim.cpu_scope is not None and profile == detect.CPU
        missing = requirements.unmet_scope(task.claim.scope, known, waive) + missing
    if case is None and not missing:
        missing.append(Missing(reason="no_case", detail="no case puts this claim to the test yet"))
    content = None if case is None else CaseRef(id=case.id, sha=digest(case.model_dump(mode="json"), 16), content=case)
    return Measured(claim=task.claim, case=content, machine=here, profile=profile, facts=known, missing=missing, context=detect.context())


def _run_series(
    records: Sequence[Measured], case: Case, machine: Machine, profile: str, options: Options, progress: Progress
) -> list[_Settled]:
    """Run a series: discarded launches, then pairs. Each claim is judged at the looks, and keeps the record of the look that settled it."""
    settled: dict[int, _Settled] = {}
    # The case's minutes are for all of its launches, those of before included; `--budget` is for this command.
    request = Request(
        case.id,
        case,
        profile,
        machine,
        resolve_all(case, profile),
        options,
        progress,
        journal=options.journal,
        deadline=options.deadline,
        own_s=60 * case.budget.minutes,
    )
    with Series.open(request) as running:
        running.infeasible = frozenset(n for r in records if r.claim for n in curve_rules.named(r.claim.expect.infeasible))
        counted = all(_metric(r, case).deterministic for r in records)
        if not (counted and _counted(running, records)):
            _timed(running, records, settled, options)
        for i, record in enumerate(records):
            settled.setdefault(i, _judge(running, record))
    return [settled[i] for i in range(len(records))]


def _counted(running: Series, records: Sequence[Measured]) -> bool:
    """Launch each variant once, and a command's twice; False where launches of a command differ in what is counted, which then takes a series.

    What was launched counts as discarded there.
    """
    told = [_metric(record, running.case) for record in records]
    running.oom_is_data = any(metric.name == "fits" for metric in told)
    twice = bool(running.case.command) and not running.oom_is_data
    running.expected = len(running.variants) * (2 if twice else 1)
    running.progress.series(running.case.id, running.expected)
    if twice and not _burn_in(running):
        return True
    series.measure_pairs(running, lambda s, n: True, schedule.once(list(running.variants)))
    noisy = [m.name for m in told if not metrics.as_told(m, running.case, running.runs).deterministic]
    if noisy:
        running.progress.note(f"{', '.join(noisy)} differs between launches of one command: comparing it over pairs, as times are")
        running.runs = [r.model_copy(update={"role": "burn_in", "pair": None}) for r in running.runs]
    return not noisy


def _timed(running: Series, records: Sequence[Measured], settled: dict[int, _Settled], options: Options) -> None:
    """Run a series of a metric with noise: discarded launches, then pairs until every claim is settled."""
    looks, limit = running.plan.looks, running.plan.pairs_limit
    running.expected = schedule.launches(looks, limit, len(running.variants))
    running.progress.series(running.case.id, running.expected)
    if limit and limit > looks[-1]:
        running.progress.note(
            f"--pairs {limit} is more than the {looks[-1]} at which the case ends (its budget.pairs); {looks[-1]} are run at most"
        )

    def left() -> list[Derived]:
        """What is said so far of each claim that is not settled yet."""
        out = []
        for i, record in enumerate(records):
            if i not in settled:
                found = _judge(running, record)
                if _settles(found, options):
                    settled[i] = found
                else:
                    out.append(found[1])
        return out

    # The first run of each variant shows whether they can be compared and ran what they should; if not, no pair is spent on them.
    if not _burn_in(running) or not left():
        return
    series.note_if_short(running)

    def enough(s: Series, pairs: int) -> bool:
        return pairs in looks and ((pairs == looks[0] and not s.plan.extended and not _steady(s)) or not left())

    series.measure_pairs(running, enough)
    if running.plan.stopped == "decided" and not running.plan.extended and not settled and not _steady(running):
        running.progress.note("step time drifts inside the timed window; starting over once with a longer warm-up")
        running.extend()
        running.expected = len(running.launched) + len(running.alive) * looks[0]
        series.measure_pairs(running, enough)


def _settles(found: _Settled, options: Options) -> bool:
    reason = found[1].verdict.reason
    return options.settles(found[1]) if reason == "no_claim" else reason not in ("budget", "power")


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


def _judge(running: Series, record: Measured) -> _Settled:
    measured = running.measured().model_copy(update={"claim": record.claim, "context": record.context})
    derived = derive(measured)
    return measured, derived, series.totals(running.launched), cut_by_time(measured, derived) and not running.own_time


def _metric(record: Measured, case: Case) -> metrics.Metric:
    return metrics.on(record.claim.metric if record.claim else case.metric or "", gpus=bool(record.machine.gpus))


def _check(task: Task, loaded: dict[str, Case]) -> None:
    """Refuse a claim whose metric, margin or comparison does not fit its case, before any run.

    Raises:
        ConfigError: the claim and its case do not fit.
    """
    claim, case = task.claim, loaded[task.case] if task.case else None
    if claim is None or case is None or case.kind not in LAUNCHED_KINDS:
        return
    row = metrics.get(claim.metric)
    effects.threshold(row, claim.expect.margin)
    effects.bands(case, row)
    if claim.expect.op not in model.OPS[case.kind]:
        expected = ", ".join(model.OPS[case.kind])
        raise ConfigError(f"claim {claim.id}: '{claim.expect.op}' is no rule for a case of kind {case.kind}; expected one of {expected}")
    problems = [] if case.kind == "pair" else curve_rules.problems(claim.expect, list(case.variants), case.kind)
    if problems:
        raise ConfigError(f"claim {claim.id}, case {case.id}: {'; '.join(problems)}")
    for variant, told in (("baseline", claim.comparison.baseline), ("candidate", claim.comparison.candidate)):
        if told != case.compared(variant):
            raise ConfigError(f"claim {claim.id} and case {case.id} name different deltas for the {variant}; make them equal")
