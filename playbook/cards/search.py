"""Finding cards by what a person sees or wants: BM25 over fields of a card, with the scope of its claims as the judge of what applies.

A card's score is a weighted sum of BM25 over its fields, of its best passage, and of how like the question is to known ones that it
answers. Every hit says why it was found and whether any of its claims speaks for the machine that was stated. A question that the cards
do not cover, as `playbook.cards.terms` judges it, is answered with the reason and what is nearest. Sources: Robertson and Zaragoza, The
Probabilistic Relevance Framework: BM25 and Beyond, 2009; https://github.com/xhluca/bm25s.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import log, log1p, sqrt
from typing import Any

from playbook.cards.model import Card, guidance
from playbook.cards.scope import follow, unmet
from playbook.cards.terms import (
    GPUS,
    LEAST,
    MOST,
    WAYS,
    Facts,
    KnownQuestion,
    Likeness,
    Signs,
    against,
    covered,
    facts,
    foreign_share,
    kinds,
    likeness,
    load_asked,
    neutral,
    normal,
    odds,
    opening,
    phrases,
    terms,
)
from playbook.errors import PlaybookError
from playbook.paths import data_root

# Sections of guides and skills, which a search names beside cards.

_HEADING = re.compile(r"^(#{1,3}) (.+?) *$", re.M)
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_NOT_SEARCHED = frozenset({"glossary", "architecture"})
"""Guides left out of search: they mention every subject, so they would match every question."""


@dataclass(frozen=True)
class Section:
    """One section of a guide or skill."""

    source: str
    """Its file from the repository's root, such as `docs/guide/cluster.md`."""
    title: str
    """The page's title, and the section's."""
    text: str


def load_sections() -> list[Section]:
    """Every section of the guides and skills that ship."""
    guides = [(f"docs/guide/{p.name}", p) for p in sorted(data_root("guide").glob("*.md")) if p.stem not in _NOT_SEARCHED]
    skills = [(f"skills/{p.parent.name}/SKILL.md", p) for p in sorted(data_root("skills").glob("*/SKILL.md"))]
    return [page for source, path in [*guides, *skills] for page in sections(source, path.read_text(encoding="utf-8"))]


def sections(source: str, text: str) -> list[Section]:
    """A file's sections; what stands before its first heading belongs to that."""
    prose = _FENCE.sub("", text)
    headings = list(_HEADING.finditer(prose))
    if not headings:
        return []
    top = headings[0][2]
    ends = [m.start() for m in headings[1:]] + [len(prose)]
    out = [Section(source, m[2] if m[2] == top else f"{top}: {m[2]}", prose[m.end() : end]) for m, end in zip(headings, ends, strict=True)]
    return [Section(source, out[0].title, prose[: headings[0].start()] + out[0].text), *out[1:]]


MAX_QUERY = 2000
"""Characters; a longer question is refused. The longest of the test set has about a hundred."""

FIELDS = {"title": 1.0, "signs": 2.0, "body": 0.5}
PASSAGE = 2.0
"""Weights, chosen on the half of the test set that is for tuning."""
ALIKE = 2.0
"""Weight of the likeness to known questions, chosen so that each batch was asked with only earlier ones known."""

BESIDE = 0.16
"""Least evidence of every further card in an answer."""
NEAREST = 3
_PAGES = 2
_QUOTABLE = 8
"""Of the sentences that match best, how many are weighed; aliases and comparisons are none."""
_LEAST_PAGE = 0.15
"""Score that a section must have, as a share of what the question's words weigh."""
MOSTLY = 0.5
"""Share of letters in another script from which on a question is not answered."""
K1, B = 2.4, 0.6
"""Of BM25: how soon a repeated word counts no more, and how far long texts are held back."""
UNKNOWN = 0.6
"""How much a word that no card knows counts against one, as a share of the rarest word's weight."""


@dataclass(frozen=True)
class Hit:
    """One card that answers a question."""

    id: str
    title: str
    claims: list[str]
    """Ids of its claims: those that speak for the run that was stated first, of these the nearest to the question."""
    why: str
    """The passage that matched best, after its kind."""
    applies: bool
    """Whether any of its claims speaks for the run that was stated; true where nothing was."""
    limits: list[str]
    """Where claims do not speak for it, each with what was found and expected."""
    sizes: list[str] = field(default_factory=list)
    """Which sizes to take for the run, by the card or by the planner; empty where the question states no model and length."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found, or why nothing answers."""

    hits: list[Hit]
    """Cards that answer, best first."""
    none: str = ""
    """Why no card answers; empty where one does."""
    nearest: list[str] = field(default_factory=list)
    """Ids of the cards that come nearest where none answers; they may be of no use."""
    pages: list[Section] = field(default_factory=list)
    """Sections of guides and skills that speak of it, best first."""

    def as_row(self) -> dict[str, Any]:
        """The answer as plain data, pages by their place and title."""
        pages = [{"source": p.source, "title": p.title} for p in self.pages]
        return {"hits": [asdict(h) for h in self.hits], "none": self.none, "nearest": self.nearest, "pages": pages}


@dataclass(frozen=True)
class Passage:
    """A piece of a card: what kind it is, the claim that it belongs to, and its text."""

    card: str
    kind: str
    text: str
    claim: str = ""


@dataclass(frozen=True)
class SearchIndex:
    """The cards, prepared. Build it once with `index`; a search reads it only."""

    cards: Mapping[str, Card]
    passages: Mapping[Passage, frozenset[str]]
    """Each with its terms."""
    fields: Mapping[str, Any]
    pieces: Any
    vocabulary: Mapping[str, frozenset[str]]
    title_terms: Mapping[str, frozenset[str]]
    """Terms in the title, the aliases, the symptoms and the pitfalls of each card."""
    named: frozenset[str]
    """All of these."""
    weights: Mapping[str, float]
    known_questions: Sequence[KnownQuestion]
    """Known questions that one of the cards answers, or none does."""
    odds: Mapping[str, float]
    """By how much each term of theirs speaks against a card."""
    alike: Likeness
    """By how much their terms speak for each card."""
    pages: Sequence[Section]
    sections: Any
    """The index of the pages."""


def index(cards: Mapping[str, Card], pages: Sequence[Section] = ()) -> SearchIndex:
    """The cards of guidance prepared for search, and sections of guides and skills to name beside them."""
    cards = guidance(cards)
    passages = list(dict.fromkeys(p for card in cards.values() for p in _passages(card)))
    tokens = [terms(p.text) for p in passages]
    terms_of_cards: dict[str, dict[str, list[str]]] = {i: {name: [] for name in FIELDS} for i in cards}
    for passage, words in zip(passages, tokens, strict=True):
        terms_of_cards[passage.card]["body"] += words
        if passage.kind in ("title", "alias"):
            terms_of_cards[passage.card]["title"] += words
        if passage.kind in ("symptom", "pitfall", "alias"):
            terms_of_cards[passage.card]["signs"] += words
    vocabulary = {i: frozenset(parts["body"]) for i, parts in terms_of_cards.items()}
    title_terms = {i: frozenset(parts["title"] + parts["signs"]) for i, parts in terms_of_cards.items()}
    frequency = Counter(t for words in tokens for t in set(words))
    questions = [q for q in load_asked() if not q.cards or q.cards & set(cards)]
    return SearchIndex(
        cards=cards,
        passages=dict(zip(passages, map(frozenset, tokens), strict=True)),
        fields={name: _bm25([parts[name] for parts in terms_of_cards.values()]) for name in FIELDS},
        pieces=_bm25(tokens),
        vocabulary=vocabulary,
        title_terms=title_terms,
        named=frozenset().union(*title_terms.values()),
        weights={t: log(1 + (len(tokens) - n + 0.5) / (n + 0.5)) for t, n in frequency.items()},
        known_questions=questions,
        odds=odds(questions),
        alike=likeness(questions, list(cards)),
        pages=pages,
        sections=_bm25([terms(f"{p.title} {p.title} {p.text}") for p in pages]) if pages else None,
    )


def search(
    index: SearchIndex, query: str, stated: Facts | None = None, *, only: frozenset[str] | None = None, limit: int = 5
) -> SearchResult:
    """The cards that answer a question, best first; where they do not cover it or none applies to the stated run, why, and what is nearest.

    Of a pasted text with logs, its opening is the question. `stated` goes before what the text itself says. `only` keeps claims with
    these ids, and cards that have one.

    Raises:
        PlaybookError: the question is too long, or holds no word.
    """
    if len(query) > MAX_QUERY:
        raise PlaybookError(
            f"the question has {len(query)} characters; at most {MAX_QUERY} are read, ask with a few words or one error line"
        )
    beginning = opening(query)
    words = terms(beginning)
    if foreign_share(query) > MOSTLY:
        return SearchResult(
            [], "the cards are in English, and most of this question is in another script; ask in English, or with the error line"
        )
    if not words:
        raise PlaybookError("the question holds no word to search for; say what you see or want, such as 'out of memory at 128k'")
    ranked = rank(index, words)
    nearest, pages = [r.card for r in ranked[:NEAREST]], _pages(index, words)
    subjects = [phrase for phrase, term in phrases(beginning) if term not in index.named and term not in WAYS]
    if not ranked or covered(signs(index, beginning, words, ranked)) < LEAST:
        return SearchResult([], f"no card covers {repr(subjects[0]) if subjects else 'this question'}", nearest, pages)
    run = (stated or Facts()).over(facts(query))
    chosen = (r for i, r in enumerate(ranked) if i == 0 or r.evidence >= BESIDE)
    hits = [hit for r in chosen if (hit := _hit(index, r, words, run, only)) is not None]
    if any(h.applies for h in hits):
        return SearchResult(
            sorted((h for h in hits if h.applies or not _of_other_models(h)), key=lambda h: not h.applies)[:limit], pages=pages
        )
    out = next((h for h in hits if not h.applies), None)
    why = f"{out.id} would answer, and does not apply to the stated run ({out.limits[0]})" if out else "no claim of that status answers"
    return SearchResult([], why, nearest, pages)


def _passages(card: Card) -> Iterator[Passage]:
    """Everything that a reader could be looking for in a card."""
    yield Passage(card.id, "title", f"{card.id.replace('-', ' ')}. {card.title}. {card.summary}")
    yield from (Passage(card.id, "alias", word) for word in card.aliases)
    yield from (Passage(card.id, "symptom", symptom) for symptom in card.symptoms)
    for claim in card.claims:
        yield Passage(card.id, "claim", f"{claim.statement} {claim.mechanism}", claim.id)
        yield Passage(
            card.id,
            "comparison",
            _pairs(claim.comparison.baseline, claim.comparison.candidate, claim.scope, {"metric": claim.metric}),
            claim.id,
        )
        if claim.mechanism_check:
            yield Passage(card.id, "claim", claim.mechanism_check.statement, claim.id)
    for rule in card.decide:
        yield Passage(card.id, "rule", f"{_pairs(rule.when, rule.set, rule.avoid)}. {rule.note or ''}", rule.because[0])
    yield from (Passage(card.id, "pitfall", f"{p.symptom}. {p.cause}. {p.fix}") for p in card.pitfalls)
    yield from (Passage(card.id, "interaction", words) for words in card.interactions)
    for f in card.families:
        yield Passage(card.id, "family", f"{f.name} {f.hardware} {f.model} {_pairs(f.layout, f.settings)} {f.note or ''}")
    yield from (Passage(card.id, "figure", f"{figure.name} {_pairs(figure.when)}") for figure in card.figures)


def _pairs(*parts: Mapping[str, Any]) -> str:
    """Keys and values of mappings, as words."""
    return " ".join(f"{k} {v}" for part in parts for k, v in part.items())


@dataclass(frozen=True)
class Ranked:
    """A card with its evidence and its passages that match, best first."""

    card: str
    score: float
    evidence: float
    passages: list[tuple[float, Passage]]


def rank(index: SearchIndex, words: list[str]) -> list[Ranked]:
    """The cards that share a word with the question, best first."""
    scores = {card_id: ALIKE * odds for card_id, odds in index.alike.of(words).items()}
    for name, weight in FIELDS.items():
        for card_id, score in zip(index.cards, _scores(index.fields[name], words), strict=True):
            scores[card_id] += weight * float(score)
    matched: dict[str, list[tuple[float, Passage]]] = {i: [] for i in index.cards}
    for passage, score in zip(index.passages, _scores(index.pieces, words), strict=True):
        if score > 0:
            matched[passage.card].append((float(score), passage))
    out = []
    for card_id, scored in matched.items():
        if scored:
            scored.sort(key=lambda m: -m[0])
            best = scored[0][0]
            out.append(Ranked(card_id, scores[card_id] + PASSAGE * best, _evidence(index, card_id, words, best), scored))
    return sorted(out, key=lambda r: -r.score)


def signs(index: SearchIndex, beginning: str, words: list[str], ranked: Sequence[Ranked]) -> Signs:
    """What speaks for and against an answer, given the terms of the question and the cards that share one."""
    first, about = ranked[0], kinds(beginning)
    by_the_way = neutral(words, about)
    return Signs(
        evidence=max(r.evidence for r in ranked),
        passage=log1p(first.passages[0][0]),
        own=_share(_weights(index, words), index.title_terms[first.card]),
        beyond=float(min(MOST, sum(term not in index.named and term not in by_the_way for _, term in phrases(beginning)))),
        odds=against(index.odds, (word for word in words if word not in by_the_way)),
        **about,
    )


def _pages(index: SearchIndex, words: list[str]) -> list[Section]:
    """The sections that match best, one of each page."""
    if index.sections is None:
        return []
    scored = sorted(zip(_scores(index.sections, words), index.pages, strict=True), key=lambda s: -s[0])
    least = _LEAST_PAGE * sum(_weights(index, words).values())
    best = {p.source: p for score, p in reversed(scored) if score > least}
    return [p for _, p in scored if best.get(p.source) is p][:_PAGES]


def _evidence(index: SearchIndex, card_id: str, words: list[str], best: float) -> float:
    """How well a card covers a question, from 0 up.

    It is the share of the question's information (inverse document frequency) that the card holds, times the root of its best passage's
    score in units of the rarest word.
    """
    weights, most = _weights(index, words), max(index.weights.values())
    return _share(weights, index.vocabulary[card_id]) * sqrt(best / most)


def _share(weights: Mapping[str, float], vocabulary: frozenset[str]) -> float:
    """The share of a question's information that a set of terms holds."""
    return sum(v for w, v in weights.items() if w in vocabulary) / (sum(weights.values()) or 1.0)


def _weights(index: SearchIndex, words: list[str]) -> dict[str, float]:
    """The information of each word. Whole identifiers have none, since their words are there too, nor have figures that no card has."""
    unknown = UNKNOWN * max(index.weights.values())
    counted = [w for w in words if w.startswith("=") or "_" not in w]
    return {w: index.weights.get(w, 0.0 if any(c.isdigit() for c in w) else unknown) for w in counted}


def _quoted(index: SearchIndex, ranked: Ranked, words: list[str]) -> Passage:
    """The sentence to quote: of the best, the one whose score times its share of the question's information is highest."""
    weights = _weights(index, words)
    sentences = [m for m in ranked.passages if m[1].kind not in ("alias", "comparison")] or ranked.passages
    return max(sentences[:_QUOTABLE], key=lambda m: m[0] * sum(v for w, v in weights.items() if w in index.passages[m[1]]))[1]


def _hit(index: SearchIndex, ranked: Ranked, words: list[str], run: Facts, only: frozenset[str] | None) -> Hit | None:
    """The hit of a ranked card; None where `only` leaves none of its claims."""
    card = index.cards[ranked.card]
    near = list(dict.fromkeys(p.claim for _, p in ranked.passages if p.claim))
    claims = [c for i in near for c in card.claims if c.id == i] + [c for c in card.claims if c.id not in near]
    chosen = [c for c in claims if only is None or c.id in only or (c.mechanism_check and c.mechanism_check.id in only)]
    if not chosen:
        return None
    limits = {c.id: _limits(c.scope, run, cpu=bool(c.cpu_scope)) for c in chosen}
    whole = _limits(card.scope, run)
    best = _quoted(index, ranked, words)
    return Hit(
        id=card.id,
        title=card.title,
        claims=sorted((c.id for c in chosen), key=lambda i: bool(limits[i])),
        why=f"{best.kind}{' ' + best.claim if best.claim else ''}: {best.text}",
        applies=not whole and any(not v for v in limits.values()),
        limits=[f"the card: {'; '.join(whole)}"] if whole else [f"{i}: {'; '.join(v)}" for i, v in limits.items() if v],
        sizes=follow(card, run),
    )


def _of_other_models(hit: Hit) -> bool:
    """Whether a card speaks of models with experts alone, and the one that was stated has none."""
    return all("moe: found False" in limit for limit in hit.limits)


def _limits(scope: Mapping[str, Any], run: Facts, *, cpu: bool = False) -> list[str]:
    """What of a scope the stated run does not meet; nothing where any of the named GPUs meets all that is known of it, or `cpu` will do."""
    unmet_parts: list[str] = []
    named = list(run.each())
    for facts_of_gpu in named:
        decidable = {k: v for k, v in scope.items() if k in facts_of_gpu}
        unmet_parts = unmet(decidable, facts_of_gpu)
        if not unmet_parts or (cpu and facts_of_gpu.get("gpu") == "cpu"):
            return []
    if len(named) > 1:  # a family of GPUs: none of them will do, not the last alone
        return unmet(decidable, {**facts_of_gpu, "gpu": " or ".join(str(k["gpu"]) for k in named)})
    return unmet_parts


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """A context in which imports of these modules fail as if they were not installed."""
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
    documents_index = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy", csc_backend="numpy")
    documents_index.index(documents, show_progress=False)
    return documents_index


def _scores(documents_index: Any, words: list[str]) -> Sequence[float]:
    indexed = [w for w in words if w in documents_index.vocab_dict]
    if not indexed:
        return [0.0] * int(documents_index.scores["num_docs"])
    out: Sequence[float] = documents_index.get_scores(indexed).tolist()
    return out


_MFU = re.compile(r"\b(\d{1,2}(?:\.\d{1,2})?) ?%? ?mfu\b|\bmfu (?:of |is |at |only )?(\d{1,2}(?:\.\d{1,2})?)\b")
_SPEED = re.compile(r"\b(?:mfu|slow|slower|too slow|throughput|utili[sz]ation|tokens per second|tokens/s|step time)\b")

_MANY = re.compile(r"\b(\d{1,6}) (?:nvidia )?([a-z]{1,2}\d{2,3})s?\b")
"""A number before a GPU's name, which the search takes for no count."""


def diagnosis_of(query: str, run: Facts) -> str:
    """The diagnosis that a question asks for; nothing where it names no speed, or neither model nor GPUs. Capital words are left to fill
    in.
    """
    line, facts_over = normal(query[:2000]), run.over(facts(query[:2000]))
    gpus = facts_over.gpus or next((int(m[1]) for m in _MANY.finditer(line) if m[2] in GPUS), None)
    if not _SPEED.search(line) or not (facts_over.model or (facts_over.hardware and gpus)):
        return ""
    share = _MFU.search(line)
    gpu = facts_over.hardware[0] if len(facts_over.hardware) == 1 else "KIND"
    speed = f" --mfu {share[1] or share[2]}" if share else ""
    return f"playbook diagnose --model {facts_over.model or 'MODEL'} --gpus {gpus or 'N'} --gpu {gpu}{speed}"
