"""Finding cards by what a person sees or wants: BM25 over fields of a card, with the scope of its claims as the judge of what applies.

A card's score is a weighted sum of BM25 over its fields and of its best passage. Every hit says why it was found and whether any of its
claims speaks for the machine that was stated; a question that the cards do not cover is answered with nothing.
Sources: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; https://github.com/xhluca/bm25s.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any

from playbook.cards.model import Card, Claim
from playbook.cards.scope import unmet
from playbook.cards.terms import Facts, facts, terms
from playbook.errors import PlaybookError

MAX_QUERY = 2000
"""Characters; a longer question is refused. The longest of the test set has about a hundred."""

FIELDS = {"title": 1.0, "signs": 2.0, "body": 1.0}
_PASSAGE = 2.0
"""Weights, chosen on the half of the test set that is for tuning."""

_LEAST_EVIDENCE = 0.38
"""Evidence that some card must have for there to be an answer at all, chosen like the weights."""
_BESIDE = 0.2
"""Evidence that is enough for a card beside such a one."""
UNKNOWN = 0.6
"""How much a word that no card knows counts against one, as a share of the rarest word's weight."""


@dataclass(frozen=True)
class Hit:
    """One card that answers a question."""

    id: str
    title: str
    claims: list[str]
    """Ids of its claims, nearest to the question first."""
    why: str
    """The passage that matched best, after its kind."""
    applies: bool
    """Whether any of its claims speaks for the run that was stated; true where nothing was."""
    limits: list[str]
    """Where claims do not speak for it, each with what was found and expected."""


@dataclass(frozen=True)
class Passage:
    """A piece of a card: what kind it is, the claim that it belongs to, and its text."""

    card: str
    kind: str
    text: str
    claim: str = ""


@dataclass(frozen=True)
class Index:
    """The cards, prepared. Build it once with `index`; a search reads it only."""

    cards: Mapping[str, Card]
    passages: Sequence[Passage]
    fields: Mapping[str, Any]
    pieces: Any
    vocabulary: Mapping[str, frozenset[str]]
    weights: Mapping[str, float]
    owner: Any = field(repr=False)


def index(cards: Mapping[str, Card]) -> Index:
    """The cards prepared for search."""
    passages = [p for card in cards.values() for p in _passages(card)]
    tokens = [terms(p.text) for p in passages]
    held: dict[str, dict[str, list[str]]] = {i: {name: [] for name in FIELDS} for i in cards}
    for passage, words in zip(passages, tokens, strict=True):
        held[passage.card]["body"] += words
        if passage.kind in ("title", "alias"):
            held[passage.card]["title"] += words
        if passage.kind in ("symptom", "pitfall", "alias"):
            held[passage.card]["signs"] += words
    vocabulary = {i: frozenset(parts["body"]) for i, parts in held.items()}
    frequency = Counter(t for words in tokens for t in set(words))
    order = {i: n for n, i in enumerate(cards)}
    return Index(
        cards=cards,
        passages=passages,
        fields={name: _bm25([parts[name] for parts in held.values()]) for name in FIELDS},
        pieces=_bm25(tokens),
        vocabulary=vocabulary,
        weights={t: log(1 + (len(tokens) - n + 0.5) / (n + 0.5)) for t, n in frequency.items()},
        owner=[order[p.card] for p in passages],
    )


def search(found: Index, query: str, stated: Facts | None = None, *, only: frozenset[str] | None = None, limit: int = 5) -> list[Hit]:
    """The cards that answer a question, best first; none where they do not cover it or nothing applies to the stated run.

    `stated` goes before what the question itself says. `only` keeps claims with these ids, and cards that have one.

    Raises:
        PlaybookError: the question is too long, or empty.
    """
    if len(query) > MAX_QUERY:
        raise PlaybookError(
            f"the question has {len(query)} characters; at most {MAX_QUERY} are read, ask with a few words or one error line"
        )
    words = terms(query)
    if not words:
        raise PlaybookError("the question holds no word to search for; say what you see or want, such as 'out of memory at 128k'")
    run = (stated or Facts()).over(facts(query))
    hits = []
    for card_id, passages in _ranked(found, words):
        hit = _hit(found, card_id, passages, run, only)
        if hit is not None:
            hits.append(hit)
        if sum(h.applies for h in hits) == limit:
            break
    if not any(h.applies for h in hits):
        return []
    return sorted(hits, key=lambda h: not h.applies)[:limit]


def _passages(card: Card) -> Iterator[Passage]:
    """Everything that a reader could be looking for in a card."""
    yield Passage(card.id, "title", f"{card.id.replace('-', ' ')}. {card.title}. {card.summary}")
    for word in card.aliases:
        yield Passage(card.id, "alias", word)
    for symptom in card.symptoms:
        yield Passage(card.id, "symptom", symptom)
    for claim in card.claims:
        yield Passage(card.id, "claim", f"{claim.statement} {claim.mechanism}", claim.id)
        keys = [*claim.comparison.baseline.items(), *claim.comparison.candidate.items(), *claim.scope.items()]
        yield Passage(card.id, "comparison", " ".join(f"{k} {v}" for k, v in [*keys, ("metric", claim.metric)]), claim.id)
        if claim.mechanism_check:
            yield Passage(card.id, "claim", claim.mechanism_check.statement, claim.id)
    for rule in card.decide:
        words = " ".join(f"{k} {v}" for part in (rule.when, rule.set, rule.avoid) for k, v in part.items())
        yield Passage(card.id, "rule", f"{words}. {rule.note or ''}", rule.because[0])
    for pitfall in card.pitfalls:
        yield Passage(card.id, "pitfall", f"{pitfall.symptom}. {pitfall.cause}. {pitfall.fix}")
    for words in card.interactions:
        yield Passage(card.id, "interaction", words)
    for family in card.families:
        settings = " ".join(f"{k} {v}" for part in (family.layout, family.settings) for k, v in part.items())
        yield Passage(card.id, "family", f"{family.name} {family.hardware} {family.model} {settings} {family.note or ''}")
    for figure in card.figures:
        yield Passage(card.id, "figure", f"{figure.name} {' '.join(f'{k} {v}' for k, v in figure.when.items())}")


def _ranked(found: Index, words: list[str]) -> list[tuple[str, list[tuple[float, Passage]]]]:
    """Cards that cover the question, best first, each with its passages that match, best first."""
    ids = list(found.cards)
    scores = dict.fromkeys(ids, 0.0)
    for name, weight in FIELDS.items():
        for card_id, score in zip(ids, _scores(found.fields[name], words), strict=True):
            scores[card_id] += weight * float(score)
    matched: dict[str, list[tuple[float, Passage]]] = {i: [] for i in ids}
    for passage, score in zip(found.passages, _scores(found.pieces, words), strict=True):
        if score > 0:
            matched[passage.card].append((float(score), passage))
    for card_id in ids:
        matched[card_id].sort(key=lambda m: -m[0])
        scores[card_id] += _PASSAGE * (matched[card_id][0][0] if matched[card_id] else 0.0)
    evidence = {i: _evidence(found, i, words, matched[i][0][0]) for i in ids if matched[i]}
    if max(evidence.values(), default=0.0) < _LEAST_EVIDENCE:
        return []
    fit = [i for i, e in evidence.items() if e >= _BESIDE]
    return [(i, matched[i]) for i in sorted(fit, key=lambda i: -scores[i])]


def _evidence(found: Index, card_id: str, words: list[str], best: float) -> float:
    """How well a card covers a question, from 0 up.

    It is the share of the question's information (inverse document frequency) that the card holds, times the root of its best passage's
    score in units of the rarest word. Whole identifiers do not count in the share, since their words are there too.
    """
    most = max(found.weights.values())
    weights = {w: found.weights.get(w, UNKNOWN * most) for w in words if w.startswith("=") or "_" not in w}
    share = sum(v for w, v in weights.items() if w in found.vocabulary[card_id]) / (sum(weights.values()) or 1.0)
    return float(share * sqrt(best / most))


def _hit(found: Index, card_id: str, passages: list[tuple[float, Passage]], run: Facts, only: frozenset[str] | None) -> Hit | None:
    card = found.cards[card_id]
    near = list(dict.fromkeys(p.claim for _, p in passages if p.claim))
    claims = [c for i in near for c in card.claims if c.id == i] + [c for c in card.claims if c.id not in near]
    kept = [c for c in claims if only is None or c.id in only or (c.mechanism_check and c.mechanism_check.id in only)]
    if not kept:
        return None
    limits = {c.id: _limits(c, run) for c in kept}
    best = passages[0][1]
    return Hit(
        id=card.id,
        title=card.title,
        claims=[c.id for c in kept],
        why=f"{best.kind}{' ' + best.claim if best.claim else ''}: {best.text}",
        applies=any(not v for v in limits.values()),
        limits=[f"{i}: {'; '.join(v)}" for i, v in limits.items() if v],
    )


def _limits(claim: Claim, run: Facts) -> list[str]:
    """What of the claim's scope the stated run does not meet; nothing where any of the named GPUs meets all that is known of it."""
    found: list[str] = []
    named = list(run.each())
    for known in named:
        asked = {k: v for k, v in claim.scope.items() if k in known}
        found = unmet(asked, known)
        if not found or (claim.cpu_scope and known.get("gpu") == "cpu"):
            return []
    if len(named) > 1:  # a family of GPUs: none of them will do, not the last alone
        return unmet(asked, {**known, "gpu": " or ".join(str(k["gpu"]) for k in named)})
    return found


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Modules that count as missing meanwhile."""
    hidden = [n for n in names if n not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how Python marks a module as not importable
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _bm25(documents: list[list[str]]) -> Any:
    """An index of token lists."""
    # bm25s imports these where it finds them, for collections of millions; they would take most of a cold search's time.
    with _without("numba", "jax", "scipy.sparse", "tqdm"):
        import bm25s
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for every message when it is imported
    made = bm25s.BM25(method="lucene", k1=1.2, b=0.6, backend="numpy", csc_backend="numpy")
    made.index(documents, show_progress=False)
    return made


def _scores(made: Any, words: list[str]) -> Sequence[float]:
    known = [w for w in words if w in made.vocab_dict]
    if not known:
        return [0.0] * int(made.scores["num_docs"])
    out: Sequence[float] = made.get_scores(known).tolist()
    return out
