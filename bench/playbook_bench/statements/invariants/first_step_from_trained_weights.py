"""The first step on images, from weights that were trained on text and from fresh ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from playbook_bench.statements import short_runs

_CONFIG = "qwen3_vl_moe_tiny"


def first_step_from_trained_weights(steps: int, rate: float, least_ratio: float) -> tuple[bool, str, dict[str, Any]]:
    """Whether the gradient norm of the first step on images is so many times that of the first on text alone, once the decoder has learned text for `steps` steps.

    The tower stays as it was drawn, so decoder and tower do not fit each other, as in a model whose weights were put together.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-first-step-") as name:
        root = Path(name)
        learned = (
            "data.kind=text",
            "data.seq_len=128",
            f"train.steps={steps}",
            f"optimizer.lr={rate}",
            f"checkpoint.export={root / 'weights'}",
        )
        if problem := short_runs.train(_CONFIG, root / "learned", *learned):
            return False, problem, {}
        norms: dict[str, float] = {}
        for weights, words in {"trained": (f"init.weights={root / 'weights'}",), "fresh": ()}.items():
            for kind in ("vqa", "text"):
                out = root / f"{weights}-{kind}"
                if problem := short_runs.train(_CONFIG, out, *words, f"data.kind={kind}", "data.seq_len=512", "train.steps=2"):
                    return False, problem, {}
                norms[f"{weights}, {kind}"] = _first(out)["grad_norm"]
        losses = [_first(root / part)["loss"] for part in ("fresh-text", "trained-text")]
    ratios = {weights: norms[f"{weights}, vqa"] / norms[f"{weights}, text"] for weights in ("trained", "fresh")}
    holds = ratios["trained"] >= least_ratio and losses[1] < losses[0]
    # One digit: the norms of a few steps differ in their last ones from machine to machine, and a record has to replay.
    shown = {weights: float(f"{ratio:.1g}") for weights, ratio in ratios.items()}
    sentence = (
        f"first gradient norm on images over that on text: {shown['trained']:g} times from weights trained on text for {steps} steps, "
        f"{shown['fresh']:g} times from fresh ones; claimed at least {least_ratio:g} times"
    )
    return holds, sentence if losses[1] < losses[0] else f"{steps} steps did not lower the loss on text", shown


def _first(out: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return row
