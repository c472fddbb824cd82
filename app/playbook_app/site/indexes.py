"""What the site's search and its question box look through, and the site for readers that take plain Markdown: `llms.txt`,
`llms-measured.txt` and `llms-full.txt`.

Search: titles, headings, first sentences, and the questions that a card answers; tables, records and what did not work are found by
their titles alone. Question box: the words, scores and thresholds of the search of cards, counted in the browser by `ask.js`.
Source: the convention of https://llmstxt.org: a title, a summary in a quotation, sections of links with notes; a page's plain text lies at
its own address with `.md` added.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.cards import search
from playbook.cards.model import Card, Claim, MechanismCheck, by_claim, expectation
from playbook.cards.terms import EXPERTS, FAMILIES, GPUS, LEAST, MOST, PRIOR, WAYS, load_weights, load_words, tables, terms
from playbook.paths import data_root
from playbook.planner.models import MODELS
from playbook.records.read import DECIDED, Record, verdicts
from playbook.records.standing import bases, standing
from playbook.skills.model import load_skills
from playbook_app.site.cards import Shelf, each, effect
from playbook_app.site.pages import render_plain
from playbook_app.site.text import NBSP, plain

_MOST = 240
"""Characters of the text that stands for a section."""
_BY_TITLE = ("_generated/", "evidence/", "adr/")
_NEGATIVE = "What did not work"
_ASKED, _PAGE = 6.0, 2.0
"""Weights of whole pages; that of a card is 4."""
_TAG = re.compile(r"<[^>]+>")
_FIGURE = re.compile(r"<(table|pre|figure|svg|script|form)\b.*?</\1>", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_ANSWERED = re.compile(r"fsdp-or-3d|how-much-cp|which-dispatcher")
"""Generated pages that answer a question, and are no table."""


def questions(cards: Mapping[str, Card]) -> dict[str, list[str]]:
    """What people ask that a card answers, by its page: its signs and its other names."""
    return {f"cards/{i}.html": [*card.symptoms, *card.aliases] for i, card in cards.items()}


def shortened(index: Mapping[str, Any], questions_of_pages: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A search index whose entries have their first sentences alone, and the page of a card its questions behind them."""
    docs = [{**d, **_boosted(d, questions_of_pages), "text": _paragraph(_text(d, questions_of_pages))} for d in index["docs"]]
    return {**index, "docs": docs}


def _paragraph(text: str) -> str:
    """Text as an element of its own, which the style sheet cuts to two lines where it is shown."""
    return f"<p>{html.escape(text, quote=False)}</p>" if text else ""


def _boosted(entry: Mapping[str, Any], questions_of_pages: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """A page that says what it is asked, or has its title alone, goes before a card that has as many of the words, since cards have many
    more.
    """
    page, _, section = entry["location"].partition("#")
    if section or page.startswith(("cards/", "evidence/")):
        return {}
    return {"boost": max(_ASKED if page in questions_of_pages or page.startswith("_generated/") else _PAGE, entry.get("boost", 0))}


def _text(entry: Mapping[str, str], questions_of_pages: Mapping[str, Sequence[str]]) -> str:
    page, _, section = entry["location"].partition("#")
    if (page.startswith(_BY_TITLE) and not _ANSWERED.search(page)) or html.unescape(entry["title"]).startswith(_NEGATIVE):
        return ""
    first = _first(html.unescape(" ".join(_TAG.sub(" ", _FIGURE.sub(" ", entry["text"])).split())))
    return " ".join([first, *questions_of_pages.get(page, ())]) if not section else first


def _first(text: str) -> str:
    """The sentences that a text begins with, as many as are short."""
    out = ""
    for sentence in _SENTENCE.split(text):
        if out and len(out) + len(sentence) >= _MOST:
            break
        out = f"{out} {sentence}".strip()
    return out if len(out) <= 2 * _MOST else out[: 2 * _MOST].rpartition(" ")[0] + " ..."


_FACTS = frozenset({"gpu", "gpus", "model", "seq_len", "moe", "vision"})
"""What of a scope a question can state."""
_FIELDS = {"title": "t", "alias": "a", "symptom": "s", "pitfall": "s"}
"""Which fields of a card a passage's kind belongs to: its title, its signs, or both; the body has everything."""


def question_box(cards: Mapping[str, Card]) -> str:
    """The cards' passages and known questions as numbers of terms, and what these speak against a card, with the tables that make terms
    of a question.
    """
    index = search.index(cards)
    numbers: dict[str, int] = {}
    order = {card_id: i for i, card_id in enumerate(index.cards)}
    pieces = [
        [order[p.card], _FIELDS.get(p.kind, ""), [numbers.setdefault(t, len(numbers)) for t in terms(p.text)]] for p in index.passages
    ]
    weighed = [[numbers.setdefault(t, len(numbers)), round(v, 4)] for t, v in sorted(index.odds.items()) if t]
    known_questions = [
        [[order[c] for c in sorted(q.cards & order.keys())], sorted(numbers[t] for t in q.said)]
        for q in index.known_questions
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
            "cards": [_shown(card) for card in index.cards.values()],
            "terms": list(numbers),
            "passages": pieces,
            "odds": weighed,
            "unseen": index.odds[""],
            "asked": known_questions,
            "prior": PRIOR,
            "alike": search.ALIKE,
            "fields": search.FIELDS,
            "passage": search.PASSAGE,
            "least": LEAST,
            "signs": load_weights(),
            "kinds": {kind: sorted(known_questions) for kind, known_questions in load_words().items()},
            "most_words": MOST,
            "ways": sorted(WAYS),
            "experts": sorted(EXPERTS),
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
            **tables([*(p.text for p in index.passages), *(q.text for q in index.known_questions)]),
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _shown(card: Card) -> dict[str, object]:
    return {
        "id": card.id,
        "title": card.title,
        "summary": card.summary,
        "scopes": [{k: v for k, v in scope.items() if k in _FACTS} for scope in (card.scope, *(c.scope for c in card.claims))],
        "sizes": [rule.sizes.model_dump(mode="json") for rule in card.decide if rule.sizes],
    }


SUMMARY = (
    "Performance guidance for training large models (mixture of experts, vision-language, long context). Every statement is a claim that "
    "a machine can check; each claim carries its verdicts, by machine, with the evidence behind them."
)
_READING = (
    "A verdict speaks for the machine that it names and for no other. `refuted` means that measurement does not bear the claim out."
    " Effects are positive where the candidate is better than the baseline; where lower is better, a percentage is of baseline over"
    " candidate, less one, so +100 % stands for half. Ids such as W9 are claims; W9.m is a check of W9's mechanism and says nothing"
    " about W9 itself."
)


def llms(shelf: Shelf, guides: Sequence[Path], base: str = "") -> str:
    """The index: every card with where its claims stand, and every guide. `base` is the site's address, which makes links absolute."""
    titles = [(_title(p), p.stem) for p in guides]
    stands = {
        c.id: " | ".join(f"{claim.id} {standing(shelf.records, claim, shelf.today)}" for claim in c.claims) for c in shelf.cards.values()
    }
    root = base and base.rstrip("/") + "/"
    return render_plain("llms.txt", summary=SUMMARY, reading=_READING, cards=_by_title(shelf), stands=stands, guides=titles, root=root)


def llms_measured(shelf: Shelf) -> str:
    """The claims that a verdict confirms or refutes and nothing has made stale since, with that verdict alone."""
    lines = []
    for card in _by_title(shelf):
        for claim in each(card):
            records = [r for r in verdicts(shelf.records, claim.id) if r.status in DECIDED and not r.stale(shelf.today, claim)]
            lines += [f"- {claim.id} ({card.id}): {claim.statement} {_in_words(shelf, r, claim)}." for r in records]
    head = (
        f"# Playbook: what is measured\n\n> Only claims with a current verdict of `confirmed` or `refuted`; {len(lines)}"
        f" verdicts.\n\n{_READING}"
    )
    return "\n".join([head, "", *(lines or ["No verdict is current."])]) + "\n"


def llms_full(shelf: Shelf, guides: Sequence[Path]) -> str:
    """All cards and all guides, one after the other."""
    cards = [plain_card(shelf, c) for c in _by_title(shelf)]
    return "\n\n---\n\n".join([f"# Playbook\n\n> {SUMMARY}\n\n{_READING}", *(t.strip() for t in cards), *(_body(p) for p in guides)]) + "\n"


def plain_card(shelf: Shelf, card: Card) -> str:
    """A card as plain Markdown, with the newest verdict of each machine on each claim."""
    return render_plain(
        "card.txt",
        card=card,
        rules=zip(card.decide, bases(card, shelf.records, by_claim(shelf.cards), shelf.today), strict=True),
        words=_words,
        expects=lambda claim: " ".join(filter(None, expectation(claim))),
        sources=lambda claim: "; ".join(", ".join(x for x in (s.title, s.origin, s.section, s.date) if x) for s in claim.sources),
        verdicts=lambda claim: _verdicts(shelf, claim),
    )


def _verdicts(shelf: Shelf, claim: Claim | MechanismCheck) -> list[str]:
    return [_in_words(shelf, r, claim) for r in verdicts(shelf.records, claim.id)] or ["No verdict on record: untested"]


def _in_words(shelf: Shelf, r: Record, claim: Claim | MechanismCheck) -> str:
    old = r.stale(shelf.today, claim)
    shown = html.unescape(effect(r)).replace(NBSP, " ")
    word = r.status.replace("_", " ") + (f", stale ({old})" if old else "")
    return f"On {r.machine}, {r.measured[:10]}: {word}{', ' + shown if shown else ''} (evidence {r.id})"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}: {plain(v)}" for k, v in values.items())


def _by_title(shelf: Shelf) -> list[Card]:
    return sorted(shelf.cards.values(), key=lambda c: c.title)


def _body(path: Path) -> str:
    content = path.read_text(encoding="utf-8")
    return (content.split("---\n", 2)[2] if content.startswith("---\n") else content).strip()


def _title(path: Path) -> str:
    return next((line.removeprefix("# ").strip() for line in _body(path).splitlines() if line.startswith("# ")), path.stem)
