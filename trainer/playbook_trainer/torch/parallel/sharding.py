"""Which part of each parameter a rank holds, and its first value: both follow from the parameter's name alone.

A parameter's initial value depends on the seed and its name, not on the layout: each rank draws the whole tensor on its own device, and
keeps its part. Drawing all 16 billion values of a large model takes a GPU a fraction of a second, and every layout starts equal.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import ModelConfig

Interval = tuple[int, int]
"""First and last + 1."""
Box = tuple[Interval, ...]
"""A part of a tensor: an interval of each dimension."""


Put = Callable[[str, Tensor, tuple[slice, ...], Tensor], None]
"""Sets values of a parameter, given its name, this rank's part, a box of that (all of it, if empty),
and the values in whatever precision."""


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut: dimension 0 over ep, and `tp_dim` over tp (in `blocks` equal blocks, each cut by itself).

    Experts (`ep`) are cut over etp where the rest is cut over tp.
    """

    ep: bool = False
    tp_dim: int | None = None
    blocks: int = 1


# The gate and up halves of w13 are cut each by itself, so that a rank's halves belong to the same columns.
RULES: tuple[tuple[str, Shard], ...] = (
    (r"(embed|head)\.weight$", Shard(tp_dim=0)),
    (r"attn\.[qkv]_proj\.weight$", Shard(tp_dim=0)),
    (r"attn\.o_proj\.weight$", Shard(tp_dim=1)),
    (r"mlp\.w13\.weight$", Shard(tp_dim=0, blocks=2)),
    (r"mlp\.w2\.weight$", Shard(tp_dim=1)),
    (r"experts\.w13$", Shard(ep=True, tp_dim=1, blocks=2)),
    (r"experts\.w2$", Shard(ep=True, tp_dim=2)),
)


def _shard_of(name: str) -> Shard:
    """The rule for a parameter; what no rule names is held whole by every tp and ep rank. The vision tower is never cut."""
    if name.startswith("vision."):
        return Shard()
    return next((shard for pattern, shard in RULES if re.search(pattern, name)), Shard())


def _width_axis(shard: Shard, axes: Axes) -> Axis:
    """The axis that `tp_dim` is cut over."""
    return axes.etp if shard.ep else axes.tp


def counts_in_norm(name: str, axes: Axes) -> bool:
    """Whether this rank counts its part of a gradient in the norm: what several ranks hold in common is counted once."""
    shard = _shard_of(name)
    if shard.ep:
        return axes.edp_replicate.rank == 0
    return axes.replicate.rank == 0 and (axes.tp.rank == 0 or shard.tp_dim is not None)


def is_partial_over_tp(name: str, axes: Axes) -> bool:
    """Whether each tensor-parallel rank has computed a part of the gradient only, though all hold the same values.

    So it is where a rank has seen its own heads (norms of queries and keys) or its own tokens (norms and routers behind a cut).
    """
    if axes.tp.size == 1 or name.startswith("vision."):
        return False
    if re.search(r"attn\.[qk]_norm\.weight$", name):
        return True
    if name.endswith("router.weight"):
        return axes.expert_tokens_cut
    return axes.sequence_parallel and name.endswith("norm.weight")


def held(shape: Sequence[int], name: str, axes: Axes) -> list[list[Interval]]:
    """The intervals of each dimension of a whole parameter that this rank holds before FSDP cuts further; end to end they are its part."""
    shard = _shard_of(name)
    out = [[(0, size)] for size in shape]
    if shard.ep:
        size = shape[0] // axes.ep.size
        out[0] = [(axes.ep.rank * size, (axes.ep.rank + 1) * size)]
    axis = _width_axis(shard, axes)
    if shard.tp_dim is not None and axis.size > 1:
        block = shape[shard.tp_dim] // shard.blocks
        size = block // axis.size
        starts = [i * block + axis.rank * size for i in range(shard.blocks)]
        out[shard.tp_dim] = [(start, start + size) for start in starts]
    return out


def part(full: Tensor, name: str, axes: Axes) -> Tensor:
    """This rank's part of a whole parameter, before FSDP cuts it further."""
    for dim, intervals in enumerate(held(full.shape, name, axes)):
        if intervals != [(0, full.shape[dim])]:
            full = torch.cat([full.narrow(dim, start, stop - start) for start, stop in intervals], dim=dim)
    return full


def local_boxes(param: Tensor, name: str, axes: Axes) -> list[tuple[Box, Box]]:
    """Where this rank's values lie: each box of its own tensor, and the same box of the whole parameter."""
    shape, offset = tuple(param.shape), (0,) * param.dim()
    if isinstance(param, DTensor):
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if math.prod(shape) == 0:
        return []
    windows = zip(held(full_shape(param, name, axes), name, axes), offset, shape, strict=True)
    pairs = [_inside(intervals, first, first + size) for intervals, first, size in windows]
    return [(tuple(a for a, _ in choice), tuple(b for _, b in choice)) for choice in itertools.product(*pairs)]


def _inside(intervals: Sequence[Interval], first: int, last: int) -> list[tuple[Interval, Interval]]:
    """The stretch first..last of the intervals laid end to end: as intervals counted from `first`, and as parts of the originals."""
    out, at = [], 0
    for start, stop in intervals:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            out.append(((a - first, b - first), (start + a - at, start + b - at)))
        at += stop - start
    return out


def is_second_copy(model: Any, name: str) -> bool:
    """Whether this rank holds a tied embedding for the output layer, while another stage holds it for the input and counts it."""
    return name == "embed.weight" and bool(model.config.tie_word_embeddings) and not model.options.axes.is_first_stage


def full_shape(param: Tensor, name: str, axes: Axes) -> list[int]:
    """The whole parameter's shape, from this rank's (a DTensor's shape is the one before FSDP)."""
    shape, shard = list(param.shape), _shard_of(name)
    if shard.ep:
        shape[0] *= axes.ep.size
    if shard.tp_dim is not None:
        shape[shard.tp_dim] *= _width_axis(shard, axes).size
    return shape


def count_parameters(model: nn.Module, axes: Axes, device: torch.device) -> tuple[int, int]:
    """Number of parameters of the whole model, and of those that are trained. Counts the full model even if this rank holds a shard."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for name, param in model.named_parameters():
        size = 0 if is_second_copy(model, name) else math.prod(full_shape(param, name, axes))
        counts += torch.tensor([size, size if param.requires_grad else 0], device=device)
    axes.pp.all_reduce(counts)
    whole, trained = counts.tolist()
    return whole, trained


def set_values(name: str, local: Tensor, at: tuple[slice, ...], values: Tensor) -> None:
    """Copy `values` into a box of the parameter, in the parameter's precision."""
    local[at].copy_(values)


@torch.no_grad()
def fill(
    model: nn.Module,
    axes: Axes,
    value: Callable[[str, list[int], torch.device], Tensor],
    device: torch.device | None = None,
    write: Put = set_values,
) -> None:
    """Set each parameter to this rank's part of `value(name, full shape, device)`,
    drawn on `device` (by default where the parameter is).
    """
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        local_part = part(value(name, full_shape(param, name, axes), device or local.device), name, axes)
        if isinstance(param, DTensor):
            # src_data_rank=None: every rank has the same tensor at hand, nothing is sent.
            local_part = distribute_tensor(local_part, param.device_mesh, param.placements, src_data_rank=None).to_local()
        write(name, local, (), local_part)


def initial_value(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Callable[[str, list[int], torch.device], Tensor]:
    """Normal weights, ones for norms, zeros for biases, drawn on the device: float32 values that `dtype` holds exactly.

    megatron-core makes its float32 weights of the 16-bit ones that it computes with. Weights that begin between two numbers of 16 bits
    follow an update smaller than their distance at once, some of them; those that begin on one do so after several.
    So both backends begin on one.
    Source: initializer_range of the published Qwen3 configurations (0.02); megatron-core,
    `distrib_optimizer.py` (main parameters are clones).
    """

    def value(name: str, shape: list[int], device: torch.device) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, device=device)
        if re.search(r"norm\d?\.weight$", name):
            return torch.ones(shape, device=device)
        generator = torch.Generator(device=device).manual_seed((seed << 32) + zlib.crc32(name.encode()))
        drawn = torch.randn(shape, device=device, generator=generator).mul_(config.init_std)
        return drawn if dtype == drawn.dtype else drawn.copy_(drawn.to(dtype))

    return value
