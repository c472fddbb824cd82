"""One more launch of each of two commands, with a trace: the wall that each runs into. Launches that are timed are never traced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from playbook.errors import ConfigError, LaunchError
from playbook.records.case import Case
from playbook.records.commands import Traced, fill
from playbook.records.evidence import Variant
from playbook_bench.launch.local import LocalLauncher, interruptible
from playbook_bench.trace.reports import timeline_from_file
from playbook_bench.trace.walls import Tail, Walls, walls
from playbook_bench.variants.command import Command
from playbook_bench.variants.resolve import resolve_all

NSYS = "nsys"
_PROFILED = (NSYS, "profile", "-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx", "-o", "{run}/trace")
_REPORT = "{run}/trace.nsys-rep"


@dataclass(frozen=True)
class Asked:
    """How the commands leave a trace: `nsys` profiles them, or they write `file` themselves when `words` are added."""

    file: str
    words: Sequence[str] = ()


def both(case: Case, profile: str, asked: Asked) -> dict[Variant, Walls]:
    """The walls of each variant of a case that launches a command.

    Raises:
        ConfigError: nsys is to profile and is not on PATH.
        LaunchError: a launch failed.
        PlaybookError: it left no trace, or one that cannot be read.
    """
    by_nsys = asked.file == NSYS
    if by_nsys and not shutil.which(NSYS):
        raise ConfigError(
            "--trace nsys: nsys is not on PATH; install it, or let the command write a trace of torch.profiler: --trace '{run}/trace.json' --trace-with --profile"
        )
    traced = case if by_nsys else case.model_copy(update={"trace": Traced(file=asked.file, arguments=list(asked.words))})
    found: dict[Variant, Walls] = {}
    with interruptible(), TemporaryDirectory(prefix="playbook-trace-") as name:
        for variant, run in resolve_all(traced, profile).items():
            assert isinstance(run, Command)
            folder = Path(name) / variant
            folder.mkdir()
            if by_nsys:
                run = replace(run, words=(*_PROFILED, *run.words))
            ended = run.ready(Path(name) / "cache", proves=True).launch(LocalLauncher(), folder, {}, case.budget.launch_timeout_s)
            if ended.outcome != "ok":
                raise LaunchError(f"the traced launch of the {variant} failed: {ended.message}")
            report = run.here / fill(_REPORT if by_nsys else asked.file, {"run": str(folder)})
            found[variant] = walls(timeline_from_file(report), _timed(folder))
    return found


def _timed(folder: Path) -> Tail:
    """The timed steps at the end of a run, from its own figures."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    strict = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["env"]["strict"]
    timed = [row["seconds"] for row in rows if row["timed"]]
    return Tail(strict["log_every"] * len(timed), strict["log_every"] * sum(timed))
