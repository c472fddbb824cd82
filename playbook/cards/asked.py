"""Questions that people asked in public issue threads, with the cards that answer each: by these the search knows what each card is asked, and what is beyond all.

`asked.csv` has them paraphrased; OWNER/REPOSITORY#NUMBER stands for https://github.com/OWNER/REPOSITORY/issues/NUMBER. Cards stand best first; none
where no card answers. Of the first seven batches only questions whose hash is even belong there: the other half measures the search, and stands among
the tests. Of the later ones the eighth, ninth and twelfth to fourteenth tune and belong there whole; the tenth, the
eleventh and the fifteenth to seventeenth measure and stand among the tests whole.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import log

from playbook.cards.terms import terms
from playbook.paths import data_root

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
