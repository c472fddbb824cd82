"""`llms.txt`, `llms-measured.txt` and `llms-full.txt`: the site for readers that take plain Markdown.

Source: the convention of https://llmstxt.org: a title, a summary in a quotation, sections of links with notes; a page's plain text lies at
its own address with `.md` added.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.cards.model import Card, Claim, MechanismCheck, by_claim, expectation
from playbook.records.read import DECIDED, Record, verdicts
from playbook.records.standing import bases, standing
from playbook_app.site.cards import effect
from playbook_app.site.pages import render_plain
from playbook_app.site.shelf import Shelf
from playbook_app.site.text import NBSP, plain

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
    stands = {c.id: " | ".join(_stands(shelf, claim) for claim in c.claims) for c in shelf.cards.values()}
    root = base and base.rstrip("/") + "/"
    return render_plain("llms.txt", summary=SUMMARY, reading=_READING, cards=_by_title(shelf), stands=stands, guides=titles, root=root)


def llms_measured(shelf: Shelf) -> str:
    """The claims that a verdict confirms or refutes and nothing has made stale since, with that verdict alone."""
    lines = []
    for card in _by_title(shelf):
        for claim in (c for claim_of_card in card.claims for c in (claim_of_card, claim_of_card.mechanism_check) if c):
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


def _stands(shelf: Shelf, claim: Claim) -> str:
    return f"{claim.id} {standing(shelf.records, claim, shelf.today)}"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}: {plain(v)}" for k, v in values.items())


def _by_title(shelf: Shelf) -> list[Card]:
    return sorted(shelf.cards.values(), key=lambda c: c.title)


def _body(path: Path) -> str:
    content = path.read_text(encoding="utf-8")
    return (content.split("---\n", 2)[2] if content.startswith("---\n") else content).strip()


def _title(path: Path) -> str:
    return next((line.removeprefix("# ").strip() for line in _body(path).splitlines() if line.startswith("# ")), path.stem)
