"""Which claims a target names: `CARD`, `CARD/CLAIM`, `CLAIM` or a card's file; and the case that tests each."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playbook.cards import load as validate
from playbook.cards import model
from playbook.errors import ConfigError, FileError
from playbook.records.case import beside
from playbook.records.evidence import ClaimRef, digest
from playbook.yaml_files import did_you_mean, load

_TARGET = re.compile(r"(?P<card>[a-z0-9][a-z0-9-]*)(?:/(?P<claim>[A-Z][0-9]{1,3}(?:\.[a-z])?))?\Z")


@dataclass(frozen=True)
class Task:
    """One claim, or mechanism check, and the case that settles it."""

    claim: ClaimRef | None
    case: str | None
    asked: bool = True

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
    known = validate.load_all()
    card = validate.card_of(target, known)
    match = _TARGET.match(f"{card}/{target}" if card else target)
    if match is None:
        raise ConfigError(
            f"'{target}' is neither a card nor a claim; write CARD, CARD/CLAIM or CLAIM, for example moe-dispatcher-choice/W9"
        )
    if match["card"] not in known:
        raise ConfigError(f"card '{match['card']}' is not known{did_you_mean(match['card'], known)}")
    tasks = tasks_of_card(known[match["card"]])
    if match["claim"] is None:
        return tasks
    ids = [t.claim.id for t in tasks if t.claim]
    chosen = [t for t in tasks if t.claim and match["claim"] in (t.claim.id, t.claim.mechanism_of)]
    if not chosen:
        raise ConfigError(f"card '{match['card']}' has no claim '{match['claim']}'{did_you_mean(match['claim'], ids)}")
    return [replace(t, asked=t.claim is not None and t.claim.id == match["claim"]) for t in chosen]


def tasks_of_card(card: model.Card) -> list[Task]:
    """Each claim of a card, followed by its mechanism check."""
    sha = digest(card.model_dump(mode="json"), 16)
    out = []
    for claim in card.claims:
        own: dict[str, Any] = {f: getattr(claim, f) for f in ("kind", "scope", "label", "cpu_scope")}
        out.append(Task(ClaimRef(card=card.id, card_sha=sha, **_shared(claim), **own), claim.case))
        check = claim.mechanism_check
        if check is not None:
            ref = ClaimRef(card=card.id, card_sha=sha, **_shared(check), kind="pair", mechanism_of=claim.id)
            out.append(Task(ref, check.case))
    return out


def _shared(claim: model.Claim | model.MechanismCheck) -> dict[str, Any]:
    return {f: getattr(claim, f) for f in ("id", "statement", "metric", "expect", "comparison")}


def _tasks_of_file(path: Path) -> list[Task]:
    """The tasks of a card outside the playbook; its cases may lie beside it, in `../bench/cases/`."""
    found, card = [], load(path, model.Card)[0]
    if taken := validate.clashes(path):
        raise FileError(taken)
    for task in tasks_of_card(card):
        own = beside(path, task.case) if task.case else None
        found.append(Task(task.claim, str(own)) if own else task)
    return found
