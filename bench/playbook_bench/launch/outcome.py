"""How a launch ended, from the codes of its ranks, their logs and the summary that rank 0 wrote."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from playbook.records import commands
from playbook.records.evidence import Fingerprint, Observed, RunOutcome, Sample, Seconds
from playbook.records.machine import TIMED_STEPS
from playbook_trainer import exit_codes

_TAIL_BYTES = 4000
_EXCEPTION = re.compile(r"(\[rank\d+\]: )?(error: \S|[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout)\b(:|$))")
_PACKAGES = re.compile(r"(?<![^\s\"':,(])/[^\s\"':,(]*/(?=(site|dist)-packages/)")
"""Where a machine keeps its packages says nothing to others who read a record."""
_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "DefaultCPUAllocator: can't allocate memory")
_EXIT_OUTCOMES: Mapping[int, RunOutcome] = {
    exit_codes.REFUSED: "refused",
    exit_codes.NAN: "nan",
    exit_codes.OUT_OF_MEMORY: "oom",
    exit_codes.STOPPED: "killed",
    exit_codes.HANG: "hang",
}
_WORST_FIRST: tuple[RunOutcome, ...] = ("oom", "nan", "refused", "killed", "hang", "crash")


@dataclass(frozen=True)
class Result:
    """How a launch ended. The files that it wrote are in its folder."""

    outcome: RunOutcome
    returncode: int | None
    message: str
    started: float
    wall_s: float
    launched: Literal["", "fork", "mixed"] = ""
    """How the ranks were really started: each as a fresh process, each as a fork, or some of either."""


@dataclass(frozen=True)
class Ended:
    """A rank that has ended. `exit_code` is that with which it ended by itself (negative: by that signal), None where it was ended."""

    index: int
    exit_code: int | None
    log: Path


def judge(ranks: Sequence[Ended], folder: Path, started: float, wall: float) -> Result:
    """The outcome, from the ranks that ended by themselves; those that the launcher ended say nothing."""
    judged = [(_outcome(r.exit_code, tail(r.log)), r, r.exit_code) for r in ranks if r.exit_code]
    if judged:
        outcome, rank, code = min(judged, key=lambda j: _WORST_FIRST.index(j[0]))
        end = tail(rank.log)
        return Result(outcome, code, f"rank {rank.index} ended with {_how(code)}{_cause(end)}\n{end}", started, wall)
    summary = read_summary(folder)
    if summary is None:
        return Result("crash", 0, f"every rank ended well but wrote no readable summary.json\n{tail(ranks[0].log)}", started, wall)
    if summary.get("outcome") != "ok":
        return Result("nan", 0, f"the summary says '{summary.get('outcome')}'", started, wall)
    return Result("ok", 0, "", started, wall)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    return f"{name} (most often the host was out of memory: see `dmesg`)" if -code == signal.SIGKILL else name


def _cause(log: str) -> str:
    """The last line of a log that names an exception, as Python prints it."""
    lines = [line.strip() for line in log.splitlines() if _EXCEPTION.match(line)]
    return f": {lines[-1][:300]}" if lines else ""


def _outcome(code: int, log: str) -> RunOutcome:
    if code < 0:
        return "killed"
    if code == 1 and out_of_memory(log):
        return "oom"
    return _EXIT_OUTCOMES.get(code, "crash")


def out_of_memory(log: str) -> bool:
    """Whether the end of a log says that memory ran out."""
    return any(text in log for text in _MEMORY)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run, or None where it is missing or no JSON object."""
    try:
        data = json.loads((folder / "summary.json").read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def tail(log: Path) -> str:
    """The end of a log, without what looks like a secret, with `~` for the home folder and with packages by their names alone.

    It goes into records and messages, which others read.
    """
    try:
        with log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = commands.hidden(f.read().decode("utf-8", "replace").strip())
    except OSError:
        return ""
    text = _PACKAGES.sub("", text)
    home = os.environ.get("HOME", "").rstrip("/")
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=[/\s\"':,)]|$)", "~", text) if home else text


# What a launch left in its folder: steps, summary and receipt, as a record holds them, and when its timed steps were.

MAX_LINES = 100_000
"""The most lines of metrics.jsonl that are read."""


def window(result: Result, folder: Path) -> tuple[str, float, float]:
    """When a launch was in its timed steps, in seconds since the epoch; all of it, where its summary does not tell.

    Counted from when the summary was written, for a launch may begin long before its ranks: the first to be forked waits for imports.
    """
    seconds = _mapping((read_summary(folder) or {}).get("seconds"))
    phases = [seconds.get(k) for k in ("total", "start_up", "warm_up", "timed")]
    numbers = [float(v) for v in phases if isinstance(v, int | float)]
    if len(numbers) < len(phases) or not numbers[-1] > 0:
        return "launch", result.started, result.started + result.wall_s
    total, start_up, warm_up, timed = numbers
    written = min((folder / "summary.json").stat().st_mtime, result.started + result.wall_s)
    begin = max(result.started, written - total) + start_up + warm_up
    return TIMED_STEPS, begin, begin + timed


@dataclass(frozen=True)
class RunFiles:
    """What a run left in its folder."""

    fields: dict[str, Any]
    fingerprint: Fingerprint


def read_run(folder: Path) -> RunFiles:
    """Samples, summary and receipt of a run, as far as the run got.

    Raises:
        ValueError: a file does not hold what `docs/trainer-files.md` says.
    """
    samples = _samples(folder / "metrics.jsonl")
    summary = read_summary(folder)
    if summary is None:
        return RunFiles({"samples": samples}, Fingerprint())
    env = _mapping(summary.get("env"))
    strict = {
        **_mapping(env.get("strict")),
        "source_sha": summary.get("source_sha"),
        "performance_revision": summary.get("performance_revision"),
        "world_size": summary.get("world_size"),
    }
    receipt = _mapping(summary.get("receipt"))
    fields = {
        "samples": samples,
        "data_sha": summary.get("data_sha"),
        "performance_revision": summary.get("performance_revision"),
        "revisions": {k: v for k, v in _mapping(summary.get("revisions")).items() if isinstance(v, int)},
        "parameters_of": "model" if summary.get("parameters_of") == "model" else "rank",
        "num_parameters": summary.get("num_parameters"),
        "trained_parameters": summary.get("trained_parameters"),
        "seconds": Seconds(**{k: float(v) for k, v in _mapping(summary.get("seconds")).items() if k in Seconds.model_fields}),
        "metrics": {k: float(v) for k, v in _mapping(summary.get("metrics")).items() if isinstance(v, int | float)},
        "observed": _observed(receipt),
    }
    return RunFiles(fields, Fingerprint(strict=strict, context=_mapping(env.get("context"))))


def _samples(path: Path) -> list[Sample]:
    """The steps in metrics.jsonl; none without the file. A last line that is cut does not count.

    Raises:
        ValueError: another line is no step, or there are more than `MAX_LINES`.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) > MAX_LINES:
        raise ValueError(f"metrics.jsonl has {len(lines)} lines; at most {MAX_LINES} are read")
    out = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            out.append(Sample(**{k: v for k, v in _mapping(row).items() if k in Sample.model_fields}))
        except (ValueError, ValidationError) as e:
            if number == len(lines):
                break  # a run that was ended may leave half a line
            raise ValueError(f"metrics.jsonl line {number}: {str(e).splitlines()[0]}") from e
    return out


def _observed(receipt: Mapping[str, Any]) -> Observed | None:
    if not any(receipt.get(key) for key in ("numbers", "ranges", "collectives", "logs")):
        return None
    try:
        return Observed.model_validate({k: v for k, v in receipt.items() if k in Observed.model_fields})
    except ValidationError as e:
        raise ValueError(f"summary.json, receipt: {e.errors(include_url=False)[0]['loc']}: {e.errors(include_url=False)[0]['msg']}") from e


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
