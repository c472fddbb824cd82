"""The search of the cards as data for the site's question box: the same words, scores and thresholds, counted there by `ask.js`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from playbook.cards import questions, search
from playbook.cards.model import Card
from playbook.cards.questions import PRIOR
from playbook.cards.terms import FAMILIES, GPUS, tables, terms
from playbook.paths import data_root
from playbook.planner.models import MODELS
from playbook.skills.model import load_skills

_FACTS = frozenset({"gpu", "gpus", "model", "seq_len", "moe", "vision"})
_FIELDS = {"title": "t", "alias": "a", "symptom": "s", "pitfall": "s"}
"""Which fields of a card a passage's kind belongs to: its title, its signs, or both; the body has everything."""


def asked(cards: Mapping[str, Card]) -> str:
    """The cards' passages and known questions as numbers of terms, and what these speak against a card, with the tables that make terms of a question."""
    found = search.index(cards)
    numbers: dict[str, int] = {}
    order = {card_id: i for i, card_id in enumerate(found.cards)}
    pieces = [
        [order[p.card], _FIELDS.get(p.kind, ""), [numbers.setdefault(t, len(numbers)) for t in terms(p.text)]] for p in found.passages
    ]
    weighed = [[numbers.setdefault(t, len(numbers)), round(v, 4)] for t, v in sorted(found.odds.items()) if t]
    known = [
        [[order[c] for c in sorted(q.cards & order.keys())], sorted(numbers[t] for t in q.said)]
        for q in found.asked
        if q.cards & order.keys()
    ]
    skills = [
        {
            "name": s.name,
            "description": s.front.description,
            "terms": [numbers.setdefault(t, len(numbers)) for t in terms(f"{s.name} {s.name} {s.front.description}")],
        }
        for s in load_skills(data_root("skills")).values()
    ]
    return json.dumps(
        {
            "cards": [_shown(card) for card in found.cards.values()],
            "terms": list(numbers),
            "passages": pieces,
            "odds": weighed,
            "unseen": found.odds[""],
            "asked": known,
            "prior": PRIOR,
            "alike": search.ALIKE,
            "fields": search.FIELDS,
            "passage": search.PASSAGE,
            "least": questions.LEAST,
            "signs": questions.load_weights(),
            "kinds": {kind: sorted(known) for kind, known in questions.load_words().items()},
            "most_words": questions.MOST,
            "beside": search.BESIDE,
            "nearest": search.NEAREST,
            "unknown": search.UNKNOWN,
            "mostly": search.MOSTLY,
            "k1": search.K1,
            "b": search.B,
            "models": {name: {"moe": shape.experts > 0, "vision": shape.vision is not None} for name, shape in MODELS.items()},
            "skills": skills,
            "families": FAMILIES,
            "gpus": sorted(GPUS),
            **tables([*(p.text for p in found.passages), *(q.text for q in found.asked)]),
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _stated(scope: Mapping[str, object]) -> dict[str, object]:
    """What of a scope a question can state."""
    return {k: v for k, v in scope.items() if k in _FACTS}


def _shown(card: Card) -> dict[str, object]:
    return {
        "id": card.id,
        "title": card.title,
        "summary": card.summary,
        "scopes": [_stated(scope) for scope in (card.scope, *(c.scope for c in card.claims))],
        "sizes": [rule.sizes.model_dump(mode="json") for rule in card.decide if rule.sizes],
    }
