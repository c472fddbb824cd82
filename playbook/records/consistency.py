"""Checks that a record does not contradict itself: its plan, its order of runs, its noise and its machine. A record that does counts for nothing.

A record that was changed and sealed again passes its own hash. These checks, with a replay, find the changes that leave a trace in the rest of the
record. They vouch for no more: whoever can write every field of a record can write one that agrees with itself (docs/guide/evidence.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from playbook.records.case import LAUNCHED_KINDS
from playbook.records.evidence import Baseline, Evidence, Measured, Plan, Run, noise_key, workload
from playbook.records.first_rules import FIRST_RULES
from playbook.records.machine import label

_NEIGHBOURHOOD = timedelta(hours=2)
"""For how long series in one place share an A/A."""
_CLOCK_TOLERANCE = 0.02
"""By how much the sum of steps may differ from the timed window that the trainer reported, as a share."""


AS_OF_VERSION_1 = (
    "it claims rules of version 1, which no record may that is not of their time; `playbook bench rejudge` judges it by those of today"
)


def contradictions(evidence: Evidence) -> list[str]:
    """Where a record disagrees with itself, one line for each; empty for one that the harness wrote."""
    return [text for check in _CHECKS for text in check(evidence)]


def _plan(evidence: Evidence) -> Iterator[str]:
    """Looks and error rate decide how wide the intervals are: they are the case's, not the record's."""
    plan, case = evidence.measured.plan, evidence.measured.case
    if plan is None or case is None or case.content.kind not in LAUNCHED_KINDS:
        return
    looks = case.content.budget.looks if plan.rules >= 3 else case.content.budget.pairs
    if plan.looks != looks:
        yield f"the plan looks after {plan.looks} pairs, its case after {looks}"
    if plan.alpha != Plan.model_fields["alpha"].default:
        yield f"the plan's error rate is {plan.alpha:g}, every series has {Plan.model_fields['alpha'].default:g}"


def _rules(evidence: Evidence) -> Iterator[str]:
    """Version 1 sees less than today's: a record may claim it only where it was made before there were others."""
    plan = evidence.measured.plan
    if plan is not None and plan.rules == 1 and evidence.sha256 not in FIRST_RULES:
        yield AS_OF_VERSION_1


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
        return
    pairs: dict[int, list[Run]] = {}
    for run in sorted(evidence.measured.runs, key=lambda r: r.position):
        if run.role == "measure" and run.pair is not None:
            pairs.setdefault(run.pair, []).append(run)
    if sorted(pairs) != list(range(len(plan.order))):
        yield f"the order has {len(plan.order)} pairs, the runs are of {len(pairs)}: {_short(sorted(pairs))}"
        return
    letters = {"A": "baseline", "B": "candidate"}
    for number, said in enumerate(plan.order):
        wanted = [letters[x] for x in said if x in letters] if case.content.kind == "pair" else said.split()
        ran = [run.variant for run in pairs[number]]
        left = iter(wanted)
        if len(set(ran)) != len(ran) or not all(variant in left for variant in ran):
            yield f"pair {number} ran {' '.join(ran)}, its order says {' '.join(wanted)}"


def _launches(evidence: Evidence) -> Iterator[str]:
    """No launch counts twice: neither its name, nor its place, nor its times, which no two launches share to the last digit."""
    runs = evidence.measured.runs
    for what, values in (("run id", [r.run_id for r in runs]), ("position", [r.position for r in runs])):
        if twice := [v for v, n in Counter(values).items() if n > 1]:
            yield f"{what} {_short(twice)} is used twice"
    case = evidence.measured.case
    if case is not None and case.content.command:
        return  # logs of commands round their times
    for launched in (runs, evidence.measured.aa.runs if evidence.measured.aa else []):
        times = Counter(tuple(s.seconds for s in r.samples) for r in launched if len(r.samples) > 1)
        if any(n > 1 for n in times.values()):
            yield "two launches have the same step times to the last digit; no two runs do"


def _clock(evidence: Evidence) -> Iterator[str]:
    """Timed steps add up to the timed window, and a launch holds its steps."""
    for run in evidence.measured.runs:
        timed = math.fsum(s.seconds for s in run.samples if s.timed)
        if run.outcome == "ok" and run.seconds.timed and abs(timed - run.seconds.timed) > _CLOCK_TOLERANCE * run.seconds.timed:
            yield f"the timed steps of run {run.run_id} take {timed:.6g} s, its timed window {run.seconds.timed:.6g} s"


def _noise(evidence: Evidence) -> Iterator[str]:
    """The A/A that floors the noise is one of this machine, and of a configuration of this series or of its neighbourhood."""
    measured, aa = evidence.measured, evidence.measured.aa
    if aa is None:
        return
    if aa.machine != measured.machine.name:
        yield f"the A/A is of {aa.machine}, the runs of {measured.machine.name}"
    if (measured.profile or aa.profile) != aa.profile:
        yield f"the A/A is of profile {aa.profile}, the runs of {measured.profile}"
    own = {r.config_sha for r in measured.runs}
    foreign = {r.config_sha for r in aa.runs} - own
    if foreign and aa.place is not None:
        yield from _neighbourhood(measured, aa)
        return
    known = [r for r in measured.runs if r.strict_sha in measured.strict]
    if known and aa.noise_key not in {noise_key(r, measured.strict) for r in known}:
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
    own = machine.model_dump(mode="json")
    for sha, strict in evidence.measured.strict.items():
        seen = strict.get("machine", {})
        differing = [k for k, v in seen.items() if k in own and own[k] != v] if isinstance(seen, Mapping) else ["machine"]
        if own["memory_gib"] is not None and "memory_gib" not in seen:
            differing.append("memory_gib")
        if differing:
            yield f"environment {sha[:16]} is of another machine: {', '.join(differing)} differ"


def _short(values: Sequence[Any]) -> str:
    return ", ".join(str(v)[:40] for v in values[:4]) + (", ..." if len(values) > 4 else "")


_CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (_plan, _rules, _case, _order, _launches, _clock, _noise, _machine)
