"""`playbook mcp`: serves cards, evidence and layout rules to agents. Part of the command line."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from playbook import __version__
from playbook.errors import PlaybookError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from playbook.cards.model import Card
    from playbook.mcp.answers import Plan, PlannedCase, PlannedProfile
    from playbook.mcp.server import Library
    from playbook.records.case import Case
    from playbook.records.evidence import Baseline


def mcp() -> None:
    """Serve cards, evidence and layout rules to an agent over the Model Context Protocol on stdio; read-only."""
    try:
        from playbook.mcp.server import server
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise PlaybookError("the package 'mcp' is not installed; run pip install 'perf-playbook[mcp]'") from e
    serving = server(library_here())
    # A thread of the library waits for the next line and would hold an interrupted server until one comes. It writes nothing, so it may just end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serving.run("stdio")


def library_here() -> Library:
    """Cards and skills that ship, with evidence from this folder's runs and from the repository."""
    from datetime import UTC, datetime

    from playbook.cards.load import load_all
    from playbook.cli.evidence import here, records_here
    from playbook.mcp.server import Library
    from playbook.paths import data_root
    from playbook.skills.model import load_skills

    cards, mine = load_all(), here()
    return Library(
        cards=cards,
        skills=load_skills(data_root("skills")),
        records=lambda: records_here(cards, mine),
        today=lambda: datetime.now(UTC).date(),
        plan=plan,
        version=__version__,
    )


def plan(card: Card) -> Plan:
    """What `playbook confirm CARD` would run on each profile, from files alone; no machine is looked at."""
    from playbook.mcp.answers import Plan
    from playbook.records.case import load_case
    from playbook_bench.run.confirm import tasks_of_card

    named: dict[str, list[tuple[str, str]]] = {}
    without = []
    for task in tasks_of_card(card):
        if task.claim is None or task.case is None:
            without += [task.claim.id] if task.claim else []
        else:
            named.setdefault(task.case, []).append((task.claim.id, task.claim.metric))
    cases = [_case(load_case(case), claims) for case, claims in named.items()]
    return Plan(card_id=card.id, command=f"playbook confirm {card.id} --json", cases=cases, without_case=without)


def _case(case: Case, claims: Sequence[tuple[str, str]]) -> PlannedCase:
    from playbook.mcp.answers import PlannedCase
    from playbook.records.case import LAUNCHED_KINDS
    from playbook_bench.judge import metrics

    launched = case.kind in LAUNCHED_KINDS
    exact = launched and all(metrics.get(metric).deterministic for _, metric in claims)
    profiles = [_profile(case, name, exact) for name in case.profiles] if launched else []
    return PlannedCase(case=case.id, kind=case.kind, claims=[i for i, _ in claims], requires=case.requires, profiles=profiles)


def _profile(case: Case, profile: str, exact: bool) -> PlannedProfile:
    """Launches as the schedule counts them; their cost as the stored A/A runs of this profile took."""
    from statistics import median

    from playbook.mcp.answers import PlannedProfile
    from playbook_bench.run import schedule
    from playbook_bench.run.variants import resolve_variant

    stored = _baselines(case.id, profile)
    looks = case.budget.pairs
    aa_pairs = schedule.FRESH_AA_PAIRS if stored else schedule.AA_PAIRS
    k = len(case.variants)
    # An exact metric is compared in one pair or block, without burn-in or A/A.
    least, most = (k, k) if exact else (schedule.launches(looks, None, aa_pairs, k), k + 2 * aa_pairs + k * looks[-1])
    walls = [r.wall_s for b in stored for r in b.runs if r.outcome == "ok"]
    each = median(walls) if walls else None
    limit = 60 * case.budget.minutes
    noise = "exact metric, no noise" if exact else "stored; measured again if the environment differs" if stored else "measured first"
    return PlannedProfile(
        profile=profile,
        ranks=max(resolve_variant(case, v, profile).ranks for v in case.variants),
        launches_least=least,
        launches_most=most,
        seconds_per_launch=each,
        seconds_least=None if each is None else min(limit, least * each),
        seconds_most=None if each is None else min(limit, most * each),
        limit_s=limit,
        noise=noise,
    )


def _baselines(case: str, profile: str) -> list[Baseline]:
    """The stored A/A of a case on a profile, from any environment."""
    from playbook.paths import data_root
    from playbook_bench.run.store import DEFAULT_RESULTS, load_baseline

    folders: list[Path] = [DEFAULT_RESULTS / "baselines", data_root("baselines")]
    found = [load_baseline(p) for folder in folders for p in sorted(folder.glob(f"*/{case}.*.json"))]
    return [b for b in found if b.case == case and b.profile == profile]
