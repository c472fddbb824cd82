"""Read a run's log, whichever trainer wrote it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from playbook.diagnosis.rl_step import Step
from playbook.errors import LogError
from playbook_bench.logs import adapters, fields, parsers
from playbook_bench.logs.adapters import ADAPTERS, Adapter
from playbook_bench.logs.checks import ARRIVAL, step_log
from playbook_bench.logs.fields import NO_TIME, StepLog, shown
from playbook_bench.logs.proposal import pattern
from playbook_bench.logs.steps import Expected

_PATTERN = "regex:"
_NAMES = ", ".join(each.name for each in ADAPTERS)
_KNOWN = f"{_NAMES}, {_PATTERN}PATTERN"
_FILES = [name for each in ADAPTERS for name in each.files]
"""Patterns of the files that adapters read in a folder."""


class NoAdapter(LogError):
    """No adapter knows a line of a log."""

    tried = _NAMES
    """The adapters that were tried."""

    def __init__(self, message: str, pattern: str) -> None:
        super().__init__(message)
        self.pattern = pattern
        """A regular expression that fits the log, as `regex:...`; empty where none was found."""


def read(
    text_or_path: str | Path,
    adapter: str | None = None,
    *,
    steps: int | None = None,
    arrivals: Sequence[float] | None = None,
    running: bool = False,
    beside: bool = True,
) -> StepLog:
    """The steps that a log tells of: its text, a file, or a folder with one file that an adapter knows.

    `adapter` is a name in `ADAPTERS` or `regex:PATTERN`; None: the one whose lines the text has. `steps` is how many the run was to make:
    only with it does a log that ends early show, except where the log names the number. `arrivals` are the moments, in seconds on one
    clock, at which the lines of the text arrived: for logs without times.
    `running`: the run may go on, so that a log which ends early is one, with a caveat; so is one without times: its seconds
    are those of a file `beside` it that has its steps and losses, else the mean of the run, else NaN.

    Raises:
        LogError: the log is not the whole and sound log of one run, or does not say how long its steps took.
    """
    content = _file(text_or_path) if isinstance(text_or_path, Path) else text_or_path
    chosen = _chosen(adapter, content)
    source = _source(chosen, content)
    arrived = arrivals if chosen.printed else None
    log = step_log(chosen.parse(source), Expected(chosen.name, steps, arrived, chosen.each_step, chosen.timed, running))
    log = log if chosen.binary else replace(log, facts=fields.of(source))
    if log.clock not in NO_TIME:
        return log
    timed = _timed_beside(log, content) if isinstance(content, Path) and beside else None
    return timed or replace(
        log, caveats=(*log.caveats, f"the log holds no time of a step, which `playbook ab` needs. {chosen.timed}; {ARRIVAL}")
    )


def rl_steps(path: Path, adapter: str | None = None) -> list[Step]:
    """The steps of a log of reinforcement learning by their phases; none where it is another log, or none that is known.

    Raises:
        LogError: it cannot be read.
    """
    try:
        content = _file(path)
        chosen = _chosen(adapter, content)
        return adapters.steps(chosen.parse(_source(chosen, content)))
    except (NoAdapter, parsers.Unfinished):
        return []


def _file(path: Path) -> Path:
    """The file itself, or the one in a folder that an adapter reads."""
    if not path.is_dir():
        return path
    files = [file for name in _FILES for file in sorted(path.glob(name))]
    if len(files) != 1:
        raise LogError(
            f"{path}: holds {len(files)} files that an adapter reads; expected one of {', '.join(_FILES)}, or name the file itself"
        )
    return files[0]


def _source(adapter: Adapter, content: str | Path) -> str:
    if adapter.binary:
        return str(content)
    return fields.load(content) if isinstance(content, Path) else content


def named(name: str) -> Adapter:
    """The adapter of that name, or for `regex:PATTERN`.

    Raises:
        LogError: there is none, or the pattern is no regular expression.
    """
    if name.startswith(_PATTERN):
        parse = parsers.by_pattern(name.removeprefix(_PATTERN))
        return Adapter("regex", "lines that a pattern finds", (), parse, "one line printed for each step", "Name a group `seconds` or `ms`")
    adapter = next((each for each in ADAPTERS if each.name == name), None)
    if adapter is None:
        raise LogError(f"there is no adapter {fields.shown(name)}; expected one of {_KNOWN}")
    return adapter


def _chosen(name: str | None, content: str | Path) -> Adapter:
    """The adapter of that name; without a name, the one that reads files of this name, or the first that knows a line."""
    if name is not None:
        return named(name)
    if isinstance(content, Path) and (binary := [a for a in ADAPTERS if a.binary and any(content.match(p) for p in a.files)]):
        return binary[0]
    text = fields.load(content) if isinstance(content, Path) else content
    adapter = next((each for each in ADAPTERS if not each.binary and _knows(each, text)), None)
    if adapter is None:
        fitting = f"{_PATTERN}{proposed}" if (proposed := pattern(text)) else ""
        hint = (
            f"This pattern fits its lines: {shlex.quote(fitting)}"
            if fitting
            else "JSON lines with step, seconds, loss and tokens are read without options"
        )
        raise NoAdapter(f"no adapter knows a line of this log. {hint}. Those that can be named: {_KNOWN}", fitting)
    return adapter


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


def _timed_beside(log: StepLog, path: Path) -> StepLog | None:
    """The log with the seconds of a file beside it that has its steps and their losses; None where there is none, or several disagree."""
    folders = [path.parent, *([path.parent.parent] if path.parent.match(_CHECKPOINT) else [])]
    patterns = [*(f"{below}{name}" for name in _FILES for below in ("", _BELOW)), *_PRINTED]
    beside = (each for folder in folders for name in patterns for each in sorted(folder.glob(name)) if each != path and each.is_file())
    matches = []
    for each in islice(beside, _MOST_FILES):
        with suppress(LogError):
            if (match := _with_seconds(log, read(each, running=True, beside=False))) is not None:
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
    equal_losses = all(math.isclose(step.loss or 0.0, of_step[step.step].loss or 0.0, rel_tol=_ROUNDING) for step in common)
    have_losses = "loss" not in (*log.unknown, *other.unknown)
    if other.clock in NO_TIME or len(common) < max(2, len(log.steps) - 1) or not (equal_losses and have_losses):
        return None
    steps = tuple(replace(step, seconds=of_step[step.step].seconds) for step in common)
    return replace(log, steps=steps, clock=other.clock)
