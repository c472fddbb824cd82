"""The resolved configuration reaches the tracker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from playbook_bench.statements import short_runs
from playbook_trainer.config.tree import TrainerConfig


def tracker_gets_configuration() -> tuple[bool, str, dict[str, Any]]:
    """Whether TensorBoard's event file holds each line of the run's resolved configuration, an override's value among them."""
    with tempfile.TemporaryDirectory(prefix="playbook-tracker-") as name:
        out = Path(name) / "run"
        problem = short_runs.train(
            "qwen3_moe_tiny", out, "tracker.tensorboard=true", "train.steps=2", "data.seq_len=64", "optimizer.lr=0.000123"
        )
        if problem:
            return False, problem, {}
        events = b"".join(p.read_bytes() for p in sorted((out / "tensorboard").glob("events.*")))
        lines = (out / "config.yaml").read_text(encoding="utf-8").splitlines()
        missing = [line for line in lines if line.encode() not in events]
        written = yaml.safe_load("\n".join(lines))
    holds = not missing and written["optimizer"]["lr"] == 0.000123 and set(TrainerConfig.model_fields) <= set(written)
    # How many lines there are is no finding: it grows with every setting, and the record must replay.
    sentence = (
        f"{len(missing) or 'no'} line{'' if len(missing) == 1 else 's'} of the resolved configuration missing from the tracker's file"
    )
    return holds, sentence + (f": {missing[0].strip()}" if missing else ""), {"missing": missing[:5]}
