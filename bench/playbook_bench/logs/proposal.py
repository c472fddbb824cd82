"""A pattern for a log that no adapter knows: from lines of one form in which a whole number grows evenly."""

from __future__ import annotations

import re
from itertools import chain, pairwise

from playbook_bench.logs.text import lines

_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"0|[1-9]\d{0,14}")
_STEP = re.compile(r"\b(?:global_?)?(?:step|steps|iter|iters|iteration|it|update|batch)\W{0,4}$", re.IGNORECASE)
_ANY_FIGURE = r"[-+\d.eE]+"
_FEWEST = 4
"""Lines of one form from which on a pattern is proposed."""
_READ = 20_000
"""Lines that are looked at."""
_MOST = 16
"""Figures of a line; one with more is no line about a step."""
_LONGEST = 300
_BY_UNIT = (("ms", r"\s?ms\b"), ("seconds", r"\s?(?:s|sec|secs|seconds)\b(?!\w)"), ("tokens_per_s", r"\s?(?:tokens|tok)/s(?:ec)?\b(?!/)"))
"""Figures by what stands behind them."""
_BY_NAME = (
    ("loss", r"(?<!val)(?<!val_)(?<!val )\bloss\W{0,3}$"),
    ("grad_norm", r"\b(?:grad_?norm|gnorm)\W{0,3}$"),
    ("ms", r"(?:_ms|\(ms\))\W{0,3}$"),
    ("seconds", r"\b(?:sec|secs|seconds|\w+_s)\W{0,3}$"),
)
"""Figures by what stands before them."""


def pattern(text: str) -> str:
    """A regular expression with named groups for the most frequent form of lines with a step; empty where there is none."""
    forms: dict[str, list[list[str]]] = {}
    for _, line in lines(text)[:_READ]:
        plain = " ".join(line.split())
        figures = _FIGURE.findall(plain)
        if 0 < len(figures) <= _MOST and plain.isascii() and plain.isprintable():
            forms.setdefault(_FIGURE.sub("\0", plain), []).append(figures)
    for form, rows in sorted(forms.items(), key=lambda each: -len(each[1])):
        if len(rows) < _FEWEST:
            break
        words = form.split("\0")
        counters = [i for i, column in enumerate(zip(*rows, strict=True)) if _counts(column)]
        step = next((i for i in counters if _STEP.search(words[i])), counters[0] if counters else None)
        if step is not None and len(written := _written(words, step)) <= _LONGEST:
            return written
    return ""


def _counts(column: tuple[str, ...]) -> bool:
    """Whether a figure grows by the same whole number from line to line."""
    if not all(_WHOLE.fullmatch(value) for value in column):
        return False
    grown = {int(b) - int(a) for a, b in pairwise(column)}
    return len(grown) == 1 and min(grown) > 0


def _written(words: list[str], step: int) -> str:
    """The pattern of a form, from the word before its first figure with a name to the last."""
    names = {step: "step"}
    for i in range(len(words) - 1):
        name = _name(words[i], words[i + 1])
        if i != step and name and name not in names.values():
            names[i] = name
    first, last = min(names), max(names)
    parts = [_escaped(words[first].split(" ")[-1] or " ".join(words[first].split(" ")[-2:]))]
    for i in range(first, last + 1):
        parts.append(f"(?P<{names[i]}>{_ANY_FIGURE})" if i in names else _ANY_FIGURE)
        if i < last:
            parts.append(_escaped(words[i + 1]))
    behind = re.match(r"\s?[^\s,;|\])}]{0,20}", words[last + 1])
    return "".join(parts) + _escaped(behind[0] if behind else "")


def _name(before: str, behind: str) -> str:
    by_unit = (name for name, unit in _BY_UNIT if re.match(unit, behind))
    by_name = (name for name, word in _BY_NAME if re.search(word, before, re.IGNORECASE))
    return next(chain(by_unit, by_name), "")


def _escaped(words: str) -> str:
    return r"\s*".join(re.escape(word) for word in words.split(" "))
