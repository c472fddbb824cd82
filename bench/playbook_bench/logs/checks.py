"""From rows to checked steps: what is missing, doubled, out of order, cut short or not finite is an error, never a number."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from playbook.errors import LogError
from playbook_bench.logs import steps
from playbook_bench.logs.fields import Clock, LoggedStep, StepLog, ranked
from playbook_bench.logs.parsers import Row, Unfinished
from playbook_bench.logs.steps import Expected, Line, Numbered

_MAX_STEPS = 1_000_000
_BURST_S = 5e-5
"""Lines closer than this were written at once, whatever the steps took."""
FIELDS = ("tokens", "loss", "grad_norm", "memory_bytes", "skipped", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s")
_NOT_WHEN_SKIPPED = frozenset({"loss", "grad_norm"})
_RATES = frozenset({"tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s"})
"""Figures that trainers average over some steps, so that the first lines have none."""
ARRIVAL = "`playbook ab` and cases of kind `command` time each printed line as it arrives"
_MANY = 8
_UNITS_S = (60.0, 1.0, 0.36)
"""Seconds to which clocks are rounded: minutes, seconds, and hours with four decimals."""
_COARSE = 0.1
"""Share of a line's time from which on the rounding of a clock hides what one line took."""
_ON_UNIT = 1e-4
_DIGITS = 4
"""Significant digits to which transformers 5 and nanotron round totals."""
_LARGE = 10 ** (_DIGITS + 1)


def step_log(rows: Iterable[Row], expected: Expected) -> StepLog:
    """The steps of a log.

    Raises:
        LogError: it is not the whole and sound log of one run.
    """
    figures, remarks = _read(rows, expected)
    figures, of_one_step = steps.per_step(figures, expected)
    if len(figures) < 2:
        raise LogError(
            f"{expected.adapter}: the log has {len(figures)} lines about steps; expected at least 2. "
            f"Look at what the command printed, name the right adapter, and let it log each step: {expected.each_step}"
        )
    if expected.running:
        figures = _with_bar_clock(figures)
    names, sparse = _fields(figures, expected)
    lines, through_epochs = steps.numbered(figures, expected)
    remarks += of_one_step + through_epochs
    if expected.running:
        lines, restarts = steps.last_run(lines)
        remarks += restarts
    every = steps.interval(lines, expected)
    remarks += steps.end(lines, every, expected)
    clock, seconds = _seconds(lines, names, expected)
    arrivals = expected.arrivals or ()
    tokens = _tokens(lines, names, expected)
    covered = [min(every, max(1, lines[0].step)), *(b.step - a.step for a, b in itertools.pairwise(lines))]
    begin = int(clock != "logged" or ("tokens_total" in names and "tokens" not in names))
    logged = tuple(
        LoggedStep(
            line.step,
            seconds[i],
            tokens[i],
            **{name: line.values.get(name) for name in names.intersection(FIELDS) - {"tokens", "skipped"}},
            skipped=line.values["skipped"] >= covered[i] if "skipped" in names else None,
            arrived=arrivals[line.number - 1] if line.number <= len(arrivals) else None,
        )
        for i, line in enumerate(lines)
        if i >= begin
    )
    unknown = tuple(name for name in FIELDS if all(getattr(step, name) is None for step in logged))
    caveats = (*remarks, *_skipped(lines, sum(covered)), *_caveats(lines, every, clock, sparse, expected))
    return StepLog(expected.adapter, logged, unknown, every, clock, caveats)


def _read(rows: Iterable[Row], expected: Expected) -> tuple[list[Numbered], list[str]]:
    """The figures of all lines, and a word where the end of the run is missing."""
    figures: list[Numbered] = []
    remarks: list[str] = []
    try:
        figures.extend(_named_alike(itertools.islice(rows, _MAX_STEPS + 1), expected))
    except Unfinished as e:
        if not expected.running:
            raise
        remarks.append(f"the log has no end ({e}): the run goes on, or ended early")
    if len(figures) > _MAX_STEPS:
        raise LogError(f"{expected.adapter}: the log has more than {_MAX_STEPS} lines about steps; expected the log of one short run")
    return figures, remarks


def _named_alike(rows: Iterable[Row], expected: Expected) -> Iterable[Numbered]:
    """The figures of lines.

    Raises:
        LogError: a figure has another name than before; what has two names may be two things, such as two clocks.
    """
    names: dict[str, int] = {}
    for number, row in rows:
        values = ranked(row)
        other = next((figure for figure, (rank, _) in values.items() if names.setdefault(figure, rank) != rank), "")
        if other:
            raise LogError(f"{expected.adapter}: line {number} has its {other} under another name than lines before; the log is damaged")
        yield number, {figure: value for figure, (_, value) in values.items()}


def _with_bar_clock(rows: list[Numbered]) -> list[Numbered]:
    """Rows without any time, with a progress bar's clock: good enough to say how fast a run was, not for a comparison."""
    if any(values.keys() & {"seconds", "clock"} for _, values in rows):
        return rows
    return [(number, values | ({"clock": values["bar_clock"]} if "bar_clock" in values else {})) for number, values in rows]


def in_bursts(moments: Sequence[float]) -> bool:
    """Whether most lines came together with the line before: the command buffers what it prints, and arrivals are no clock."""
    return 2 * sum(b - a < _BURST_S for a, b in itertools.pairwise(moments)) > len(moments)


def _fields(rows: Sequence[Numbered], expected: Expected) -> tuple[set[str], list[str]]:
    """The names of figures that the lines hold, and of those that most lines do not, which are passed over.

    Raises:
        LogError: a line lacks a figure that most have, or one is not finite.
    """
    counts = Counter(name for _, values in rows for name in values)
    names = {name for name, n in counts.items() if 2 * n >= len(rows)}
    begins = {name: number for number, values in reversed(rows) for name in values if name in _RATES}
    begin = max(begins.values(), default=0)
    # Of several rates that begin together: one alone may have been lost.
    rates = set(begins) if len(begins) > 1 and len(set(begins.values())) == 1 else set()
    for number, values in rows:
        for name, value in values.items():
            if name == "nan" and value:
                raise LogError(
                    f"{expected.adapter}: line {number} says that its loss or gradients are NaN; expected finite ones. "
                    "The run is no measurement"
                )
            if name in names and not math.isfinite(value) and not (name in _NOT_WHEN_SKIPPED and values.get("skipped")):
                raise LogError(
                    f"{expected.adapter}: line {number} has {name} {value}; expected a finite number. "
                    "The run is no measurement: let it train soundly first"
                )
        late = rates if number < begin else set()
        missing = sorted(names - values.keys() - late - (_NOT_WHEN_SKIPPED if values.get("skipped") else set()))
        if missing:
            raise LogError(
                f"{expected.adapter}: line {number} has no {', '.join(missing)}, which other lines about steps have; "
                "the log is damaged, two processes write into it, or a value was NaN and left out"
            )
    return names, sorted(name for name in counts.keys() - names if name in FIELDS)


def _seconds(lines: Sequence[Line], names: set[str], expected: Expected) -> tuple[Clock, list[float]]:
    """Where seconds come from, and those of each line; the first line of a clock only starts it."""
    clock: Clock = "logged"
    coarse = _clock_unit(lines) > 0
    if "seconds" in names:
        seconds = [line.values["seconds"] for line in lines]
    elif "clock" in names and not (coarse and expected.arrivals is not None):
        clock = "differences"
        seconds = _rates([line.values["clock"] for line in lines], lines)
        if coarse and expected.running:
            seconds = [_steady("clock", lines)] * len(lines)
    elif expected.arrivals is not None:
        clock = "arrival"
        if max(line.number for line in lines) > len(expected.arrivals):
            raise LogError(
                f"{expected.adapter}: the text has more lines than the {len(expected.arrivals)} that were timed; expected a time for each"
            )
        moments = [expected.arrivals[line.number - 1] for line in lines]
        seconds = _rates(moments, lines)
        if in_bursts(moments):
            raise LogError(
                f"{expected.adapter}: lines arrived in bursts, so the command buffers what it prints; expected each as its step ends. "
                "Set PYTHONUNBUFFERED=1, or flush"
            )
    elif expected.running and "mean_seconds" in names:
        clock = "mean"
        seconds = [line.values["mean_seconds"] for line in lines]
    elif expected.running:
        return "none", [math.nan] * len(lines)
    else:
        figures = ", ".join(sorted(names & {"step", "epoch", *FIELDS})) or "nothing known here"
        raise LogError(
            f"{expected.adapter}: lines about steps hold {figures}; expected the seconds of a step as well. {expected.timed}; {ARRIVAL}"
        )
    for line, value in list(zip(lines, seconds, strict=True))[clock != "logged" :]:
        if not 0 < value < math.inf:
            raise LogError(
                f"{expected.adapter}: step {line.step} on line {line.number} took {value:g} s; expected more than 0. "
                "The clock went back, or is too coarse"
            )
    return clock, seconds


def _clock_unit(lines: Sequence[Line]) -> float:
    """Seconds to which the log's clock is rounded, where that is whole seconds or more, or much of what a line takes; else 0."""
    moments = [line.values.get("clock", math.nan) for line in lines]
    unit = next((u for u in _UNITS_S if all(abs(m / u - round(m / u)) < _ON_UNIT for m in moments if math.isfinite(m))), 0.0)
    if not unit or not all(map(math.isfinite, moments)):
        return 0.0
    return unit if unit >= 1 or unit > _COARSE * (moments[-1] - moments[0]) / (len(moments) - 1) else 0.0


def _steady(name: str, lines: Sequence[Line]) -> float:
    """How much a total grows in a step, on average after the first fifth."""
    begin, end = lines[(len(lines) - 1) // 5], lines[-1]
    return (end.values[name] - begin.values[name]) / (end.step - begin.step)


def _tokens(lines: Sequence[Line], names: set[str], expected: Expected) -> list[float | None]:
    if "tokens" in names and _is_total([line.values["tokens"] for line in lines]):
        return [None, *_growth("tokens", lines)]
    if "tokens" in names:
        tokens: list[float | None] = [line.values["tokens"] for line in lines]
    elif "tokens_total" in names:
        tokens = [None, *_growth("tokens_total", lines)]
    else:
        return [None] * len(lines)
    for line, value in zip(lines, tokens, strict=True):
        if value is not None and value < 0:
            raise LogError(f"{expected.adapter}: step {line.step} on line {line.number} has {value:g} tokens; expected 0 or more")
    return tokens


def _growth(name: str, lines: Sequence[Line]) -> list[float]:
    """How much a total grows in the steps of each line but the first; the mean for all, where it is rounded to few digits."""
    totals = [line.values[name] for line in lines]
    if max(totals) >= _LARGE and all(float(f"{total:.{_DIGITS}g}") == total for total in totals):
        return [_steady(name, lines)] * (len(lines) - 1)
    return _rates(totals, lines)[1:]


def _is_total(values: Sequence[float]) -> bool:
    """Whether figures are a running total, which those of single steps never look like: they grow on each of many lines."""
    return len(values) >= _MANY and all(b > a for a, b in itertools.pairwise(values))


def _rates(totals: Sequence[float], lines: Sequence[Line]) -> list[float]:
    """Growth for each step; 0 for the first line, whose own cannot be known."""
    growths = [
        (b - a) / (after.step - before.step)
        for (a, b), (before, after) in zip(itertools.pairwise(totals), itertools.pairwise(lines), strict=True)
    ]
    return [0.0, *growths]


def _skipped(lines: Sequence[Line], covered: int) -> Iterable[str]:
    """What is to be said of steps without an update."""
    skipped = sum(line.values.get("skipped", 0.0) for line in lines)
    if skipped:
        share = "no step made an update" if skipped >= covered else f"{skipped:.0f} of {covered} steps made no update"
        yield f"{share}: their gradients were not finite under the loss scale, and the optimizer's work is missing from their time"


def _caveats(lines: Sequence[Line], every: int, clock: Clock, sparse: Sequence[str], expected: Expected) -> Iterable[str]:
    """What the figures do not vouch for, as sentences. `sparse`: figures that most lines lack."""
    if steps.is_late(lines, every):
        yield f"the log begins at step {lines[0].step}: the run went on from a checkpoint, or the beginning is missing"
    if clock == "differences" and expected.running and (unit := _clock_unit(lines)):
        of_unit = "whole seconds" if unit == 1 else f"steps of {unit:g} s"
        yield f"the log's clock has {of_unit}: each step has the mean of all after the first fifth"
    if every > 1:
        yield f"each line covers {every} steps, so what a single step took does not show. To see each: {expected.each_step}"
    if clock == "differences":
        yield "seconds lie between the log's own time stamps: what happens between steps, such as a checkpoint, counts"
    if clock == "mean":
        yield "each step has the mean of the whole run, by its closing line: validations and checkpoints count"
    if clock == "arrival":
        yield "seconds lie between the arrivals of the log's lines: what happens between steps, such as a checkpoint, counts"
    if sparse:
        yield f"most lines have no {', '.join(sparse)}: passed over"
