"""Lint rules on what decision rules rest on: claims that agree, and conditions that somebody can measure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from playbook.lint.base import Found, Rule, Shelf, is_number

_BY_DEGREE = re.compile(r"\b(?:exposed|visible)", re.I)


def _both_sides(shelf: Shelf) -> Iterator[Found]:
    """Decisions that set a key because of two claims of which one denies the other."""
    denies = {c.id: {*c.contradicts, *c.supersedes} for e in shelf.every for c in e.card.claims}
    for entry in shelf.checked:
        for i, rule in enumerate(entry.card.decide):
            keys = [k for k in rule.set if "." in str(k)]
            for n, second in enumerate(rule.because if keys else ()):
                for first in rule.because[:n]:
                    if first in denies.get(second, ()) or second in denies.get(first, ()):
                        message = (
                            f"sets {keys[0]} because of {first} and of {second}, which denies it; name the one that stands, or say `try`"
                        )
                        yield entry, ("decide", i, "because", n), message


def _without_threshold(shelf: Shelf) -> Iterator[Found]:
    """Conditions of more or less, without the number from which on they hold."""
    for entry in shelf.checked:
        for i, rule in enumerate(entry.card.decide):
            for key, value in rule.when.items():
                words = _BY_DEGREE.search(f"{key} {value}".replace("_", " "))
                if words and not (str(key).endswith("_percent") and is_number(value)):
                    message = f"'{key}: {value}' does not say from which share of the step on; write a number, such as exposed_dispatch_percent: '>=2'"
                    yield entry, ("decide", i, "when", key), message


RULES = (
    Rule("decision-dispute", "A decision that rests on both sides of a contradiction", _both_sides),
    Rule("decision-threshold", "A condition such as `exposed` without the share of the step from which on it holds", _without_threshold),
)
