"""What a count of FLOPs leaves out without the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.planner import flops
from playbook.planner.models import MODELS
from playbook.yaml_files import did_you_mean
from playbook_bench.judge.verdict import Statement

_PATCH = 16
"""Pixels on a side of a patch. Source: config.json of Qwen3-VL, vision_config.patch_size."""


def vision_left_out(*, model: str, samples: Sequence[Mapping[str, Any]], at_least: float, at_most: float) -> Statement:
    """Whether counting the decoder alone misses a share of the FLOPs within the two bounds, for every sample.

    A sample has `images`, as (height, width) in pixels, and `text_tokens`. Attention covers the sample's tokens alone, as in packed rows.
    Source: `playbook.planner.flops`, checked against PyTorch's counter.
    """
    shape = MODELS.get(model)
    if shape is None or shape.vision is None:
        raise ValueError(f"'{model}' is no model with a vision tower{did_you_mean(model, [n for n, s in MODELS.items() if s.vision])}")
    unit, rows = _PATCH * shape.vision.merge, []
    for sample in samples:
        # Both sides are rounded to whole visual tokens, as the image processor does.
        sizes = [tuple(max(1, round(side / unit)) * shape.vision.merge for side in image) for image in sample["images"]]
        patches = [rows_ * columns for rows_, columns in sizes]
        tokens = sample["text_tokens"] + sum(patches) // shape.vision.merge**2
        decoder = tokens * flops.per_token(shape, tokens)
        pairs = sum(n * n for n in patches)
        tower = flops.BACKWARD * sum(flops.vision_forward(shape.vision, shape.hidden, sum(patches), pairs).values())
        rows.append({"tokens": tokens, "patches": sum(patches), "left_out": tower / (tower + decoder)})
    found = [row["left_out"] for row in rows]
    holds = all(at_least <= share <= at_most for share in found)
    sentence = (
        f"{model}: without its vision tower {min(found):.0%} to {max(found):.0%} of the model FLOPs of {len(rows)} samples are left out; "
        f"claimed {at_least:.0%} to {at_most:.0%}"
    )
    return holds, sentence, {"rows": rows}
