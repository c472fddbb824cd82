"""What confirming a card would run, from files alone: cases, profiles, number of launches, and a rough cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pydantic import BaseModel, Field

from playbook.cards.model import Card
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Evidence
from playbook.records.machine import CPU
from playbook.records.read import Record
from playbook_bench import metrics
from playbook_bench.run import schedule
from playbook_bench.run.targets import tasks_of_card
from playbook_bench.variants.resolve import overrides


class PlannedProfile(BaseModel):
    """What one case would run on one kind of machine."""

    profile: str
    ranks: int
    launches_least: int
    """Launches up to the first look at the results, the earliest end."""
    launches_most: int
    """Launches up to the last look, the latest end. A series whose step time drifts starts over once; that is not counted."""
    seconds_per_launch: float | None
    """Median of the recorded launches on this profile; null where there are none."""
    seconds_least: float | None
    seconds_most: float | None
    limit_s: float
    """The case's time budget, after which the series ends."""
    noise: str
    """Where the noise of launches is known from, if the metric has any."""


class PlannedCase(BaseModel):
    """One case of a plan, with the claims that it settles."""

    case: str
    kind: str
    claims: list[str]
    requires: list[str]
    profiles: list[PlannedProfile] = Field(default_factory=list)
    """Empty for cases that launch no training run."""


class ConfirmationPlan(BaseModel):
    """What confirming a card would run, worked out without running anything."""

    card_id: str
    command: str
    cases: list[PlannedCase]
    without_case: list[str] = Field(default_factory=list)
    """Ids of claims that have no case."""


def plan(card: Card, records: Sequence[Record]) -> ConfirmationPlan:
    """What `playbook confirm CARD` would run on each profile, from files alone; no machine is looked at."""
    named: dict[str, list[tuple[str, str]]] = {}
    without = []
    for task in tasks_of_card(card):
        if task.claim is None or task.case is None:
            without += [task.claim.id] if task.claim else []
        else:
            named.setdefault(task.case, []).append((task.claim.id, task.claim.metric))
    cases = [_case(load_case(case), claims, records) for case, claims in named.items()]
    return ConfirmationPlan(card_id=card.id, command=f"playbook confirm {card.id} --json", cases=cases, without_case=without)


def _case(case: Case, claims: Sequence[tuple[str, str]], records: Sequence[Record]) -> PlannedCase:
    launched = case.kind in LAUNCHED_KINDS

    def exact(profile: str) -> bool:
        return all(metrics.on(metric, gpus=profile != CPU).deterministic for _, metric in claims)

    profiles = [_profile(case, name, exact(name), records) for name in case.profiles] if launched else []
    return PlannedCase(case=case.id, kind=case.kind, claims=[i for i, _ in claims], requires=case.requires, profiles=profiles)


def _profile(case: Case, profile: str, exact: bool, records: Sequence[Record]) -> PlannedProfile:
    """Number of launches by the schedule, and their cost by the recorded launches of this case and profile."""
    looks, k = case.budget.looks, len(case.variants)
    # An exact metric is compared in one pair or block, without burn-in.
    least, most = (k, k) if exact else (schedule.launches(looks, None, k), k + k * looks[-1])
    found = [r.content.measured for r in records if isinstance(r.content, Evidence) and not r.altered]
    walls = [r.wall_s for m in found if m.case and (m.case.id, m.profile) == (case.id, profile) for r in m.runs if r.outcome == "ok"]
    each = median(walls) if walls else None
    limit = 60 * case.budget.minutes
    noise = "exact metric, no noise" if exact else "that of the launches that are compared"
    return PlannedProfile(
        profile=profile,
        ranks=max(overrides(case, v, profile)[1] for v in case.variants),
        launches_least=least,
        launches_most=most,
        seconds_per_launch=each,
        seconds_least=None if each is None else min(limit, least * each),
        seconds_most=None if each is None else min(limit, most * each),
        limit_s=limit,
        noise=noise,
    )
