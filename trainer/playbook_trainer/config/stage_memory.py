"""What a rank of one pipeline stage holds, as a dry run reports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from playbook.planner.plan import Plan
from playbook_trainer.config.tree import TrainerConfig

WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of a number in each `train.dtype`."""


@dataclass(frozen=True)
class Stage:
    """What a rank of one pipeline stage holds. Units: counts, and bytes."""

    stage: int
    layers: int
    parameters: int
    """Of this stage's share of the model, before data parallelism shards them."""
    state_bytes: float
    """Parameters, gradients and optimizer state between steps."""
    gathered_bytes: float
    """Two layers gathered at once under full sharding; all of them where they stay until the backward pass."""
    activation_bytes: float
    loss_bytes: float
    host_bytes: float
    """In host memory, with offload: state, and activations of all layers but three (one computes, its neighbours are on their way)."""
    vision_bytes: float = 0.0
    """Activations of the vision tower, at most: of rows in which every token is an image's."""
    replayed_bytes: float = 0.0
    """What recompute brings back of a layer; it is not there at the same time as the loss."""
    workspace_bytes: float = 0.0
    """Workspaces and communication buffers, where a backend's were measured."""

    @property
    def peak_bytes(self) -> float:
        """All of it that is on the GPU at once."""
        held = self.state_bytes + self.gathered_bytes + self.activation_bytes + self.vision_bytes + self.workspace_bytes
        return held + max(self.loss_bytes, self.replayed_bytes)

    def row(self) -> dict[str, Any]:
        """All figures, by name."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def vision(config: TrainerConfig, plan: Plan) -> float:
    """Bytes that the vision tower keeps of a micro-batch in which every token is an image's; real rows hold text too.

    A block keeps per patch: the inputs and outputs of both norms, queries, keys and values before and after rotation, the output of
    attention, and the MLP before and after its activation. Source: Hugging Face transformers,
    `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
    """
    tower = config.model.vision
    if tower is None or config.data.kind != "vqa" or "vision" in config.train.freeze:
        return 0.0
    rows = plan.mbs * plan.seq_len  # whole ones: a context-parallel rank holds a part of them, and encodes the images of all
    entry = rows * tower.spatial_merge_size**2 * tower.hidden_size * WIDTH[config.train.dtype]
    block = entry * (10 + 2 * tower.ffn_size / tower.hidden_size)
    again = "vision" in config.train.recompute_modules
    return entry * tower.depth + block if again else block * tower.depth
