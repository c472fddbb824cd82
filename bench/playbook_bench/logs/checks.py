"""From rows to checked steps: what is missing, doubled, out of order, cut short or not finite is an error, never a number."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from playbook.errors import LogError
from playbook.text import count
from playbook_bench.logs.fields import ranked
from playbook_bench.logs.model import Clock, LoggedStep, StepLog
from playbook_bench.logs.parsers import Row, Unfinished

_MAX_STEPS = 1_000_000
_LARGEST_STEP = 2**53
_BURST_S = 5e-5
"""Lines closer than this were written at once, whatever the steps took."""
FIELDS = ("tokens", "loss", "grad_norm", "memory_bytes", "skipped", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s")
_NOT_WHEN_SKIPPED = frozenset({"loss", "grad_norm"})
ARRIVAL = "`playbook ab` and cases of kind `command` time each printed line as it arrives"
_NEXT_LINE = 1.5
"""A line further in epochs than this many usual ones stands after a missing one."""
_MANY = 8
_CLOSING = 0.005
"""Share by which the number of steps is uncertain that the closing line's rounded time and rate imply."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class _Line:
    number: int
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Wanted:
    """What the caller knows of the run, and how this adapter's trainer is made to say more."""

    adapter: str
    steps: int | None
    """Steps that the run was to make; None where nobody knows, and then a log that ends early may pass."""
    first: int | None
    """Number of its first step; None: 0 or 1."""
    arrivals: Sequence[float] | None
    """Seconds on one clock at which each line of the text arrived."""
    each_step: str
    """The setting that makes the trainer log each step."""
    timed: str
    """What makes the trainer say how long steps take."""
    running: bool = False
    """Whether the run may go on, and its log need not tell all that a comparison needs."""


def step_log(rows: Iterable[Row], wanted: Wanted) -> StepLog:
    """The steps of a log.

    Raises:
        LogError: it is not the whole and sound log of one run.
    """
    found: list[tuple[int, dict[str, float]]] = []
    left: list[str] = []
    try:
        found.extend(_named_alike(itertools.islice(rows, _MAX_STEPS + 1), wanted))
    except Unfinished as e:
        if not wanted.running:
            raise
        left.append(f"the log has no end ({e}): the run goes on, or ended early")
    if len(found) > _MAX_STEPS:
        raise LogError(f"{wanted.adapter}: the log has more than {_MAX_STEPS} lines about steps; expected the log of one short run")
    if len(found) < 2:
        raise LogError(
            f"{wanted.adapter}: the log has {len(found)} lines about steps; expected at least 2. "
            f"Look at what the command printed, name the right adapter, and let it log each step: {wanted.each_step}"
        )
    if wanted.running and not any(values.keys() & {"seconds", "clock"} for _, values in found):
        found = [(number, values | ({"clock": values["bar_clock"]} if "bar_clock" in values else {})) for number, values in found]
    kept, sparse = _fields(found, wanted)
    lines = _numbered(found, wanted)
    if wanted.running:
        lines, again = _last_run(lines)
        left += again
    every = _interval(lines, wanted)
    left += _end(lines, every, wanted)
    clock, seconds = _seconds(lines, kept, wanted)
    tokens = _tokens(lines, kept, wanted)
    covered = [min(every, max(1, lines[0].step)), *(b.step - a.step for a, b in itertools.pairwise(lines))]
    begin = int(clock != "logged" or ("tokens_total" in kept and "tokens" not in kept))
    steps = tuple(
        LoggedStep(
            line.step,
            seconds[i],
            tokens[i],
            **{name: _optional(line, name, kept) for name in FIELDS if name not in ("tokens", "skipped")},
            skipped=line.values["skipped"] >= covered[i] if "skipped" in kept else None,
            arrived=_arrived(line, wanted.arrivals),
        )
        for i, line in enumerate(lines)
        if i >= begin
    )
    unknown = tuple(name for name in FIELDS if all(getattr(step, name) is None for step in steps))
    caveats = (*left, *_skipped(lines, sum(covered)), *_caveats(lines, every, clock, sparse, wanted))
    return StepLog(wanted.adapter, steps, unknown, every, clock, caveats)


def _named_alike(rows: Iterable[Row], wanted: Wanted) -> Iterable[tuple[int, dict[str, float]]]:
    """The figures of lines.

    Raises:
        LogError: a figure has another name than before; what has two names may be two things, such as two clocks.
    """
    names: dict[str, int] = {}
    for number, row in rows:
        values = ranked(row)
        other = next((figure for figure, (rank, _) in values.items() if names.setdefault(figure, rank) != rank), "")
        if other:
            raise LogError(f"{wanted.adapter}: line {number} has its {other} under another name than lines before; the log is damaged")
        yield number, {figure: value for figure, (_, value) in values.items()}


def _arrived(line: _Line, arrivals: Sequence[float] | None) -> float | None:
    return arrivals[line.number - 1] if arrivals is not None and line.number <= len(arrivals) else None


def in_bursts(moments: Sequence[float]) -> bool:
    """Whether most lines came together with the line before: the command buffers what it prints, and arrivals are no clock."""
    return 2 * sum(b - a < _BURST_S for a, b in itertools.pairwise(moments)) > len(moments)


def _optional(line: _Line, name: str, kept: set[str]) -> float | None:
    return line.values.get(name) if name in kept else None


def _fields(found: Sequence[tuple[int, dict[str, float]]], wanted: Wanted) -> tuple[set[str], list[str]]:
    """Figures that the lines hold, and those that most lines do not, which are passed over. A line without one that most have is damaged."""
    counts = Counter(name for _, values in found for name in values)
    kept = {name for name, n in counts.items() if 2 * n >= len(found)}
    for number, values in found:
        for name, value in values.items():
            if name == "nan" and value:
                raise LogError(
                    f"{wanted.adapter}: line {number} says that its loss or gradients are NaN; expected finite ones. The run is no measurement"
                )
            if name in kept and not math.isfinite(value) and not (name in _NOT_WHEN_SKIPPED and values.get("skipped")):
                raise LogError(
                    f"{wanted.adapter}: line {number} has {name} {value}; expected a finite number. The run is no measurement: let it train soundly first"
                )
        missing = sorted(kept - values.keys() - (_NOT_WHEN_SKIPPED if values.get("skipped") else set()))
        if missing:
            raise LogError(
                f"{wanted.adapter}: line {number} has no {', '.join(missing)}, which other lines about steps have; "
                "the log is damaged, two processes write into it, or a value was NaN and left out"
            )
    return kept, sorted(name for name in counts.keys() - kept if name in FIELDS)


def _numbered(found: Sequence[tuple[int, dict[str, float]]], wanted: Wanted) -> list[_Line]:
    """Lines with their steps; where they have none, counted, if their epochs show that none is missing."""
    if any("step" in values for _, values in found):
        return [_Line(number, _whole(values["step"], number, wanted), values) for number, values in found]
    origin, every = _uncounted([values for _, values in found], wanted)
    _even_epochs(found, wanted)
    return [_Line(number, origin + every * i, values) for i, (number, values) in enumerate(found)]


def _last_run(lines: list[_Line]) -> tuple[list[_Line], list[str]]:
    """What follows the last time that steps begin again, in a file to which several runs were appended, and a word on it.

    Lines of one step that are there twice, or out of order, begin again at once: they stay, for an error.
    """
    begins = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(lines), 1) if b.step <= a.step)]
    if len(begins) == 1 or _MANY * len(begins) > len(lines) or len(lines) - begins[-1] < _MANY:
        return lines, []
    last = lines[begins[-1] :]
    return last, [
        f"steps begin again {count(len(begins) - 1, 'time')}, as after a restart: counted is what follows, from line {last[0].number} on"
    ]


def _uncounted(rows: Sequence[Mapping[str, float]], wanted: Wanted) -> tuple[int, int]:
    """The first step and the steps of a line, where lines have none: by the number expected, or by what the closing line implies."""
    n = len(rows)
    first = 0 if wanted.first is None else wanted.first - 1
    if wanted.steps is not None:
        if wanted.steps % n:
            raise LogError(
                f"{wanted.adapter}: the log has {n} lines about steps, which does not divide the {wanted.steps} steps expected; "
                f"lines are missing or doubled. Let each step be logged: {wanted.each_step}"
            )
        every = wanted.steps // n
        return first + every, every
    if "run_steps" in rows[0]:
        steps = rows[0]["run_steps"]
        least, most = steps * (1 - _CLOSING) - 1, steps * (1 + _CLOSING) + 1
        fits = [e for e in range(1, int(most / n) + 1) if least < e * (n + 1) and e * n < most]
        if len(fits) != 1:
            raise LogError(
                f"{wanted.adapter}: the log has {n} lines about steps, and its closing line tells of about {steps:.0f} steps, which leaves open how many "
                f"a line covers; expected the number of steps as well, or a line for each: {wanted.each_step}"
            )
        return first + fits[0], fits[0]
    return first + 1, 1


def _whole(value: float, number: int, wanted: Wanted) -> int:
    if not 0 <= value < _LARGEST_STEP or value != int(value):
        raise LogError(f"{wanted.adapter}: line {number} has step {value:g}; expected a whole number from 0 on")
    return int(value)


def _even_epochs(found: Sequence[tuple[int, dict[str, float]]], wanted: Wanted) -> None:
    """Epochs grow evenly from line to line. They are printed with four digits, or two decimals: too coarse for many steps to an epoch."""
    epochs = [values.get("epoch", math.nan) for _, values in found]
    grown = [b - a for a, b in itertools.pairwise(epochs)]
    usual = median(grown)
    hundredths = all(abs(e * 100 - round(e * 100)) < _ROUNDING for e in epochs if math.isfinite(e))
    unit = max(10 ** (math.floor(math.log10(epochs[-1])) - 3) if epochs[-1] > 0 else math.inf, 0.01 if hundredths else 0.0)
    coarse = not usual > 2 * unit
    if coarse and wanted.steps is None:
        raise LogError(
            f"{wanted.adapter}: lines have no step, and their epochs are too coarse to show that none is missing; expected the number of steps as well"
        )
    for (number, _), grew in zip(found[1:], grown, strict=True):
        if not (grew >= 0 if coarse else 0 < grew < _NEXT_LINE * usual + unit):
            raise LogError(
                f"{wanted.adapter}: line {number} is {grew:.3g} epochs after the line before, where {usual:.3g} are usual; "
                "lines are missing, doubled or out of order"
            )


def _interval(lines: Sequence[_Line], wanted: Wanted) -> int:
    """Steps from line to line; the first step and the last may have a line of their own."""
    for a, b in itertools.pairwise(lines):
        if b.step == a.step:
            raise LogError(
                f"{wanted.adapter}: step {b.step} is logged twice, on lines {a.number} and {b.number}; expected once. "
                "Where several ranks write into one log, keep one (torchrun --local-ranks-filter 0)"
            )
        if b.step < a.step:
            raise LogError(
                f"{wanted.adapter}: step {b.step} on line {b.number} comes after step {a.step}; expected steps in order, from one run"
            )
    gaps = [b.step - a.step for a, b in itertools.pairwise(lines)]
    every = min(gaps[1:-1] or gaps[1:] or gaps)
    for i, (a, b) in enumerate(itertools.pairwise(lines)):
        own_line = i == 0 and a.step == (min(a.step, 1) if wanted.first is None else wanted.first) and b.step - a.step < every
        cut_short = i == len(gaps) - 1 > 1 and b.step - a.step < every
        if b.step - a.step != every and not own_line and not cut_short:
            raise LogError(
                f"{wanted.adapter}: after step {a.step} (line {a.number}) comes step {b.step} (line {b.number}), where every {every} is logged; "
                "steps are missing from the log"
            )
    begin = lines[0].step
    if wanted.first is not None and begin not in range(wanted.first, wanted.first + every):
        raise LogError(
            f"{wanted.adapter}: the first step logged is {begin} on line {lines[0].number}, where every {every} is logged; "
            f"expected {wanted.first} or less than {every} after it: the beginning is missing, or the run resumed another"
        )
    return every


def _end(lines: Sequence[_Line], every: int, wanted: Wanted) -> list[str]:
    """The last line is the last that the run should have written; of a run that may go on, what is missing is said."""
    named = lines[-1].values.get("total", 0)
    expected = wanted.steps if wanted.steps is not None else int(named) if 0 < named < _LARGEST_STEP and wanted.first is None else None
    if expected is None:
        return []
    begin, last = lines[0].step, lines[-1].step
    # What the caller expects counts from a late beginning; the number that a log names, from the first step of all.
    late = wanted.steps is not None and _late(lines, every, wanted)
    origin = wanted.first if wanted.first is not None else begin if late else int(begin not in (0, every - 1) or begin == 1)
    least = origin + expected - 1 - (every - 1 if late else 0)
    if last + every <= least:
        if wanted.running:
            return [f"the log ends at step {last} of {expected}: the run goes on, or ended early"]
        if late:
            raise LogError(
                f"{wanted.adapter}: the first step logged is {begin} on line {lines[0].number}, the last is {last}; expected {expected} steps. "
                "The beginning is missing, or the run ended early"
            )
        raise LogError(
            f"{wanted.adapter}: the log ends at step {last} (line {lines[-1].number}); expected {expected} steps. "
            "The run ended early, whatever its exit code said, or its last lines were not written"
        )
    if last > origin + expected - 1:
        raise LogError(
            f"{wanted.adapter}: the log goes on to step {last}; expected {expected} steps. It holds another run, or the run made more"
        )
    return []


def _late(lines: Sequence[_Line], every: int, wanted: Wanted) -> bool:
    """Whether the log begins after the first steps, as that of a run which goes on from a checkpoint does."""
    return wanted.first is None and lines[0].step not in {0, 1, every - 1, every}


def _seconds(lines: Sequence[_Line], kept: set[str], wanted: Wanted) -> tuple[Clock, list[float]]:
    """Where seconds come from, and those of each line; the first line of a clock only starts it."""
    clock: Clock = "logged"
    coarse = _whole_seconds(lines)
    if "seconds" in kept:
        seconds = [line.values["seconds"] for line in lines]
    elif "clock" in kept and not (coarse and wanted.arrivals is not None):
        clock = "differences"
        seconds = _rates([line.values["clock"] for line in lines], lines)
        if coarse and wanted.running:
            seconds = [_steady(lines)] * len(lines)
    elif wanted.arrivals is not None:
        clock = "arrival"
        if max(line.number for line in lines) > len(wanted.arrivals):
            raise LogError(
                f"{wanted.adapter}: the text has more lines than the {len(wanted.arrivals)} that were timed; expected a time for each"
            )
        moments = [wanted.arrivals[line.number - 1] for line in lines]
        seconds = _rates(moments, lines)
        if in_bursts(moments):
            raise LogError(
                f"{wanted.adapter}: lines arrived in bursts, so the command buffers what it prints; expected each as its step ends. Set PYTHONUNBUFFERED=1, or flush"
            )
    elif wanted.running:
        return "none", [math.nan] * len(lines)
    else:
        known = ", ".join(sorted(kept)) or "nothing known here"
        raise LogError(
            f"{wanted.adapter}: lines about steps hold {known}; expected the seconds of a step as well. {wanted.timed}; {ARRIVAL}"
        )
    for line, value in list(zip(lines, seconds, strict=True))[clock != "logged" :]:
        if not 0 < value < math.inf:
            raise LogError(
                f"{wanted.adapter}: step {line.step} on line {line.number} took {value:g} s; expected more than 0. The clock went back, or is too coarse"
            )
    return clock, seconds


def _whole_seconds(lines: Sequence[_Line]) -> bool:
    """Whether the log's clock has no more than whole seconds."""
    return all(line.values.get("clock", math.nan).is_integer() for line in lines)


def _steady(lines: Sequence[_Line]) -> float:
    """Seconds of a step, on average after the first fifth."""
    begin, end = lines[(len(lines) - 1) // 5], lines[-1]
    return (end.values["clock"] - begin.values["clock"]) / (end.step - begin.step)


def _tokens(lines: Sequence[_Line], kept: set[str], wanted: Wanted) -> list[float | None]:
    if "tokens" in kept and _is_total([line.values["tokens"] for line in lines]):
        return [None, *_rates([line.values["tokens"] for line in lines], lines)[1:]]
    if "tokens" in kept:
        tokens: list[float | None] = [line.values["tokens"] for line in lines]
    elif "tokens_total" in kept:
        tokens = list(_rates([line.values["tokens_total"] for line in lines], lines))
    else:
        return [None] * len(lines)
    for line, value in list(zip(lines, tokens, strict=True))["tokens" not in kept :]:
        if value is not None and value < 0:
            raise LogError(f"{wanted.adapter}: step {line.step} on line {line.number} has {value:g} tokens; expected 0 or more")
    return tokens


def _is_total(values: Sequence[float]) -> bool:
    """Whether figures are a running total, which those of single steps never look like: they grow on each of many lines."""
    return len(values) >= _MANY and all(b > a for a, b in itertools.pairwise(values))


def _rates(totals: Sequence[float], lines: Sequence[_Line]) -> list[float]:
    """Growth for each step; 0 for the first line, whose own cannot be known."""
    grown = [
        (b - a) / (after.step - before.step)
        for (a, b), (before, after) in zip(itertools.pairwise(totals), itertools.pairwise(lines), strict=True)
    ]
    return [0.0, *grown]


def _skipped(lines: Sequence[_Line], steps: int) -> Iterable[str]:
    """What is to be said of steps without an update."""
    skipped = sum(line.values.get("skipped", 0.0) for line in lines)
    if skipped:
        share = "no step made an update" if skipped >= steps else f"{skipped:.0f} of {steps} steps made no update"
        yield f"{share}: their gradients were not finite under the loss scale, and the optimizer's work is missing from their time"


def _caveats(lines: Sequence[_Line], every: int, clock: Clock, sparse: Sequence[str], wanted: Wanted) -> Iterable[str]:
    if _late(lines, every, wanted):
        yield f"the log begins at step {lines[0].step}: the run went on from a checkpoint, or the beginning is missing"
    if clock == "differences" and wanted.running and _whole_seconds(lines):
        yield "the log's clock has whole seconds: each step has the mean of all after the first fifth"
    if every > 1:
        yield f"each line covers {every} steps, so what a single step took does not show. To see each: {wanted.each_step}"
    if clock == "differences":
        yield "seconds lie between the log's own time stamps: what happens between steps, such as a checkpoint, counts"
    if clock == "arrival":
        yield "seconds lie between the arrivals of the log's lines: what happens between steps, such as a checkpoint, counts"
    if sparse:
        yield f"most lines have no {', '.join(sparse)}: passed over"
