"""One micro-batch, as the loader hands it to the model.

Suffixes of tensor names: N tokens (rows laid end to end), P patches, V visual tokens, I images, C values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The label of a token that bears no loss."""


@dataclass
class VisionBatch:
    """The images of a micro-batch, packed patch by patch: no padding to the largest image. Indices are made by the data workers.

    Shapes: patches of one image are in merge order (each 2 x 2 block that the merger joins is contiguous).
    """

    pixels_PC: Tensor
    """float32 [P, channels * temporal_patch * patch * patch]"""
    cu_seqlens: Tensor
    """int32 [I + 1], patch offsets of the images (frames)."""
    max_seqlen: int
    rotary_P2: Tensor
    """int64 [P, 2], row and column of each patch."""
    pos_index_4P: Tensor
    """int64 [4, P], the four neighbours in the learned position grid."""
    pos_weight_4P: Tensor
    """float32 [4, P], their bilinear weights."""
    visual_index_V: Tensor
    """int64 [V], where each merged visual token goes among the N tokens."""
    visual_take_V: Tensor | None = None
    """Where a rank holds a share of the tokens only: int64 [v], which of the V visual tokens are among them;
    `visual_index_V` is then [v] too."""


@dataclass(frozen=True)
class Slice:
    """Under context parallelism, one stretch of a rank's queries and the stretch of keys k0:k1 that they may see."""

    k0: int
    k1: int
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class Block:
    """Under ring context parallelism: the queries q0:q1 of this rank that see the keys k0:k1 of another, all of them; one document."""

    q0: int
    q1: int
    k0: int
    k1: int
    cu_q: Tensor
    """int32 [2], the one segment of queries."""
    cu_k: Tensor


@dataclass(frozen=True)
class Ring:
    """Under ring context parallelism, what a rank computes and sends in each step; None where no document needs anything."""

    cu_seqlens: Tensor
    """int32, borders of the documents among the rank's own tokens."""
    max_seqlen: int
    receive: list[Block | None]
    """Step i (from 1): from the rank i places before."""
    send: list[tuple[int, int] | None]
    """Step i (from 1): the stretch of keys for the rank i places after."""


@dataclass
class Batch:
    """One micro-batch of one data-parallel rank."""

    tokens_N: Tensor
    """int64 [N]"""
    labels_N: Tensor
    """int64 [N], the token to predict at each place (already shifted), IGNORE where none."""
    positions: Tensor
    """int64 [N], or [3, N] (time, height, width) for M-RoPE; restarts with each document."""
    cu_seqlens: Tensor
    """int32 [documents + 1]; attention never crosses these borders. Padding is a document of its own."""
    max_seqlen: int
    num_useful: int
    """Real tokens, text and visual."""
    num_loss: int
    """Labels that are not IGNORE."""
    num_images: int
    num_pairs: int = 0
    """Sum of the squared lengths of the documents, padding left out; what attention costs."""
    real_N: Tensor | None = None
    """bool [N], which tokens are no padding; None where all are real, or where nothing asks for it, as in a model without experts."""
    vision: VisionBatch | None = None
    slices: list[Slice] | None = None
    """Set by the context-parallel split where keys are gathered."""
    ring: Ring | None = None
    """Set by the context-parallel split where keys travel around a ring."""

    def to(self, device: Any) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch(**{f.name: moved(getattr(self, f.name), device) for f in fields(self)})


def share_of(vision: VisionBatch, token_index_N: Tensor) -> VisionBatch:
    """The same images for a rank that holds a share of the tokens: all are encoded, the visual tokens of others are left out.

    Shapes: token_index int64 [N], where each token is among the rank's, or -1.
    """
    index = token_index_N[vision.visual_index_V]
    keep = (index >= 0).nonzero().squeeze(1)
    take = keep if vision.visual_take_V is None else vision.visual_take_V[keep]
    return replace(vision, visual_index_V=index[keep], visual_take_V=take)


def to_device(tensor: Tensor, device: Any) -> Tensor:
    """The tensor on `device`, by a copy that the host does not wait for.

    From memory that is not pinned, CUDA copies only when the stream is empty, and the host waits for that: for the whole step before.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def moved(value: Any, device: Any) -> Any:
    """The value with the tensors in it on `device`."""
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, VisionBatch | Slice | Block | Ring):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    if isinstance(value, list):
        return [moved(v, device) for v in value]
    return value
