"""Which part of each parameter a rank holds, and its first value: both follow from the parameter's name alone.

A parameter's initial value depends on the seed and its name, not on the layout: each rank draws the whole tensor on its own device, and
keeps its part. Drawing all 16 billion values of a large model takes a GPU a fraction of a second, and every layout starts equal.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from playbook_trainer.config import ModelConfig
from playbook_trainer.parallel.axes import Axes, Axis


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


def shard_of(name: str) -> Shard:
    """The rule for a parameter; what no rule names is held whole by every tp and ep rank. The vision tower is never cut."""
    if name.startswith("vision."):
        return Shard()
    return next((shard for pattern, shard in RULES if re.search(pattern, name)), Shard())


def width_axis(shard: Shard, axes: Axes) -> Axis:
    """The axis that `tp_dim` is cut over."""
    return axes.etp if shard.ep else axes.tp


def counts_in_norm(name: str, axes: Axes) -> bool:
    """Whether this rank counts its part of a gradient in the norm: what several ranks hold in common is counted once."""
    shard = shard_of(name)
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


def part(full: Tensor, name: str, axes: Axes) -> Tensor:
    """This rank's part of a whole parameter, before FSDP cuts it further."""
    shard = shard_of(name)
    if shard.ep:
        full = full.chunk(axes.ep.size, dim=0)[axes.ep.rank]
    axis = width_axis(shard, axes)
    if shard.tp_dim is not None and axis.size > 1:
        blocks = full.chunk(shard.blocks, dim=shard.tp_dim)
        full = torch.cat([b.chunk(axis.size, dim=shard.tp_dim)[axis.rank] for b in blocks], dim=shard.tp_dim)
    return full


def full_shape(param: Tensor, name: str, axes: Axes) -> list[int]:
    """The whole parameter's shape, from this rank's (a DTensor's shape is the one before FSDP)."""
    shape, shard = list(param.shape), shard_of(name)
    if shard.ep:
        shape[0] *= axes.ep.size
    if shard.tp_dim is not None:
        shape[shard.tp_dim] *= width_axis(shard, axes).size
    return shape


def count_parameters(model: nn.Module, axes: Axes, device: torch.device) -> tuple[int, int]:
    """Parameters of the whole model and those of them that are trained, whatever share of them this rank holds."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for name, param in model.named_parameters():
        size = math.prod(full_shape(param, name, axes))
        counts += torch.tensor([size, size if param.requires_grad else 0], device=device)
    if axes.pp.size > 1:
        dist.all_reduce(counts, group=axes.pp.group)
    whole, trained = counts.tolist()
    return whole, trained


@torch.no_grad()
def fill(model: nn.Module, axes: Axes, value: Callable[[str, list[int], torch.device], Tensor]) -> None:
    """Set each parameter to this rank's part of `value(name, full shape, device)`."""
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        mine = part(value(name, full_shape(param, name, axes), local.device), name, axes).to(local.dtype)
        if isinstance(param, DTensor):
            # src_data_rank=None: every rank has the same tensor at hand, nothing is sent.
            mine = distribute_tensor(mine, param.device_mesh, param.placements, src_data_rank=None).to_local()
        local.copy_(mine)


def initial_value(config: ModelConfig, seed: int) -> Callable[[str, list[int], torch.device], Tensor]:
    """Normal weights, ones for norms, zeros for biases, drawn on the device.

    Source: initializer_range of the published Qwen3 configurations (0.02).
    """

    def value(name: str, shape: list[int], device: torch.device) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, device=device)
        if re.search(r"norm\d?\.weight$", name):
            return torch.ones(shape, device=device)
        generator = torch.Generator(device=device).manual_seed((seed << 32) + zlib.crc32(name.encode()))
        return torch.randn(shape, device=device, generator=generator).mul_(config.init_std)

    return value
