"""What one step adds up over all ranks: a named tuple that travels as one tensor through one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

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
        """All fields as one float64 vector on `device`, in their order. The numbers go there in one copy that the host does not wait for."""
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
