"""A parameter as boxes of the whole tensor: what a checkpoint stores, so that any layout can read what another has written.

Where a box lies is asked from `sharding.local_boxes`, so the two halves of `w13` under tensor parallelism are two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from playbook_trainer.axes import Axes
from playbook_trainer.torch.parallel.sharding import full_shape, local_boxes


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
        return Pieces(self.shape, values.dtype, self.cut(values))

    def made(self, make: Callable[[], Tensor], dtype: torch.dtype) -> Pieces:
        """As `of`, of values that are made anew whenever they are asked for, so that they take memory for that moment only."""
        return _Made(self.shape, dtype, lambda: self.cut(make()))

    def cut(self, values: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of `values`, each with its offsets in the whole tensor."""
        return [(b.offsets, values[b.own]) for b in self.boxes]


class Pieces:
    """What this rank holds of a whole tensor, as torch.distributed.checkpoint asks a tensor for it (the methods with two underscores)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
        self.shape, self.dtype, self._pieces = torch.Size(shape), dtype, pieces

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes, each with where it begins in the whole tensor."""
        return self._pieces

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
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


class _Made(Pieces):
    """Pieces without memory of their own."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], list[tuple[tuple[int, ...], Tensor]]]) -> None:
        super().__init__(shape, dtype, [])
        self._make = make

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes, computed on each access."""
        return self._make()


def place(name: str, param: Tensor, axes: Axes) -> Place:
    """Where this rank's part of the parameter lies; no boxes where FSDP leaves it nothing."""
    boxes = (Box(tuple(slice(a, b) for a, b in own), tuple(first for first, _ in whole)) for own, whole in local_boxes(param, name, axes))
    return Place(tuple(full_shape(param, name, axes)), tuple(boxes))
