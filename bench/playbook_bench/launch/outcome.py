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

from playbook.records import confidential
from playbook.records.evidence import RunOutcome
from playbook_trainer import exit_codes

_TAIL_BYTES = 4000
_EXCEPTION = re.compile(r"(\[rank\d+\]: )?(error: \S|[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout)\b(:|$))")
_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "DefaultCPUAllocator: can't allocate memory")
_EXIT_OUTCOMES: Mapping[int, RunOutcome] = {
    exit_codes.REFUSED: "refused",
    exit_codes.NAN: "nan",
    exit_codes.OUT_OF_MEMORY: "oom",
    exit_codes.STOPPED: "killed",
    exit_codes.HANG: "hang",
}
_WORST_FIRST: tuple[RunOutcome, ...] = ("oom", "nan", "refused", "killed", "hang", "crash")

Launched = Literal["", "fork", "mixed"]
"""How the ranks of a run were really started: each as a fresh process, each as a fork, or some of either."""


@dataclass(frozen=True)
class Result:
    """How a launch ended. The files that it wrote are in its folder."""

    outcome: RunOutcome
    returncode: int | None
    message: str
    started: float
    wall_s: float
    launched: Launched = ""


@dataclass(frozen=True)
class Ended:
    """A rank that has ended. `own` is the code with which it ended by itself (negative: by that signal), None where it was ended."""

    index: int
    own: int | None
    log: Path


def judge(ranks: Sequence[Ended], folder: Path, started: float, wall: float) -> Result:
    """The outcome, from the ranks that ended by themselves; those that the launcher ended say nothing."""
    judged = [(_outcome(r.own, tail(r.log)), r, r.own) for r in ranks if r.own]
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
    found = [line.strip() for line in log.splitlines() if _EXCEPTION.match(line)]
    return f": {found[-1][:300]}" if found else ""


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
    """The end of a log, without what looks like a secret and with `~` for the home folder: it goes into records and messages."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = confidential.hidden(f.read().decode("utf-8", "replace").strip())
    except OSError:
        return ""
    home = os.environ.get("HOME", "").rstrip("/")
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=[/\s\"':,)]|$)", "~", text) if home else text
