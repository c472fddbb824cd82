"""Seconds from a file beside a log that holds none: the same run told twice, as by `trainer_state.json` and `trainer_log.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from playbook.errors import LogError
from playbook_bench.logs.model import StepLog
from playbook_bench.logs.text import shown

_PRINTED = ("*.log", "*.out", "*.txt")
_BELOW = "runs/*/"
"""Where the Hugging Face Trainer puts its events, below its output."""
_CHECKPOINT = "checkpoint-*"
"""A folder in the Trainer's output that has a `trainer_state.json` of its own."""
_MOST = 64
"""Files that are looked at."""
_ROUNDING = 1e-3
"""Share by which losses of one step differ that are printed with four digits."""
_LIKE = 0.2
"""Share by which two files' seconds of one run may differ: where clocks stand in a step is the trainer's choice."""


def timed(log: StepLog, path: Path, names: Iterable[str], read: Callable[[Path], StepLog]) -> StepLog | None:
    """The log with the seconds of a file beside it that has its steps and their losses; None where there is none, or several disagree.

    `names` are patterns of files that tell steps; `read` reads one of them.
    """
    folders = [path.parent, *([path.parent.parent] if path.parent.match(_CHECKPOINT) else [])]
    patterns = [*(f"{below}{name}" for name in names for below in ("", _BELOW)), *_PRINTED]
    beside = (each for folder in folders for name in patterns for each in sorted(folder.glob(name)) if each != path and each.is_file())
    matches = []
    for each in islice(beside, _MOST):
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
