"""A parameter as boxes of the whole tensor: what a checkpoint stores, so that any layout can read what another has written.

Where a box lies is asked from `sharding.part` itself: the coordinates of the whole parameter are cut as its values are, and FSDP's part of that is
added. Consecutive coordinates are one box, so the two halves of `w13` under tensor parallelism become two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from playbook_trainer.parallel.axes import Axes
from playbook_trainer.parallel.sharding import full_shape, part, shard_of


@dataclass(frozen=True)
class Box:
    """A stretch of a rank's own tensor in every dimension, and where it begins in the whole one."""

    own: tuple[slice, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole parameter."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def of(self, values: Tensor) -> Pieces:
        """`values`, of the shape of this rank's part, as pieces of the whole; they share its memory."""
        return Pieces(self.shape, values.dtype, [(b.offsets, values[b.own]) for b in self.boxes])


class Pieces:
    """What this rank holds of a whole tensor, as torch.distributed.checkpoint asks a tensor for it (the methods with two underscores)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
        self.shape, self.dtype, self.pieces = torch.Size(shape), dtype, pieces

    def size(self) -> torch.Size:
        """The whole tensor's."""
        return self.shape

    def replaced(self, tensors: Iterable[Tensor]) -> Pieces:
        """The same boxes with other memory behind them."""
        return Pieces(self.shape, self.dtype, [(offsets, t) for (offsets, _), t in zip(self.pieces, tensors, strict=True)])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), t.size()) for offsets, t in self.pieces]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(t for offsets, t in self.pieces if index.offset == torch.Size(offsets))


def place(name: str, param: Tensor, axes: Axes) -> Place:
    """Where this rank's part of the parameter lies; no boxes where FSDP leaves it nothing."""
    shape = tuple(full_shape(param, name, axes))
    if isinstance(param, DTensor):
        chunk = param.__create_chunk_list__()[0]
        first, sizes = list(chunk.offsets), list(chunk.sizes)
    else:
        first, sizes = [0] * param.dim(), list(param.shape)
    held = _coordinates(name, shape, axes)
    runs = [_runs(c[o : o + n]) for c, o, n in zip(held, first, sizes, strict=True)]
    boxes = [Box(tuple(slice(a, a + n) for a, _, n in box), tuple(at for _, at, _ in box)) for box in itertools.product(*runs)]
    return Place(shape, tuple(boxes))


def _coordinates(name: str, shape: tuple[int, ...], axes: Axes) -> list[Tensor]:
    """For each dimension, the coordinates in the whole parameter that this rank's part (before FSDP) has there."""
    rule = shard_of(name)
    cut = {d for d, wanted in ((0, rule.ep), (rule.tp_dim, rule.tp_dim is not None)) if wanted and d is not None}
    out = [torch.arange(n) for n in shape]
    # Dimensions that are never cut shrink to one, so that the probe stays small whatever the parameter's size.
    lean = [n if d in cut else 1 for d, n in enumerate(shape)]
    probe = part(torch.arange(math.prod(lean)).view(lean), name, axes) if cut else None
    for d in cut:
        assert probe is not None
        out[d] = probe.movedim(d, 0).flatten(1)[:, 0] // math.prod(lean[d + 1 :]) % shape[d]
    return out


def _runs(coordinates: Tensor) -> list[tuple[int, int, int]]:
    """Stretches of consecutive coordinates: (place among them, first coordinate, length)."""
    if not len(coordinates):
        return []
    starts = [0, *((coordinates.diff() != 1).nonzero().flatten() + 1).tolist(), len(coordinates)]
    return [(a, int(coordinates[a]), b - a) for a, b in itertools.pairwise(starts)]
