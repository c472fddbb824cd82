from __future__ import annotations

import os
import subprocess
import sys

import planned_clock
import pytest
from guide_blocks import script

from playbook.paths import repo_root, sources


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory without earlier results, of a process that is no rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


@pytest.fixture
def shell(tmp_path):
    """Runs a line as a person's shell would, with `playbook` and `python` of this environment and a pip that installs nothing. Seconds of launches are planned."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "playbook": f'exec {sys.executable} {planned_clock.__file__} "$@"',
        "python": f'exec {sys.executable} "$@"',
        "pip": "exit 0",
    }.items():
        script(tools / name, text)
    place = tmp_path / "theirs"
    place.mkdir()
    path = os.pathsep.join(sources(repo_root()))
    git = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **git, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "PLANNED_CLOCK": "1"}

    def run(line, folder=place, **more):
        return subprocess.run(["bash", "-ec", line], cwd=folder, env={**environment, **more}, capture_output=True, text=True, timeout=3000)

    run.place = place
    return run
