"""Which claims wait for a verdict on a machine class, the most valuable first, and which verdicts for a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date

from playbook.cards.model import Card, Claim, MechanismCheck
from playbook.cards.scope import MACHINE_KEYS
from playbook.records.case import load_case
from playbook.records.evidence import Evidence
from playbook.records.machine import CPU
from playbook.records.read import Record, earlier
from playbook.records.trace import TraceResult

_DECIDED = ("confirmed", "refuted")


def untested_claims(cards: Mapping[str, Card], records: Sequence[Record], profile: str, today: date) -> list[str]:
    """Claims and mechanism checks, as `CARD/CLAIM`, that have no fresh verdict from this profile and whose case has it, or needs no run.

    Those that most decision rules rest on come first, and a claim's mechanism check follows it. Behind them come those that were undecided after all
    of their pairs, and last what failed when it last ran.
    """
    rules = Counter(claim for card in cards.values() for rule in card.decide for claim in rule.because)
    waiting: list[tuple[tuple[int, int], str]] = []
    for card in cards.values():
        for claim in card.claims:
            for asked in (c for c in (claim, claim.mechanism_check) if c):
                own = [r for r in earlier(records, asked.id) if not r.altered and _profile(r) in (profile, None)]
                if _has(asked, profile) and not any(r.status in _DECIDED and not r.stale(today, asked) for r in own):
                    last = max(own, key=lambda r: r.measured, default=None)
                    waiting.append(((_lateness(last, today, asked), -rules[claim.id]), f"{card.id}/{asked.id}"))
    return [target for _, target in sorted(waiting, key=lambda w: w[0])]


def untraced_verdicts(cards: Mapping[str, Card], records: Sequence[Record], profile: str, today: date) -> dict[str, tuple[str, Evidence]]:
    """By case, as `CARD/CLAIM` and record, fresh timed verdicts from this profile whose variants nobody has traced there."""
    traced = {r.content.case for r in records if isinstance(r.content, TraceResult) and not r.altered and r.content.profile == profile}
    found: dict[str, tuple[str, Evidence]] = {}
    for card in cards.values():
        for claim in card.claims:
            if claim.case is None or claim.case in traced or load_case(claim.case).command:
                continue
            for r in earlier(records, claim.id):
                if (
                    isinstance(r.content, Evidence)
                    and not r.altered
                    and _profile(r) == profile
                    and r.content.timed_on_gpus
                    and not r.stale(today, claim)
                ):
                    found.setdefault(claim.case, (f"{card.id}/{claim.id}", r.content))
    return found


def _lateness(last: Record | None, today: date, asked: Claim | MechanismCheck) -> int:
    """How far behind a claim has to wait: its last series failed, or took all of its pairs and left it open; a series that time cut goes on at once."""
    if last is None:
        return 0
    if last.status == "error":
        return 2
    reason = last.content.derived.verdict.reason if isinstance(last.content, Evidence) else None
    return int(reason == "power" and not last.stale(today, asked))


def _profile(record: Record) -> str | None:
    return record.content.measured.profile if isinstance(record.content, Evidence) else ""


def _has(asked: Claim | MechanismCheck, profile: str) -> bool:
    """Whether the claim's case can be run on the profile, and on a CPU says something of the claim."""
    if asked.case is None:
        return False
    case = load_case(asked.case)
    speaks = profile != CPU or isinstance(asked, MechanismCheck) or asked.cpu_scope or not MACHINE_KEYS & asked.scope.keys()
    return not case.profiles or (profile in case.profiles and bool(speaks))
