"""Train layouts and what one rank makes of the same rows, and tell how far they differ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ranks import ROOT, environment, steps, summary

MANY = Path(__file__).with_name("many.py")


@dataclass(frozen=True)
class Job:
    """A configuration and its output."""

    name: str
    ranks: int
    words: tuple[str, ...]
    chain: str = ""
    """Jobs of one name are trained one after the other."""


def train_all(
    jobs: Sequence[Job], folder: Path, timeout: float, stall: float = 1200, script: Path = MANY, workers: int = 1
) -> dict[str, str | None]:
    """Train every job into `folder`/name, in `timeout` seconds, and at most `stall` for one; for each what went wrong, or None.

    With several `workers`, on GPUs, jobs of one rank are trained side by side.
    """
    listed = folder / "jobs.json"
    listed.write_text(json.dumps([{"ranks": j.ranks, "words": [*j.words, f"output={folder / j.name}"], "chain": j.chain} for j in jobs]))
    # What kernels were found the fastest serves the processes that come after, too.
    env = environment(PYTORCH_NVML_BASED_CUDA_CHECK="1", TRITON_CACHE_AUTOTUNING="1")
    command = [sys.executable, str(script), str(listed), str(stall), str(workers)]
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True) as process:
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            pass  # what was trained by then counts
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    errors: dict[str, str] = {}
    for said in folder.glob("jobs.*.errors"):
        errors |= json.loads(said.read_text())
    missing = [None if (folder / job.name / "summary.json").is_file() else "was not reached" for job in jobs]
    return {job.name: errors.get(str(i), missing[i]) for i, job in enumerate(jobs)}


Runs = tuple[Path, dict[str, str | None]]
"""The folder of all runs, and by name what went wrong."""


def good(runs: Runs, name: str) -> Path:
    """The folder of a run that came to a good end."""
    root, errors = runs
    assert errors[name] is None, errors[name]
    return root / name


def difference(folder: Path, reference: Path) -> dict[str, float]:
    """The largest relative differences of loss and gradient norm over all steps, and the number of steps."""
    assert summary(folder)["outcome"] == "ok"
    rows, expected = steps(folder), steps(reference)
    assert len(rows) == len(expected), f"{len(rows)} steps, expected {len(expected)}"
    for counted in ("useful_tokens", "raw_tokens", "images"):
        assert [r[counted] for r in rows] == [r[counted] for r in expected], counted
    far = {key: max(abs(a[key] / b[key] - 1) for a, b in zip(rows, expected, strict=True)) for key in ("loss", "grad_norm")}
    return {**far, "steps": len(rows)}


def assert_near(folder: Path, reference: Path, loss: float = 1e-5, grad_norm: float = 1e-4) -> dict[str, float]:
    """Losses and gradient norms are those of the reference to these shares, by default of the size of float32's rounding; how far they are is printed."""
    far = difference(folder, reference)
    print(f"{folder.name} against {reference.name}: loss {far['loss']:.1e}, gradient norm {far['grad_norm']:.1e}")
    assert far["loss"] < loss, (folder.name, far)
    assert far["grad_norm"] < grad_norm, (folder.name, far)
    return far


def note(rows: Iterable[dict[str, Any]], backend: str) -> None:
    """Add rows to the parity tables, where PLAYBOOK_PARITY names their folder (`make parity`)."""
    if folder := os.environ.get("PLAYBOOK_PARITY"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "layouts.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(row | {"torch": version("torch").split("+")[0], "backend": backend}) + "\n" for row in rows)
