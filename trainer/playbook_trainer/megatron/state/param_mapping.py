"""Which part of our whole tensors each of megatron-core's holds, on any rank of any layout.

megatron-core fuses queries, keys and values by group of heads, cuts matrices over tensor-parallel ranks (the gate and up halves each by
itself), numbers the layers of each pipeline chunk from zero, and keeps a rank's experts apart. All of that is said here as boxes: the same
numbers lie in this box of its tensor and in that box of ours (`huggingface.names.rules`, under the names of the torch backend).

Letters in shapes: H hidden size, G groups of heads, d head size, E experts, W width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from playbook_trainer.config.tree import ModelConfig
from playbook_trainer.huggingface.names import Box, Shape, rules, whole
from playbook_trainer.megatron.state.sharded import local_shape


@dataclass(frozen=True)
class Place:
    """This rank on the axes that cut tensors."""

    tp: int = 0
    tp_size: int = 1
    etp: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class Piece:
    """The same numbers: a box of megatron-core's tensor and a box of ours."""

    here: Box
    ours: str
    there: Box


@dataclass(frozen=True)
class Held:
    """One of megatron-core's tensors on this rank, and the pieces that fill it."""

    name: str
    tensor: Tensor
    pieces: tuple[Piece, ...]


PLAIN = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "attn_norm.weight",
    "self_attention.q_layernorm.weight": "attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "attn.k_norm.weight",
    "self_attention.linear_proj.weight": "attn.o_proj.weight",
    "self_attention.linear_q_proj.weight": "attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "attn.q_a_norm.weight",
    "self_attention.linear_q_up_proj.weight": "attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "attn.kv_a_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "attn.kv_a_norm.weight",
    "self_attention.linear_kv_up_proj.weight": "attn.kv_b_proj.weight",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm.weight",
    "mlp.linear_fc2.weight": "mlp.w2.weight",
    "mlp.router.weight": "moe.router.weight",
    "mlp.router.expert_bias": "moe.router.bias",
    "mlp.shared_experts.linear_fc2.weight": "moe.shared.w2.weight",
}
"""Tensors of a layer that are one of ours, whole or cut over tp in the one dimension in which they are shorter."""

_HALVES = {"mlp.linear_fc1.weight": "mlp.w13.weight", "mlp.shared_experts.linear_fc1.weight": "moe.shared.w13.weight"}
"""Tensors of a layer with a gate half and an up half, each cut over tp."""

_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<apart>\d+)\.)?linear_fc(?P<which>[12])\.weight(?P<stacked>\d*)$")
"""An expert's matrix: a module each, or numbered parameters of one module (Transformer Engine's grouped layers)."""

TOP = {
    "embedding.word_embeddings.weight": "embed.weight",
    "output_layer.weight": "head.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}

_DEPTH = {
    "enorm.weight": "embed_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "proj.weight",
    "final_layernorm.weight": "norm.weight",
}
"""What a depth of multi-token prediction has besides its layer."""


def held(model: nn.Module, config: ModelConfig, place: Place) -> list[Held]:
    """The tensors of a chunk of the model (GPTModel, not wrapped) with their pieces; a vision tower, under `vision.`, is held whole."""
    shapes = {rule.ours: rule.shape for rule in rules(config)}
    return [Held(name, tensor, tuple(_pieces(model, config, shapes, place, name, local_shape(tensor)))) for name, tensor in tensors(model)]


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the routers' biases, which are buffers."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))


def _pieces(model: Any, config: ModelConfig, shapes: dict[str, Shape], place: Place, name: str, shape: Shape) -> list[Piece]:
    if name.startswith("vision."):
        return [Piece(whole(shape), name, whole(shape))]
    if name in TOP:
        tied = name == "output_layer.weight" and config.tie_word_embeddings
        return [_cut("embed.weight" if tied else TOP[name], shapes, shape, place)]
    prefix, layer, rest = _layer(model, name)
    if rest in _DEPTH and prefix.startswith("mtp."):
        return [_cut(prefix + _DEPTH[rest], shapes, shape, place)]
    if rest in PLAIN:
        return [_cut(prefix + PLAIN[rest], shapes, shape, place)]
    if rest in _HALVES:
        return _halves(prefix + _HALVES[rest], shapes[prefix + _HALVES[rest]], place.tp, place.tp_size)
    if rest == "self_attention.linear_qkv.weight":
        return _fused(config, prefix, place)
    if match := _EXPERT.match(rest):
        expert = layer.mlp.local_expert_indices[int(match["apart"] or match["stacked"])]
        return _expert(shapes, prefix, match["which"], expert, place)
    raise AssertionError(f"{name} of megatron-core has no counterpart")


def _layer(model: Any, name: str) -> tuple[str, Any, str]:
    """Our prefix of the layer that a parameter belongs to, the layer, and what is left of the name."""
    if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = model.decoder.layers[int(match[1])]
        return f"layers.{layer.layer_number - 1}.", layer, match[2]
    if match := re.match(r"mtp\.layers\.(\d+)\.(?:(transformer_layer|mtp_model_layer)\.)?(.*)", name):
        depth = model.mtp.layers[int(match[1])]
        return f"mtp.{match[1]}.", getattr(depth, match[2]) if match[2] else None, match[3]
    raise AssertionError(f"{name} of megatron-core has no counterpart")


def _cut(ours: str, shapes: dict[str, Shape], shape: Shape, place: Place) -> Piece:
    """A tensor that is one of ours, or this tp rank's stretch of it in the dimension in which it is shorter."""
    there = tuple((place.tp * n, (place.tp + 1) * n) if n < all_ else (0, n) for n, all_ in zip(shape, shapes[ours], strict=True))
    return Piece(whole(shape), ours, there)


def _halves(ours: str, shape: Shape, rank: int, size: int, first: int | None = None) -> list[Piece]:
    """Gate rows over up rows; `first` is an expert's number, where ours is stacked over experts."""
    *_, rows, columns = shape
    half = rows // 2
    part = half // size
    out = []
    for i in range(2):
        start = i * half + rank * part
        there: Box = ((start, start + part), (0, columns))
        out.append(Piece(((i * part, (i + 1) * part), (0, columns)), ours, there if first is None else ((first, first + 1), *there)))
    return out


def _fused(config: ModelConfig, prefix: str, place: Place) -> list[Piece]:
    """Queries, keys and values of this rank's groups: for each group its query heads, then its key head, then its value head."""
    size, d = config.hidden_size, config.head_dim
    groups, per_group = config.num_kv_heads // place.tp_size, config.num_heads // config.num_kv_heads
    out, row = [], 0
    for group in range(place.tp * groups, (place.tp + 1) * groups):
        for letter, rows in (("q", per_group * d), ("k", d), ("v", d)):
            there = ((group * rows, (group + 1) * rows), (0, size))
            out.append(Piece(((row, row + rows), (0, size)), f"{prefix}attn.{letter}_proj.weight", there))
            row += rows
    return out


def _expert(shapes: dict[str, Shape], prefix: str, which: str, expert: int, place: Place) -> list[Piece]:
    """One expert's matrix, cut over etp."""
    if which == "1":
        ours = f"{prefix}moe.experts.w13"
        return _halves(ours, shapes[ours], place.etp, place.etp_size, first=expert)
    ours = f"{prefix}moe.experts.w2"
    _, rows, columns = shapes[ours]
    part = columns // place.etp_size
    there = ((expert, expert + 1), (0, rows), (place.etp * part, (place.etp + 1) * part))
    return [Piece(((0, rows), (0, part)), ours, there)]
