"""Where claims and decision rules stand, in words: what terminal, site, skills and MCP server say of a verdict they take from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Literal

from playbook.cards.model import Card, Claim, Decision, MechanismCheck
from playbook.records.evidence import Evidence
from playbook.records.machine import short_gpu
from playbook.records.read import FROM, UNTESTED, Claims, Record, verdicts

_Basis = Literal["measured", "refuted", "hypothesis"]

_WITHOUT_RUNS: Mapping[str | None, str] = {"arithmetic": "arithmetic", "invariant": "check of the software"}
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 8: "eight"}


def in_words(record: Record, stale: Sequence[str] | str | None = None, *, places: bool = True) -> str:
    """A verdict with what it rests on: `confirmed, one H200, megatron`, `confirmed, stale, CPU, torch` or `confirmed, arithmetic`; with or without the machine."""
    return ", ".join([record.status.replace("_", " "), *(["stale"] if stale else []), *_rests_on(record, places)])


def stands(records: Iterable[Record], claim: Claim | MechanismCheck, today: date) -> list[str]:
    """The verdict of each kind of machine with its backend, each once; empty where nobody has tested the claim."""
    return list(dict.fromkeys(in_words(r, r.stale(today, claim)) for r in verdicts(records, claim.id)))


def standing(records: Iterable[Record], claim: Claim | MechanismCheck, today: date) -> str:
    """Where a claim stands, in one line; `untested` where nobody has tested it."""
    return "; ".join(stands(records, claim, today)) or UNTESTED


def basis(rule: Decision, records: Sequence[Record], claims: Claims, today: date) -> _Basis:
    """What a decision rule rests on, derived and never typed: `measured` where a fresh verdict confirms one of the claims that it cites.

    `refuted` where there are fresh verdicts, and all are against it; else `hypothesis`. A verdict on another backend than the rule's says nothing.
    """
    cited = [(r, claims[i][1]) for i in rule.because if i in claims for r in verdicts(records, i)]
    wanted = rule.when.get("backend")
    fresh = {r.status for r, claim in cited if (not r.backends or wanted in (None, *r.backends)) and not r.stale(today, claim)}
    return "measured" if "confirmed" in fresh else "refuted" if "refuted" in fresh else "hypothesis"


def bases(card: Card, records: Sequence[Record], claims: Claims, today: date) -> list[_Basis]:
    """`basis` of each decision rule of a card, in their order."""
    return [basis(rule, records, claims, today) for rule in card.decide]


def _rests_on(record: Record, places: bool) -> list[str]:
    """The machine and the backends, or that there were no runs."""
    where = _WITHOUT_RUNS.get(record.claim_ref.kind if record.claim_ref else None)
    found = [where] if where else [*([_machine(record)] if places else []), *([" and ".join(record.backends)] if record.backends else [])]
    return [*found, *([f"by {record.origin}"] if record.origin else [])]


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
