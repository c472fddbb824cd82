"""`llms.txt` and `llms-full.txt`: the site for readers that take plain Markdown.

Source: the convention of https://llmstxt.org: a title, a summary in a quotation, sections of links with notes; a page's plain text lies at
its own address with `.md` added.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.cards.model import Card, Claim, ConfigFamily, Decision, MechanismCheck, expectation
from playbook.records.read import verdicts
from playbook.site.cards import Shelf, effect
from playbook.site.text import NBSP, plain

SUMMARY = (
    "Performance guidance for training large models (mixture of experts, vision-language, long context). Every statement is a claim that "
    "a machine can check; each claim carries its verdicts, by machine, with the evidence behind them."
)
READING = (
    "A verdict speaks for the machine that it names and for no other. `refuted` means that measurement does not bear the claim out. "
    "Effects are positive where the candidate is better than the baseline; where lower is better, a percentage is of baseline over candidate, less one, "
    "so +100 % stands for half. Ids such as W9 are claims; W9.m is a check of W9's mechanism "
    "and says nothing about W9 itself."
)


def llms(shelf: Shelf, guides: Sequence[Path]) -> str:
    """The index: every card and every guide with one line on each."""
    cards = [f"- [{c.title}](cards/{c.id}.html.md): {c.summary} Claims {', '.join(x.id for x in c.claims)}." for c in _by_title(shelf)]
    pages = [
        "- [Claims](_generated/claims.html): every claim and its verdict on every machine",
        "- [Layout calculator](_generated/calculator.html): can a layout run, what does each GPU hold",
        "- [Evidence](evidence/index.html): every record; each lies beside its page as JSON",
        "- [Everything in one file](llms-full.txt): all cards and guides",
    ]
    parts = [
        "# Playbook",
        f"> {SUMMARY}",
        READING,
        "## Cards\n\n" + "\n".join(cards),
        "## Guides\n\n" + "\n".join(f"- [{_title(p)}](guide/{p.stem}.html)" for p in guides),
        "## Optional\n\n" + "\n".join(pages),
    ]
    return "\n\n".join(parts) + "\n"


def llms_full(shelf: Shelf, guides: Sequence[Path]) -> str:
    """All cards and all guides, one after the other."""
    cards = [plain_card(shelf, c) for c in _by_title(shelf)]
    return "\n\n---\n\n".join([f"# Playbook\n\n> {SUMMARY}\n\n{READING}", *(t.strip() for t in cards), *(_body(p) for p in guides)]) + "\n"


def plain_card(shelf: Shelf, card: Card) -> str:
    """A card as plain Markdown, with the newest verdict of each machine on each claim."""
    parts = [f"# {card.title}", card.summary, f"Card `{card.id}`, phase {card.phase}, wall {card.wall}."]
    parts.append("## Symptoms\n\n" + _bullets(card.symptoms))
    if card.decide:
        parts.append("## What to set\n\n" + _bullets(map(_decision, card.decide)))
    parts.append("## Claims")
    parts += [_claim(shelf, card, c) for c in card.claims]
    if card.disputes:
        rows = [f"{d.subject}: {', '.join(d.claims)}; {d.stands} stands. {d.why}" for d in card.disputes]
        parts.append("## In dispute\n\n" + _bullets(rows))
    if card.pitfalls:
        parts.append("## Pitfalls\n\n" + _bullets(f"{p.symptom}. Cause: {p.cause}. Fix: {p.fix}." for p in card.pitfalls))
    if card.interactions:
        parts.append("## Interactions\n\n" + _bullets(card.interactions))
    if card.families:
        parts.append("## Configurations in use\n\n" + _bullets(map(_family, card.families)))
    return "\n\n".join(parts) + "\n"


def _decision(rule: Decision) -> str:
    avoid = f"; avoid {_words(rule.avoid)}" if rule.avoid else ""
    return f"{_words(rule.when)}: set {_words(rule.set)}{avoid} (because of {', '.join(rule.because)}). {rule.note or ''}"


def _family(family: ConfigFamily) -> str:
    recipe = f" Recipe: {family.recipe}." if family.recipe else ""
    return f"{family.name}: {family.model} on {family.hardware}, {_words(family.layout)}; {_words(family.settings)}. {family.note or ''}{recipe}"


def _claim(shelf: Shelf, card: Card, claim: Claim) -> str:
    sources = "; ".join(", ".join(x for x in (s.title, s.origin, s.section, s.date) if x) for s in claim.sources)
    lines = [
        f"Why: {claim.mechanism}",
        f"Expects: {' '.join(filter(None, expectation(claim)))}",
        f"Scope: {_words(claim.scope) or 'everywhere'}",
        *_verdicts(shelf, claim),
        f"Source: {sources}",
        f"Check it: `playbook confirm {card.id}/{claim.id}`",
    ]
    check = claim.mechanism_check
    more = f"\n\n### {check.id}, mechanism of {claim.id}\n\n{check.statement}\n\n{_bullets(_verdicts(shelf, check))}" if check else ""
    return f"### {claim.id}\n\n{claim.statement}\n\n{_bullets(lines)}{more}"


def _verdicts(shelf: Shelf, claim: Claim | MechanismCheck) -> list[str]:
    out = []
    for r in verdicts(shelf.records, claim.id):
        old = r.stale(shelf.today, claim)
        shown = html.unescape(effect(r)).replace(NBSP, " ")
        word = r.status.replace("_", " ") + (f", stale ({old})" if old else "")
        out.append(f"On {r.machine}, {r.measured[:10]}: {word}{', ' + shown if shown else ''} (evidence {r.id})")
    return out or ["No verdict on record: untested"]


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}: {plain(v)}" for k, v in values.items())


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {' '.join(x.split())}" for x in lines)


def _by_title(shelf: Shelf) -> list[Card]:
    return sorted(shelf.cards.values(), key=lambda c: c.title)


def _body(path: Path) -> str:
    content = path.read_text(encoding="utf-8")
    return (content.split("---\n", 2)[2] if content.startswith("---\n") else content).strip()


def _title(path: Path) -> str:
    return next((line.removeprefix("# ").strip() for line in _body(path).splitlines() if line.startswith("# ")), path.stem)
