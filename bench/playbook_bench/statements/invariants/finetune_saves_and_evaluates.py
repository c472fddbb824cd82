"""A run from saved weights evaluates, saves and is continued."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playbook_bench.statements import short_runs


def finetune_saves_and_evaluates(words: Sequence[str] = (), checkpoint_format: str = "") -> tuple[bool, str, dict[str, Any]]:
    """Whether a run from saved weights evaluates, leaves a checkpoint (of that format, where one is named), and is continued from it by a second run.

    `words` override the configuration of all runs.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-finetune-") as name:
        root = Path(name)
        weights, saved = root / "weights", root / "checkpoints"
        common = (f"checkpoint.dir={saved}", "checkpoint.every=2", "eval.every=2", "eval.batches=1", f"init.weights={weights}")
        runs = {
            "export": ("train.steps=2", f"checkpoint.export={weights}"),
            "finetune": (*common, "train.steps=4"),
            "resume": (*common, "train.steps=6"),
        }
        for run, own in runs.items():
            problem = short_runs.train("qwen3_vl_moe_tiny", root / run, "data.seq_len=256", *words, *own)
            if problem:
                return False, f"{run}: {problem}", {}
        summaries = {run: json.loads((root / run / "summary.json").read_text(encoding="utf-8")) for run in runs}
        steps = [json.loads(line)["step"] for line in (root / "resume" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        checkpoints = sorted(p.name for p in saved.glob("step_*"))
        formats = {json.loads(p.read_text(encoding="utf-8")).get("format") for p in saved.glob("step_*/checkpoint.json")}
    evaluated = [row["step"] for row in summaries["finetune"]["eval"]]
    holds = evaluated == [2, 4] and bool(checkpoints) and steps == [5, 6] and (not checkpoint_format or formats == {checkpoint_format})
    sentence = f"from saved weights: evaluated after steps {evaluated}, checkpoints {', '.join(checkpoints)}, continued with steps {steps}"
    sentence += f"; their format is {', '.join(map(str, formats)) or 'not said'}" if checkpoint_format else ""
    return holds, sentence, {"evaluated": evaluated, "checkpoints": checkpoints, "resumed": steps}
