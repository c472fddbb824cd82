"""Words and units that every reader gets alike: control characters written out, counts with their nouns, settings, GiB."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

GIB = 1 << 30
"""Bytes of a GiB."""

_CONTROLS = {c: f"\\x{c:02x}" for c in [*range(32), 127, *range(128, 160)] if chr(c) not in "\n\t"}
_SPACE = re.compile(r"\s+")
# What would change meaning inside a sentence; the rest stays readable in the generated file.
_INLINE = re.compile(r"([\\`*_{}\[\]#!|~^<>$]|(?<=\S):(?=\S)|^[-+]|^\d+\.)")


def plain(text: str) -> str:
    """The text with control characters written out: a file of somebody else's must not steer the reader's terminal."""
    return text.translate(_CONTROLS)


def in_markdown(value: object) -> str:
    """`value` as one line that Markdown and HTML leave alone."""
    line = _SPACE.sub(" ", str(value)).strip().replace("&", "&amp;")
    return _INLINE.sub(lambda m: "".join(c if c.isalnum() else f"&#{ord(c)};" for c in m.group(0)), line)


def count(number: int, noun: str) -> str:
    """`3 cards`, `1 card`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def pairs(values: Mapping[str, Any]) -> str:
    """`ep 8, tp 2`."""
    return ", ".join(f"{k} {v}" for k, v in values.items())


def key_of(setting: str) -> str:
    """The key of a setting such as `ep=8`: `ep`. A word without `=` is its own key."""
    return setting.partition("=")[0]


def keys_of(settings: Iterable[str]) -> frozenset[str]:
    """The keys of settings such as `ep=8`."""
    return frozenset(map(key_of, settings))
