"""A short run of the trainer, on the CPU where nothing else is said, for statements about what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from playbook.paths import data_root

_TIMEOUT_S = 240
_TINY = (
    "train.device=cpu",
    "data.num_workers=0",
    "train.global_batch_size=1",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.receipt=false",
)


def train(config: str, out: Path, *words: str) -> str:
    """Run a shipped configuration once, with these overrides; what went wrong, or nothing."""
    command: Sequence[str] = [
        *(sys.executable, "-m", "playbook_trainer", str(data_root("configs") / f"{config}.yaml"), f"output={out}"),
        *(*_TINY, *words),
    ]
    hidden = {} if "train.device=cuda" in words else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the trainer took more than {_TIMEOUT_S} s"
    return "" if done.returncode == 0 else f"the trainer ended with code {done.returncode}: {(done.stderr or done.stdout)[-400:].strip()}"
