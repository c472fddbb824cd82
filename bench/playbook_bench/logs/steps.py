"""Which step each line of a log is of: numbered, in order, without gaps, with the lines of one step as one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from playbook.errors import LogError
from playbook.text import count

_LARGEST_STEP = 2**53
_NEXT_LINE = 1.5
"""A line further in epochs than this many usual ones stands after a missing one."""
_LEAST_RUN = 8
"""Lines of a run from which on it counts as one that was started anew."""
_CLOSING = 0.005
"""Share by which the number of steps is uncertain that the closing line's rounded time and rate imply."""
_ROUNDING = 1e-6
_RANKS_APART = 0.2
"""Share of a step's time within which all ranks log it."""

Values = dict[str, float]
"""Figures of a line by their names in `fields.NAMES`."""
Numbered = tuple[int, Values]
"""A line's number in the text, and its figures."""


@dataclass(frozen=True)
class Line:
    """A line about a step."""

    number: int
    step: int
    values: Mapping[str, float]
    next_in: int | None = None
    """Steps to the next line, where an epoch ends and they may be fewer; None: as many as usual."""


@dataclass(frozen=True)
class Expected:
    """What the caller knows of the run, and how this adapter's trainer is made to say more."""

    adapter: str
    steps: int | None
    """Steps that the run was to make; None where nobody knows, and then a log that ends early may pass."""
    arrivals: Sequence[float] | None
    """Seconds on one clock at which each line of the text arrived."""
    each_step: str
    """The setting that makes the trainer log each step."""
    timed: str
    """What makes the trainer say how long steps take."""
    running: bool = False
    """Whether the run may go on, and its log need not tell all that a comparison needs."""


# Several lines of one step: of its micro-batches, whose seconds add up, or of ranks, which say the same.


def per_step(rows: Sequence[Numbered], expected: Expected) -> tuple[list[Numbered], list[str]]:
    """One row for each step, and a word on it where each step has equally many lines; the rows as they are where not.

    The first step and the last may have fewer lines: they are left out.
    """
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[1].get("step"))]
    size = max(map(len, groups), default=0)
    whole = [group for group in groups if len(group) == size]
    if size < 2 or any(len(group) != size for group in groups[1:-1]):
        return list(rows), []
    if all(_counts_up([values.get("micro", math.nan) for _, values in group]) for group in groups):
        return [_added(group) for group in whole], [
            f"each step has {size} lines, of its micro-batches: their seconds and tokens are added up"
        ]
    if expected.running and len(whole) == len(groups) and _of_ranks(groups):
        return [group[-1] for group in groups], [f"each step is logged {size} times, by several ranks: the last line of each counts"]
    return list(rows), []


def _counts_up(values: Sequence[float]) -> bool:
    return all(math.isfinite(v) for v in values) and all(b > a for a, b in itertools.pairwise(values))


def _of_ranks(groups: Sequence[Sequence[Numbered]]) -> bool:
    """Whether the lines of each step state one loss, each step another, at about one moment: those of micro-batches do not."""
    losses = [{values.get("loss") for _, values in group} for group in groups]
    clocks = [[values["clock"] for _, values in group if "clock" in values] for group in groups]
    apart = max((max(clock) - min(clock) for clock in clocks if clock), default=0.0)
    between = clocks[-1][-1] - clocks[0][-1] if clocks[0] and clocks[-1] else math.inf
    alike = all(len(each) == 1 and None not in each for each in losses)
    return alike and len(set(map(frozenset, losses))) > 1 and apart * len(groups) < _RANKS_APART * between


def _added(group: Sequence[Numbered]) -> Numbered:
    """The lines of a step's micro-batches as one: a clock and totals are those of the last."""
    number, merged = group[-1][0], dict(group[-1][1])
    for name, of_all in {"seconds": math.fsum, "tokens": math.fsum, "loss": fmean, "memory_bytes": max}.items():
        values = [row[name] for _, row in group if name in row]
        if len(values) == len(group):
            merged[name] = float(of_all(values))  # type: ignore[operator]
    return number, merged


def numbered(rows: Sequence[Numbered], expected: Expected) -> tuple[list[Line], list[str]]:
    """Lines with their steps, and a word where these count anew in each epoch.

    Where lines have no step they are counted, if their epochs show that none is missing.
    """
    if any("step" in values for _, values in rows):
        return _through_epochs([Line(number, _whole(values["step"], number, expected), values) for number, values in rows])
    every = _uncounted([values for _, values in rows], expected)
    _even_epochs(rows, expected)
    return [Line(number, every * i, values) for i, (number, values) in enumerate(rows, start=1)], []


def _through_epochs(lines: list[Line]) -> tuple[list[Line], list[str]]:
    """Steps that begin again with each epoch, counted on: each epoch must log the steps of the first, and the last may not be through."""
    begins = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(lines), 1) if b.step <= a.step)]
    epochs = [lines[a:b] for a, b in itertools.pairwise([*begins, len(lines)])]
    steps = [[line.step for line in epoch] for epoch in epochs]
    first = steps[0]
    alike = all(each == first for each in steps[1:-1]) and steps[-1] == first[: len(steps[-1])]
    alike &= all(len({line.values.get("epoch") for line in epoch}) == 1 for epoch in epochs)
    if len(epochs) < 2 or len(first) < 2 or not alike or not _counts_up([epoch[0].values.get("epoch", math.nan) for epoch in epochs]):
        return lines, []
    every = first[1] - first[0]
    short = len(first) > 2 and first[-1] - first[-2] < every
    length = first[-1] + (0 if first[0] else 1 if short else every)
    gaps = [b - a for a, b in itertools.pairwise([*first, first[0] + length])]
    closing = [None] * (len(first) - 1 - short) + gaps[len(first) - 1 - short :]
    out = [
        Line(line.number, line.step + i * length, line.values, next_in)
        for i, epoch in enumerate(epochs)
        for line, next_in in zip(epoch, closing, strict=False)
    ]
    return out, [f"steps begin again with each of {len(epochs)} epochs: they are counted on"]


def last_run(lines: list[Line]) -> tuple[list[Line], list[str]]:
    """What follows the last time that steps begin again, in a file to which several runs were appended, and a word on it.

    Lines of one step that are there twice, or out of order, begin again at once: they stay, for an error.
    """
    begins = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(lines), 1) if b.step <= a.step)]
    if len(begins) == 1 or _LEAST_RUN * len(begins) > len(lines) or len(lines) - begins[-1] < _LEAST_RUN:
        return lines, []
    last = lines[begins[-1] :]
    return last, [
        f"steps begin again {count(len(begins) - 1, 'time')}, as after a restart: counted is what follows, from line {last[0].number} on"
    ]


def _uncounted(rows: Sequence[Mapping[str, float]], expected: Expected) -> int:
    """The steps of a line, where lines have no step: by the number expected, or by what the closing line implies."""
    n = len(rows)
    if expected.steps is not None:
        if expected.steps % n:
            raise LogError(
                f"{expected.adapter}: the log has {n} lines about steps, which does not divide the {expected.steps} steps expected; "
                f"lines are missing or doubled. Let each step be logged: {expected.each_step}"
            )
        return expected.steps // n
    if "run_steps" in rows[0]:
        steps = rows[0]["run_steps"]
        least, most = steps * (1 - _CLOSING) - 1, steps * (1 + _CLOSING) + 1
        fits = [e for e in range(1, int(most / n) + 1) if least < e * (n + 1) and e * n < most]
        if len(fits) != 1:
            raise LogError(
                f"{expected.adapter}: the log has {n} lines about steps, and its closing line tells of about {steps:.0f} steps, "
                f"which leaves open how many a line covers; expected the number of steps as well, or a line for each: {expected.each_step}"
            )
        return fits[0]
    return 1


def _whole(value: float, number: int, expected: Expected) -> int:
    if not 0 <= value < _LARGEST_STEP or value != int(value):
        raise LogError(f"{expected.adapter}: line {number} has step {value:g}; expected a whole number from 0 on")
    return int(value)


def _even_epochs(rows: Sequence[Numbered], expected: Expected) -> None:
    """Epochs grow evenly from line to line. They are printed with four digits, or two decimals: too coarse for many steps to an epoch."""
    epochs = [values.get("epoch", math.nan) for _, values in rows]
    growths = [b - a for a, b in itertools.pairwise(epochs)]
    usual = median(growths)
    hundredths = all(abs(e * 100 - round(e * 100)) < _ROUNDING for e in epochs if math.isfinite(e))
    unit = max(10 ** (math.floor(math.log10(epochs[-1])) - 3) if epochs[-1] > 0 else math.inf, 0.01 if hundredths else 0.0)
    coarse = not usual > 2 * unit
    if coarse and expected.steps is None:
        raise LogError(
            f"{expected.adapter}: lines have no step, and their epochs are too coarse to show that none is missing; "
            "expected the number of steps as well"
        )
    for (number, _), growth in zip(rows[1:], growths, strict=True):
        if not (growth >= 0 if coarse else 0 < growth < _NEXT_LINE * usual + unit):
            raise LogError(
                f"{expected.adapter}: line {number} is {growth:.3g} epochs after the line before, where {usual:.3g} are usual; "
                "lines are missing, doubled or out of order"
            )


def interval(lines: Sequence[Line], expected: Expected) -> int:
    """Steps from line to line; the first step and the last may have a line of their own, and so may the last of an epoch."""
    for a, b in itertools.pairwise(lines):
        if b.step == a.step:
            raise LogError(
                f"{expected.adapter}: step {b.step} is logged twice, on lines {a.number} and {b.number}; expected once. "
                "Where several ranks write into one log, keep one (torchrun --local-ranks-filter 0); "
                "lines of micro-batches need a counter of them, `micro_step`"
            )
        if b.step < a.step:
            raise LogError(
                f"{expected.adapter}: step {b.step} on line {b.number} comes after step {a.step}; expected steps in order, from one run"
            )
    gaps = [b.step - a.step for a, b in itertools.pairwise(lines)]
    within = [gap for gap, line in zip(gaps, lines, strict=False) if line.next_in is None]
    every = min(within[1:-1] or within[1:] or within or gaps)
    for i, (a, b) in enumerate(itertools.pairwise(lines)):
        is_first = i == 0 and a.step <= 1 and b.step - a.step < every
        is_last = i == len(gaps) - 1 > 1 and b.step - a.step < every
        if b.step - a.step != (a.next_in or every) and not is_first and not is_last:
            raise LogError(
                f"{expected.adapter}: after step {a.step} (line {a.number}) comes step {b.step} (line {b.number}), "
                f"where every {every} is logged; steps are missing from the log"
            )
    return every


def end(lines: Sequence[Line], every: int, expected: Expected) -> list[str]:
    """The last line is the last that the run should have written; of a run that may go on, what is missing is said."""
    total = lines[-1].values.get("total", 0)
    steps = expected.steps if expected.steps is not None else int(total) if 0 < total < _LARGEST_STEP else None
    if steps is None:
        return []
    begin, last = lines[0].step, lines[-1].step
    # What the caller expects counts from a late beginning; the number that a log names, from the first step of all.
    late = expected.steps is not None and is_late(lines, every)
    origin = begin if late else int(begin not in (0, every - 1) or begin == 1)
    least = origin + steps - 1 - (every - 1 if late else 0)
    if last + (lines[-1].next_in or every) <= least:
        if expected.running:
            return [f"the log ends at step {last} of {steps}: the run goes on, or ended early"]
        if late:
            raise LogError(
                f"{expected.adapter}: the first step logged is {begin} on line {lines[0].number}, the last is {last}; "
                f"expected {steps} steps. The beginning is missing, or the run ended early"
            )
        raise LogError(
            f"{expected.adapter}: the log ends at step {last} (line {lines[-1].number}); expected {steps} steps. "
            "The run ended early, whatever its exit code said, or its last lines were not written"
        )
    if last > origin + steps - 1:
        raise LogError(
            f"{expected.adapter}: the log goes on to step {last}; expected {steps} steps. It holds another run, or the run made more"
        )
    return []


def is_late(lines: Sequence[Line], every: int) -> bool:
    """Whether the log begins after the first steps, as that of a run which goes on from a checkpoint does."""
    return lines[0].step not in {0, 1, every - 1, every}
