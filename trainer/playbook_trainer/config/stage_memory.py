"""What the vision tower keeps of a micro-batch, and the widths of numbers, for a dry run of either backend."""

from __future__ import annotations

from playbook.planner.plan import Plan
from playbook_trainer.config.tree import TrainerConfig

WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of a number in each `train.dtype`."""


def vision(config: TrainerConfig, plan: Plan) -> float:
    """Bytes that the vision tower keeps of a micro-batch in which every token is an image's; real rows hold text too.

    A block keeps per patch: the inputs and outputs of both norms, queries, keys and values before and after rotation, the output of
    attention, and the MLP before and after its activation. Source: Hugging Face transformers,
    `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
    """
    tower = config.model.vision
    if tower is None or config.data.kind not in ("vqa", "chat") or "vision" in config.train.freeze:
        return 0.0
    rows = plan.mbs * plan.seq_len  # whole ones: a context-parallel rank holds a part of them, and encodes the images of all
    entry = rows * tower.spatial_merge_size**2 * tower.hidden_size * WIDTH[config.train.dtype]
    block = entry * (10 + 2 * tower.ffn_size / tower.hidden_size)
    again = "vision" in config.train.recompute_modules
    return entry * tower.depth + block if again else block * tower.depth
