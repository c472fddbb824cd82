"""What one step adds up over all ranks: a named tuple that travels as one tensor through one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from playbook.planner import flops
from playbook_trainer.config.sections import shape_of
from playbook_trainer.config.tree import TrainConfig, TrainerConfig
from playbook_trainer.data.batch import Batch, to_device

_Scalar = TypeVar("_Scalar", Tensor, float)


class StepTotals(NamedTuple, Generic[_Scalar]):
    """Sums of one step, first of this rank, then of all ranks; each a float64 scalar on the device, or a float.

    Pairs are sums of squared lengths, of which the FLOPs of attention are a multiple.
    """

    squared_grad_norm: _Scalar
    """Sum of the squares of all gradients, before clipping."""
    loss: _Scalar
    """Cross-entropy summed over labels, in nats."""
    stop_requested: _Scalar = 0.0
    """Number of ranks that a signal has asked to stop."""
    useful_tokens: _Scalar = 0.0
    """Number of text and visual tokens, without padding."""
    raw_tokens: _Scalar = 0.0
    """Number of tokens, with padding."""
    images: _Scalar = 0.0
    """Number of images."""
    pairs: _Scalar = 0.0
    """Sum of the squared lengths of documents, in tokens squared, without padding."""
    padded_pairs: _Scalar = 0.0
    """The same with padding, which is a document of its own."""
    patches: _Scalar = 0.0
    """Number of image patches that the vision tower reads."""
    patch_pairs: _Scalar = 0.0
    """Sum of the squared number of patches of each image."""

    @property
    def grad_norm(self) -> _Scalar:
        """Global norm of the gradients, before clipping."""
        return self.squared_grad_norm**0.5

    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers; waits for the device."""
        return bool(torch.stack([self.squared_grad_norm, self.loss]).isfinite().all())

    def pack(self, device: torch.device) -> Tensor:
        """All fields as one float64 vector on `device`, in their order. The numbers go there in one copy that the host does not wait
        for.
        """
        packed = to_device(torch.tensor([0.0 if isinstance(v, Tensor) else v for v in self], dtype=torch.float64), device)
        for i, value in enumerate(self):
            if isinstance(value, Tensor):
                packed[i] = value
        return packed

    @classmethod
    def unpack(cls, packed: Tensor) -> StepTotals[Any]:
        """The fields of a packed vector, as scalars on its device."""
        return cls(*packed.unbind())

    def read(self) -> StepTotals[float]:
        """The fields as floats, in one copy; waits for the device."""
        return StepTotals(*torch.stack(tuple(self)).tolist())


def counts(batches: Sequence[Batch]) -> dict[str, float]:
    """The totals that are known before the model runs: tokens, images, pairs and patches of a rank's micro-batches."""
    towers = [b.vision for b in batches if b.vision is not None]
    return {
        "useful_tokens": float(sum(b.num_useful for b in batches)),
        "raw_tokens": float(sum(b.tokens_N.numel() for b in batches)),
        "images": float(sum(b.num_images for b in batches)),
        "pairs": float(sum(b.num_pairs for b in batches)),
        "padded_pairs": sum(squares(b.cu_seqlens) for b in batches),
        "patches": float(sum(len(v.pixels_PC) for v in towers)),
        "patch_pairs": sum(squares(v.cu_seqlens) for v in towers),
    }


def squares(cu_seqlens: Tensor) -> float:
    """The sum of the squares of packed lengths."""
    return float(cu_seqlens.diff().double().square().sum())


# The FLOPs of a step by class of operation, from what its batches hold: real lengths of documents and images.
# model FLOPs: documents and images without padding, nothing twice; the numerator of MFU. hardware FLOPs: padding and recomputed forward
# passes as well; the numerator of HFU. In the backward pass a class counts once for the gradient of its input and once for its weights,
# where wanted. Attention inside a document counts half of the square, and what a fused kernel computes again in its own backward pass
# does not count.

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
        factors = {name: factor + (name in self._again) for name, factor in self._factors.items()}
        return _joined(_times(self._forward(step.raw_tokens, step.padded_pairs, step), factors))

    def _forward(self, tokens: float, pairs: float, step: StepTotals[float]) -> dict[str, float]:
        per_token = flops.forward(self._shape, pairs / max(1.0, tokens))
        by_class = {name: tokens * each for name, each in per_token.items()}
        if self._shape.vision is not None:
            by_class |= flops.vision_forward(self._shape.vision, self._shape.hidden, step.patches, step.patch_pairs)
        return by_class


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


def peak(device: torch.device) -> flops.Peak | None:
    """The dense BF16 peak of this rank's GPU; None on a CPU, or for a GPU that is not in the table."""
    return flops.dense_bf16(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _times(forward: Mapping[str, float], factors: Mapping[str, int]) -> dict[str, float]:
    return {name: factors[name] * each for name, each in forward.items()}


def _joined(by_class: dict[str, float]) -> dict[str, float]:
    """The embedding of patches is part of the vision tower; classes that the model lacks are left out."""
    by_class["vision"] = by_class.get("vision", 0.0) + by_class.pop("patches", 0.0)
    return {name: by_class[name] for name in _CLASSES if by_class.get(name)}
