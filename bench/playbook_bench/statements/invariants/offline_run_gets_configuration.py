"""The resolved configuration reaches an offline run of Weights & Biases."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from playbook_bench.statements import short_runs
from playbook_bench.statements.offline_runs import offline_run


def offline_run_gets_configuration() -> tuple[bool, str, dict[str, Any]]:
    """Whether what `wandb sync` would upload holds each section of the run's resolved configuration, an override's value among them."""
    with tempfile.TemporaryDirectory(prefix="playbook-tracker-") as name:
        out = Path(name) / "run"
        words = ("tracker.wandb=true", "tracker.offline=true", "train.steps=2", "data.seq_len=64", "optimizer.lr=0.000123")
        problem = short_runs.train("qwen3_moe_tiny", out, *words)
        if problem:
            return False, problem, {}
        written = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
        sent = offline_run(out / "wandb")[0]
    missing = [key for key, value in written.items() if sent.get(key) != value]
    holds = not missing and written["optimizer"]["lr"] == 0.000123
    return holds, f"sections of the resolved configuration missing from the run: {', '.join(missing) or 'none'}", {"missing": missing}
