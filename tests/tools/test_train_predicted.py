"""The script that trains the rows of predictions of one GPU, narrow and on a CPU."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("transformers")
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "planner" / "train_predicted.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.full
def test_a_row_trains_and_says_what_it_reached():
    row = "one-qwen3-30b-a3b-8-layers-full"
    line = json.loads(ran("--smoke", row).stdout)
    assert line["row"] == row
    assert line["tokens_per_s"] > 0
    assert all(5 < loss < 8 for loss in line["losses"])  # ln(512) = 6.2


def test_a_row_that_does_not_exist_is_named_with_those_that_do():
    done = ran("one-llama31-8b-lora17")
    assert done.returncode == 2
    assert "no row one-llama31-8b-lora17" in done.stderr
    assert "one-llama31-8b-lora16" in done.stderr


def test_the_measured_rows_are_within_what_was_asked_of_their_seals():
    lines = [json.loads(line) for line in (SCRIPT.parents[2] / "docs" / "parity" / "fine-tuning-one-gpu.jsonl").read_text().splitlines()]
    assert median(abs(line["sealed_gib"] / line["allocated_gib"] - 1) for line in lines) <= 0.05
    assert median(abs(line["predicted_h200"] / line["tokens_per_s"] - 1) for line in lines) <= 0.15
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(rate(line), rel=0.01)


def rate(line: dict) -> float:
    """Tokens per second of the median timed step, by the row of the prediction."""
    with (SCRIPT.parents[2] / "playbook" / "_tables" / "predictions.csv").open() as table:
        row = next(r for r in csv.DictReader(table) if r["id"] == line["row"])
    return int(row["gbs"]) * int(row["seq_len"]) / median(line["step_seconds"][3:])
