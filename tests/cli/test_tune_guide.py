"""The guide to tuning: its files are written as it shows them, and its console blocks run, by a planned clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from guide_blocks import consoles, script

from playbook.paths import data_root, repo_root, sources

CLOCK = repo_root() / "tests" / "support" / "ranks" / "planned_clock.py"
SLEPT, INVENTED = "time.perf_counter() - begin", "seconds * random.gauss(1, 0.002)"


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_every_console_block_of_the_guide_runs(tmp_path):
    for name, line in {"playbook": f'exec {sys.executable} {CLOCK} "$@"', "python": f'exec {sys.executable} "$@"'}.items():
        script(tmp_path / name, line)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sources(repo_root())), "PLANNED_CLOCK": "1"}
    outputs = []
    for text in consoles(
        data_root("guide") / "tune.md", theirs, lambda text: text.replace(SLEPT, INVENTED).replace("    time.sleep(seconds)\n", "")
    ):
        done = subprocess.run(["bash", "-ec", text], cwd=theirs, env=environment, capture_output=True, text=True, timeout=2000)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert len(outputs) == 3
    assert "workers=8" in outputs[0]
    found = json.loads(outputs[2])
    assert {row["knob"] for row in found["kept"]} == {"fuse", "workers"}
    assert "kept      fuse=on" in outputs[1]
    assert "refused   graphs=on  crashed" in outputs[1]
