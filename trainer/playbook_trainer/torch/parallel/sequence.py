"""Sequence parallelism: outside tensor-parallel regions a rank holds an equal stretch of its tp group's tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from playbook_trainer.axes import Axes
from playbook_trainer.data.batch import Batch, share_of


def local_tokens(num_tokens: int, axes: Axes) -> int:
    """Number of tokens that a rank holds between layers, out of those of its tp group."""
    return num_tokens // axes.tp.size if axes.sequence_parallel else num_tokens


def routed(real_N: Tensor | None, axes: Axes) -> Tensor | None:
    """Which of the tokens that this rank routes are real, from those of its tp group; None where all are."""
    return real_N.chunk(axes.tp.size)[axes.tp.rank] if real_N is not None and axes.expert_tokens_cut else real_N


def cut(batch: Batch, axes: Axes) -> Batch:
    """The batch with the visual tokens of this rank's stretch; tokens, labels and positions are needed whole inside the regions."""
    if batch.vision is None or not axes.sequence_parallel:
        return batch
    num = local_tokens(batch.tokens_N.numel(), axes)
    place_N = torch.full((batch.tokens_N.numel(),), -1)
    place_N[axes.tp.rank * num : (axes.tp.rank + 1) * num] = torch.arange(num)
    return replace(batch, vision=share_of(batch.vision, place_N))
