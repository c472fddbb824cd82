"""The sampler of a launch's first seconds sees the trainer's own lines, and says how long they took."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from ranks import ROOT, environment


@pytest.mark.timeout(2000)
@pytest.mark.full
def test_the_seconds_of_a_launch_are_told_by_line() -> None:
    words = ["trainer/configs/qwen3_moe_tiny.yaml", "train.steps=12", "train.warmup_steps=1"]
    command = [sys.executable, "tools/first_step.py", "--ranks", "1", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 12 " in done.stdout
    below, at = done.stdout.split("below a line of the trainer")[1].split("in the innermost line")
    found = {line: float(s) for s, line in re.findall(r"([\d.]+) s  (.*)", below)}
    steps = max(s for line, s in found.items() if line.endswith(" run_steps"))
    within = max(s for line, s in found.items() if line.endswith(" train_step"))
    assert steps >= within > 0.1, "twelve steps take longer than that"
    assert re.search(r"[\d.]+ s  \S+:\d+ \w+", at)
