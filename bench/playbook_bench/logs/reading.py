"""Read a run's log, whichever trainer wrote it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from statistics import median

from playbook.errors import LogError
from playbook_bench.logs import fields, model, parsers
from playbook_bench.logs.adapters import ADAPTERS, Adapter
from playbook_bench.logs.checks import ARRIVAL, Wanted, step_log
from playbook_bench.logs.fields import lines, shown
from playbook_bench.logs.model import StepLog

_PATTERN = "regex:"
_NAMES = ", ".join(each.name for each in ADAPTERS)
_KNOWN = f"{_NAMES}, {_PATTERN}PATTERN"


class NoAdapter(LogError):
    """No adapter knows a line of a log."""

    known = _NAMES
    """Those that were tried."""

    def __init__(self, message: str, pattern: str) -> None:
        super().__init__(message)
        self.pattern = pattern
        """A regular expression that fits the log, as `regex:...`; empty where none was found."""


def read(
    text_or_path: str | Path,
    adapter: str | None = None,
    *,
    steps: int | None = None,
    first: int | None = None,
    arrivals: Sequence[float] | None = None,
    running: bool = False,
    beside: bool = True,
) -> StepLog:
    """The steps that a log tells of: its text, a file, or a folder with one file that an adapter knows.

    `adapter` is a name in `ADAPTERS` or `regex:PATTERN`; None: the one whose lines the text has. `steps` is how many the run was to make: only
    with it does a log that ends early show, except where the log names the number. `first` is the number of the first step, where that is neither
    0 nor 1. `arrivals` are the moments, in seconds on one clock, at which the lines of the text arrived: for logs that hold no time.
    `running`: the run may go on, so that a log which ends early is one, with a caveat; so is one without times: its seconds
    are those of a file `beside` it that has its steps and losses, else NaN.

    Raises:
        LogError: the log is not the whole and sound log of one run, or does not say how long its steps took.
    """
    content = _file(text_or_path) if isinstance(text_or_path, Path) else text_or_path
    chosen = _chosen(adapter, content)
    source = _source(chosen, content)
    arrived = arrivals if chosen.printed else None
    log = step_log(chosen.parse(source), Wanted(chosen.name, steps, first, arrived, chosen.each_step, chosen.timed, running))
    log = log if chosen.binary else replace(log, facts=model.of(source))
    if log.clock != "none":
        return log
    names = [name for each in ADAPTERS for name in each.files]
    timed = _timed_beside(log, content, names, partial(read, running=True, beside=False)) if isinstance(content, Path) and beside else None
    return timed or replace(log, caveats=(*log.caveats, f"the log holds no time, which `playbook ab` needs. {chosen.timed}; {ARRIVAL}"))


def _file(path: Path) -> Path:
    """The file itself, or the one in a folder that an adapter reads."""
    if not path.is_dir():
        return path
    patterns = [name for each in ADAPTERS for name in each.files]
    known = [found for name in patterns for found in sorted(path.glob(name))]
    if len(known) != 1:
        raise LogError(
            f"{path}: holds {len(known)} files that an adapter reads; expected one of {', '.join(patterns)}, or name the file itself"
        )
    return known[0]


def _source(adapter: Adapter, content: str | Path) -> str:
    if adapter.binary:
        if isinstance(content, str):
            raise LogError(f"{adapter.name}: reads {adapter.reads}; expected a path, and found what a command printed. Name the file")
        return str(content)
    found = fields.load(content) if isinstance(content, Path) else content
    if len(found) > fields.MAX_BYTES:
        raise LogError(
            f"the log is longer than {fields.MAX_BYTES >> 20} MiB; expected the log of one run. Let one rank write it, or run fewer steps"
        )
    return found


def named(name: str) -> Adapter:
    """The adapter of that name, or for `regex:PATTERN`.

    Raises:
        LogError: there is none, or the pattern is no regular expression.
    """
    if name.startswith(_PATTERN):
        parse = parsers.by_pattern(name.removeprefix(_PATTERN))
        return Adapter("regex", "lines that a pattern finds", (), parse, "one line printed for each step", "Name a group `seconds` or `ms`")
    found = next((each for each in ADAPTERS if each.name == name), None)
    if found is None:
        raise LogError(f"there is no adapter {fields.shown(name)}; expected one of {_KNOWN}")
    return found


def _chosen(name: str | None, content: str | Path) -> Adapter:
    """The adapter of that name; without a name, the one that reads files of this name, or the first that knows a line."""
    if name is not None:
        return named(name)
    if isinstance(content, Path) and (binary := [a for a in ADAPTERS if a.binary and any(content.match(p) for p in a.files)]):
        return binary[0]
    whole = fields.load(content) if isinstance(content, Path) else content
    found = next((each for each in ADAPTERS if not each.binary and _knows(each, whole)), None)
    if found is None:
        fitting = f"{_PATTERN}{proposed}" if (proposed := pattern(whole)) else ""
        hint = (
            f"This pattern fits its lines: {shlex.quote(fitting)}"
            if fitting
            else "JSON lines with step, seconds, loss and tokens are read without options"
        )
        raise NoAdapter(f"no adapter knows a line of this log; expected one of {_KNOWN}. {hint}", fitting)
    return found


def _knows(adapter: Adapter, content: str) -> bool:
    try:
        return next(adapter.parse(content), None) is not None
    except LogError:
        return True


# Seconds from a file beside a log that holds none: the same run told twice, as by `trainer_state.json` and `trainer_log.jsonl`.

_PRINTED = ("*.log", "*.out", "*.txt")
_BELOW = "runs/*/"
"""Where the Hugging Face Trainer puts its events, below its output."""
_CHECKPOINT = "checkpoint-*"
"""A folder in the Trainer's output that has a `trainer_state.json` of its own."""
_MOST_FILES = 64
"""Files that are looked at."""
_ROUNDING = 1e-3
"""Share by which losses of one step differ that are printed with four digits."""
_LIKE = 0.2
"""Share by which two files' seconds of one run may differ: where clocks stand in a step is the trainer's choice."""


def _timed_beside(log: StepLog, path: Path, names: Iterable[str], read: Callable[[Path], StepLog]) -> StepLog | None:
    """The log with the seconds of a file beside it that has its steps and their losses; None where there is none, or several disagree.

    `names` are patterns of files that tell steps; `read` reads one of them.
    """
    folders = [path.parent, *([path.parent.parent] if path.parent.match(_CHECKPOINT) else [])]
    patterns = [*(f"{below}{name}" for name in names for below in ("", _BELOW)), *_PRINTED]
    beside = (each for folder in folders for name in patterns for each in sorted(folder.glob(name)) if each != path and each.is_file())
    matches = []
    for each in islice(beside, _MOST_FILES):
        with suppress(LogError):
            if (match := _with_seconds(log, read(each))) is not None:
                matches.append((each, match))
    middles = [median(step.seconds for step in match.steps) for _, match in matches]
    if not matches or max(middles) > (1 + _LIKE) * min(middles):
        return None
    each, match = matches[0]
    return replace(
        match, caveats=(*match.caveats, f"seconds are those of {shown(each.name)} beside it, which has the same steps and losses")
    )


def _with_seconds(log: StepLog, other: StepLog) -> StepLog | None:
    """The log with the other's seconds; its first step may have none."""
    of_step = {step.step: step for step in other.steps}
    common = [step for step in log.steps if step.step in of_step]
    same = all(math.isclose(step.loss or 0.0, of_step[step.step].loss or 0.0, rel_tol=_ROUNDING) for step in common)
    told = "loss" not in (*log.unknown, *other.unknown)
    if other.clock == "none" or len(common) < max(2, len(log.steps) - 1) or not (same and told):
        return None
    steps = tuple(replace(step, seconds=of_step[step.step].seconds) for step in common)
    return replace(log, steps=steps, clock=other.clock)


# A pattern for a log that no adapter knows: from lines of one form in which a whole number grows evenly.

_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"0|[1-9]\d{0,14}")
_STEP = re.compile(r"\b(?:global_?)?(?:step|steps|iter|iters|iteration|it|update|batch)\W{0,4}$", re.IGNORECASE)
_ANY_FIGURE = r"[-+\d.eE]+"
_FEWEST = 4
"""Lines of one form from which on a pattern is proposed."""
_READ = 20_000
"""Lines that are looked at."""
_MOST_LINES = 16
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
        if 0 < len(figures) <= _MOST_LINES and plain.isascii() and plain.isprintable():
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
