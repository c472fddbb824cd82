"""Checks that a record does not contradict itself: its plan, its order of runs, its noise and its machine. A record that does counts for
nothing.

A record that was changed and sealed again passes its own hash. These checks, with a replay, find the changes that leave a trace in the
rest of the record. They vouch for no more: whoever can write every field of a record can write one that agrees with itself
(docs/guide/evidence.md).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from playbook.records.case import LAUNCHED_KINDS
from playbook.records.evidence import Baseline, Evidence, Measured, Plan, Run, noise_key, workload
from playbook.records.machine import label

# The order of pairs and blocks that a seed gives, as rules of version 2 drew it: with it, a record cannot choose its order.


def expected(rules: int, seed: int, pair: bool, variants: Sequence[str], count: int) -> list[str] | None:
    """The first `count` entries of a plan's order: halves of ABBA blocks for a pair, else all variants in a drawn order and its reverse;
    None for rules whose order is not known here.
    """
    if rules != 2:
        return None
    draw = random.Random(seed)
    entries: list[str] = []
    while len(entries) < count:
        if pair:
            block = draw.choice(("ABBA", "BAAB"))
            entries += [block[:2], block[2:]]
        else:
            order = draw.sample(list(variants), len(variants))
            entries += [" ".join(order), " ".join(order[::-1])]
    return entries[:count]


RULES = (2, 3)
"""Versions of the rules of verdicts that a record may name: those by which it can be judged again."""
_NEIGHBOURHOOD = timedelta(hours=2)
"""For how long series in one place share an A/A."""
_CLOCK_TOLERANCE = 0.01
"""Share by which what a launch is made of may exceed its wall time: two clocks of one machine drift by far less."""
_SUM_TOLERANCE = 1e-6
"""Share by which two sums of the same figures may differ."""
_CLOCK_SET_S = 2.0
"""By how much a machine's clock may have been set back between two launches."""
_ROUNDED_S = 0.01


def contradictions(evidence: Evidence) -> list[str]:
    """Where a record disagrees with itself, one line for each; empty for one that the harness wrote."""
    checks = (_plan, _case, _order, _launches, _clock, _totals, _noise, _machine)
    return [text for check in checks for text in check(evidence)]


def _plan(evidence: Evidence) -> Iterator[str]:
    """Looks and error rate decide how wide the intervals are: they are the case's, not the record's."""
    plan, case = evidence.measured.plan, evidence.measured.case
    if plan is None or case is None or case.content.kind not in LAUNCHED_KINDS:
        return
    if plan.rules not in RULES:
        known = " and ".join(map(str, RULES))
        yield f"it was judged by rules of version {plan.rules}; this playbook knows {known}: run it again, or upgrade"
    looks = case.content.budget.looks if plan.rules >= 3 else case.content.budget.pairs
    if plan.looks != looks:
        yield f"the plan looks after {plan.looks} pairs, its case after {looks}"
    if plan.alpha != Plan.model_fields["alpha"].default:
        yield f"the plan's error rate is {plan.alpha:g}, every series has {Plan.model_fields['alpha'].default:g}"


def _case(evidence: Evidence) -> Iterator[str]:
    case = evidence.measured.case
    if case is not None and case.id != case.content.id:
        yield f"the case is called {case.id}, its content {case.content.id}"


def _order(evidence: Evidence) -> Iterator[str]:
    """Pairs are those that were fixed before the data, each in its order, none twice and none left out."""
    plan, case = evidence.measured.plan, evidence.measured.case
    if plan is None or case is None or not plan.order:
        return
    if plan.rules >= 3 and case.content.kind == "pair":
        launches = [r for r in sorted(evidence.measured.runs, key=lambda r: r.position) if r.role == "measure"]
        letter = "".join("A" if r.variant == "baseline" else "B" for r in launches)
        if letter != "".join(plan.order):
            yield f"the launches came as {letter}, its order says {''.join(plan.order)}"
        for variant in case.content.variants:
            numbers = [r.pair for r in launches if r.variant == variant]
            if numbers != list(range(len(numbers))):
                yield f"the launches of {variant} are of pairs {_short(numbers)}; expected 0, 1, 2 in their order"
        return
    pairs: dict[int, list[Run]] = {}
    for run in sorted(evidence.measured.runs, key=lambda r: r.position):
        if run.role == "measure" and run.pair is not None:
            pairs.setdefault(run.pair, []).append(run)
    if sorted(pairs) != list(range(len(plan.order))):
        yield f"the order has {len(plan.order)} pairs, the runs are of {len(pairs)}: {_short(sorted(pairs))}"
        return
    pair = case.content.kind == "pair"
    drawn = expected(plan.rules, plan.seed, pair, list(case.content.variants), len(plan.order))
    if drawn is not None and drawn != plan.order:
        yield f"the order is {_short(plan.order)}, its seed gives {_short(drawn)}"
    letters = {"A": "baseline", "B": "candidate"}
    for number, entry in enumerate(plan.order):
        planned = [letters[x] for x in entry if x in letters] if pair else entry.split()
        ran = [run.variant for run in pairs[number]]
        remaining = iter(planned)
        if len(set(ran)) != len(ran) or not all(variant in remaining for variant in ran):
            yield f"pair {number} ran {' '.join(ran)}, its order says {' '.join(planned)}"


def _launches(evidence: Evidence) -> Iterator[str]:
    """No launch counts twice: neither its name, nor its place, nor its times, which no two launches share to the last digit."""
    runs = evidence.measured.runs
    for what, values in (("run id", [r.run_id for r in runs]), ("position", [r.position for r in runs])):
        if twice := [v for v, n in Counter(values).items() if n > 1]:
            yield f"{what} {_short(twice)} is used twice"
    command = evidence.measured.case is not None and bool(evidence.measured.case.content.command)
    for launched in (runs, evidence.measured.aa.runs if evidence.measured.aa else []):
        ended = [r for r in launched if len(r.samples) > 1]
        times = Counter(tuple(s.seconds for s in r.samples) for r in ended)
        # A command may make up its times, such as a simulator: then every launch repeats.
        if any(n > 1 for n in times.values()) and not (command and len(times) < len({r.config_sha for r in ended}) + 1):
            yield "two launches have the same step times to the last digit; no two runs do"
    ordered = itertools.pairwise(sorted(runs, key=lambda r: r.position))
    if late := next((after for before, after in ordered if _began(after) < _began(before) + before.wall_s - _CLOCK_SET_S), None):
        yield f"run {late.run_id} began before the one before it had ended; launches follow one another"


def _began(run: Run) -> float:
    try:
        return datetime.fromisoformat(run.started).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return math.nan


def _clock(evidence: Evidence) -> Iterator[str]:
    """Timed steps add up to the timed window, and a launch holds its steps: each takes time, and all together no longer than the launch."""
    measured = evidence.measured
    command = measured.case is not None and bool(measured.case.content.command)
    runs = [r for r in (*measured.runs, *(measured.aa.runs if measured.aa else [])) if r.outcome == "ok" and r.samples]
    problems = (problem for run in runs for problem in _clock_of(run, measured.strict.get(run.strict_sha, {}), command))
    yield from itertools.islice(problems, 1)  # the first says enough


def _clock_of(run: Run, strict: Mapping[str, Any], command: bool) -> Iterator[str]:
    timed = math.fsum(s.seconds for s in run.samples if s.timed)
    if not math.isclose(timed, run.seconds.timed, rel_tol=_SUM_TOLERANCE) or not timed > 0:
        yield f"the timed steps of run {run.run_id} take {timed:.6g} s, its timed window {run.seconds.timed:.6g} s"
    trainer = strict.get("trainer")
    covered = trainer.get("log_every") if isinstance(trainer, Mapping) else None
    every = covered if isinstance(covered, int) else 1
    steps = run.samples[0].seconds + every * math.fsum(s.seconds for s in run.samples[1:])  # a first line may be of one step alone
    if steps > (1 + _CLOCK_TOLERANCE) * run.wall_s:
        yield f"the steps of run {run.run_id} take {steps:.6g} s, the whole launch {run.wall_s:.6g} s"
    if run.seconds.total > (1 + _CLOCK_TOLERANCE) * run.wall_s or _phases(run) > (1 + _CLOCK_TOLERANCE) * run.seconds.total:
        yield f"the phases of run {run.run_id} take {max(_phases(run), run.seconds.total):.6g} s, the whole launch {run.wall_s:.6g} s"
    if command and abs(run.wall_s - run.seconds.total) > _SUM_TOLERANCE * run.wall_s:
        yield f"the seconds of run {run.run_id} are {run.seconds.total:.6g}, its launch took {run.wall_s:.6g} s"


def _phases(run: Run) -> float:
    return run.seconds.start_up + run.seconds.warm_up + run.seconds.timed


def _totals(evidence: Evidence) -> Iterator[str]:
    """The series took as long as its launches: none was left out, but where it started over, or a launch failed, those are in the total
    too.
    """
    measured, plan = evidence.measured, evidence.measured.plan
    if plan is None or not measured.runs:
        return
    launches = math.fsum(r.wall_s for r in measured.runs)
    noise = math.fsum(r.wall_s for r in measured.aa.runs) if measured.aa else 0.0
    whole = measured.aa is not None or plan.rules >= 3
    total, alone = evidence.seconds.total, whole and not (plan.extended or measured.failed_before)
    if total < launches - _ROUNDED_S or (alone and total > launches + noise + _ROUNDED_S):
        yield f"the series took {total:.6g} s, its launches {launches:.6g} s"


def _noise(evidence: Evidence) -> Iterator[str]:
    """The A/A that floors the noise is one of this machine, and of a configuration of this series or of its neighbourhood."""
    measured, aa = evidence.measured, evidence.measured.aa
    if aa is None:
        return
    if aa.machine != measured.machine.name:
        yield f"the A/A is of {aa.machine}, the runs of {measured.machine.name}"
    if (measured.profile or aa.profile) != aa.profile:
        yield f"the A/A is of profile {aa.profile}, the runs of {measured.profile}"
    config_shas = {r.config_sha for r in measured.runs}
    foreign = {r.config_sha for r in aa.runs} - config_shas
    if foreign and aa.place is not None:
        yield from _neighbourhood(measured, aa)
        return
    recorded = [r for r in measured.runs if r.strict_sha in measured.strict]
    if recorded and aa.noise_key not in {noise_key(r, measured.strict) for r in recorded}:
        yield f"the A/A has the noise key {aa.noise_key[:16]}: it was measured in another environment or configuration than every run"
    if foreign:
        yield f"the A/A ran configuration {_short(sorted(foreign))}, none of the series did"


def _neighbourhood(measured: Measured, aa: Baseline) -> Iterator[str]:
    """An A/A of another configuration is of the same workload, and was measured within hours of the series."""
    workloads = {workload(r, measured.configs[r.config_sha]) for r in measured.runs if r.config_sha in measured.configs}
    if any(workload(r, aa.config) not in workloads for r in aa.runs):
        yield "the A/A is of another configuration, and of another environment, backend or number of ranks than every run"
    times = [[datetime.fromisoformat(r.started) for r in runs if r.started] for runs in (measured.runs, aa.runs)]
    if not all(times) or abs(min(times[0]) - max(times[1])) > _NEIGHBOURHOOD:
        yield f"the A/A is of another configuration and was not measured within {_NEIGHBOURHOOD} of the series"


def _machine(evidence: Evidence) -> Iterator[str]:
    """The machine is the one that the runs' environments name, under the name that such a machine has."""
    machine = evidence.measured.machine
    if machine.name != label(machine.gpu, machine.gpus):
        yield f"the machine is called {machine.name}; one with {machine.gpus} x {machine.gpu} is {label(machine.gpu, machine.gpus)}"
    fields = machine.model_dump(mode="json")
    for sha, strict in evidence.measured.strict.items():
        recorded = strict.get("machine", {})
        differing = [k for k, v in recorded.items() if k in fields and fields[k] != v] if isinstance(recorded, Mapping) else ["machine"]
        if fields["memory_gib"] is not None and "memory_gib" not in recorded:
            differing.append("memory_gib")
        if differing:
            yield f"environment {sha[:16]} is of another machine: {', '.join(differing)} differ"


def _short(values: Sequence[Any]) -> str:
    return ", ".join(str(v)[:40] for v in values[:4]) + (", ..." if len(values) > 4 else "")
