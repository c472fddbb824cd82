"""Before a series is spent: A/A, one configuration against itself, so that a series knows how much this machine differs from itself; and
whether a case's activation proofs hold, by one short launch of each variant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from playbook.errors import ConfigError, LaunchError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Check, Observed, Run, Variant
from playbook_bench import metrics
from playbook_bench.judge import guards, statistics
from playbook_bench.judge.receipt import alike, judge_run
from playbook_bench.launch.local import LocalLauncher, interruptible
from playbook_bench.launch.outcome import read_run
from playbook_bench.machine import detect, requirements
from playbook_bench.run import schedule, series
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.variants import checkout
from playbook_bench.variants.resolve import Resolved, Runnable, resolve, resolve_all


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
    opened = series.Series.open(
        f"{case.id}-aa", case, chosen, machine, variants, options, progress or Progress(), journal=journal, deadline=deadline
    )
    with interruptible(resumes=journal is not None), opened as running:
        running.expected = 1 + 2 * pairs
        running.progress.series(f"{case.id} A/A", running.expected)
        first = next(iter(case.variants))
        burn_in = running.run(schedule.burn_in([first])[0])
        runs = [burn_in] if burn_in.outcome != "ok" else measure(running, row, pairs, variant=first)
    _check(runs, pairs, row)
    if journal:
        journal.remove()
    differences = guards.aa_differences(runs, row)
    mean = sum(differences) / len(differences)
    deviation, contaminated = statistics.aa_deviation(differences), statistics.contaminated(differences, None)
    return Noise(case.id, machine.name, runs, row.name, deviation, mean, contaminated)


def measure(running: series.Series, metric: metrics.Metric, pairs: int, first: int = 0, variant: Variant = "baseline") -> list[Run]:
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


def _check(runs: Sequence[Run], pairs: int, metric: metrics.Metric) -> None:
    if bad := next((r for r in runs if r.outcome != "ok"), None):
        raise LaunchError(f"the A/A stopped: run {bad.run_id} ended as {bad.outcome}: {bad.message[:500]}")
    if problem := next(filter(None, (guards.complete(r, metric) for r in runs)), ""):
        raise LaunchError(f"the A/A is of no use: {problem}")
    if len(runs) < 2 * pairs:
        raise LaunchError(f"the A/A stopped after {len(runs) // 2} of {pairs} pairs: the case's budget is spent")


_TIMED_STEPS = 1
_WARMUP_STEPS = 4
"""Enough for compilation and for the capture of graphs, which takes three; the observed step comes after the timed ones."""


@dataclass(frozen=True)
class Proof:
    """What one launch of a variant showed."""

    case: str
    variant: Variant
    outcome: str
    """`ok`, or how the launch ended instead (`oom`, `crash`, ...)."""
    message: str
    checks: list[Check]
    observed: Observed | None

    @property
    def ok(self) -> bool:
        """Whether the launch ended well and met every rule."""
        return self.outcome == "ok" and all(c.ok for c in self.checks)


def prove(
    case_ids: Sequence[str],
    *,
    profile: str | None = None,
    say: Callable[[Proof], None] = lambda proof: None,
) -> list[Proof]:
    """Launch each variant of each case once, in short, and judge its receipt by the case's rules; nothing is timed and nothing is stored.

    Of a gate's case, which names no candidate, the baseline alone is launched.

    Raises:
        ConfigError: a case launches nothing, or cannot run on this machine.
        FileError: there is no such case, or its file is invalid.
    """
    whole_machine = detect.detect()
    todo: list[tuple[Case, str, Runnable]] = []
    for case in map(load_case, case_ids):
        if case.kind not in LAUNCHED_KINDS:
            raise ConfigError(f"case '{case.id}' is of kind '{case.kind}' and launches nothing; it has no proofs to check")
        chosen = requirements.require_profile(case, whole_machine, profile)
        variants = {"baseline": resolve(case, "baseline", chosen)} if case.is_one_sided else resolve_all(case, chosen)
        todo += [(case, chosen, r) for r in variants.values()]
    proofs: list[Proof] = []
    with interruptible(), TemporaryDirectory(prefix="playbook-prove-") as folder:
        for i, (case, chosen, resolved) in enumerate(todo):
            machine = requirements.restrict(whole_machine, chosen)
            environment = {**detect.visible_devices(machine, chosen), **resolved.environment}
            threads = series.threads_per_rank(machine, [resolved])
            proofs.append(_launch(case, resolved, environment, threads, Path(folder) / str(i)))
            ended = [p for p in proofs if p.case == case.id and p.outcome == "ok"]
            more = alike(case, ended, [c for p in ended for c in p.checks])  # the launches so far may meet each other's rules too
            proofs[-1] = replace(proofs[-1], checks=[*proofs[-1].checks, *more])
            say(proofs[-1])
    return proofs


def _launch(case: Case, run: Runnable, environment: dict[str, str], threads: int, folder: Path) -> Proof:
    """Launch a variant once, shortened, and judge its receipt."""
    folder.mkdir()
    if isinstance(run, Resolved):
        environment = {"OMP_NUM_THREADS": str(threads), **environment}
        run = _shortened(run)
    ended = run.ready(folder.parent / "cache", proves=True).launch(
        LocalLauncher(), folder, environment, case.budget.launch_timeout_s, lambda step: None
    )
    if ended.outcome != "ok":
        return Proof(case.id, run.variant, ended.outcome, ended.message, [], None)
    try:
        observed = read_run(folder).fields.get("observed")
    except ValueError as e:
        return Proof(case.id, run.variant, "crash", f"the run's files cannot be read: {e}", [], None)
    proof = Proof(case.id, run.variant, "ok", "", [], observed)
    return replace(proof, checks=judge_run(case.activation, proof))


def _shortened(resolved: Resolved) -> Resolved:
    train = resolved.config.train
    warmup = min(train.warmup_steps, _WARMUP_STEPS)
    train = train.model_copy(update={"warmup_steps": warmup, "steps": min(train.steps, warmup + _TIMED_STEPS)})
    return replace(resolved, config=resolved.config.model_copy(update={"train": train}))
