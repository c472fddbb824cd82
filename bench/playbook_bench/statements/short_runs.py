"""Invariants that a short run of the trainer shows, on the CPU and in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from playbook.paths import data_root
from playbook_trainer.config.tree import TrainerConfig

_TIMEOUT_S = 240
_TINY = (
    "train.device=cpu",
    "data.num_workers=0",
    "train.global_batch_size=1",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.receipt=false",
)


def tracker_gets_configuration() -> tuple[bool, str, dict[str, Any]]:
    """Whether TensorBoard's event file holds each line of the run's resolved configuration, an override's value among them."""
    with tempfile.TemporaryDirectory(prefix="playbook-tracker-") as name:
        out = Path(name) / "run"
        problem = _train("qwen3_moe_tiny", out, "tracker.tensorboard=true", "train.steps=2", "data.seq_len=64", "optimizer.lr=0.000123")
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


def finetune_saves_and_evaluates() -> tuple[bool, str, dict[str, Any]]:
    """Whether a run from saved weights evaluates, leaves a checkpoint, and is continued from it by a second run."""
    with tempfile.TemporaryDirectory(prefix="playbook-finetune-") as name:
        root = Path(name)
        weights, saved = root / "weights", root / "checkpoints"
        common = (f"checkpoint.dir={saved}", "checkpoint.every=2", "eval.every=2", "eval.batches=1", f"init.weights={weights}")
        runs = {
            "export": ("train.steps=2", f"checkpoint.export={weights}"),
            "finetune": (*common, "train.steps=4"),
            "resume": (*common, "train.steps=6"),
        }
        for run, words in runs.items():
            problem = _train("qwen3_vl_moe_tiny", root / run, "data.seq_len=256", *words)
            if problem:
                return False, f"{run}: {problem}", {}
        summaries = {run: json.loads((root / run / "summary.json").read_text(encoding="utf-8")) for run in runs}
        steps = [json.loads(line)["step"] for line in (root / "resume" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        checkpoints = sorted(p.name for p in saved.glob("step_*"))
    evaluated = [row["step"] for row in summaries["finetune"]["eval"]]
    holds = evaluated == [2, 4] and bool(checkpoints) and steps == [5, 6]
    sentence = f"from saved weights: evaluated after steps {evaluated}, checkpoints {', '.join(checkpoints)}, continued with steps {steps}"
    return holds, sentence, {"evaluated": evaluated, "checkpoints": checkpoints, "resumed": steps}


def _train(config: str, out: Path, *words: str) -> str:
    """Run the trainer once; what went wrong, or nothing."""
    command: Sequence[str] = [
        *(sys.executable, "-m", "playbook_trainer", str(data_root("configs") / f"{config}.yaml"), f"output={out}"),
        *(*_TINY, *words),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the trainer took more than {_TIMEOUT_S} s"
    return "" if done.returncode == 0 else f"the trainer ended with code {done.returncode}: {(done.stderr or done.stdout)[-400:].strip()}"
