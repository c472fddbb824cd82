"""What pages are made from: cards, records and today's date; and which verdicts count today."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from playbook.cards.model import Card, Claim, Expect
from playbook.records.read import DECIDED, Record, verdicts
from playbook_app.site.curves import Bar, forest

_SAID = re.compile(r"^(?:train|parallel|megatron|precision)\.")
"""Parts of a key that its own name says again."""
TARGETS = {"megatron-lm": "Megatron-LM", "megatron-bridge": "Megatron Bridge", "torchtitan": "torchtitan"}
"""Trainers that configurations are exported to, with their names."""
Flags = Callable[[Mapping[str, Any]], Mapping[str, Sequence[str]]]
"""A function that gives, for keys of the trainer's configuration and their values, the settings of other trainers that say the same."""


def no_flags(keys: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """No setting of any trainer."""
    return {}


@dataclass(frozen=True)
class Shelf:
    """Everything that pages are made from."""

    cards: Mapping[str, Card]
    records: Sequence[Record]
    today: date
    home: Mapping[str, str]
    """For each claim id, the card that holds it."""
    flags: Flags = no_flags


def anchor(claim: str) -> str:
    """The heading id of a claim."""
    return claim.lower().replace(".", "-")


def margin(expect: Expect) -> float | None:
    """The claimed margin on the effect's own scale, a share of the baseline; a ratio of 0.45 is a loss of 0.55."""
    if expect.margin is None:
        return None
    return {"percent": expect.margin.value / 100, "ratio": expect.margin.value - 1}.get(expect.margin.unit)


def verdict_forest(shelf: Shelf, cards: Iterable[Card], up: str = "", machine: str | None = None) -> str:
    """Current verdicts from GPUs, or from one kind of machine, on the cards' claims, of those that have an interval; `up` leads to the
    site's root.
    """
    return forest([b for card in cards for claim in card.claims for b in _bars(shelf, card, claim, up, machine)])


def _bars(shelf: Shelf, card: Card, claim: Claim, up: str, machine: str | None) -> Iterator[Bar]:
    """The bars of a claim's current verdicts that have an interval on the logarithmic scale."""
    for r in current(shelf, claim):
        if machine not in (None, r.get("measured", "machine", "name")):
            continue
        comparison = r.get("derived", "comparison", default={})
        curve = r.get("derived", "curve", default={})
        if len(contrasts := curve.get("contrasts", ())) == 1:
            comparison = {**curve, **contrasts[0]}
        low, value, high = (comparison.get(k) for k in ("low", "effect", "high"))
        if comparison.get("scale") != "log_ratio" or low == high or not all(isinstance(v, int | float) for v in (low, value, high)):
            continue
        yield Bar(
            claim=claim.id,
            name=compared(claim) or (claim.case or card.id).replace("-", " "),
            about=card.title,
            statement=claim.statement,
            address=f"{up}cards/{card.id}.html#{anchor(claim.id)}",
            effect=value,
            low=low,
            high=high,
            margin=margin(claim.expect),
            op=claim.expect.op,
            status=r.status,
        )


def compared(claim: Claim) -> str:
    """What the sides of a claim set differently, in a few words: `recompute: full → selective`; empty where it compares no settings."""
    before, after = claim.comparison.baseline, claim.comparison.candidate
    keys = [k for k in dict.fromkeys([*after, *before]) if before.get(k) != after.get(k)]
    changed = [f"{_SAID.sub('', k)}: {_set(before.get(k))} → {_set(after.get(k))}" for k in keys]
    return "; ".join(changed) if len(changed) < 3 else f"{changed[0]}, …"


def _set(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def current(shelf: Shelf, claim: Claim) -> list[Record]:
    """The verdicts from GPUs that still speak for the claim."""
    return [
        r
        for r in verdicts(shelf.records, claim.id)
        if r.gpus and r.status in (*DECIDED, "inconclusive") and not r.stale(shelf.today, claim)
    ]
