"""Predictions scaled to measured runs: the published ones that ship, and one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

from playbook.errors import ConfigError
from playbook.planner.choice.search import Answer
from playbook.planner.choice.space import Question
from playbook.planner.runs import published
from playbook.planner.runs.anchor import NO_SCALE, Anchor, Anchors, Scale
from playbook.planner.runs.predict import predict
from playbook.planner.runs.table import Run, read_runs
from playbook.planner.time import spread
from playbook.planner.time.step import Estimate, StepTime
from playbook.text import count


def anchored(answer: Answer, path: Path | None = None, *, with_published: bool = True) -> Answer:
    """The answer with each plan's speed scaled by what measured runs showed over what was predicted for them: published ones, and those of
    a table.

    One scale holds for all plans, so their order stays.

    Raises:
        ConfigError: the table has no run that can be predicted and was measured.
    """
    if not answer.choices:
        return answer
    own_anchors = _of_table(path) if path else []
    first = answer.choices[0]
    scale = scale_of(answer.question, first.time, fp8=bool(first.plan.options.fp8), mine=own_anchors, with_published=with_published)
    if scale == NO_SCALE:
        return answer
    sources = [*([count(len(own_anchors), "run")] if own_anchors else []), *(["published runs"] if with_published else [])]
    choices = [replace(c, time=scaled(c.time, scale)) for c in answer.choices]
    return replace(answer, choices=choices, anchored=f"{' and '.join(sources)}, x{exp(scale.log):.2f}")


def scale_of(q: Question, time: StepTime, *, fp8: bool, mine: Sequence[Anchor] = (), with_published: bool = True) -> Scale:
    """The scale for a question's predictions, given one of them; of no source, unless it has runs of its own.

    Published runs scale what the table of GPUs makes of a machine. Where a file measured this one, they say nothing more of it.
    """
    with_published = with_published and not q.cluster.calibrated
    if mine:
        anchors = Anchors([*(published.anchors() if with_published else ()), *mine])
    elif with_published:
        anchors = published.scaling()
    else:
        return NO_SCALE
    words = {
        "model": q.model,
        "hardware": q.cluster.name,
        "gpus": str(q.gpus),
        "precision": "fp8" if fp8 else "bf16",
        "gbs": str(q.global_batch),
    }
    return anchors.scale(Anchor(Run("plan", 0, words, Path()), 0.0, time.spread, spread.weights(time.parts)))


def scaled(time: StepTime, scale: Scale) -> StepTime:
    """A prediction and its interval, scaled."""
    by = exp(scale.log)
    wide = exp(spread.QUANTILE * time.spread * scale.left)
    speed, seconds = time.tokens_per_s_per_gpu.value * by, time.seconds.value / by
    return replace(
        time, seconds=Estimate(seconds, seconds / wide, seconds * wide), tokens_per_s_per_gpu=Estimate(speed, speed / wide, speed * wide),
        tflops_per_gpu=time.tflops_per_gpu * by, mfu=time.mfu * by, parts={k: v / by for k, v in time.parts.items()},
        spread=time.spread * scale.left,
    )  # fmt: skip


def _of_table(path: Path) -> list[Anchor]:
    anchors = []
    for run, measured in read_runs(path):
        prediction = predict(run)
        error = None if isinstance(prediction, str) else prediction.error(measured)
        if error is not None and not isinstance(prediction, str):
            anchors.append(Anchor(run, error, prediction.spread, prediction.parts))
    if not anchors:
        raise ConfigError(f"{path}: no run with a speed that can be compared; expected tokens_per_s_per_gpu, tflops_per_gpu or step_time_s")
    return anchors
