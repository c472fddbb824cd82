"""The vision tower of Qwen3-VL: packed patches in, one embedding per visual token out, for the input and for the first decoder layers.

Suffixes: P patches (all images end to end, in merge order), V = P / merge^2 visual tokens, I images, D tower width, H heads, d head size,
C values of a patch, r = d / 2 rotary pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from playbook.errors import ConfigError
from playbook_trainer.config.sections import broken
from playbook_trainer.config.tree import VisionConfig
from playbook_trainer.data.batch import VisionBatch
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.model.attention import attend, cudnn_width

_NORM_EPS = 1e-6
_ROTARY_THETA = 10_000.0


class VisionTower(nn.Module):
    """Patches to visual tokens: position embeddings, transformer blocks, a merger, and one DeepStack merger per tapped block.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    def __init__(
        self, config: VisionConfig, out_size: int, *, recompute: bool = False, attention: str = "auto", fused: bool = False
    ) -> None:
        """Build the tower; `out_size` is the decoder's hidden size."""
        super().__init__()
        _check(config)
        self.recompute = recompute
        self.head_dim = config.hidden_size // config.num_heads
        self.taps = list(config.deepstack_layers)
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        # A Conv3d whose stride equals its kernel is a linear map of the flattened patch; as a Linear it is one matrix product.
        self.patch_embed = nn.Linear(patch, config.hidden_size)
        self.pos_embed = Positions(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config, attention, fused=fused) for _ in range(config.depth))
        self.merger = Merger(config, out_size, norm_after=False)
        self.deepstack = nn.ModuleList(Merger(config, out_size, norm_after=True) for _ in self.taps)

    def forward(self, vision: VisionBatch, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The visual tokens for the decoder's input, and those that its first layers add (DeepStack), one for each.

        The mergers run after the last block, so that `vision` and `projector` are ranges side by side and not interleaved.

        Shapes: returns (V, out_size) and a list of (V, out_size), in `dtype`, the precision of the parameters at hand.
        """
        with range_("vision") as span:
            x_PD = self.patch_embed(vision.pixels_PC.to(dtype))
            x_PD = x_PD + self.pos_embed(vision.pos_index_4P, vision.pos_weight_4P).to(dtype)
            x_PD = span.enter(x_PD)
            cos_Pr, sin_Pr = rotation(vision.rotary_P2, self.head_dim)
            tapped = []
            for number, block in enumerate(self.blocks):
                inputs = (x_PD, cos_Pr, sin_Pr, vision.cu_seqlens, vision.max_seqlen)
                x_PD = checkpoint(block, *inputs, use_reentrant=False) if self.recompute else block(*inputs)
                if number in self.taps:
                    tapped.append(x_PD)
                    # What follows adds up its gradients before the merger's joins them. FSDP has that order by itself;
                    # of three, another rounds otherwise.
                    x_PD = x_PD.view_as(x_PD)
            x_PD = span.exit(x_PD)
        with range_("projector") as span:
            out = [self.merger(span.enter(x_PD))]
            out += [merger(t_PD) for merger, t_PD in zip(self.deepstack, tapped, strict=True)]
            out[-1] = span.exit(out[-1])  # the last made is the first that the backward pass reaches
        return out[0], out[1:]


class Positions(nn.Embedding):
    """The learned positions. Read by the module's own call: whoever shards or gathers parameters does it around that."""

    def forward(self, index_4P: Tensor, weight_4P: Tensor) -> Tensor:
        """Interpolated in float32: (P, D). One neighbour at a time, so that (4, P, D) never exists."""
        terms = (super(Positions, self).forward(index).float() * weight[:, None] for index, weight in zip(index_4P, weight_4P, strict=True))
        return sum(terms, start=torch.zeros((), device=self.weight.device))


class VisionBlock(nn.Module):
    """Pre-norm attention inside each image, then an MLP.

    `before`, `projected` and `after` are plain tensor code without data-dependent control flow, for torch.compile. With `fused`, one Triton
    kernel takes the place of what `before` does after the projection.
    """

    def __init__(self, config: VisionConfig, attention: str = "auto", *, fused: bool = False) -> None:
        super().__init__()
        size, self.attention = config.hidden_size, attention
        self.num_heads, self.head_dim = config.num_heads, config.hidden_size // config.num_heads
        self.width = cudnn_width(self.head_dim) if fused and attention == "cudnn" else self.head_dim
        self.turn = _fused_turn() if fused else None
        self.norm1 = nn.LayerNorm(size, eps=_NORM_EPS)
        self.norm2 = nn.LayerNorm(size, eps=_NORM_EPS)
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)
        self.fc1 = nn.Linear(size, config.ffn_size)
        self.fc2 = nn.Linear(config.ffn_size, size)

    def forward(self, x_PD: Tensor, cos_Pr: Tensor, sin_Pr: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """The block's output, (P, D)."""
        if self.turn is None:
            q_PHd, k_PHd, v_PHd = self.before(x_PD, cos_Pr, sin_Pr)
        else:
            q_PHd, k_PHd, v_PHd = self.turn(self.projected(x_PD), cos_Pr, sin_Pr, self.width)
        scale = None if self.width == self.head_dim else self.head_dim**-0.5
        a_PHd = attend(
            q_PHd, k_PHd, v_PHd, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=False, backend=self.attention, scale=scale
        )
        return self.after(x_PD, a_PHd)

    def before(self, x_PD: Tensor, cos_Pr: Tensor, sin_Pr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values, each (P, H, d)."""
        q_PHd, k_PHd, v_PHd = self.projected(x_PD).unbind(1)
        return rotate(q_PHd, cos_Pr, sin_Pr), rotate(k_PHd, cos_Pr, sin_Pr), v_PHd

    def projected(self, x_PD: Tensor) -> Tensor:
        """Queries, keys and values, (P, 3, H, d), not yet rotated."""
        return self.qkv(self.norm1(x_PD)).unflatten(-1, (3, self.num_heads, -1))

    def after(self, x_PD: Tensor, a_PHd: Tensor) -> Tensor:
        """Both residual sums, from the block's input and the attention's output."""
        x_PD = x_PD + self.proj(a_PHd[..., : self.head_dim].flatten(1))
        return x_PD + self.fc2(gelu(self.fc1(self.norm2(x_PD)), approximate="tanh"))


class Merger(nn.Module):
    """Joins the merge x merge patches of a block, which lie end to end, into one visual token of the decoder's width."""

    def __init__(self, config: VisionConfig, out_size: int, *, norm_after: bool) -> None:
        super().__init__()
        joined = config.hidden_size * config.spatial_merge_size**2
        self.joined, self.norm_after = joined, norm_after
        self.norm = nn.LayerNorm(joined if norm_after else config.hidden_size, eps=_NORM_EPS)
        self.fc1 = nn.Linear(joined, joined)
        self.fc2 = nn.Linear(joined, out_size)

    def forward(self, x_PD: Tensor) -> Tensor:
        """Visual tokens, (V, out_size)."""
        if self.norm_after:
            x = self.norm(x_PD.reshape(-1, self.joined))
        else:
            x = self.norm(x_PD).reshape(-1, self.joined)
        return self.fc2(gelu(self.fc1(x)))


def _fused_turn() -> Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """The Triton kernel; imported where it is asked for, since hosts without a GPU have no Triton."""
    from playbook_trainer.torch.kernels.rotary import split_turned

    return split_turned


def rotation(rotary_P2: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each patch's angles, rows first, then columns; float32 (P, head_dim / 2)."""
    steps = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=rotary_P2.device)
    frequencies = _ROTARY_THETA ** (-steps / (head_dim // 2))
    angles = (rotary_P2[:, :, None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def rotate(x_PHd: Tensor, cos_Pr: Tensor, sin_Pr: Tensor) -> Tensor:
    """Rotary embedding in float32; pair i is (i, i + d / 2)."""
    a, b = x_PHd.float().chunk(2, dim=-1)
    cos, sin = cos_Pr[:, None].float(), sin_Pr[:, None].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_PHd.dtype)


def _check(config: VisionConfig) -> None:
    taps = config.deepstack_layers
    rules = {
        f"vision.hidden_size {config.hidden_size} over {config.num_heads} heads must give a head size in multiples of 4; "
        "change vision.hidden_size or vision.num_heads": config.hidden_size % (4 * config.num_heads),
        f"vision.num_position_embeddings {config.num_position_embeddings} is no square number; the grid of positions is": (
            math.isqrt(config.num_position_embeddings) ** 2 != config.num_position_embeddings
        ),
        f"vision.deepstack_layers {taps} must rise and lie in 0..{config.depth - 1}, the tower's blocks": (
            taps != sorted(set(taps)) or any(not 0 <= t < config.depth for t in taps)
        ),
    }
    if problems := broken(rules):
        raise ConfigError(problems[0])
