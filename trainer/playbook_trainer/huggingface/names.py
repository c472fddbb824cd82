"""The table between our tensors and those of Hugging Face checkpoints: Qwen3, Qwen3-MoE, Qwen3-VL, Qwen3-VL-MoE and DeepSeek-V3.

The layouts differ in names, and in how matrices are stacked: our `w13` is gate over up in one matrix; text checkpoints keep each expert's
matrices apart; published vision-language checkpoints stack the experts with input and output swapped; the patch embedding is stored as a
Conv3d. Each of our tensors is one Rule; each tensor of the checkpoint is one Piece, a box of ours. Both directions, the shapes, the list of
names and reading no more than a box of a tensor come from the same table.

Letters in shapes: E experts, F expert (or MLP) width, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from playbook_trainer.config.tree import ModelConfig, VisionConfig

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A part of a tensor: first and last + 1 of each dimension."""

HEAD = "lm_head.weight"


class Source(Protocol):
    """Tensors of a checkpoint by name, read in parts."""

    shapes: Mapping[str, Shape]

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """This part of a tensor; dimensions that are not named are read whole."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint, and the box of ours that holds the same numbers."""

    name: str
    shape: Shape
    at: Box
    swapped: bool = False
    """Stored with the last two dimensions swapped, as published; in our order (transformers 5 writes it so) it is read as well."""

    def accepted(self) -> list[Shape]:
        """The shapes in which it may be stored."""
        return [self.shape, (*self.shape[:-2], self.shape[-1], self.shape[-2])] if self.swapped else [self.shape]

    def stored(self, whole: Tensor) -> Tensor:
        """What the checkpoint holds, from our whole tensor (a view where possible)."""
        part = whole[slices(self.at)]
        return (part.transpose(-1, -2) if self.swapped else part).reshape(self.shape)

    def read(self, source: Source, box: Box) -> Tensor:
        """The box (of our tensor, inside this piece) from the checkpoint."""
        local = [slice(a - first, b - first) for (a, b), (first, _) in zip(box, self.at, strict=True)]
        shape = tuple(source.shapes[self.name])
        if len(shape) > len(local):  # the convolution's kernel: our columns are its last dimensions, flattened
            part = source.read(self.name, (local[0],)).flatten(1)[:, local[1]]
        elif self.swapped and shape == self.shape:
            part = source.read(self.name, (*local[:-2], local[-1], local[-2])).transpose(-1, -2)
        else:
            part = source.read(self.name, tuple(local[len(local) - len(shape) :]))  # one expert's matrix lacks the first dimension
        return part.reshape(sizes(box))


@dataclass(frozen=True)
class Rule:
    """One of our tensors and the tensors of the checkpoint that hold the same numbers."""

    ours: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def theirs(self) -> dict[str, Shape]:
        """The checkpoint's tensors and their shapes, as published."""
        return {piece.name: piece.shape for piece in self.pieces}

    def split(self, whole: Tensor) -> list[Tensor]:
        """The checkpoint's tensors from ours, in the order of `theirs`."""
        return [piece.stored(whole) for piece in self.pieces]

    def read(self, source: Source, box: Box) -> Tensor:
        """A box of ours, from the parts of the checkpoint's tensors that it needs and no others."""
        parts = [(overlap, piece.read(source, overlap)) for piece in self.pieces if (overlap := _intersect(piece.at, box))]
        if len(parts) == 1:
            return parts[0][1].contiguous()
        out = torch.empty(sizes(box), dtype=reduce(torch.promote_types, (part.dtype for _, part in parts)))
        for overlap, part in parts:
            out[tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(overlap, box, strict=True))] = part
        return out


class InMemory:
    """A checkpoint's tensors that lie in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes: Mapping[str, Shape] = {name: tuple(t.shape) for name, t in tensors.items()}

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A view of this part."""
        return self._tensors[name][where]


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a whole tensor of this shape."""
    return tuple((0, n) for n in shape)


def sizes(box: Box) -> Shape:
    """The shape of what a box holds."""
    return tuple(b - a for a, b in box)


def slices(box: Box) -> tuple[slice, ...]:
    """The box as a tuple of slices, to index a tensor with."""
    return tuple(slice(a, b) for a, b in box)


def _intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(p < q for p, q in out) else None


def rules(config: ModelConfig) -> list[Rule]:
    """All rules for a model: for each of our tensors, the checkpoint's tensors that hold the same numbers. In the order of the model."""
    base = "model." if config.vision is None else "model.language_model."
    vocab = (config.vocab_size, config.hidden_size)
    depths = range(config.num_layers, config.num_layers + config.mtp_layers)
    table = [_copies("embed.weight", [f"{base}embed_tokens.weight", *(f"{base}layers.{i}.embed_tokens.weight" for i in depths)], vocab)]
    for i in range(config.num_layers):
        table += _layer(config, i, f"layers.{i}.", f"{base}layers.{i}.")
    table.append(_same("norm.weight", f"{base}norm.weight", (config.hidden_size,)))
    if not config.tie_word_embeddings:
        table.append(_copies("head.weight", [HEAD, *(f"{base}layers.{i}.shared_head.head.weight" for i in depths)], vocab))
    for depth, i in enumerate(depths):
        table += _prediction(config, f"mtp.{depth}.", f"{base}layers.{i}.") + _layer(config, i, f"mtp.{depth}.", f"{base}layers.{i}.")
    return table + (_vision(config.vision, config.hidden_size) if config.vision is not None else [])


def _layer(config: ModelConfig, index: int, ours: str, theirs: str) -> list[Rule]:
    """A decoder layer; those of multi-token prediction are like the last one."""
    size = config.hidden_size
    attention = _mla(config) if config.attention == "mla" else _gqa(config)
    table = [_same(f"{ours}attn.{name}.weight", f"{theirs}self_attn.{their}.weight", shape) for name, (their, shape) in attention.items()]
    table.append(_same(f"{ours}attn_norm.weight", f"{theirs}input_layernorm.weight", (size,)))
    table.append(_same(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight", (size,)))
    if index < config.dense_layers:
        return table + _mlp(f"{ours}mlp.", f"{theirs}mlp.", config.ffn_size, size)
    table.append(_same(f"{ours}moe.router.weight", f"{theirs}mlp.gate.weight", (config.num_experts, size)))
    if config.router_bias:
        table.append(_same(f"{ours}moe.router.bias", f"{theirs}mlp.gate.e_score_correction_bias", (config.num_experts,)))
    if config.shared_expert_ffn_size:
        table += _mlp(f"{ours}moe.shared.", f"{theirs}mlp.shared_experts.", config.shared_expert_ffn_size, size)
    experts = _experts_apart if config.vision is None else _experts_stacked
    return table + experts(config, f"{ours}moe.experts.", f"{theirs}mlp.experts.")


def _gqa(config: ModelConfig) -> dict[str, tuple[str, Shape]]:
    """Grouped-query attention: our name to theirs and the shape."""
    size, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"q_proj": (q, size), "k_proj": (kv, size), "v_proj": (kv, size), "o_proj": (size, q)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return {name: (name, shape) for name, shape in shapes.items()}


def _mla(config: ModelConfig) -> dict[str, tuple[str, Shape]]:
    """Multi-head latent attention likewise: a is the projection down to the compressed row, b the one up to the heads."""
    size, heads, q_rank, rank = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    table: dict[str, tuple[str, Shape]] = {}
    if q_rank:
        table |= {"q_a_proj": ("q_a_proj", (q_rank, size)), "q_b_proj": ("q_b_proj", (heads * config.head_dim, q_rank))}
    else:
        table["q_proj"] = ("q_proj", (heads * config.head_dim, size))
    table["kv_a_proj"] = ("kv_a_proj_with_mqa", (rank + config.qk_rope_head_dim, size))
    table["kv_b_proj"] = ("kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), rank))
    table["o_proj"] = ("o_proj", (size, heads * config.v_head_dim))
    if config.qk_norm:
        table |= {"q_a_norm": ("q_a_layernorm", (q_rank,))} if q_rank else {}
        table["kv_a_norm"] = ("kv_a_layernorm", (rank,))
    return table


def _mlp(ours: str, theirs: str, width: int, size: int) -> list[Rule]:
    """A SwiGLU layer."""
    halves = tuple(
        Piece(f"{theirs}{name}_proj.weight", (width, size), ((i * width, (i + 1) * width), (0, size)))
        for i, name in enumerate(("gate", "up"))
    )
    return [Rule(f"{ours}w13.weight", (2 * width, size), halves), _same(f"{ours}w2.weight", f"{theirs}down_proj.weight", (size, width))]


def _prediction(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """What a depth of multi-token prediction has besides its layer: two norms, the projection of both, and the norm before the head.

    Source: DeepSeek-V3's README_WEIGHTS.md, which places it in the checkpoint as one more layer, with copies of embedding and head.
    """
    size = config.hidden_size
    norms = {"embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
    table = [_same(f"{ours}{name}.weight", f"{theirs}{their}.weight", (size,)) for name, their in norms.items()]
    return [*table, _same(f"{ours}proj.weight", f"{theirs}eh_proj.weight", (size, 2 * size))]


def _experts_apart(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """Text checkpoints: a gate, an up and a down matrix for each expert."""
    num, width, size = config.num_experts, config.expert_ffn_size, config.hidden_size
    gate_up = tuple(
        Piece(f"{theirs}{e}.{name}_proj.weight", (width, size), ((e, e + 1), (i * width, (i + 1) * width), (0, size)))
        for e in range(num)
        for i, name in enumerate(("gate", "up"))
    )
    down = tuple(Piece(f"{theirs}{e}.down_proj.weight", (size, width), ((e, e + 1), (0, size), (0, width))) for e in range(num))
    return [Rule(f"{ours}w13", (num, 2 * width, size), gate_up), Rule(f"{ours}w2", (num, size, width), down)]


def _experts_stacked(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """Vision-language checkpoints: all experts in one tensor, (E, input, output)."""
    num, width, size = config.num_experts, config.expert_ffn_size, config.hidden_size
    return [
        _swapped(f"{ours}w13", f"{theirs}gate_up_proj", (num, 2 * width, size)),
        _swapped(f"{ours}w2", f"{theirs}down_proj", (num, size, width)),
    ]


def _vision(vision: VisionConfig, out_size: int) -> list[Rule]:
    """The vision tower."""
    ours, theirs, size, ffn = "vision.", "model.visual.", vision.hidden_size, vision.ffn_size
    kernel = (size, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    flat = (size, math.prod(kernel[1:]))
    table = [
        Rule(f"{ours}patch_embed.weight", flat, (Piece(f"{theirs}patch_embed.proj.weight", kernel, whole(flat)),)),
        _same(f"{ours}patch_embed.bias", f"{theirs}patch_embed.proj.bias", (size,)),
        _same(f"{ours}pos_embed.weight", f"{theirs}pos_embed.weight", (vision.num_position_embeddings, size)),
    ]
    for i in range(vision.depth):
        a, b = f"{ours}blocks.{i}.", f"{theirs}blocks.{i}."
        table += _linear(f"{a}qkv", f"{b}attn.qkv", 3 * size, size) + _linear(f"{a}proj", f"{b}attn.proj", size, size)
        table += _linear(f"{a}fc1", f"{b}mlp.linear_fc1", ffn, size) + _linear(f"{a}fc2", f"{b}mlp.linear_fc2", size, ffn)
        table += _norm(f"{a}norm1", f"{b}norm1", size) + _norm(f"{a}norm2", f"{b}norm2", size)
    joined = size * vision.spatial_merge_size**2
    mergers = [(f"{ours}merger.", f"{theirs}merger.", size)]
    mergers += [(f"{ours}deepstack.{j}.", f"{theirs}deepstack_merger_list.{j}.", joined) for j in range(len(vision.deepstack_layers))]
    for a, b, normed in mergers:
        table += _norm(f"{a}norm", f"{b}norm", normed)
        table += _linear(f"{a}fc1", f"{b}linear_fc1", joined, joined) + _linear(f"{a}fc2", f"{b}linear_fc2", out_size, joined)
    return table


def _copies(ours: str, theirs: Sequence[str], shape: Shape) -> Rule:
    """One tensor that the checkpoint holds several times."""
    return Rule(ours, shape, tuple(Piece(name, shape, whole(shape)) for name in theirs))


def _same(ours: str, theirs: str, shape: Shape) -> Rule:
    """The same tensor under another name."""
    return Rule(ours, shape, (Piece(theirs, shape, whole(shape)),))


def _swapped(ours: str, theirs: str, shape: Shape) -> Rule:
    """Stacked matrices, stored with input and output swapped, as published; transformers 5 writes them unswapped, and both are read.

    transformers tells the two apart by shape alone, and takes square matrices for unswapped ones. So must we.
    """
    stored = (shape[0], shape[2], shape[1])
    return Rule(ours, shape, (Piece(theirs, stored, whole(shape), swapped=stored != shape),))


def _linear(ours: str, theirs: str, rows: int, cols: int) -> list[Rule]:
    return [_same(f"{ours}.weight", f"{theirs}.weight", (rows, cols)), _same(f"{ours}.bias", f"{theirs}.bias", (rows,))]


def _norm(ours: str, theirs: str, size: int) -> list[Rule]:
    return [_same(f"{ours}.{part}", f"{theirs}.{part}", (size,)) for part in ("weight", "bias")]
