"""Exports read back by megatron-core's own code, many in one process."""

from __future__ import annotations

import ast
import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from playbook.paths import repo_root
from playbook.planner.plan import Plan
from playbook_trainer.export.launch import Launchable

FOLDER = repo_root() / ".venv" / "targets" / "megatron-core"
"""The unpacked wheel, which `make targets` fetches."""
_WORKER = Path(__file__).with_name("megatron_worker.py")
Export = tuple[Plan, str, Launchable]
"""A plan, the kind of GPU that it is for, and its export."""


def read_back(exports: Sequence[Export]) -> list[dict[str, Any]]:
    """What Megatron-LM's parser, its `TransformerConfig` and its layer counts make of each command line; `error` where they refuse it."""
    return answers([{**setting(export), "argv": words(export[2])} for export in exports])


def setting(export: Export) -> dict[str, Any]:
    """What surrounds an export."""
    plan, hardware, found = export
    return {"world": plan.gpus, "blackwell": hardware.startswith(("b", "gb")), "environment": dict(found.environment)}


def words(found: Launchable) -> list[str]:
    """The words behind the script's name."""
    script = next(i for i, word in enumerate(found.command) if word.endswith(".py"))
    return list(found.command[script + 1 :])


def answers(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the worker says of each job."""
    return [_answer(json.dumps(job)) for job in jobs]


def _answer(job: str) -> dict[str, Any]:
    process, errors = _worker()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{job}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, errors.read_text()[-2000:]
    return json.loads(answer)


@cache
def _worker() -> tuple[subprocess.Popen[str], Path]:
    """One process for all jobs, and the file of its errors: what it imports takes seconds."""
    with tempfile.NamedTemporaryFile(prefix="playbook-worker-", delete=False) as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(FOLDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    atexit.register(Path(errors.name).unlink)
    atexit.register(process.communicate)  # the end of its input ends it
    return process, Path(errors.name)


def dataclasses_in(*files: Path) -> dict[str, tuple[dict[str, ast.expr], list[str]]]:
    """By the name of a class its annotated fields and its bases; nothing is imported, since a GPU's packages would be."""
    found = {}
    for node in (node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)):
        own = {n.target.id: n.annotation for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        found[node.name] = (own, [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases])
    return found
