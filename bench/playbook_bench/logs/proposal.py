"""A regular expression for a log that no adapter knows: from lines of one form in which a whole number counts steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import regex

from playbook_bench.logs.fields import figure_of, lines, number

_FIGURE = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:[kKMBGT]\b)?|(?<=[a-zA-Z_])\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_REMARK = re.compile(r" \([a-z]{1,20}\)")
"""What only some lines have, such as `(step)` where an update was made."""
_ANY_DATE = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*"
_WHOLE = re.compile(r"0|[1-9]\d{0,14}")
_STEP = re.compile(r"\b(?:global_?)?(?:step|steps|iter|iters|iteration|it|update|batch)\W{0,4}$", re.IGNORECASE)
_ANY_FIGURE = r"[-+\d.,eE]*[\dkKMBGT]"
_FEWEST = 4
"""Lines of one form from which on a pattern is proposed."""
_READ = 20_000
"""Lines that are looked at."""
_MOST_FIGURES = 40
"""Of a line; one with more is no line about a step."""
_LONGEST = 400
_TIMEOUT_S = 1.0
_GREW = 1.5
"""How many times its first value the last of a running total is, at least; seconds of steps hardly grow from line to line for so long."""
_NO_STEP_TIME = re.compile(r"(?:eta|remaining|left|data|avg|average|mean)(?:[ _]time)?\W*$", re.IGNORECASE)
_BY_UNIT = (
    ("ms", r"\s?ms\b(?!/)"),
    ("tokens_per_s_per_gpu", r"\s?(?:tokens|tok)/s(?:ec)?/(?:gpu|device)\b"),
    ("tokens_per_s", r"\s?(?:tokens|tok)/s(?:ec)?\b(?!/)"),
    ("seconds", r"\s?(?:s|sec|secs|seconds)\b(?!\w)"),
)
"""Figures by what stands behind them."""
_BY_NAME = (
    ("loss", r"(?<!val)(?<!val_)(?<!val )\bloss\W{0,3}$"),
    ("grad_norm", r"\b(?:grad_?norm|gnorm)\W{0,3}$"),
    ("tokens_per_s", r"\b(?:tok|tokens)/s(?:ec)?\W{0,3}$"),
    ("ms", r"(?:_ms|\(ms\))\W{0,3}$"),
    ("seconds", r"\b(?:sec|secs|seconds|\w+_s)\W{0,3}$"),
)
"""Figures by what stands before them."""
_GROUPS = {
    ("seconds", 1.0): "seconds",
    ("seconds", 1e-3): "ms",
    ("clock", 1.0): "seconds_total",
    ("clock", 1e-3): "ms_total",
    ("memory_bytes", 2.0**30): "memory_gib",
    ("flops_per_s", 1e12): "tflops",
}
"""Names of groups for figures of these units; those of `_SAME_NAME` are named as the figure is."""
_SAME_NAME = frozenset({"loss", "grad_norm", "tokens", "tokens_total", "tokens_per_s", "tokens_per_s_per_gpu", "memory_bytes"})
_TOTALS = {"ms": "ms_total", "seconds": "seconds_total", "tokens": "tokens_total"}


@dataclass(frozen=True)
class _Form:
    """Lines that differ in their figures alone: the words between these, and the figures by line."""

    words: list[str]
    rows: list[list[str]]
    texts: list[str]
    """The lines themselves."""

    def column(self, i: int) -> list[str]:
        return [row[i] for row in self.rows]


def pattern(text: str) -> str:
    """A regular expression with named groups for the most frequent form of lines with a step; empty where there is none."""
    forms: dict[str, _Form] = {}
    for _, line in lines(text)[:_READ]:
        plain = " ".join(line.split())
        bare = _REMARK.sub("", _DATE.sub("\1", plain))
        figures = _FIGURE.findall(bare)
        if 0 < len(figures) <= _MOST_FIGURES and "\0" not in bare:
            words = _FIGURE.sub("\0", bare)
            form = forms.setdefault(words, _Form(words.split("\0"), [], []))
            form.rows.append(figures)
            form.texts.append(plain)
    for form in sorted(forms.values(), key=lambda each: -len(each.rows)):
        if len(form.rows) < _FEWEST:
            break
        names = _names(form)
        for written in (_by_neighbours(form, names), _by_all_words(form, names)) if names else ():
            if len(written) <= _LONGEST and written.isascii() and written.isprintable() and _reads(written, form, names):
                return written
    return ""


def _names(form: _Form) -> dict[int, str]:
    """Names of groups by the place of their figure; none where no figure counts steps."""
    places = range(len(form.words) - 1)
    counters = [i for i in places if _counts(form.column(i)) and not form.words[i + 1].startswith("%")]
    # A step counts lines in groups where each of its micro-batches has a line.
    groups = [i for i in places if {b - a for a, b in pairwise(_wholes(form.column(i)))} == {0, 1}]
    of_groups = next((i for i in groups if _STEP.search(form.words[i])), None)
    if of_groups is not None and counters:
        names = {of_groups: "step", counters[0]: "micro"}
    else:
        step = next((i for i in counters if _STEP.search(form.words[i])), None)
        names = {i: "step" for i in counters if i == step or (step is None and not _name(form, i))}
    names = dict(list(names.items())[: 1 + ("micro" in names.values())])
    for i in places if names else ():
        name = _name(form, i)
        if i not in names and name and name not in names.values():
            names[i] = name
    return names


def _wholes(column: Sequence[str]) -> list[int]:
    """The numbers of a column of whole ones; none of another."""
    return [int(value) for value in column] if all(_WHOLE.fullmatch(value) for value in column) else []


def _counts(column: Sequence[str]) -> bool:
    """Whether a figure grows by the same whole number from line to line, be it that it begins again at times, as with an epoch."""
    values = _wholes(column)
    growths = {b - a for a, b in pairwise(values) if b != min(values)}
    return len(growths) == 1 and min(growths) > 0


def _name(form: _Form, i: int) -> str:
    """The group's name of a figure, by its unit, or by the words before it as trainers write them; empty where nothing tells."""
    before, behind = form.words[i], form.words[i + 1]
    words = re.sub(r"[\s:=|]+$", "", before).rpartition("| ")[2].split(" ")
    figure, factor = next((f for k in range(min(4, len(words)), 0, -1) if (f := figure_of(" ".join(words[-k:])))), ("", 0.0))
    if figure == "step":
        return ""
    by_unit = "" if _NO_STEP_TIME.search(before) else next((name for name, unit in _BY_UNIT if re.match(unit, behind)), "")
    if by_unit:
        name = _TOTALS.get(by_unit, by_unit) if figure == "clock" else by_unit
    elif figure:
        name = _GROUPS.get((figure, factor)) or (figure if factor == 1 and figure in _SAME_NAME else "")
    else:
        by_name = (name for name, word in _BY_NAME if re.search(word, before, re.IGNORECASE))
        name = "" if _NO_STEP_TIME.search(before) else next(by_name, "")
    return _TOTALS.get(name, name) if _grows(form.column(i)) else name


def _grows(column: Sequence[str]) -> bool:
    values = [number(value.replace(",", "")) or 0.0 for value in column]
    return all(b > a for a, b in pairwise(values)) and values[-1] >= _GREW * values[0]


def _by_neighbours(form: _Form, names: dict[int, str]) -> str:
    """Each figure with the word before it and its unit, whatever stands between; a date before the step where it is a line's only time."""
    timed = {"ms", "seconds", "ms_total", "seconds_total"} & set(names.values())
    dated = not timed and any("\1" in words for words in form.words[: min(names) + 1])
    parts = [f"(?P<time>{_ANY_DATE})"] if dated else []
    for i in sorted(names):
        before = form.words[i].replace("\1", " ")
        word = next((w for k in range(1, 4) if re.search(r"\w", w := " ".join(before.split(" ")[-k:]))), before)
        parts.append(f"{_escaped(word)}(?P<{names[i]}>{_ANY_FIGURE}){_unit(form.words[i + 1])}")
    return ".*?".join(parts)


def _by_all_words(form: _Form, names: dict[int, str]) -> str:
    """From the word before the first figure with a name to the last, with all words between."""
    first, last = min(names), max(names)
    parts = [_escaped(form.words[first].split(" ")[-1] or " ".join(form.words[first].split(" ")[-2:]))]
    for i in range(first, last + 1):
        parts.append(f"(?P<{names[i]}>{_ANY_FIGURE})" if i in names else _ANY_FIGURE)
        if i < last:
            parts.append(_escaped(form.words[i + 1]))
    return "".join(parts) + _unit(form.words[last + 1])


def _unit(behind: str) -> str:
    """What stands right behind a figure, up to the next space, so that a figure which was cut off is none."""
    match = re.match(r"\s?[^\s,;|\])}\1]{0,20}", behind)
    return _escaped(match[0]) if match and match[0].strip() else r"(?![\w.])"


def _reads(written: str, form: _Form, names: dict[int, str]) -> bool:
    """Whether the pattern finds in each line the figures that it is meant to find."""
    compiled = regex.compile(written)
    for text, row in zip(form.texts, form.rows, strict=True):
        try:
            match = compiled.search(text, timeout=_TIMEOUT_S)
        except TimeoutError:
            return False
        if match is None or any(match[name] != row[i] for i, name in names.items()):
            return False
    return True


def _escaped(words: str) -> str:
    return r"\s*".join(re.escape(word) for word in words.split(" "))
