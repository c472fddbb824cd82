"""Which claims a target names: `CARD`, `CARD/CLAIM`, `CLAIM` or a card's file; and the case that tests each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playbook.cards import load as cards
from playbook.cards import model
from playbook.errors import ConfigError, FileError
from playbook.records.case import LAUNCHED_KINDS, Case, beside, load_case
from playbook.records.evidence import CaseRef, ClaimRef, Machine, Measured, Missing, digest
from playbook.yaml_files import did_you_mean, load
from playbook_bench import metrics
from playbook_bench.judge import effects
from playbook_bench.machine import detect, requirements
from playbook_bench.variants.resolve import resolve_all

_TARGET = re.compile(r"(?P<card>[a-z0-9][a-z0-9-]*)(?:/(?P<claim>[A-Z][0-9]{1,3}(?:\.[a-z])?))?\Z")


@dataclass(frozen=True)
class Task:
    """One claim, or mechanism check, and the case that settles it."""

    claim: ClaimRef | None
    case: str | None
    counts: bool = True

    @property
    def name(self) -> str:
        """`CARD/CLAIM`, or the case's."""
        return f"{self.claim.card}/{self.claim.id}" if self.claim else self.case or ""


def tasks_of(target: str) -> list[Task]:
    """The claims, with their mechanism checks, that a target names.

    Raises:
        ConfigError: there is no such card or claim.
        FileError: the card is invalid.
    """
    if target.endswith((".yaml", ".yml")):
        return _tasks_of_file(Path(target))
    by_id = cards.load_all()
    claim = model.by_claim(by_id).get(target)
    match = _TARGET.match(f"{claim[0]}/{target}" if claim else target)
    if match is None:
        raise ConfigError(
            f"'{target}' is neither a card nor a claim; write CARD, CARD/CLAIM or CLAIM, for example moe-dispatcher-choice/W9"
        )
    if match["card"] not in by_id:
        raise ConfigError(f"card '{match['card']}' is not known{did_you_mean(match['card'], by_id)}")
    tasks = tasks_of_card(by_id[match["card"]])
    if match["claim"] is None:
        return tasks
    ids = [t.claim.id for t in tasks if t.claim]
    chosen = [t for t in tasks if t.claim and match["claim"] in (t.claim.id, t.claim.mechanism_of)]
    if not chosen:
        raise ConfigError(f"card '{match['card']}' has no claim '{match['claim']}'{did_you_mean(match['claim'], ids)}")
    return [replace(t, counts=t.claim is not None and t.claim.id == match["claim"]) for t in chosen]


def tasks_of_card(card: model.Card) -> list[Task]:
    """Each claim of a card, followed by its mechanism check."""
    sha, out = digest(card.model_dump(mode="json"), 16), []

    def named(claim: model.Claim | model.MechanismCheck, **more: Any) -> Task:
        fields = {f: getattr(claim, f) for f in ("id", "statement", "metric", "expect", "comparison")}
        return Task(ClaimRef(card=card.id, card_sha=sha, **fields, **more), claim.case)

    for claim in card.claims:
        out.append(named(claim, kind=claim.kind, scope=claim.scope, label=claim.label, cpu_scope=claim.cpu_scope))
        if claim.mechanism_check is not None:
            out.append(named(claim.mechanism_check, kind="pair", mechanism_of=claim.id))
    return out


def _tasks_of_file(path: Path) -> list[Task]:
    """The tasks of a card outside the playbook; its cases may lie beside it, in `../bench/cases/`."""
    tasks, card = [], load(path, model.Card)[0]
    if clash := cards.clashes(path):
        raise FileError(clash)
    for task in tasks_of_card(card):
        beside_card = beside(path, task.case) if task.case else None
        tasks.append(Task(task.claim, str(beside_card)) if beside_card else task)
    return tasks


# What is known of a claim before any run: whether it fits its case, and what this machine lacks for it.


def checked(tasks: Sequence[Task], loaded: Mapping[str, Case], machine: Machine, requested: str | None) -> dict[str, Case]:
    """The cases of the tasks, those that are `loaded` and the others loaded, once each fits its claims and can be resolved for the profile
    that would run.

    Raises:
        FileError: a case is invalid.
        ConfigError: a claim and its case do not fit, or a configuration cannot be resolved.
    """
    cases = {**loaded, **{name: load_case(name) for name in {t.case for t in tasks if t.case} - loaded.keys()}}
    for case in cases.values():
        if case.kind in LAUNCHED_KINDS and (profile := requirements.choose_profile(case, machine, requested)):
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
    problems = [] if case.kind == "pair" else effects.claim_problems(claim.expect, list(case.variants), case.kind)
    if problems:
        raise ConfigError(f"claim {claim.id}, case {case.id}: {'; '.join(problems)}")
    for variant, stated in (("baseline", claim.comparison.baseline), ("candidate", claim.comparison.candidate)):
        if stated != case.compared(variant):
            raise ConfigError(f"claim {claim.id} and case {case.id} name different deltas for the {variant}; make them equal")


def record_of(task: Task, case: Case | None, machine: Machine, requested: str | None, context: Mapping[str, Any]) -> Measured:
    """The record of a claim before any run, on the profile that is `requested`, or else the largest that fits."""
    missing: list[Missing] = []
    profile = requirements.choose_profile(case, machine, requested) if case and case.profiles else None
    kind: str = case.kind if case else task.claim.kind if task.claim else ""
    restricted = requirements.restrict(machine, profile)
    run_facts = requirements.facts(restricted)
    if case is not None and (case.requires or case.kind in LAUNCHED_KINDS):
        missing += requirements.unmet_requirements(case.requires, trains=not case.command)
    if case is not None and case.kind in LAUNCHED_KINDS:
        if profile is None:
            offered = f"profile {requested}" if requested else f"profile for {machine.name}"
            missing.append(Missing(reason="profile", detail=f"case {case.id} has no {offered}; it has {', '.join(case.profiles)}"))
        else:
            variants = list(resolve_all(case, profile).values())
            missing += [m for m in dict.fromkeys(m for v in variants for m in v.missing()) if m not in missing]
            run_facts = variants[-1].facts(restricted)
    if task.claim is not None and kind not in ("arithmetic", "invariant"):
        waive = task.claim.cpu_scope is not None and profile == detect.CPU
        missing = requirements.unmet_scope(task.claim.scope, run_facts, waive) + missing
    if case is None and not missing:
        missing.append(Missing(reason="no_case", detail="no case puts this claim to the test yet"))
    return Measured(
        claim=task.claim,
        case=None if case is None else CaseRef(id=case.id, sha=digest(case.model_dump(mode="json"), 16), content=case),
        machine=restricted,
        profile=profile,
        facts=run_facts,
        missing=missing,
        context=dict(context),
    )


def is_launched(record: Measured) -> bool:
    """Whether the claim is settled by runs on this machine."""
    return not record.missing and record.case is not None and record.case.content.kind in LAUNCHED_KINDS


def count_inapplicable(profile: str) -> tuple[int, int]:
    """Number of claims that `profile` cannot test on this machine, and number of all claims. Mechanism checks are not counted."""
    machine = detect.detect()
    tasks = [t for card in cards.load_all().values() for t in tasks_of_card(card) if t.claim and t.claim.mechanism_of is None]
    lacking = sum(bool(record_of(task, load_case(task.case) if task.case else None, machine, profile, {}).missing) for task in tasks)
    return lacking, len(tasks)
