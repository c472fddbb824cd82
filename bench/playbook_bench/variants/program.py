"""Launches a command, and writes the files of a run from its log and its trace: those of our trainer, as `docs/trainer-files.md` describes
them.

The command is started without a shell and leads a session of its own, like a rank of ours; it ends with the harness, and whatever it
started ends with it, in sessions of their own too: the harness adopts them. What it prints is kept up to a limit. Its exit code alone says
nothing: steps that its log does not tell, or tells twice, or as NaN, make the launch a crash.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from playbook.errors import LaunchError, LogError, PlaybookError
from playbook.processes import adopting
from playbook.records.commands import Steps
from playbook_bench import logs
from playbook_bench.launch.local import GRACE_S, Rank, deferred_signals, started, terminate_ranks
from playbook_bench.launch.outcome import Result, out_of_memory, tail
from playbook_bench.logs import StepLog
from playbook_bench.logs.checks import in_bursts
from playbook_bench.machine.detect import PACKAGES
from playbook_bench.metrics import OUTSIDE, WALL_STEP
from playbook_bench.trace import kineto, nsys

_COLLECTIVES = {
    "all_gather": "all_?gather",
    "reduce_scatter": "reduce_?scatter",
    "all_reduce": "all_?reduce",
    "all_to_all": "all_?to_?all",
    "send": "send_?recv|send",
    "recv": "recv",
    "broadcast": "broadcast",
}
"""By name, what the names of kernels and operators hold."""


def trace_counts(trace: Path) -> dict[str, Any]:
    """The numbers of kernels, ranges and collectives in a trace, as a receipt has them.

    Raises:
        PlaybookError: there is none, or it is of neither tool, or damaged.
    """
    try:
        with trace.open("rb") as f:
            head = f.read(len(nsys.SQLITE_MAGIC))
    except OSError as e:
        raise PlaybookError(f"it left no trace {trace.name} ({e.strerror or e}); name the file that it writes in trace.file") from e
    timeline = nsys.read(trace, ranges=False) if head == nsys.SQLITE_MAGIC else kineto.read(trace)
    ran = [*timeline.ops, *timeline.unlaunched]
    sent = Counter(op for o in ran if o.kind == "communication" and (op := _collective(o.name)))
    return {
        "ranges": dict(Counter(span.name for span in timeline.spans)),
        "collectives": [{"op": op, "count": count} for op, count in sent.items()],
        "kernels": dict(Counter(o.name for o in ran)),
    }


def keep_trace(trace: Path, folder: Path, run: str) -> None:
    """A copy of a launch's trace that stays beside the records, by the run's id; JSON is packed.

    Raises:
        LaunchError: it cannot be written.
    """
    packs = trace.suffix == ".json"
    copy = folder / f"{run}-{trace.name}{'.gz' if packs else ''}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with trace.open("rb") as source, gzip.open(copy, "wb", 5) if packs else copy.open("wb") as target:
            shutil.copyfileobj(source, target)
    except OSError as e:
        raise LaunchError(f"the trace {copy} cannot be kept: {e.strerror or e}; choose another folder with --results") from e


def _collective(name: str) -> str | None:
    return next((op for op, pattern in _COLLECTIVES.items() if re.search(pattern, name, re.IGNORECASE)), None)


_POLL_S = 0.25
_DRAIN_S = 10.0
_MOST_BYTES = 256 << 20
"""Of what a command prints; more ends it."""
_LONG_LINE = 10_000
"""Characters of a line in which patterns are looked for."""


@dataclass(frozen=True)
class Program:
    """What to start, and how to read what it leaves."""

    words: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    source: str | None
    """Of its files: the commit with what is changed, or the hash of their tree."""
    ranks: int
    timeout_s: float
    step_settings: Steps
    tokens: int | None = None
    """Of a step of the whole job; None where its log is to tell them."""
    longer: bool = False
    patterns: Sequence[str] = ()
    trace: Path | None = None

    @property
    def steps_file(self) -> Path | None:
        """The file that tells the steps, as seen from where the command runs; None where it prints them."""
        return self.cwd / self.step_settings.file if self.step_settings.file else None


def start(program: Program, folder: Path, on_step: Callable[[int], None] | None = None) -> Result:
    """Run it to its end. `on_step` hears how many lines it has printed.

    Raises:
        LaunchError: it cannot be started, or the run's folder cannot be written.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **program.environment}
    printed = _PrintedOutput(folder / "rank0.log")
    states = {path: _state(path) for path in (program.steps_file, program.trace) if path is not None}
    began, clock = time.time(), time.monotonic()
    stopped, process = "", None
    kill_orphans = adopting()
    try:
        # SIGTERM is what torchrun hands on to its ranks.
        process = started(0, program.words, printed.path, printed.pipe, environment, program.cwd, signal.SIGTERM)
        printed.start()
        stopped = _wait(process, printed, program.timeout_s, on_step)
    finally:
        with deferred_signals() as arrived_signals:
            terminate_ranks([process] if process else [], GRACE_S, arrived_signals)
            kill_orphans()
        printed.finish()
    wall = time.monotonic() - clock
    if stopped:
        return Result("hang", None, f"{stopped}\n{tail(printed.path)}", began, wall)
    if process.exit_code:
        return _failed(process.exit_code, printed.path, began, wall)
    try:
        for path, before in states.items():
            if before and _state(path) == before:
                raise LogError(
                    f"{path} is as it was before the launch, which has not written it; name it below {{run}}, a new folder of each launch"
                )
        _write(program, folder, printed, environment, wall)
    except PlaybookError as e:
        return Result("crash", 0, str(e), began, wall)
    return Result("ok", 0, "", began, wall)


class _PrintedOutput:
    """What a process prints: kept up to a limit, with the moment at which each line came."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrivals: list[float] = []
        self.size = 0
        self._read, self.pipe = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Begin to read; the writing end is the process's alone from now on."""
        os.close(self.pipe)
        self.pipe = -1
        self._thread.start()

    def finish(self) -> None:
        """Read the rest, once the process and all of its own have ended."""
        if self.pipe >= 0:
            os.close(self.pipe)
            os.close(self._read)
            return
        self._thread.join(_DRAIN_S)

    @property
    def too_much(self) -> bool:
        """Whether it printed more than is kept."""
        return self.size > _MOST_BYTES

    def _copy(self) -> None:
        with os.fdopen(self._read, "rb") as lines, self.path.open("wb") as log:
            for line in lines:
                self.arrivals.append(time.monotonic())
                self.size += len(line)
                if not self.too_much:
                    log.write(line)
                    log.flush()


def _wait(process: Rank, printed: _PrintedOutput, timeout_s: float, on_step: Callable[[int], None] | None) -> str:
    """Until it has ended; why it must be ended, or nothing."""
    deadline = time.monotonic() + timeout_s
    while process.process.poll() is None:
        if process.pidfd is not None:
            select.select([process.pidfd], [], [], _POLL_S)
        else:
            time.sleep(_POLL_S)
        if on_step is not None:
            on_step(len(printed.arrivals))
        if printed.too_much:
            return f"printed more than {_MOST_BYTES >> 20} MiB; let it print less, or name a file for its steps"
        if time.monotonic() > deadline:
            return f"did not end within {timeout_s:g} s"
    return ""


def _failed(code: int, log: Path, began: float, wall: float) -> Result:
    text = tail(log)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    outcome = "oom" if out_of_memory(text) else "killed" if code < 0 else "crash"
    return Result(outcome, code, f"it ended with {how}: {last[:300]}\n{text}", began, wall)  # type: ignore[arg-type]


def _write(program: Program, folder: Path, printed: _PrintedOutput, environment: Mapping[str, str], wall: float) -> None:
    """The run's metrics.jsonl and summary.json.

    Raises:
        PlaybookError: the log does not tell the steps that it must, or a trace cannot be read.
    """
    log = _with_tokens(_read_steps(program.step_settings, program.steps_file, printed), program.tokens)
    rows = _rows(log, program.step_settings, program.longer)
    first = next(i for i, row in enumerate(rows) if row["timed"])
    warm_up, timed = (math.fsum(r["seconds"] for r in rows if r["timed"] is which) for which in (False, True))
    receipt = {"logs": _count(printed.path, program.patterns)}
    if program.trace is not None:
        receipt |= trace_counts(program.trace)
    strict = {
        **_interpreter_of(program.words, program.cwd, environment),
        "log": log.adapter,
        "log_clock": log.clock,
        "log_every": log.every,
        "not_told": sorted({"tokens", "loss"} & set(log.unknown)),
        "world_size": program.ranks,
    }
    summary = {
        "outcome": "ok",
        "seconds": {"start_up": max(0.0, wall - log.every * (warm_up + timed)), "warm_up": warm_up, "timed": timed, "total": wall},
        "env": {"strict": strict},
        "source_sha": program.source,
        "world_size": program.ranks,
        "receipt": receipt,
        "metrics": figures(log, first, wall),
    }
    try:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    except OSError as e:
        raise LaunchError(f"the run folder {folder} cannot be written: {e.strerror or e}; choose another with --results") from e


def _state(path: Path) -> dict[Path, tuple[int, int]]:
    """When the file, or each of a folder's, was changed, and its size; empty where there is none."""
    states = {}
    for each in path.iterdir() if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            stat = each.stat()
            states[each] = (stat.st_mtime_ns, stat.st_size)
    return states


def _read_steps(step_settings: Steps, file: Path | None, printed: _PrintedOutput) -> StepLog:
    """The steps that a launch told, all that were declared.

    Raises:
        LogError: there are others, or they cannot be read.
    """
    if file is not None:
        log = logs.read(file, step_settings.log, steps=step_settings.count)
    else:
        log = logs.read(printed.path, step_settings.log, steps=step_settings.count, arrivals=printed.arrivals)
    if len(log.steps) <= step_settings.first_timed(len(log.steps), log.every):
        raise LogError(f"its log has {len(log.steps)} lines of steps, of which none is left after the warm-up; run more steps")
    return log


def _with_tokens(log: StepLog, tokens: int | None) -> StepLog:
    """The log with tokens that its command is known to take.

    Raises:
        LogError: it tells them itself.
    """
    if tokens is None:
        return log
    if "tokens" not in log.unknown:
        raise LogError(
            f"its log tells the tokens of a step itself; leave out the {tokens} that are named beside it (--tokens, step_tokens)"
        )
    steps = tuple(replace(step, tokens=float(tokens)) for step in log.steps)
    return replace(log, steps=steps, unknown=tuple(name for name in log.unknown if name != "tokens"))


def _rows(log: StepLog, step_settings: Steps, longer: bool) -> list[dict[str, Any]]:
    """The steps of a log as lines of metrics.jsonl; those after the warm-up, which is longer if `longer`, are timed."""
    first = step_settings.first_timed(len(log.steps), log.every, longer)
    return [
        {
            "step": step.step,
            "timed": i >= first,
            "seconds": step.seconds,
            "useful_tokens": round(step.tokens or 0),
            "raw_tokens": round(step.tokens or 0),
            "loss": step.loss,
            "nan": bool(step.skipped),
            "grad_norm": step.grad_norm,
            "peak_memory_bytes": round(step.memory_bytes or 0),
        }
        for i, step in enumerate(log.steps)
    ]


def _count(log: Path, patterns: Sequence[str]) -> dict[str, int]:
    """How many of the printed lines hold each pattern."""
    if not patterns:
        return {}
    each = {pattern: re.compile(pattern) for pattern in patterns}
    counts: Counter[str] = Counter(dict.fromkeys(patterns, 0))
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            counts.update(pattern for pattern, compiled in each.items() if compiled.search(line[:_LONG_LINE]))
    return dict(counts)


# The clock of a command's log, held against two that the command does not write: the arrival of its lines, and the launch's wall time.

_SLACK = 0.01
"""Share of the wall time by which steps may exceed it: two clocks of one machine drift by far less."""
_THOUSANDTH = (1 / 2000, 1 / 500)
_BIAS = 0.01
"""The largest error of a mean, as a share, that the rounding of a log may cause."""
_ON_GRID = 1e-3
_TWO_VALUES = 0.9
"""Where two values make up this share of the steps, they vary by less than the rounding, which then does not average out.
Source: B. Widrow, I. Kollar, Quantization Noise, 2008: the bias falls with exp(-2 pi^2 (deviation / unit)^2), to 0.04 of half a unit at 0.4
units."""


def figures(log: StepLog, first: int, wall_s: float) -> dict[str, float]:
    """What the other clocks say of a launch, by name: seconds of a timed step between arrivals of lines, where lines were printed one by
    one, and seconds outside of all steps.

    `first` is the index of the first timed line, `wall_s` the seconds of the whole launch.

    Raises:
        LogError: the steps of the log take longer than the launch, are in another unit, or are rounded too coarsely to be compared.
    """
    _check_rounding(log, first)
    inside = logged(log)
    if inside > (1 + _SLACK) * wall_s:
        raise LogError(
            f"its steps take {inside:.4g} s by its log, and the whole launch took {wall_s:.3g} s. "
            "Log seconds, or name the figure after its unit, such as ms for milliseconds"
        )
    clocks = {OUTSIDE: wall_s - inside}
    lines = log.steps[max(0, first - 1) :]
    moments = [step.arrived for step in lines if step.arrived is not None]
    if len(moments) < len(lines) or len(moments) < 2 or in_bursts(moments):
        return clocks
    clocks[WALL_STEP] = (moments[-1] - moments[0]) / (log.every * (len(moments) - 1))
    share = statistics.fmean(step.seconds for step in lines[1:]) / clocks[WALL_STEP]
    if _THOUSANDTH[0] < share < _THOUSANDTH[1]:
        raise LogError(
            f"its steps take {share * clocks[WALL_STEP]:.3g} s by its log, and its lines arrive {clocks[WALL_STEP]:.3g} s apart, a "
            "thousand times as much; "
            "expected as much. Log seconds, or name the figure after its unit, such as ms for milliseconds"
        )
    return clocks


def logged(log: StepLog) -> float:
    """Seconds of all steps of a log, at least: its first line may be of one step alone."""
    return log.steps[0].seconds + math.fsum((b.step - a.step) * b.seconds for a, b in itertools.pairwise(log.steps))


def _check_rounding(log: StepLog, first: int) -> None:
    """Raise where the rounding of the log may move the mean of its timed steps by more than is let pass."""
    seconds = [step.seconds for step in log.steps[first:]]
    if log.clock == "arrival":
        return
    mean = statistics.fmean(seconds)
    # Differences of time stamps add up to the last less the first, so that one rounding is spread over all steps.
    steps = log.every * len(seconds) if log.clock == "differences" else 1
    unit = 10.0 ** math.ceil(math.log10(2 * _BIAS * mean * steps))
    per_line = log.every if log.clock == "differences" else 1
    if not _on_grid([per_line * s for s in seconds], unit):
        return
    if log.clock == "logged" and sum(n for _, n in Counter(seconds).most_common(2)) < _TWO_VALUES * len(seconds):
        return
    while _on_grid([per_line * s for s in seconds], 10 * unit):
        unit *= 10
    raise LogError(
        f"its log rounds seconds to {unit:g} s, and a step takes {mean:.3g} s: too coarse to compare; log more digits, or milliseconds"
    )


def _on_grid(values: Sequence[float], unit: float) -> bool:
    return all(abs(v / unit - round(v / unit)) < _ON_GRID for v in values)


# Which Python a command runs on, and the packages that move its step time there.

_MORE = (
    "transformers",
    "accelerate",
    "datasets",
    "lightning",
    "pytorch-lightning",
    "torchtitan",
    "deepspeed",
    "megatron-bridge",
    "liger-kernel",
)
_PYTHON = re.compile(r"python[0-9.]*\Z")
_ASK = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
found = {name: v for name in sys.argv[1:] if (v := version(name))}
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "packages": found}))
"""
_TIMEOUT_S = 60


def _interpreter_of(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The interpreter's version and packages, as far as the command is a Python or a script of one; else empty packages."""
    program = str(cwd / words[0]) if "/" in words[0] else words[0]
    python = _python(program, environment.get("PATH"))
    return dict(_ask(python, environment.get("PYTHONPATH", ""))) if python else {"packages": {}}


def _python(word: str, path: str | None) -> str | None:
    """The Python that a word stands for: itself, or the one in the first line of a script."""
    executable = shutil.which(word, path=path)
    if executable is None or _PYTHON.match(Path(executable).name):
        return executable
    try:
        with Path(executable).open("rb") as f:
            first = f.readline(300).decode("utf-8", "replace")
    except OSError:
        return None
    named = first.removeprefix("#!").split()[-1] if first.startswith("#!") and first.split() else ""
    return shutil.which(named, path=path) if _PYTHON.match(Path(named).name) else None


@cache
def _ask(python: str, import_path: str) -> dict[str, Any]:
    """What one interpreter says; asked once, since it does not change within a command."""
    words = [python, "-c", _ASK, *PACKAGES, *_MORE]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env={**os.environ, "PYTHONPATH": import_path}
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {"packages": {}}
    return answer
