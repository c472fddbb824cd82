"""From a micro-batch of the loader to what megatron-core's models take.

Rows that are one document each go in as rows (batch, tokens): causal attention never looks at what lies behind a document, so padding at
its end changes nothing. Packed rows, rows of unequal length and rows with images go in as one stream of documents (`thd`).

Under context parallelism each document (a row, or a packed document) is cut into 2 x cp slices, of which rank r takes slices r
and 2 cp - 1 - r. A packed document is first filled up to a length that divides.
Source: megatron-core, `megatron/core/utils.py` (get_batch_on_this_cp_rank), and Transformer Engine, thd_get_partitioned_indices.

Suffixes: N tokens of a micro-batch, n of them on this context rank, B rows, S tokens of a row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import IGNORE, Batch, VisionBatch, moved, share_of
from playbook_trainer.torch.parallel import tensor


@dataclass
class Inputs:
    """One micro-batch on this rank."""

    tokens: Tensor
    """int64 [B, S / cp] or [1, n]"""
    labels: Tensor
    """Of the same shape; 0 where there is nothing to predict."""
    weight: Tensor
    """float32 of the same shape; 1 where there is."""
    positions: Tensor
    """int64, of the same shape, or [3, n] with images."""
    borders: Tensor | None
    """int32 [documents + 1], of a stream: where documents end, over all context ranks. What fills one up counts as its last tokens."""
    longest: int
    num_loss: int
    """Labels of the whole micro-batch, over all context ranks."""
    vision: VisionBatch | None = None
    padding: Tensor | None = None
    """bool, of the shape of `tokens`; None where no token is padding, or where no experts are balanced."""

    def to(self, device: Any) -> Inputs:
        """The same micro-batch with its tensors on `device`."""
        return Inputs(**{name: moved(value, device) for name, value in vars(self).items()})


def make(batch: Batch, config: TrainerConfig, axes: Axes) -> Inputs:
    """This rank's share of a micro-batch, on the CPU."""
    if config.data.pack or not config.data.pad or config.model.vision is not None:  # without padding between documents
        return _stream(batch, axes, config.model.vision is not None)
    rows = config.train.micro_batch_size
    tokens, labels, positions = (t.view(rows, -1) for t in (batch.tokens_N, batch.labels_N, batch.positions))
    padding = None if batch.real_N is None else ~batch.real_N.view(rows, -1)
    if axes.cp.size > 1:
        take = slices(tokens.shape[1], axes.cp)
        tokens, labels, positions = tokens[:, take], labels[:, take], positions[:, take]
        padding = None if padding is None else padding[:, take].contiguous()
    return _inputs(tokens, labels, positions, None, 0, batch, padding=padding)


def slices(length: int, cp: Axis) -> Tensor:
    """Which of a document's places a context rank holds; int64 [length / cp]."""
    size = length // (2 * cp.size)
    first, second = cp.rank, 2 * cp.size - 1 - cp.rank
    return torch.cat([torch.arange(first * size, (first + 1) * size), torch.arange(second * size, (second + 1) * size)])


def _stream(batch: Batch, axes: Axes, visual: bool) -> Inputs:
    """A micro-batch as one stream of documents, of which this context rank has its slices, filled up to lengths that divide."""
    if axes.cp.size == 1:
        share = tensor.cut(batch, axes)
        padding = None if batch.real_N is None else ~batch.real_N.unsqueeze(0)
        tokens, labels = batch.tokens_N.unsqueeze(0), batch.labels_N.unsqueeze(0)
        positions = batch.positions if visual else batch.positions.unsqueeze(0)
        return _inputs(tokens, labels, positions, batch.cu_seqlens.to(torch.int32), batch.max_seqlen, batch, share.vision, padding)
    multiple = 2 * axes.cp.size * (axes.tp.size if axes.sequence_parallel else 1)
    index_n, borders = _document_slices(batch.cu_seqlens.tolist(), axes.cp, multiple)
    real_n = index_n >= 0
    place_n = index_n.clamp(min=0)
    tokens = batch.tokens_N[place_n].where(real_n, 0).unsqueeze(0)
    labels = batch.labels_N[place_n].where(real_n, IGNORE).unsqueeze(0)
    positions = batch.positions[..., place_n].where(real_n, 0)
    vision = None if batch.vision is None else _own_images(batch, index_n, axes)
    longest = int((borders[1:] - borders[:-1]).max())
    padding = None
    if batch.real_N is not None or int(borders[-1]) > batch.tokens_N.numel():
        padding = ~(real_n if batch.real_N is None else batch.real_N[place_n] & real_n).unsqueeze(0)
    return _inputs(tokens, labels, positions if visual else positions.unsqueeze(0), borders, longest, batch, vision, padding)


def _document_slices(cu_seqlens: list[int], cp: Axis, multiple: int) -> tuple[Tensor, Tensor]:
    """Which token of the stream lies in each place of a context rank, -1 where none does, and where documents end when filled up.

    Shapes: int64 [n], int32 [documents + 1].
    """
    index, ends = [], [0]
    for start, end in itertools.pairwise(cu_seqlens):
        length = -(-(end - start) // multiple) * multiple
        place = slices(length, cp)
        index.append((place + start).where(place < end - start, -1))
        ends.append(ends[-1] + length)
    return torch.cat(index), torch.tensor(ends, dtype=torch.int32)


def _own_images(batch: Batch, index_n: Tensor, axes: Axes) -> VisionBatch:
    """The images, with those of their tokens that this rank's rows of the decoder hold."""
    assert batch.vision is not None
    if axes.sequence_parallel:
        size = index_n.numel() // axes.tp.size
        index_n = index_n[axes.tp.rank * size : (axes.tp.rank + 1) * size]
    token_index_N = torch.full((batch.tokens_N.numel(),), -1)
    real_n = index_n >= 0
    token_index_N[index_n[real_n]] = real_n.nonzero().squeeze(1)
    return share_of(batch.vision, token_index_N)


def _inputs(
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor,
    borders: Tensor | None,
    longest: int,
    batch: Batch,
    vision: VisionBatch | None = None,
    padding: Tensor | None = None,
) -> Inputs:
    real = labels != IGNORE
    weight, labels = real.float(), labels.where(real, 0).contiguous()
    return Inputs(tokens.contiguous(), labels, weight, positions.contiguous(), borders, longest, batch.num_loss, vision, padding)
