"""Words that every reader of the terminal gets alike: control characters written out, counts with their nouns."""

from __future__ import annotations

_CONTROLS = {c: f"\\x{c:02x}" for c in [*range(32), 127, *range(128, 160)] if chr(c) not in "\n\t"}


def plain(text: str) -> str:
    """The text with control characters written out: a file of somebody else's must not steer the reader's terminal."""
    return text.translate(_CONTROLS)


def count(number: int, noun: str) -> str:
    """`3 cards`, `1 card`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
