"""Building blocks of the lint rules: the cards, the configurations in them, and whether two situations overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from playbook.cards.load import LoadedCard
from playbook.cards.model import Card, Claim
from playbook.cards.scope import COMPARE, RANGE
from playbook.errors import Finding
from playbook.yaml_files import KeyPath

T = TypeVar("T")
Row = TypeVar("Row", bound=tuple[Any, ...])
CARD_DEGREES = ("tp", "pp", "cp", "ep", "etp", "edp", "dp", "vpp")
_GPU_NAMES = ("A100", "H20", "H100", "H200", "H800", "B200", "B300", "GB200", "GB300")


@dataclass(frozen=True)
class LintInput:
    """The input of a rule: the cards to check, all cards that they can disagree with (the checked ones last), and today's date."""

    checked: Sequence[LoadedCard]
    every: Sequence[LoadedCard]
    today: str

    def rivals(self, groups: Iterable[Sequence[Row]]) -> Iterator[tuple[Row, Row]]:
        """Every two rows of one group of which the second is of a checked card, each once; a row begins with its card."""
        checked = {id(e) for e in self.checked}
        for rows in groups:
            for n, second in enumerate(rows):
                yield from ((first, second) for first in rows[:n] if id(second[0]) in checked)


@dataclass(frozen=True)
class LintRule:
    """One lint rule; `check` yields a Problem for each finding."""

    id: str
    title: str
    check: Callable[[LintInput], Iterator[Problem]]
    warning: bool = False

    def run(self, shelf: LintInput) -> Iterator[Finding]:
        """The rule's findings, at file:line:column."""
        for card, key_path, message in self.check(shelf):
            yield replace(card.finding(key_path, message), rule=self.id, warning=self.warning)


def each(cards: Iterable[LoadedCard], part: Callable[[Card], Sequence[T]]) -> Iterator[tuple[LoadedCard, int, T]]:
    """What a part of each card holds, such as its claims, with the card and the place in that part."""
    for entry in cards:
        yield from ((entry, i, item) for i, item in enumerate(part(entry.card)))


class Problem(NamedTuple):
    """What a rule found: the card, the place in it, and the message."""

    card: LoadedCard
    key_path: KeyPath
    message: str


@dataclass(frozen=True)
class Config:
    """One configuration of a card, as flat keys: a family, a decision, or a variant of a claim."""

    entry: LoadedCard
    where: KeyPath
    name: str
    values: Mapping[str, Any]
    layout: Mapping[str, int]
    hardware: str = ""
    model: str = ""
    gpus: int | None = None


def configs(cards: Iterable[LoadedCard]) -> Iterator[Config]:
    """All configurations of these cards, card by card."""
    for entry in cards:
        for i, f in enumerate(entry.card.families):
            yield Config(entry, ("families", i, "settings"), f"family '{f.name}'", f.settings, f.layout, f.hardware, f.model, f.gpus)
        for i, decision in enumerate(entry.card.decide):
            hardware = " ".join(map(str, _as_list(decision.when.get("gpu", ""))))
            model = str(decision.when.get("model", ""))
            gpus = decision.set.get("gpus", decision.when.get("gpus"))
            count = gpus if isinstance(gpus, int) and not isinstance(gpus, bool) else None
            yield Config(entry, ("decide", i, "set"), "the decision", decision.set, _degrees_of(decision.set), hardware, model, count)
        for i, claim in enumerate(entry.card.claims):
            hardware = " ".join(map(str, _as_list(claim.scope.get("gpu", ""))))
            for name in ("baseline", "candidate"):
                if values := getattr(claim.comparison, name):
                    where = ("claims", i, "comparison", name)
                    yield Config(entry, where, f"the {name} of {claim.id}", values, _degrees_of(values), hardware)


def _degrees_of(values: Mapping[str, Any]) -> dict[str, int]:
    """The parallel degrees among dotted keys, such as `parallel.tp`."""
    named = ((key.rsplit(".", 1)[-1], value) for key, value in values.items())
    return {k: v for k, v in named if k in CARD_DEGREES and isinstance(v, int) and not isinstance(v, bool)}


def gpus_named(text: str) -> frozenset[str]:
    """The GPU names in a phrase such as 'H100 or B200 class'; GB200 is not B200."""
    words = {w.upper() for w in re.findall(r"[A-Za-z]+[0-9]+", text)}
    return frozenset(name for name in _GPU_NAMES if name in words)


def overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether one situation can meet both predicates; a key that only one names does not separate them."""
    return all(_meet(a[key], b[key]) for key in a.keys() & b.keys())


def is_number(predicate: Any) -> bool:
    """Whether a predicate is of numbers, such as `2`, `>=2` or `2..8`."""
    return all(_span(v) is not None for v in _as_list(predicate))


def linked(first: LoadedCard, a: Claim | None, second: LoadedCard, b: Claim | None) -> bool:
    """Whether a card or claim already says that it supersedes or contradicts the other."""
    named = {i for e in (first, second) for i in (*e.card.related.supersedes, *e.card.related.contradicts)}
    if first is not second and {first.card.id, second.card.id} & named:
        return True
    return any(x is not None and y is not None and y.id in (*x.supersedes, *x.contradicts) for x, y in ((a, b), (b, a)))


def show(value: Any) -> str:
    """A value in the notation of a card."""
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


def place(entry: LoadedCard, checked: LoadedCard, label: str) -> str:
    """The label, with the id of its card if that differs from the card being checked."""
    return label if entry is checked else f"{label} of card '{entry.card.id}'"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _meet(a: Any, b: Any) -> bool:
    if a == b:
        return True
    return _words_meet(a, b) if isinstance(a, str) and isinstance(b, str) else _ranges_or_words_meet(a, b)


@cache  # as for `_read_span`
def _words_meet(a: str, b: str) -> bool:
    return _ranges_or_words_meet(a, b)


def _ranges_or_words_meet(a: Any, b: Any) -> bool:
    spans = [[_span(v) for v in _as_list(side)] for side in (a, b)]
    if all(s is not None for side in spans for s in side):
        return any(x[0] <= y[1] and y[0] <= x[1] for x in spans[0] if x for y in spans[1] if y)
    words = [{part.strip().lower() for v in _as_list(side) for part in str(v).split("|")} for side in (a, b)]
    return bool(words[0] & words[1])


def _span(value: Any) -> tuple[float, float] | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return _read_span(str(value))


@cache  # a few hundred cards are compared pair by pair, and their predicates are few
def _read_span(text: str) -> tuple[float, float] | None:
    match = RANGE.match(text)
    if match:
        return float(match[1]), float(match[2])
    match = COMPARE.match(text)
    if match is None:
        return None
    bound = float(match[2])
    above, below = math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)
    return {">=": (bound, math.inf), "<=": (-math.inf, bound), ">": (above, math.inf), "<": (-math.inf, below)}.get(
        match[1] or "", (bound, bound)
    )
