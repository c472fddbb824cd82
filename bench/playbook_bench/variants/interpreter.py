"""Which Python a command runs on, and the packages that move its step time there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from playbook_bench.machine.detect import PACKAGES

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


def seen_by(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The interpreter's version and packages, as far as the command is a Python or a script of one; else empty packages."""
    program = str(cwd / words[0]) if "/" in words[0] else words[0]
    python = _python(program, environment.get("PATH"))
    return dict(_ask(python, environment.get("PYTHONPATH", ""))) if python else {"packages": {}}


def _python(word: str, path: str | None) -> str | None:
    """The Python that a word stands for: itself, or the one in the first line of a script."""
    found = shutil.which(word, path=path)
    if found is None or _PYTHON.match(Path(found).name):
        return found
    try:
        with Path(found).open("rb") as f:
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
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {"packages": {}}
    return found
