"""What is known of a claim before any run: whether it fits its case, and what this machine lacks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playbook.cards import load as cards
from playbook.cards import model
from playbook.errors import ConfigError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import CaseRef, Machine, Measured, Missing, digest
from playbook_bench import metrics
from playbook_bench.judge import curve_rules, effects
from playbook_bench.machine import detect, requirements
from playbook_bench.run.targets import Task, tasks_of_card
from playbook_bench.variants.resolve import resolve_all


def checked(tasks: Sequence[Task], known: Mapping[str, Case], machine: Machine, wanted: str | None) -> dict[str, Case]:
    """The cases of the tasks, those that are `known` and the others loaded, once each fits its claims and can be resolved for the profile that would run.

    Raises:
        FileError: a case is invalid.
        ConfigError: a claim and its case do not fit, or a configuration cannot be resolved.
    """
    cases = {**known, **{name: load_case(name) for name in {t.case for t in tasks if t.case} - known.keys()}}
    for case in cases.values():
        if case.kind in LAUNCHED_KINDS and (profile := requirements.choose_profile(case, machine, wanted)):
            resolve_all(case, profile)  # what is wrong with one case's configuration is said before the runs of another
    for task in tasks:
        _check(task, cases)
    return cases


def _check(task: Task, cases: Mapping[str, Case]) -> None:
    """Refuse a claim whose metric, margin or comparison does not fit its case, before any run.

    Raises:
        ConfigError: the claim and its case do not fit.
    """
    claim, case = task.claim, cases[task.case] if task.case else None
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


def record_of(task: Task, case: Case | None, machine: Machine, wanted: str | None) -> Measured:
    """The record of a claim before any run, on the profile that is `wanted`, or else the largest that fits."""
    missing: list[Missing] = []
    profile = requirements.choose_profile(case, machine, wanted) if case and case.profiles else None
    kind: str = case.kind if case else task.claim.kind if task.claim else ""
    here = requirements.restrict(machine, profile)
    known = requirements.facts(here)
    if case is not None and (case.requires or case.kind in LAUNCHED_KINDS):
        missing += requirements.unmet_requirements(case.requires, trains=not case.command)
    if case is not None and case.kind in LAUNCHED_KINDS:
        if profile is None:
            offered = f"profile {wanted}" if wanted else f"profile for {machine.name}"
            missing.append(Missing(reason="profile", detail=f"case {case.id} has no {offered}; it has {', '.join(case.profiles)}"))
        else:
            variants = resolve_all(case, profile).values()
            missing += [m for m in dict.fromkeys(m for v in variants for m in v.missing()) if m not in missing]
            *_, last = variants
            known = last.facts(here)
    if task.claim is not None and kind not in ("arithmetic", "invariant"):
        waive = task.claim.cpu_scope is not None and profile == detect.CPU
        missing = requirements.unmet_scope(task.claim.scope, known, waive) + missing
    if case is None and not missing:
        missing.append(Missing(reason="no_case", detail="no case puts this claim to the test yet"))
    content = None if case is None else CaseRef(id=case.id, sha=digest(case.model_dump(mode="json"), 16), content=case)
    return Measured(claim=task.claim, case=content, machine=here, profile=profile, facts=known, missing=missing, context=detect.context())


def is_launched(record: Measured) -> bool:
    """Whether the claim is settled by runs on this machine."""
    return not record.missing and record.case is not None and record.case.content.kind in LAUNCHED_KINDS


def count_inapplicable(profile: str) -> tuple[int, int]:
    """Number of claims that `profile` cannot test on this machine, and number of all claims. Mechanism checks are not counted."""
    machine = detect.detect()
    tasks = [t for card in cards.load_all().values() for t in tasks_of_card(card) if t.claim and t.claim.mechanism_of is None]
    lacking = sum(bool(record_of(task, load_case(task.case) if task.case else None, machine, profile).missing) for task in tasks)
    return lacking, len(tasks)
