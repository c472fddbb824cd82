"""What `playbook tune` and the MCP tool `tune_next` share: a tuning from a command or a case and its knobs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from playbook.errors import ConfigError, PlaybookError
from playbook.planner import memory
from playbook.records import confidential
from playbook.records.case import Budget, Case, Guardrails, Loss, load_case
from playbook.records.commands import Steps
from playbook.records.evidence import Machine
from playbook_bench.machine import requirements
from playbook_bench.trace.reports import timeline_from_file
from playbook_bench.trace.walls import walls
from playbook_bench.tune import knobs as files
from playbook_bench.tune import order
from playbook_bench.tune.knobs import Knobs
from playbook_bench.tune.order import Predicted, Ranked
from playbook_bench.tune.procedure import Setup
from playbook_bench.tune.session import Plan
from playbook_bench.tune.subject import CASE_ID, Subject, goal
from playbook_bench.variants.resolve import Resolved, resolve
from playbook_trainer.config.dry_run import dry_run

_ALL_DAY_MINUTES = 1440.0


@dataclass(frozen=True)
class Request:
    """What is asked of a tuning, beside its subject and its knobs."""

    goal: str = "step_time"
    false_keep: float = 0.05
    loss: float | None = 0.01
    seed: int | None = None
    trace: Path | None = None


def case_of_command(words: Sequence[str], machine: Machine, steps: Steps, metric: str, loss: float | None, timeout_s: float) -> Case:
    """A command as the case that is tuned.

    Raises:
        ConfigError: a word looks like a secret.
    """
    if secret := confidential.of_words(words):
        raise ConfigError(f"{secret} looks like a secret and would be kept in the record; export it as a variable instead")
    return Case(
        id=CASE_ID,
        summary="A command, tuned by playbook tune.",
        command=list(words),
        steps=steps,
        metric=metric,
        profiles={machine.name: {}},
        guardrails=Guardrails(loss=Loss(relative=loss, reason=None if loss else "any loss was allowed by --loss any")),
        budget=Budget(minutes=_ALL_DAY_MINUTES, launch_timeout_s=timeout_s),
    )


def case_named(name: str, machine: Machine, metric: str, wanted: str | None) -> tuple[Case, str]:
    """A case of the playbook's, and the profile that this machine runs; its baseline is the start.

    Raises:
        PlaybookError: there is no such case, it launches nothing, or the machine has no profile of it.
    """
    case = load_case(name)
    if case.kind != "pair":
        raise ConfigError(f"case '{case.id}' is of kind {case.kind}; expected one with a baseline, which is where a tuning starts")
    profile = requirements.require_profile(case, machine, wanted)
    if missing := requirements.unmet_requirements(case.requires, trains=not case.command):
        raise ConfigError(f"case '{case.id}' needs what is not here: {'; '.join(m.detail for m in missing)}")
    return case.model_copy(update={"metric": metric, "also": []}), profile


def planned(
    case: Case, profile: str, knobs: Knobs, machine: Machine, request: Request, results: Path, command: str
) -> tuple[Plan, list[Ranked]]:
    """The tuning, and the order of its candidates with the reasons.

    Raises:
        PlaybookError: a knob does not fit the case, the trace cannot be read, or the start cannot be resolved.
    """
    metric, higher = goal(request.goal)
    subject = Subject(case, profile, knobs, results.resolve() / "tune" / "files")
    if case.command:
        files.check_today([*case.command, *case.baseline.get("arguments", [])], knobs)
    start = resolve(subject.with_settings(()), "baseline", profile)
    shares = _shares(request.trace) if request.trace else {}
    rows = order.ranked(knobs, _predicted(subject, start, machine), shares)
    candidates = [(row.knob, row.value) for row in rows if not row.skipped]
    if not candidates:
        raise ConfigError(f"nothing is left to try: {rows[0].knob}={rows[0].value}: {rows[0].why}")
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    setup = Setup(knobs.choices, candidates, seed, request.false_keep, request.loss, higher, any_work=request.goal == "tokens_per_s")
    return Plan(subject, setup, request.goal, metric, command), rows


def _shares(trace: Path) -> Mapping[str, float]:
    """Which part of a traced step each wall is, at most."""
    seen = walls(timeline_from_file(trace))
    parts = {"communication": seen.exposed, "host": seen.host_idle, "data": seen.data_wait, "compute": seen.computing}
    return {name: share for name, share in parts.items() if share is not None}


def _predicted(subject: Subject, start: object, machine: Machine) -> dict[tuple[str, str], Predicted]:
    """What arithmetic says of each candidate of our trainer: whether it can run, and whether it fits the GPU's memory."""
    if not isinstance(start, Resolved):
        return {}
    out = {}
    for choice in subject.knobs.choices:
        for value in choice.values[1:]:
            out[choice.name, value] = _of_candidate(subject, ((choice.name, value),), machine)
    return out


def _of_candidate(subject: Subject, settings: tuple[tuple[str, str], ...], machine: Machine) -> Predicted:
    try:
        run = resolve(subject.with_settings(settings), "candidate", subject.profile)
        assert isinstance(run, Resolved)
        report = dry_run(run.config, run.ranks)
    except PlaybookError as e:
        return Predicted(refusal=f"cannot run: {str(e).splitlines()[0][:200]}")
    if machine.gpu_memory_gib is None:
        return Predicted()
    peak = max(stage.peak for stage in report.stages)
    if not memory.fits(peak, machine.gpu_memory_gib):
        return Predicted(refusal=f"would need {peak / 2**30:.0f} GiB of {machine.gpu_memory_gib:.0f}")
    return Predicted()
