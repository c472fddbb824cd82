"""Questions to a script in a process of its own, which may import what the tests must not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def answers(script: Path, asked: Any, *words: str, env: Mapping[str, str] | None = None) -> Any:
    """The last line that the script prints, as JSON, when it is asked this on its standard input."""
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=env, timeout=6000, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
