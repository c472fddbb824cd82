"""What the site's search looks through: titles, headings, first sentences, and the questions that a card answers. Tables, records and what did not work are found by their titles alone."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from playbook.cards.model import Card

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


def shortened(index: Mapping[str, Any], asked: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A search index whose entries have their first sentences alone, and the page of a card its questions behind them."""
    docs = [{**d, **_boosted(d, asked), "text": html.escape(_text(d, asked), quote=False)} for d in index["docs"]]
    return {**index, "docs": docs}


def _boosted(entry: Mapping[str, Any], asked: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """A page that says what it is asked, or has its title alone, goes before a card that has as many of the words, since cards have many more."""
    page, _, section = entry["location"].partition("#")
    if section or page.startswith(("cards/", "evidence/")):
        return {}
    return {"boost": max(_ASKED if page in asked or page.startswith("_generated/") else _PAGE, entry.get("boost", 0))}


def _text(entry: Mapping[str, str], asked: Mapping[str, Sequence[str]]) -> str:
    page, _, section = entry["location"].partition("#")
    if (page.startswith(_BY_TITLE) and not _ANSWERED.search(page)) or html.unescape(entry["title"]).startswith(_NEGATIVE):
        return ""
    first = _first(html.unescape(" ".join(_TAG.sub(" ", _FIGURE.sub(" ", entry["text"])).split())))
    return " ".join([first, *asked.get(page, ())]) if not section else first


def _first(text: str) -> str:
    """The sentences that a text begins with, as many as are short."""
    out = ""
    for sentence in _SENTENCE.split(text):
        if out and len(out) + len(sentence) >= _MOST:
            break
        out = f"{out} {sentence}".strip()
    return out if len(out) <= 2 * _MOST else out[: 2 * _MOST].rpartition(" ")[0] + " ..."
