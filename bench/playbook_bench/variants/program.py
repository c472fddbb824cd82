"""Launching a command, and writing the files of a run from its log: those of our trainer, as `docs/trainer-files.md` describes them.

The command is started without a shell and leads a session of its own, like a rank of ours; it ends with the harness, and whatever it started ends
with it, in sessions of their own too: the harness adopts them. What it prints is kept up to a limit. Its exit code alone says nothing: steps that its log does not tell, or tells twice, or as NaN, make the launch a crash.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playbook.errors import LaunchError, LogError, PlaybookError
from playbook.processes import adopting
from playbook.records.commands import Steps
from playbook_bench import logs
from playbook_bench.launch.local import GRACE_S, Rank, end, held, started
from playbook_bench.launch.outcome import Result, out_of_memory, tail
from playbook_bench.logs import StepLog
from playbook_bench.variants import clocks, interpreter, proof

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
    told: Steps
    tokens: int | None = None
    """Of a step of the whole job; None where its log is to tell them."""
    longer: bool = False
    patterns: Sequence[str] = ()
    trace: Path | None = None

    @property
    def steps_file(self) -> Path | None:
        """The file that tells the steps, as seen from where the command runs; None where it prints them."""
        return self.cwd / self.told.file if self.told.file else None


def start(program: Program, folder: Path, on_step: Callable[[int], None] | None = None) -> Result:
    """Run it to its end. `on_step` hears how many lines it has printed.

    Raises:
        LaunchError: it cannot be started, or the run's folder cannot be written.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **program.environment}
    printed = _Printed(folder / "rank0.log")
    left = {path: _state(path) for path in _left(program)}
    began, clock = time.time(), time.monotonic()
    stopped, process = "", None
    kill_orphans = adopting()
    try:
        # SIGTERM is what torchrun hands on to its ranks.
        process = started(0, program.words, printed.path, printed.pipe, environment, program.cwd, signal.SIGTERM)
        printed.start()
        stopped = _wait(process, printed, program.timeout_s, on_step)
    finally:
        with held() as came:
            end([process] if process else [], GRACE_S, came)
            kill_orphans()
        printed.finish()
    wall = time.monotonic() - clock
    if stopped:
        return Result("hang", None, f"{stopped}\n{tail(printed.path)}", began, wall)
    if process.own:
        return _failed(process.own, printed.path, began, wall)
    try:
        for path, before in left.items():
            if before and _state(path) == before:
                raise LogError(
                    f"{path} is as it was before the launch, which has not written it; name it below {{run}}, a new folder of each launch"
                )
        _write(program, folder, printed, environment, wall)
    except PlaybookError as e:
        return Result("crash", 0, str(e), began, wall)
    return Result("ok", 0, "", began, wall)


class _Printed:
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


def _wait(process: Rank, printed: _Printed, timeout_s: float, on_step: Callable[[int], None] | None) -> str:
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


def _write(program: Program, folder: Path, printed: _Printed, environment: Mapping[str, str], wall: float) -> None:
    """The run's metrics.jsonl and summary.json.

    Raises:
        PlaybookError: the log does not tell the steps that it must, or a trace cannot be read.
    """
    found = _with_tokens(_read_steps(program.told, program.steps_file, printed), program.tokens)
    rows = _rows(found, program.told, program.longer)
    first = next(i for i, row in enumerate(rows) if row["timed"])
    warm_up, timed = (math.fsum(r["seconds"] for r in rows if r["timed"] is which) for which in (False, True))
    receipt = {"logs": _count(printed.path, program.patterns)}
    if program.trace is not None:
        receipt |= proof.seen(program.trace)
    strict = {
        **interpreter.seen_by(program.words, program.cwd, environment),
        "log": found.adapter,
        "log_clock": found.clock,
        "log_every": found.every,
        "not_told": sorted({"tokens", "loss"} & set(found.unknown)),
        "world_size": program.ranks,
    }
    summary = {
        "outcome": "ok",
        "seconds": {"start_up": max(0.0, wall - found.every * (warm_up + timed)), "warm_up": warm_up, "timed": timed, "total": wall},
        "env": {"strict": strict},
        "source_sha": program.source,
        "world_size": program.ranks,
        "receipt": receipt,
        "metrics": clocks.figures(found, first, wall),
    }
    try:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    except OSError as e:
        raise LaunchError(f"the run folder {folder} cannot be written: {e.strerror or e}; choose another with --results") from e


def _left(program: Program) -> list[Path]:
    """The files that a launch is to leave."""
    return [path for path in (program.steps_file, program.trace) if path is not None]


def _state(path: Path) -> dict[Path, tuple[int, int]]:
    """When the file, or each of a folder's, was changed, and its size; empty where there is none."""
    found = {}
    for each in path.iterdir() if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            stat = each.stat()
            found[each] = (stat.st_mtime_ns, stat.st_size)
    return found


def _read_steps(told: Steps, file: Path | None, printed: _Printed) -> StepLog:
    """The steps that a launch told, all that were declared.

    Raises:
        LogError: there are others, or they cannot be read.
    """
    if file is not None:
        found = logs.read(file, told.log, steps=told.count)
    else:
        found = logs.read(printed.path, told.log, steps=told.count, arrivals=printed.arrivals)
    if len(found.steps) <= told.first_timed(len(found.steps), found.every):
        raise LogError(f"its log has {len(found.steps)} lines of steps, of which none is left after the warm-up; run more steps")
    return found


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


def _rows(found: StepLog, told: Steps, longer: bool) -> list[dict[str, Any]]:
    first = told.first_timed(len(found.steps), found.every, longer)
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
        for i, step in enumerate(found.steps)
    ]


def _count(log: Path, patterns: Sequence[str]) -> dict[str, int]:
    """How many of the printed lines hold each pattern."""
    if not patterns:
        return {}
    each = {pattern: re.compile(pattern) for pattern in patterns}
    found: Counter[str] = Counter(dict.fromkeys(patterns, 0))
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found.update(pattern for pattern, compiled in each.items() if compiled.search(line[:_LONG_LINE]))
    return dict(found)
