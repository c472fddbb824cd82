"""The FLOPs of a step by class of operation, from what its batches hold: real lengths of documents and images.

model FLOPs: documents and images without padding, nothing twice; the numerator of MFU. hardware FLOPs: padding and recomputed forward passes
as well; the numerator of HFU. In the backward pass a class counts once for the gradient of its input and once for its weights, where wanted.
Attention inside a document counts half of the square, and what a fused kernel computes again in its own backward pass does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from playbook.planner import flops, peaks
from playbook_trainer.config.shape import shape_of
from playbook_trainer.config.tree import TrainConfig, TrainerConfig
from playbook_trainer.observe.totals import StepTotals

FORMULA = "playbook.flops/1"
"""Raised with the formula, so that figures of different formulas are not compared."""
_CLASSES = ("attention", "linear", "mlp", "experts", "router", "head", "vision", "projector")


class Ledger:
    """FLOPs of the steps of one run."""

    def __init__(self, config: TrainerConfig) -> None:
        self._shape = shape_of(config.model)
        self._factors = factors(config.train.freeze)
        self._again = recomputed(config.train)

    def model(self, step: StepTotals[float]) -> dict[str, float]:
        """Model FLOPs of a step by the names of CLASSES, all ranks together."""
        return _joined(_times(self._forward(step.useful_tokens, step.pairs, step), self._factors))

    def hardware(self, step: StepTotals[float]) -> dict[str, float]:
        """Hardware FLOPs of a step by the names of CLASSES, all ranks together."""
        again = {name: factor + (name in self._again) for name, factor in self._factors.items()}
        return _joined(_times(self._forward(step.raw_tokens, step.padded_pairs, step), again))

    def _forward(self, tokens: float, pairs: float, step: StepTotals[float]) -> dict[str, float]:
        per_token = flops.forward(self._shape, pairs / max(1.0, tokens))
        found = {name: tokens * each for name, each in per_token.items()}
        if self._shape.vision is not None:
            found |= flops.vision_forward(self._shape.vision, self._shape.hidden, step.patches, step.patch_pairs)
        return found


def factors(freeze: Sequence[str]) -> dict[str, int]:
    """Forward and backward over forward for each class; all are `flops.BACKWARD` in a text model that trains. Pixels want no gradient."""
    tower, projector, language = (part not in freeze for part in ("vision", "projector", "language_model"))
    flows = tower or projector or language
    product = 1 + flows + language
    return {
        # The core of attention has two inputs and no weight: its backward pass multiplies twice wherever a gradient flows at all.
        "attention": 1 + 2 * flows,
        **dict.fromkeys(("linear", "mlp", "experts", "router", "head"), product),
        "patches": 1 + tower,
        "vision": 1 + 2 * tower,
        # Its norms come first, so their weights want a gradient through it whatever is before them.
        "projector": 1 + (tower or projector) + projector,
    }


def recomputed(train: TrainConfig) -> frozenset[str]:
    """The classes whose forward pass is run again in the backward pass; the rest of what is recomputed multiplies no matrices."""
    if train.recompute == "full":
        return frozenset({"attention", "linear", "mlp", "experts", "router"})
    names = {"core_attn": {"attention"}, "mlp": {"mlp"}, "moe": {"experts", "router"}, "vision": {"vision"}}
    return frozenset().union(*(names.get(module, set()) for module in train.recompute_modules))


def peak(device: torch.device) -> peaks.Peak | None:
    """The dense BF16 peak of this rank's GPU; None on a CPU, or for a GPU that is not in the table."""
    return peaks.dense_bf16(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _times(forward: Mapping[str, float], factors: Mapping[str, int]) -> dict[str, float]:
    return {name: factors[name] * each for name, each in forward.items()}


def _joined(found: dict[str, float]) -> dict[str, float]:
    """The embedding of patches is part of the vision tower; classes that the model lacks are left out."""
    found["vision"] = found.get("vision", 0.0) + found.pop("patches", 0.0)
    return {name: found[name] for name in _CLASSES if found.get(name)}
