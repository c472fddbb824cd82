"""The script that trains the rows of predictions of one GPU, narrow and on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "planner" / "train_predicted.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.full
@pytest.mark.parametrize("row", ["one-llama31-8b-full", "one-qwen3-30b-a3b-8-layers-full"])
def test_a_row_trains_and_says_what_it_reached(row):
    line = json.loads(ran("--smoke", row).stdout)
    assert line["row"] == row
    assert line["tokens_per_s"] > 0
    assert all(5 < loss < 8 for loss in line["losses"])  # ln(512) = 6.2


def test_a_row_that_does_not_exist_is_named_with_those_that_do():
    done = ran("one-llama31-8b-lora17")
    assert done.returncode == 2
    assert "no row one-llama31-8b-lora17" in done.stderr
    assert "one-llama31-8b-lora16" in done.stderr
