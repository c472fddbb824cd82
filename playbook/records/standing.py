"""Where claims and decision rules stand, in words, and which claims wait for a verdict: what terminal, site, skills and MCP server say of
a verdict they take from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal

from playbook.cards.model import Card, Claim, Decision, MechanismCheck
from playbook.cards.scope import MACHINE_KEYS
from playbook.records.case import load_case
from playbook.records.evidence import Evidence
from playbook.records.machine import CPU, short_gpu
from playbook.records.read import DECIDED, FROM, UNTESTED, Claims, Record, earlier, verdicts
from playbook.records.trace import TraceResult

_Basis = Literal["measured", "refuted", "hypothesis"]

_WITHOUT_RUNS: Mapping[str | None, str] = {"arithmetic": "arithmetic", "invariant": "check of the software"}
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 8: "eight"}


@dataclass(frozen=True)
class Stock:
    """Cards with the evidence on their claims, as of a day."""

    cards: Mapping[str, Card]
    records: Sequence[Record]
    today: date


def in_words(record: Record, stale: Sequence[str] | str | None = None, *, places: bool = True) -> str:
    """A verdict with what it rests on: `confirmed, one H200, megatron`, `confirmed, stale, CPU, torch` or `confirmed, arithmetic`; with
    or without the machine.
    """
    return ", ".join([record.status.replace("_", " "), *(["stale"] if stale else []), *_rests_on(record, places)])


def stands(records: Iterable[Record], claim: Claim | MechanismCheck, today: date, gpus: Sequence[str] = ()) -> list[str]:
    """The verdict of each kind of machine with its backend, each once, those of the GPUs named first; empty where nobody has tested the
    claim.
    """
    asked_first = sorted(verdicts(records, claim.id), key=lambda r: not r.machine.startswith(tuple(gpus)) if gpus else False)
    return list(dict.fromkeys(in_words(r, r.stale(today, claim)) for r in asked_first))


def standing(records: Iterable[Record], claim: Claim | MechanismCheck, today: date) -> str:
    """Where a claim stands, in one line; `untested` where nobody has tested it."""
    return "; ".join(stands(records, claim, today)) or UNTESTED


def basis(rule: Decision, records: Sequence[Record], claims: Claims, today: date) -> _Basis:
    """What a decision rule rests on, derived and never typed: `measured` where a fresh verdict confirms one of the claims that it cites.

    `refuted` where there are fresh verdicts, and all are against it; else `hypothesis`. A verdict on another backend than the rule's says
    nothing.
    """
    cited = [(r, claims[i][1]) for i in rule.because if i in claims for r in verdicts(records, i)]
    backend = rule.when.get("backend")
    fresh = {r.status for r, claim in cited if (not r.backends or backend in (None, *r.backends)) and not r.stale(today, claim)}
    return "measured" if "confirmed" in fresh else "refuted" if "refuted" in fresh else "hypothesis"


def bases(card: Card, records: Sequence[Record], claims: Claims, today: date) -> list[_Basis]:
    """`basis` of each decision rule of a card, in their order."""
    return [basis(rule, records, claims, today) for rule in card.decide]


def _rests_on(record: Record, places: bool) -> list[str]:
    """The machine and the backends, or that there were no runs."""
    where = _WITHOUT_RUNS.get(record.claim_ref.kind if record.claim_ref else None)
    words = [where] if where else [*([_machine(record)] if places else []), *([" and ".join(record.backends)] if record.backends else [])]
    return [*words, *([f"by {record.origin}"] if record.origin else [])]


def _machine(record: Record) -> str:
    """`one H200`, or `CPU`; with what sets it apart from other machines of its name."""
    content = record.content
    machine = content.measured.machine if isinstance(content, Evidence) else content.machine
    apart = record.machine.partition(FROM)[0].removeprefix(machine.name)
    nodes = f" on {_NUMBERS.get(machine.nodes, machine.nodes)} nodes" if machine.nodes > 1 else ""
    gpus = machine.gpus
    sharing = content.measured.sharing if isinstance(content, Evidence) else 0
    ranks = f"{_NUMBERS.get(sharing, sharing)} ranks on " if sharing else ""
    name = f"{ranks}{_NUMBERS.get(gpus, gpus)} {short_gpu(machine.gpu or '').upper()}{'s' if gpus > 1 else ''}" if gpus else "CPU"
    return f"{name}{nodes}{apart}"


# Which claims wait for a verdict on a machine class, the most valuable first, and which verdicts for a trace.


def untested_claims(cards: Mapping[str, Card], records: Sequence[Record], profile: str, today: date) -> list[str]:
    """Claims and mechanism checks, as `CARD/CLAIM`, that have no fresh verdict from this profile and whose case has it, or needs no run.

    Those that most decision rules rest on come first, and a claim's mechanism check follows it. Behind them come those that were
    undecided after all of their pairs, or out of reach, and last what failed when it last ran.
    """
    rules = Counter(claim for card in cards.values() for rule in card.decide for claim in rule.because)
    waiting: list[tuple[tuple[int, int], str]] = []
    for card in cards.values():
        for claim in card.claims:
            for tested in (c for c in (claim, claim.mechanism_check) if c):
                of_profile = [r for r in earlier(records, tested.id) if not r.altered and _profile(r) in (profile, None)]
                if _has(tested, profile) and not any(r.status in DECIDED and not r.stale(today, tested) for r in of_profile):
                    last = max(of_profile, key=lambda r: r.measured, default=None)
                    waiting.append(((_lateness(last, today, tested), -rules[claim.id]), f"{card.id}/{tested.id}"))
    return [target for _, target in sorted(waiting, key=lambda w: w[0])]


def untraced_verdicts(cards: Mapping[str, Card], records: Sequence[Record], profile: str, today: date) -> dict[str, tuple[str, Evidence]]:
    """By case, as `CARD/CLAIM` and record, fresh timed verdicts from this profile whose variants nobody has traced there."""
    traced = {r.content.case for r in records if isinstance(r.content, TraceResult) and not r.altered and r.content.profile == profile}
    untraced: dict[str, tuple[str, Evidence]] = {}
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
                    untraced.setdefault(claim.case, (f"{card.id}/{claim.id}", r.content))
    return untraced


def _lateness(last: Record | None, today: date, claim: Claim | MechanismCheck) -> int:
    """How far behind a claim has to wait: its last series failed, or left it open for want of precision; a series that time cut goes
    on at once.
    """
    if last is None:
        return 0
    if last.status == "error":
        return 2
    reason = last.content.derived.verdict.reason if isinstance(last.content, Evidence) else None
    return int(reason == "power" and not last.stale(today, claim))


def _profile(record: Record) -> str | None:
    return record.content.measured.profile if isinstance(record.content, Evidence) else ""


def _has(claim: Claim | MechanismCheck, profile: str) -> bool:
    """Whether the claim's case can be run on the profile, and on a CPU says something of the claim."""
    if claim.case is None:
        return False
    case = load_case(claim.case)
    speaks = profile != CPU or isinstance(claim, MechanismCheck) or claim.cpu_scope or not MACHINE_KEYS & claim.scope.keys()
    return not case.profiles or (profile in case.profiles and bool(speaks))
