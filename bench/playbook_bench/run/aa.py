"""A/A: one configuration against itself, so that a series knows how much this machine differs from itself."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from playbook.errors import ConfigError, LaunchError
from playbook.paths import data_root
from playbook.records.case import LAUNCHED_KINDS, load_case
from playbook.records.consistency import NEIGHBOURHOOD
from playbook.records.evidence import Baseline, Derived, Run, Variant, noise_key, workload
from playbook_bench.judge import guards, metrics, statistics
from playbook_bench.judge.metrics import Metric
from playbook_bench.launch import local
from playbook_bench.machine import detect, requirements
from playbook_bench.machine.telemetry import Telemetry
from playbook_bench.run import checkout, journal, schedule, series, store
from playbook_bench.run.options import Options
from playbook_bench.run.series import Progress, Series, Silent
from playbook_bench.run.variants import resolve_all

LEAST_GPUS = 1
"""Of a machine on which series share an A/A: what disturbs a CPU comes and goes by the minute."""
_NOISY = 0.01
"""Deviation of pairs from which a stored A/A is asked whether the machine has become quieter."""
_QUIETER_ALPHA = 0.05
"""Error rate of the test whether the machine has become quieter: an A/A that is still right is measured again this often, which costs eight launches."""


@dataclass(frozen=True)
class Noise:
    """Result of an A/A: how much launches of one configuration differ."""

    baseline: Baseline
    path: Path | None
    """Where it is stored; None for one that was disturbed, which would blunt every later verdict on this machine."""
    metric: str
    deviation: float
    """Standard deviation of the paired differences around zero; for ratios of their logarithms, so about a share."""
    mean: float
    contaminated: bool


def run(case_id: str, options: Options | None = None, progress: Progress | None = None) -> Noise:
    """Measure a case's baseline, or its first variant, against itself and store it under `<results>/baselines/<machine>/`, unless it is contaminated.

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
    work = local.new_folder(options.results / "work", f"{case.id}-aa")
    code = checkout.code_of(options.launcher, bool(case.command))
    words = ["bench aa", case.id, str(pairs), *(code or [])]
    kept = None if code is None else journal.of_command(options.results, words, detect.place(), detect.exported())
    with local.interruptible(resumes=kept is not None), Telemetry(machine, chosen, work) as telemetry:
        running = Series(
            case=case,
            profile=chosen,
            machine=requirements.restrict(machine, chosen),
            variants=resolve_all(case, chosen),
            plan=schedule.plan(case, secrets.randbelow(2**31), None, None),
            launcher=options.launcher,
            work=work,
            cache=options.results / "cache",
            progress=progress or Silent(),
            deadline=time.monotonic() + 60 * case.budget.minutes * max(1, pairs // schedule.AA_PAIRS),
            telemetry=telemetry,
            expected=1 + 2 * pairs,
            journal=kept.series(case, chosen, 0, 1) if kept else None,
        )
        running.progress.series(f"{case.id} A/A", running.expected)
        first = next(iter(case.variants))
        burn_in = running.run(schedule.burn_in([first])[0])
        runs = [burn_in] if burn_in.outcome != "ok" else measure(running, row, pairs, variant=first)
    (work / "telemetry.csv").unlink(missing_ok=True)
    _check(runs, pairs, running)
    if kept:
        kept.remove()
    if not any(work.iterdir()):
        work.rmdir()
    differences = guards.aa_differences(runs, row)
    mean = sum(differences) / len(differences)
    baseline, contaminated = _baseline(running, runs), statistics.contaminated(differences, None)
    path = None if contaminated else store.write_baseline(baseline, options.results / "baselines")
    return Noise(baseline, path, row.name, statistics.aa_deviation(differences), mean, contaminated)


def measure(running: Series, metric: Metric, pairs: int, first: int = 0, variant: Variant = "baseline") -> list[Run]:
    """A/A launches; where one stands out, its pair is set aside, which takes its number, and one more pair is measured in its place.

    One bad launch in four pairs makes their deviation three times what the rest of them say. Where one stands out of the ten as well, all
    of them count: that is this machine's noise. So they do where the budget has no room for the pair. A launch that fails is the last one returned.
    """
    runs = series.measure_aa(running, pairs, first, variant)
    odd = guards.odd_pair(runs, metric) if len(runs) == 2 * pairs and all(r.outcome == "ok" for r in runs) else None
    if odd is None:
        return runs
    running.expected += 2
    running.progress.note(f"a launch of A/A pair {odd + 1} is unlike the others; the pair is measured again")
    more = series.measure_aa(running, 1, first + pairs, variant)
    left = [*(r.model_copy(update={"pair": None}) if r.pair == odd else r for r in runs), *more]
    if len(more) < 2 or more[-1].outcome != "ok" or guards.odd_pair(left, metric) is not None:
        return [*runs, *more]
    now = {r.run_id: r for r in left}
    running.runs = [now.get(r.run_id, r) for r in running.runs]
    return left


def ensure(running: Series, folder: Path) -> bool:
    """Give the series its A/A: a stored one that a fresh pair agrees with, else one measured now.

    A fresh pair that differs more than the stored A/A allows shows that the machine is not as quiet as it was: the A/A is then measured
    anew, and the pair that showed it stays in it, so that the floor rises with what was seen. So is a stored A/A in which one launch stands out:
    it would hide effects until it expires.
    On GPUs an A/A of the neighbourhood serves as it is, without a fresh pair: see `_neighbour`.
    False where a run fails or does not give the case's metric, or where the budget does not hold them: each ends the series.

    The burn-in of the first variant must have run: it tells the environment that a stored A/A must share.
    """
    first = next(r for r in running.runs if r.variant == running.alive[0])
    key, metric = noise_key(first, running.strict), metrics.get(running.case.metric or "")
    found = store.find_baseline([folder, data_root("baselines")], running.machine, key, detect.surroundings(running.machine))
    if found is not None and running.journal and running.journal.holds(found.runs):
        return _adopt(running, found, first.variant)
    if near := _neighbour(running, first, folder):
        running.aa = near
        running.expected = schedule.launches(running.plan.looks, running.plan.pairs_limit, 0, len(running.variants))
        _say_if_short(running, 0, first.variant)
        running.progress.note(f"the A/A of {near.case}, measured here at {near.created[11:16]} UTC, serves this series too")
        return True
    running.aa = found
    _say_if_short(running, schedule.AA_PAIRS if running.aa is None else schedule.FRESH_AA_PAIRS, first.variant)
    fresh: list[Run] = []
    if running.aa is not None:
        due = _fresh_pairs(running)
        fresh = series.measure_aa(running, due, variant=first.variant)
        if len(fresh) < 2 * due or _problem(fresh, running):
            return False
        if _contradicts(fresh, running):
            running.progress.note("the machine differs more from itself than the stored A/A says; measuring it anew")
        elif _quieter(fresh, running):
            running.progress.note("the machine differs less from itself than the stored A/A says; measuring it anew")
            # They stay in the record as discarded launches, so that its total is that of its launches.
            discarded = [r.model_copy(update={"role": "burn_in", "pair": None}) for r in fresh]
            running.runs, fresh = [*running.runs[: -len(fresh)], *discarded], []
        elif guards.odd_pair(running.aa.runs, metric) is not None:
            running.progress.note("one launch of the stored A/A is unlike the others; measuring it anew")
        else:
            return True
        running.expected += 2 * schedule.AA_PAIRS
    return _measure(running, folder, fresh)


def borrowed(running: Series) -> bool:
    """Whether the series relies on the A/A of another configuration."""
    return running.aa is not None and not {r.config_sha for r in running.aa.runs} & {r.config_sha for r in running.runs}


def binds(found: Derived) -> bool:
    """Whether the A/A holds more noise than the pairs of a comparison show.

    Only then is an A/A of the series' own worth its eight launches: elsewhere four more pairs cost as much and decide more (`tools/simulate/verdicts.py`).
    """
    if found.comparison is not None:
        return not statistics.is_noisier(found.comparison.deviation or 0.0, (-1.0, 1.0), found.comparison.floor or 0.0)
    if found.curve is None:
        return False
    floor, contrasts = found.curve.floor or 0.0, found.curve.contrasts
    return any(not statistics.is_noisier(c.deviation or 0.0, list(c.weights.values()), floor) for c in contrasts)


def own(running: Series, folder: Path) -> bool:
    """Give a series an A/A of its own in place of its neighbour's; False as `ensure`."""
    running.expected += 2 * schedule.AA_PAIRS
    running.progress.note("left open by the noise of its neighbourhood, which its pairs do not show; measuring its own")
    return _measure(running, folder, [])


def _measure(running: Series, folder: Path, fresh: Sequence[Run]) -> bool:
    """Measure the A/A of a series and store it; `fresh` are its last runs, which stay in it."""
    before, metric = len(running.runs) - len(fresh), metrics.get(running.case.metric or "")
    runs = measure(running, metric, schedule.AA_PAIRS, len(fresh) // 2, running.alive[0])
    if len(runs) < 2 * schedule.AA_PAIRS or _problem(runs, running):
        return False
    running.runs = running.runs[:before]
    running.aa = _baseline(running, [*fresh, *runs])
    alike = len({noise_key(r, running.strict) for r in running.aa.runs}) == 1
    if alike and not statistics.contaminated(_differences(running.aa.runs, running), None):
        # A disturbed A/A, or one of forked ranks and fresh ones, voids this series alone; stored, it would blunt every later one.
        store.write_baseline(running.aa, folder)
    return True


def _neighbour(running: Series, first: Run, folder: Path) -> Baseline | None:
    """The newest A/A of the same workload that was measured in this place within `NEIGHBOURHOOD` before the series began; None where there is none to rely on.

    Its noise is that of another configuration. No verdict is wrong more often for it: pairs that vary more than the A/A says are held to their
    own deviation (`statistics.intervals`), and quieter ones that it leaves open at the first look get an A/A of their own. Only where ratios are compared.
    A series that goes on later finds the one that it began with.
    """
    metric = metrics.get(running.case.metric or "")
    if running.machine.gpus < LEAST_GPUS or metric.scale != "log_ratio" or not first.started:
        return None
    began = datetime.fromisoformat(first.started)
    wanted = workload(first, running.configs[first.config_sha])
    for each in store.neighbours(folder, running.machine, _place(), detect.surroundings(running.machine), began, NEIGHBOURHOOD):
        # Of commands the environment says little: only the same command is the same kind of work.
        other = each.config.get("command") != running.configs[first.config_sha].get("command")
        if other or any(workload(r, each.config) != wanted for r in each.runs) or _problem(each.runs, running):
            continue
        found = _differences(each.runs, running)
        whole = len(found) >= schedule.AA_PAIRS and not statistics.contaminated(found, None)
        if whole and guards.odd_pair(each.runs, metric) is None:
            return each
    return None


def _place() -> str:
    return detect.digest_of(detect.place())


def _adopt(running: Series, own: Baseline, variant: Variant) -> bool:
    """Take up the A/A that this series measured and stored before it was stopped: its own runs are no fresh check of it, and their time is spent."""
    before, pairs = len(running.runs), len(own.runs) // 2
    _say_if_short(running, pairs, variant, own.runs[0].pair or 0)
    if len(series.measure_aa(running, pairs, first=own.runs[0].pair or 0, variant=variant)) < 2 * pairs:
        return False
    running.runs = running.runs[:before]
    running.aa = own
    return True


def _say_if_short(running: Series, pairs: int, variant: Variant, first: int = 0) -> None:
    """Warn before the first pair if the budget does not hold the launches up to the first look."""
    look = schedule.last_pair(running.plan.looks[:1], running.plan.pairs_limit)
    measured = [s for _, specs in itertools.islice(series.blocks(running), look) for s in specs if s.variant in running.alive]
    specs = [*schedule.aa(pairs, first, variant), *measured]
    if not running.has_time_for(specs):
        launches = f"the {len(running.to_come(specs))} launches to the first look"
        if running.own_time:
            running.progress.note(
                f"{running.case.id}: the {running.case.budget.minutes:g} minutes of the case do not hold {launches}; its budget.minutes says how many it has"
            )
            return
        running.progress.note(f"{running.case.id}: the budget does not hold {launches}; {_later(running, specs[:2])}")


def _later(running: Series, pair: Sequence[schedule.RunSpec]) -> str:
    """What a second command would go on from. Half a pair is never kept, so one whose budget holds no pair would come no further."""
    if running.journal is None and running.case.command:
        return "a second command starts again, for without git nothing tells whether the files are as they were; give more time, or begin in a git repository"
    if running.journal is None:
        return "with `playbook confirm --journal FOLDER` a second one goes on"
    least = (
        ""
        if running.has_time_for(pair)
        else f", with a budget that holds a pair of launches (about {math.ceil(running.seconds_for(pair))} s)"
    )
    return f"the same command goes on where this one stops{least}"


def _contradicts(fresh: Sequence[Run], running: Series) -> bool:
    assert running.aa is not None
    stored = _differences(running.aa.runs, running)
    if len(stored) < 2:
        return True
    return statistics.contaminated(_differences(fresh, running), statistics.aa_deviation(stored), len(stored))


def _fresh_pairs(running: Series) -> int:
    """Number of fresh A/A pairs to launch: one can show that the machine became noisier; if the stored noise is large, two can show that it became quieter."""
    assert running.aa is not None
    stored = _differences(running.aa.runs, running)
    return 2 if len(stored) >= 2 and statistics.aa_deviation(stored) > _NOISY else schedule.FRESH_AA_PAIRS


def _quieter(fresh: Sequence[Run], running: Series) -> bool:
    """Whether fresh pairs vary less than the stored ones: a disturbed A/A would else hide effects until it expires. F test, one-sided."""
    from scipy.stats import f  # start-up time: `playbook bench list` imports this module too

    assert running.aa is not None
    new, stored = _differences(fresh, running), _differences(running.aa.runs, running)
    if len(new) < 2 or len(stored) < 2:
        return False
    least = float(f.ppf(_QUIETER_ALPHA, len(new), len(stored)))
    return statistics.aa_deviation(new) ** 2 < least * statistics.aa_deviation(stored) ** 2


def _differences(runs: Sequence[Run], running: Series) -> list[float]:
    return guards.aa_differences(runs, metrics.get(running.case.metric or ""))


def _baseline(running: Series, runs: Sequence[Run]) -> Baseline:
    return Baseline(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=running.machine.name,
        case=running.case.id,
        profile=running.profile,
        noise_key=noise_key(runs[0], running.strict),
        surroundings=detect.surroundings(running.machine),
        config=running.configs[runs[0].config_sha],
        place=_place(),
        runs=list(runs),
    )


def _problem(runs: Sequence[Run], running: Series) -> str:
    """Why a run cannot be used for the noise of the case's metric, or nothing."""
    metric = metrics.get(running.case.metric or "")
    return next((p for r in runs if (p := r.outcome if r.outcome != "ok" else guards.complete(r, metric))), "")


def _check(runs: Sequence[Run], pairs: int, running: Series) -> None:
    bad = next((r for r in runs if r.outcome != "ok"), None)
    if bad is not None:
        raise LaunchError(f"the A/A stopped: run {bad.run_id} ended as {bad.outcome}: {bad.message[:500]}")
    if problem := _problem(runs, running):
        raise LaunchError(f"the A/A is of no use and is not stored: {problem}")
    if len(runs) < 2 * pairs:
        raise LaunchError(f"the A/A stopped after {len(runs) // 2} of {pairs} pairs: the case's budget is spent")
