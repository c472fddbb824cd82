"""What `playbook tune` and the MCP tool `tune_next` share: a tuning from a command or a case and its knobs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from playbook.cards.model import Card
from playbook.errors import ConfigError, PlaybookError
from playbook.paths import folders
from playbook.planner import memory
from playbook.planner.time.cluster import cluster
from playbook.records.case import Budget, Case, Guardrails, Loss, case_problems, load_case
from playbook.records.commands import Steps, of_words
from playbook.records.evidence import Machine
from playbook.yaml_files import written
from playbook_app.services.ready_knobs import trainer_of
from playbook_bench.machine import requirements
from playbook_bench.run.store import replace
from playbook_bench.trace.reports import timeline_from_file
from playbook_bench.trace.walls import walls
from playbook_bench.tune.knobs import SMALL, Knobs, Predicted, Ranked, check_today, ranked
from playbook_bench.tune.procedure import Setup
from playbook_bench.tune.session import Plan
from playbook_bench.tune.subject import CASE_ID, Subject, goal
from playbook_bench.variants.command import CommandVariant
from playbook_bench.variants.resolve import Runnable, resolve
from playbook_trainer.config.dry_run import dry_run, predicted

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
    if secret := of_words(words):
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
    start = resolve(subject.with_settings(()), "baseline", profile)
    if isinstance(start, CommandVariant):
        check_today(start.words, knobs)
    for choice in knobs.choices:
        for value in choice.values[1:]:
            _check(subject, choice.name, value)
    of_each = _predicted(subject, start, machine, by_memory=request.goal == "peak_memory")
    rows = ranked(knobs, of_each, _small_walls(request.trace, machine))
    candidates = [(row.knob, row.value) for row in rows if not row.skipped]
    if not candidates:
        raise ConfigError(f"nothing is left to try: {rows[0].knob}={rows[0].value}: {rows[0].why}")
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    setup = Setup(knobs.choices, candidates, seed, request.false_keep, request.loss, higher, any_work=request.goal == "tokens_per_s")
    return Plan(subject, setup, request.goal, metric, command, [row for row in rows if row.skipped]), rows


def _check(subject: Subject, knob: str, value: str) -> None:
    """Refuse a knob that says what no launch can have, before the first of them.

    Raises:
        ConfigError: it is an option of our trainer, changes a file that the command does not name, or asks for a proof that is none.
    """
    try:
        case = subject.with_settings(((knob, value),))
        if problem := next((message for where, message in case_problems(case) if "require" in where), None):
            raise ConfigError(f"require: {problem}")
    except ValidationError as e:
        raise ConfigError(f"knob {knob}: {e.errors(include_url=False)[0]['msg']}") from e
    except PlaybookError as e:
        raise ConfigError(f"knob {knob}: {e}") from e


def _small_walls(trace: Path | None, machine: Machine) -> Mapping[str, str]:
    """Walls that are a small part of the step, each with the words that say so: by the trace, or since one GPU has none to talk to."""
    if trace is None:
        return {"communication": "one GPU sends nothing"} if machine.gpus == 1 else {}
    seen = walls(timeline_from_file(trace))
    parts = {"communication": seen.exposed, "host": seen.host_idle, "data": seen.data_wait, "compute": seen.computing}
    return {
        name: f"{name} is {100 * share:.1f} % of the traced step" for name, share in parts.items() if share is not None and share < SMALL
    }


def _predicted(subject: Subject, start: Runnable, machine: Machine, by_memory: bool) -> dict[tuple[str, str], Predicted]:
    """What arithmetic says of each candidate of our trainer: whether it can run and fits the GPU's memory, and what it gains."""
    try:
        before = _figures(start, machine)
    except PlaybookError:  # its launch says why, in its own words
        before = None
    if before is None:
        return {}
    candidates = [(choice.name, value) for choice in subject.knobs.choices for value in choice.values[1:]]
    return {candidate: _of_candidate(subject, candidate, before, machine, by_memory) for candidate in candidates}


@dataclass(frozen=True)
class _Figures:
    """What arithmetic says of a run: seconds of a step where the GPU is known, and the bytes that the fullest rank holds."""

    seconds: float | None
    peak: float

    def over(self, other: _Figures, by_memory: bool) -> float | None:
        """By how much it is better than another, as a share; None where the two are the same to arithmetic, which does not know it then."""
        mine, before = (self.peak, other.peak) if by_memory else (self.seconds, other.seconds)
        return None if mine is None or before is None or math.isclose(mine, before) else before / mine - 1


def _figures(run: Runnable, machine: Machine) -> _Figures | None:
    """None of a run that is not our trainer's.

    Raises:
        ConfigError: it cannot run.
    """
    if (ours := trainer_of(run)) is None:
        return None
    peak = max(stage.peak for stage in dry_run(*ours).stages)
    try:
        step = predicted(*ours, cluster(machine.gpu)) if machine.gpu else None
    except ConfigError:  # a GPU that the planner does not know
        step = None
    return _Figures(step.seconds.value if step else None, peak)


def _of_candidate(subject: Subject, candidate: tuple[str, str], before: _Figures, machine: Machine, by_memory: bool) -> Predicted:
    try:
        after = _figures(resolve(subject.with_settings((candidate,)), "candidate", subject.profile), machine)
    except PlaybookError as e:
        return Predicted(refusal=f"cannot run: {str(e).splitlines()[0][:200]}")
    if after is None:
        return Predicted()
    # What holds no more than the start fits, whatever the estimate says: the start runs.
    if machine.gpu_memory_gib and not memory.fits(after.peak, machine.gpu_memory_gib) and after.peak > before.peak:
        return Predicted(refusal=f"would need {after.peak / 2**30:.0f} GiB of {machine.gpu_memory_gib:.0f}")
    return Predicted(after.over(before, by_memory))


# --- what was decided, as claims ---------------------------------------------------------------------------------------------------------


def emit_claims(plan: Plan, answer: Mapping[str, Any], machine: Machine, day: str) -> Path | None:
    """A card among the user's own, with a claim for each knob that a round has decided; None where none was.

    Raises:
        StoreError: the card cannot be written.
    """
    decided = [row for row in (*answer["kept"], *answer["refused"]) if row["effect_percent"]]
    if not decided:
        return None
    own, name, first = folders("cards")[1], f"tuned-{plan.key[:8]}", 100 + int(plan.key, 16) % 800
    kept = tuple(sorted((row["knob"], row["value"]) for row in answer["kept"]))
    claims = []
    for number, row in enumerate(decided):
        without = tuple(pair for pair in kept if pair[0] != row["knob"])
        content = plan.subject.with_settings(tuple(sorted((*without, (row["knob"], row["value"])))), without).model_dump(mode="json")
        case = Case.model_validate(
            {**content, "id": f"{name}-{number}", "summary": f"{row['knob']} at {row['value']}, as a tuning decided it."}
        )
        replace(
            own.resolve().parent / "bench" / "cases" / f"{case.id}.yaml",
            yaml.safe_dump(case.model_dump(mode="json", exclude_defaults=True), width=140),
        )
        claims.append(_claim(plan, row, f"Z{first + number}", case, answer, machine, day))
    card = {
        "id": name,
        "title": f"Tuned for {answer['goal']} on {machine.name}",
        "summary": f"What a tuning of one command on {machine.description} has decided: {len(kept)} settings kept of"
        f" {len(plan.setup.choices)}.",
        "symptoms": [f"which settings make {plan.subject.case.id} faster on {machine.name}"],
        "phase": "retune",
        "wall": "compute",
        "claims": claims,
    }
    Card.model_validate(card)
    path = own / f"{name}.yaml"
    replace(path, written(card, 140))
    return path


def _claim(
    plan: Plan, row: Mapping[str, Any], ident: str, case: Case, answer: Mapping[str, Any], machine: Machine, day: str
) -> dict[str, Any]:
    """A kept change: at least its lower bound. One that a round refused: at most its upper bound."""
    kept, today = row in answer["kept"], plan.subject.knobs.knobs[row["knob"]].texts[0]
    bound = round(row["effect_percent"]["low" if kept else "high"], 1)
    words = f"{'at least' if kept else 'at most'} {bound:g} % better {answer['goal']}"
    return {
        "id": ident,
        "statement": f"On {machine.name}, {row['knob']} at {row['value']} instead of {today} gives {words}, beside"
        " the other settings that were kept.",
        "mechanism": "Not known: matched launches of the set with and without it, in a drawn order, decided it.",
        "kind": "pair",
        "comparison": {"baseline": case.compared("baseline"), "candidate": case.compared("candidate")},
        "metric": plan.metric,
        "expect": {"op": ">=" if kept else "<=", "margin": {"value": bound, "unit": "percent"}},
        "scope": {"gpus": f"=={machine.gpus}"} if machine.gpus else {},
        "label": "training-equivalent",
        "sources": [{"title": f"Record of a tuning, {answer['record']}", "origin": "own tuning", "date": day}],
        "case": case.id,
    }
