"""Predictions scaled to measured runs of one's own."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path

from playbook.errors import ConfigError
from playbook.planner.choice.explain import Answer
from playbook.planner.choice.search import Choice
from playbook.planner.runs.anchor import Anchor, Anchors
from playbook.planner.runs.predict import predict
from playbook.planner.runs.table import Run, read_runs
from playbook.planner.time import spread
from playbook.planner.time.step import Estimate
from playbook.text import count


def anchored(found: Answer, path: Path) -> Answer:
    """The answer with each plan's speed scaled by what the runs of the table showed over what was predicted for them.

    One scale holds for all plans, so their order stays.

    Raises:
        ConfigError: the table has no run that can be predicted and was measured.
    """
    errors = []
    for run, measured in read_runs(path):
        prediction = predict(run)
        if isinstance(prediction, str):
            continue
        error = prediction.error(measured)
        if error is not None:
            errors.append(Anchor(run, error, prediction.spread, prediction.parts))
    if not errors:
        raise ConfigError(f"{path}: no run with a speed that can be compared; expected tokens_per_s_per_gpu, tflops_per_gpu or step_time_s")
    q = found.question
    precision = "fp8" if found.choices and found.choices[0].plan.options.fp8 else "bf16"
    own = Run("plan", 0, {"model": q.model, "hardware": q.cluster.name, "gpus": str(q.gpus), "precision": precision}, path.parent)
    first = found.choices[0].time if found.choices else None
    asked = Anchor(own, 0.0, first.spread, spread.weights(first.parts)) if first else replace(errors[0], run=own)
    scale = Anchors(errors).scale(asked)
    word = f"{count(len(errors), 'run')}, x{exp(scale.log):.2f}"
    return replace(found, choices=[_scaled(c, exp(scale.log), scale.left) for c in found.choices], anchored=word)


def _scaled(choice: Choice, by: float, left: float) -> Choice:
    time = choice.time
    wide = exp(spread.QUANTILE * time.spread * left)
    speed, seconds = time.tokens_per_s_per_gpu.value * by, time.seconds.value / by
    scaled = replace(
        time, seconds=Estimate(seconds, seconds / wide, seconds * wide), tokens_per_s_per_gpu=Estimate(speed, speed / wide, speed * wide),
        tflops_per_gpu=time.tflops_per_gpu * by, mfu=time.mfu * by, parts={k: v / by for k, v in time.parts.items()},
        spread=time.spread * left,
    )  # fmt: skip
    return replace(choice, time=scaled)
