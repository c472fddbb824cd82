"""One series, until each of its claims has a verdict. A claim is judged at the looks, and has the record of the look that settled it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from playbook.records.case import Case
from playbook.records.evidence import Derived, Machine, Measured, Seconds
from playbook_bench import metrics
from playbook_bench.judge import curve_rules, verdict
from playbook_bench.run import applicability, schedule, series
from playbook_bench.run.journal import Journal, cut_by_time
from playbook_bench.run.options import Options
from playbook_bench.run.replay import derive
from playbook_bench.run.series import Progress, Request, Series
from playbook_bench.variants.resolve import resolve_all


@dataclass(frozen=True)
class Settled:
    """What a record is made of."""

    measured: Measured
    derived: Derived
    seconds: Seconds = field(default_factory=Seconds)
    cut: bool = False
    """Whether the series is unfinished, so that a second command with the same journal goes on with it."""


def claims(
    records: Sequence[Measured], case: Case | None, machine: Machine, journal: Journal | None, options: Options, progress: Progress
) -> list[Settled]:
    """The verdicts of one case's claims: those that do not apply here at once, the rest from one series of runs."""
    launched = [record for record in records if applicability.is_launched(record)]
    if not launched or case is None or launched[0].profile is None:
        return [_at_once(record) for record in records]
    profile = launched[0].profile
    # The case's minutes are for all of its launches, those of before included; `--budget` is for this command.
    minutes, deadline = case.budget.minutes, options.deadline
    request = Request(case.id, case, profile, machine, resolve_all(case, profile), options, progress, journal, deadline, 60 * minutes)
    with Series.open(request) as running:
        judged = iter(_by_runs(running, launched, options.settles))
    return [next(judged) if applicability.is_launched(record) else _at_once(record) for record in records]


def _at_once(record: Measured) -> Settled:
    """The verdict of a claim that needs no run, or does not apply on this machine."""
    return Settled(record, derive(record))


def _by_runs(running: Series, records: Sequence[Measured], suffices: Callable[[Derived], bool]) -> list[Settled]:
    """The verdicts of the claims of a series: discarded launches, then pairs until all of them are settled.

    `suffices` says of an effect without a claim whether it is known well enough to stop.
    """
    settled: dict[int, Settled] = {}
    running.infeasible = frozenset(n for r in records if r.claim for n in curve_rules.named(r.claim.expect.infeasible))
    counted = all(_metric(r, running.case).deterministic for r in records)
    if not (counted and _counted(running, records)):
        _timed(running, records, settled, suffices)
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


def _timed(running: Series, records: Sequence[Measured], settled: dict[int, Settled], suffices: Callable[[Derived], bool]) -> None:
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
                if _settles(found, suffices):
                    settled[i] = found
                else:
                    out.append(found.derived)
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


def _settles(judged: Settled, suffices: Callable[[Derived], bool]) -> bool:
    reason = judged.derived.verdict.reason
    return suffices(judged.derived) if reason == "no_claim" else reason not in ("budget", "power")


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


def _judge(running: Series, record: Measured) -> Settled:
    measured = running.measured().model_copy(update={"claim": record.claim, "context": record.context})
    derived = derive(measured)
    return Settled(measured, derived, series.totals(running.launched), cut_by_time(measured, derived) and not running.own_time)


def _metric(record: Measured, case: Case) -> metrics.Metric:
    return metrics.on(record.claim.metric if record.claim else case.metric or "", gpus=bool(record.machine.gpus))
