"""Questions that people asked in public issue threads, with the cards that answer each, and whether the cards cover a new question at all."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from math import log

from playbook.cards.terms import terms, words
from playbook.paths import data_root
from playbook.yaml_files import parse

# Questions that people asked in public issue threads, with the cards that answer each: by these the search knows what each card is asked,
# and what is beyond all.
# `asked.csv` has them paraphrased; OWNER/REPOSITORY#NUMBER stands for https://github.com/OWNER/REPOSITORY/issues/NUMBER. Cards stand best
# first; none where no card answers. Of the first seven batches only questions whose hash is even belong there: the other half measures
# the search, and stands among the tests. Of the later ones the eighth, ninth and twelfth to fourteenth tune and belong there whole; the
# tenth, the eleventh and the fifteenth to seventeenth measure and stand among the tests whole.

_FILE = "asked.csv"
PRIOR = 50.0
"""How many questions of no card in particular stand beside those of each card."""


@dataclass(frozen=True)
class Asked:
    """One question, paraphrased."""

    text: str
    cards: frozenset[str]
    """Ids of the cards that answer it; none where no card does."""
    thread: str
    """Where it was asked, as OWNER/REPOSITORY#NUMBER."""

    @cached_property
    def said(self) -> frozenset[str]:
        """Its terms."""
        return frozenset(terms(self.text))


@dataclass(frozen=True)
class Likeness:
    """How like a question's terms are to those of the known questions that each card answers."""

    many: Mapping[str, float]
    """Known questions of each card; one with several cards counts in parts."""
    held: Mapping[str, Mapping[str, float]]
    """For each term, those of each card that have it."""
    share: Mapping[str, float]
    """For each term, the share of all questions with a card that have it."""

    def of(self, said: Iterable[str]) -> dict[str, float]:
        """For each card, the log odds of these terms between its questions and all, as naive Bayes has them."""
        out = dict.fromkeys(self.many, 0.0)
        for term in {t for t in said if t in self.share}:
            held, share = self.held[term], self.share[term]
            for card, many in self.many.items():
                out[card] += log((held.get(card, 0.0) / share + PRIOR) / (many + PRIOR))
        return out


def likeness(asked: Sequence[Asked], cards: Collection[str]) -> Likeness:
    """The terms of known questions, counted for each of these cards."""
    known = [(q.said, q.cards.intersection(cards)) for q in asked if not q.cards.isdisjoint(cards)]
    many = dict.fromkeys(cards, 0.0)
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for said, answers in known:
        for card in answers:
            many[card] += 1 / len(answers)
            for term in said:
                held[term][card] += 1 / len(answers)
    frequency = Counter(t for said, _ in known for t in said)
    return Likeness(many, held, {t: (n + 1) / (len(known) + 2) for t, n in frequency.items()})


@cache
def load_asked() -> tuple[Asked, ...]:
    """The questions that ship."""
    with (data_root("tables") / _FILE).open(encoding="utf-8", newline="") as file:
        return tuple(Asked(row["question"], frozenset(row["cards"].split()), row["thread"]) for row in csv.DictReader(file))


# Whether the cards cover a question at all: a logistic regression over a few signs, its weights in a table.
# The signs are what the search knows about its best card, whether the question names a subject that no card names, how its words stand
# among known questions with a card and without, and how many of its words are about an aim of the cards, a fault, files, serving or a
# project. `tools/search/fit_coverage.py` fits the weights on known questions.

_WORDS = "question_words.yaml"
_WEIGHTS = "coverage.yaml"
MOST = 2
"""How many words of a kind, or phrases, count at most, so that a long question says no more than a short one."""
LEAST = -0.8
"""Log odds from which on the search answers: with each sixth of the known questions left out of the fit, one covered question in 33 stays unanswered."""
_UNSEEN = 0.3
"""What a word counts that is in no known question of a kind, in questions."""


@dataclass(frozen=True)
class Signs:
    """What speaks for and against an answer to one question; each has its weight in the table, under its name."""

    evidence: float
    """Of the card that has most of it, as `playbook.cards.search` counts it."""
    passage: float
    """Logarithm of one more than the best passage's score in the first card."""
    own: float
    """Share of the question's information in title, aliases, symptoms and pitfalls of the first card."""
    beyond: float
    """Phrases that name a subject which no card names, up to two."""
    odds: float
    """Log odds that its words speak against a card."""
    aim: float
    """Words about speed, memory, layout and choice, up to two; so are the next four for what they are about."""
    fault: float
    things: float
    serving: float
    project: float


def covered(signs: Signs) -> float:
    """The log odds that a card answers."""
    weights = load_weights()
    return float(weights["constant"] + sum(weights[name] * value for name, value in asdict(signs).items()))


def kinds(text: str) -> dict[str, float]:
    """How many words of each kind a question has."""
    said = words(text)
    return {kind: float(min(MOST, sum(w in known for w in said))) for kind, known in load_words().items()}


def odds(asked: Sequence[Asked]) -> dict[str, float]:
    """The log odds of each term between the known questions without a card and those with one, as naive Bayes has them; under the empty name, of any other."""
    held = {has: Counter(t for q in asked if bool(q.cards) is has for t in q.said) for has in (True, False)}
    many = {has: sum(bool(q.cards) is has for q in asked) + 2 * _UNSEEN for has in held}
    share = {t: {has: (held[has][t] + _UNSEEN) / many[has] for has in held} for t in {*held[True], *held[False], ""}}
    return {t: log(s[False] / s[True]) for t, s in share.items()}


def against(known: Mapping[str, float], said: Iterable[str]) -> float:
    """The log odds that these terms speak against a card, each counted once."""
    return float(sum(known.get(t, known[""]) for t in set(said)))


@cache
def load_words() -> Mapping[str, frozenset[str]]:
    """The words of each kind."""
    table: Mapping[str, Sequence[str]] = parse((data_root("tables") / _WORDS).read_text(encoding="utf-8"), _WORDS)[0]
    return {kind: frozenset(known) for kind, known in table.items()}


@cache
def load_weights() -> Mapping[str, float]:
    """The weight of each sign, and the constant."""
    table: Mapping[str, float] = parse((data_root("tables") / _WEIGHTS).read_text(encoding="utf-8"), _WEIGHTS)[0]
    return table
