"""A/A: one configuration against itself, so that a series knows how much this machine differs from itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from playbook.errors import ConfigError, LaunchError
from playbook.records.case import LAUNCHED_KINDS, load_case
from playbook.records.evidence import Run, Variant
from playbook_bench import metrics
from playbook_bench.judge import guards, statistics
from playbook_bench.launch import local
from playbook_bench.machine import detect, requirements
from playbook_bench.metrics import Metric
from playbook_bench.run import schedule, series
from playbook_bench.run.options import Options
from playbook_bench.run.series import Progress, Request, Series, Silent
from playbook_bench.variants import checkout
from playbook_bench.variants.resolve import resolve_all


@dataclass(frozen=True)
class Noise:
    """Result of an A/A: how much launches of one configuration differ."""

    case: str
    machine: str
    runs: Sequence[Run]
    metric: str
    rms_difference: float
    """Root mean square of the paired differences; for ratios of their logarithms, so about a share."""
    mean_difference: float
    """Of differences whose sign alternates from pair to pair, on the metric's scale."""
    contaminated: bool
    """Whether the pairs differ by more than noise explains."""


def run(case_id: str, options: Options | None = None, progress: Progress | None = None) -> Noise:
    """Measure a case's baseline, or its first variant, against itself.

    Raises:
        ConfigError: the case cannot run here, or fewer than four pairs are asked for.
        LaunchError: a run failed, or does not give the case's metric.
    """
    options = options or Options()
    pairs = schedule.AA_PAIRS if options.pairs is None else options.pairs
    if pairs < schedule.AA_PAIRS:
        raise ConfigError(f"an A/A of {pairs} pairs is too few to know a deviation; expected at least {schedule.AA_PAIRS}")
    case = load_case(case_id)
    machine = detect.detect()
    if case.kind not in LAUNCHED_KINDS:
        raise ConfigError(f"case '{case.id}' is of kind {case.kind} and launches nothing; there is no noise to measure")
    chosen = requirements.require_profile(case, machine, options.profile)
    row = metrics.get(case.metric or "")
    code = checkout.code_of(options.launcher, bool(case.command))
    journal = options.journal_of(["bench aa", case.id, str(pairs)], code)
    variants = resolve_all(case, chosen)
    deadline = time.monotonic() + 60 * case.budget.minutes * max(1, pairs // schedule.AA_PAIRS)
    request = Request(f"{case.id}-aa", case, chosen, machine, variants, options, progress or Silent(), journal=journal, deadline=deadline)
    with local.interruptible(resumes=journal is not None), Series.open(request) as running:
        running.expected = 1 + 2 * pairs
        running.progress.series(f"{case.id} A/A", running.expected)
        first = next(iter(case.variants))
        burn_in = running.run(schedule.burn_in([first])[0])
        runs = [burn_in] if burn_in.outcome != "ok" else measure(running, row, pairs, variant=first)
    _check(runs, pairs, running)
    if journal:
        journal.remove()
    differences = guards.aa_differences(runs, row)
    mean = sum(differences) / len(differences)
    deviation, contaminated = statistics.aa_deviation(differences), statistics.contaminated(differences, None)
    return Noise(case.id, machine.name, runs, row.name, deviation, mean, contaminated)


def measure(running: Series, metric: Metric, pairs: int, first: int = 0, variant: Variant = "baseline") -> list[Run]:
    """A/A launches; where one stands out, its pair is set aside, which takes its number, and one more pair is measured in its place.

    One bad launch in four pairs makes their deviation three times what the rest of them say. Where one stands out of the ten as well, all
    of them count: that is this machine's noise. So they do where the budget has no room for the pair. A launch that fails is the last one
    returned.
    """
    runs = series.measure_aa(running, pairs, first, variant)
    odd = guards.odd_pair(runs, metric) if len(runs) == 2 * pairs and all(r.outcome == "ok" for r in runs) else None
    if odd is None:
        return runs
    running.expected += 2
    running.progress.note(f"a launch of A/A pair {odd + 1} is unlike the others; the pair is measured again")
    more = series.measure_aa(running, 1, first + pairs, variant)
    cleaned = [*(r.model_copy(update={"pair": None}) if r.pair == odd else r for r in runs), *more]
    if len(more) < 2 or more[-1].outcome != "ok" or guards.odd_pair(cleaned, metric) is not None:
        return [*runs, *more]
    now = {r.run_id: r for r in cleaned}
    running.runs = [now.get(r.run_id, r) for r in running.runs]
    return cleaned


def _problem(runs: Sequence[Run], running: Series) -> str:
    """Why a run cannot be used for the noise of the case's metric, or nothing."""
    metric = metrics.get(running.case.metric or "")
    return next((p for r in runs if (p := r.outcome if r.outcome != "ok" else guards.complete(r, metric))), "")


def _check(runs: Sequence[Run], pairs: int, running: Series) -> None:
    bad = next((r for r in runs if r.outcome != "ok"), None)
    if bad is not None:
        raise LaunchError(f"the A/A stopped: run {bad.run_id} ended as {bad.outcome}: {bad.message[:500]}")
    if problem := _problem(runs, running):
        raise LaunchError(f"the A/A is of no use: {problem}")
    if len(runs) < 2 * pairs:
        raise LaunchError(f"the A/A stopped after {len(runs) // 2} of {pairs} pairs: the case's budget is spent")
