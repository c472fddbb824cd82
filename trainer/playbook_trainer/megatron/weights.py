"""First weights of a megatron-core model, and weights from and to Hugging Face folders; no rank ever holds the whole model.

`pieces` says which numbers of ours each rank holds; reading, drawing and collecting them is the same in every layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from playbook.errors import ConfigError
from playbook_trainer.config.tree import ModelConfig, TrainerConfig
from playbook_trainer.huggingface import weights
from playbook_trainer.huggingface.names import HEAD, Box, Shape, rules, sizes, slices, whole
from playbook_trainer.huggingface.weights import source_files
from playbook_trainer.megatron.settings import DTYPES
from playbook_trainer.torch.parallel.sharding import initial_value
from playbook_trainer.torch.weights import agree_on_folder, collect, senders

# Parameters that data parallelism shares out among ranks, by torch's FSDP2 or by Megatron-FSDP: what they are before it does.


def settle(model: Any) -> None:
    """Put a wrapped model's shards in the place of its parameters, where a forward pass has left some whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    while isinstance(model, nn.Module):
        if hasattr(model, "_replace_param_with_distributed_if_needed"):  # Megatron-FSDP, which has no name for it in public
            model._replace_param_with_distributed_if_needed()
        model = getattr(model, "module", None)


def _local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor-parallel rank's parameter, before data parallelism shards it."""
    shape = list(tensor.shape)
    for dim, ranks, _ in _cuts(tensor):
        shape[dim] //= ranks
    return tuple(shape)


def gathered(tensor: Tensor) -> Tensor:
    """A tensor-parallel rank's whole parameter, no longer in 8 bits; all ranks that share it out call this."""
    if not isinstance(tensor, DTensor):
        return tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    whole = _uneven(tensor) if hasattr(tensor, "__fsdp_param__") else tensor.full_tensor()
    for dim, ranks, rank in _cuts(tensor):
        whole = whole.chunk(ranks, dim=dim)[rank]
    return whole


def _cuts(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Dimension, ranks and this rank of the cuts that Megatron-FSDP knows to be tensor parallelism's: its tensors span both."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    axes = zip(mesh.mesh_dim_names or (), tensor.placements, strict=False)
    cuts = [(i, placement.dim) for i, (name, placement) in enumerate(axes) if "tp" in name and isinstance(placement, Shard)]
    return [(dim, mesh.size(i), mesh.get_local_rank(i)) for i, dim in cuts]


def _uneven(tensor: DTensor) -> Tensor:
    """The whole of a tensor whose shards are not those that torch would choose. The function's name changed after megatron-core 0.16."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    if hasattr(uneven_dtensor, "uneven_dtensor_to_full_tensor"):
        whole: Tensor = uneven_dtensor.uneven_dtensor_to_full_tensor(tensor)
        return whole
    return uneven_dtensor.gather_uneven_dtensor_to_full_tensor(tensor).to_local()


# Which part of our whole tensors each of megatron-core's holds, on any rank of any layout.
# megatron-core fuses queries, keys and values by group of heads, cuts matrices over tensor-parallel ranks (the gate and up halves each by
# itself), numbers the layers of each pipeline chunk from zero, and keeps a rank's experts apart. All of that is said here as boxes: the
# same numbers lie in this box of its tensor and in that box of ours (`huggingface.names.rules`, under the names of the torch backend).
# Letters in shapes: H hidden size, G groups of heads, d head size, E experts, W width.


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

    local: Box
    """Of megatron-core's tensor on this rank."""
    ours: str
    """The name of our tensor."""
    full: Box
    """Of our whole tensor."""


@dataclass(frozen=True)
class CoreTensor:
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


def core_tensors(model: nn.Module, config: ModelConfig, place: Place) -> list[CoreTensor]:
    """The tensors of a chunk of the model (GPTModel, not wrapped) with their pieces; a vision tower, under `vision.`, is held whole."""
    shapes = {rule.ours: rule.shape for rule in rules(config)}
    return [
        CoreTensor(name, tensor, tuple(_pieces(model, config, shapes, place, name, _local_shape(tensor))))
        for name, tensor in tensors(model)
    ]


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the routers' biases, which are buffers."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))


def _pieces(model: Any, config: ModelConfig, shapes: dict[str, Shape], place: Place, name: str, shape: Shape) -> list[Piece]:
    """The pieces of ours that fill the tensor `name` of megatron-core, of `shape` on this rank; `shapes` are those of ours."""
    if name.startswith("vision."):
        return [Piece(whole(shape), name, whole(shape))]
    if name in TOP:
        tied = name == "output_layer.weight" and config.tie_word_embeddings
        return [_cut("embed.weight" if tied else TOP[name], shapes, shape, place)]
    prefix, layer, parameter = _layer(model, name)
    if parameter in _DEPTH and prefix.startswith("mtp."):
        return [_cut(prefix + _DEPTH[parameter], shapes, shape, place)]
    if parameter in PLAIN:
        return [_cut(prefix + PLAIN[parameter], shapes, shape, place)]
    if parameter in _HALVES:
        return _halves(prefix + _HALVES[parameter], shapes[prefix + _HALVES[parameter]], place.tp, place.tp_size)
    if parameter == "self_attention.linear_qkv.weight":
        return _fused(config, prefix, place)
    if match := _EXPERT.match(parameter):
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
    full = tuple((place.tp * n, (place.tp + 1) * n) if n < all_ else (0, n) for n, all_ in zip(shape, shapes[ours], strict=True))
    return Piece(whole(shape), ours, full)


def _halves(ours: str, shape: Shape, rank: int, size: int, first: int | None = None) -> list[Piece]:
    """Gate rows over up rows; `first` is an expert's number, where ours is stacked over experts."""
    *_, rows, columns = shape
    half = rows // 2
    part = half // size
    out = []
    for i in range(2):
        start = i * half + rank * part
        full: Box = ((start, start + part), (0, columns))
        out.append(Piece(((i * part, (i + 1) * part), (0, columns)), ours, full if first is None else ((first, first + 1), *full)))
    return out


def _fused(config: ModelConfig, prefix: str, place: Place) -> list[Piece]:
    """Queries, keys and values of this rank's groups: for each group its query heads, then its key head, then its value head."""
    size, d = config.hidden_size, config.head_dim
    groups, per_group = config.num_kv_heads // place.tp_size, config.num_heads // config.num_kv_heads
    out, row = [], 0
    for group in range(place.tp * groups, (place.tp + 1) * groups):
        for letter, rows in (("q", per_group * d), ("k", d), ("v", d)):
            full = ((group * rows, (group + 1) * rows), (0, size))
            out.append(Piece(((row, row + rows), (0, size)), f"{prefix}attn.{letter}_proj.weight", full))
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
    full = ((expert, expert + 1), (0, rows), (place.etp * part, (place.etp + 1) * part))
    return [Piece(((0, rows), (0, part)), ours, full)]


def initialise(chunks: Sequence[nn.Module], config: TrainerConfig) -> None:
    """Give the chunks of this rank, not wrapped yet, their first values: those of `init.weights`,
    or those that the seed gives every layout.

    Raises:
        ConfigError: the folder does not hold this model.
    """
    if config.init.weights is None:
        draw(chunks, config.model, config.seed, DTYPES[config.train.dtype])
    else:
        load(chunks, config.model, Path(config.init.weights))


@torch.no_grad()
def draw(chunks: Sequence[nn.Module], config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """The same values as the torch backend's for this seed: each whole tensor is drawn where the parameter is, and this rank's part kept.

    `dtype` holds them exactly; 8-bit weights, whose optimizer begins with what they were made of, would not be rounded to it otherwise.
    """
    value, shapes = initial_value(config, seed, dtype), {rule.ours: rule.shape for rule in weights.rules(config)}
    drawn: tuple[str, Tensor] = ("", torch.empty(0))

    def read(ours: str, box: Box, device: torch.device) -> Tensor:
        nonlocal drawn
        if drawn[0] != ours:  # a rank's experts are parts of one tensor, and follow each other
            drawn = ("", torch.empty(0))  # not two at once
            drawn = (ours, value(ours, list(shapes[ours]), device))
        return drawn[1][slices(box)]

    for entry in sorted(_entries(chunks, config), key=lambda entry: entry.pieces[0].ours):
        _fill(entry, read)


@torch.no_grad()
def load(chunks: Sequence[nn.Module], config: ModelConfig, folder: Path) -> weights.Files:
    """Fill the chunks of this rank from a Hugging Face folder, of which only its parts are read;
    returns the files, which have counted them.

    Raises:
        ConfigError: the folder does not hold this model.
    """
    table = {rule.ours: rule for rule in weights.rules(config)}
    with ExitStack() as stack:
        files = weights.open_folder(config, folder, stack)
        twice = config.tie_word_embeddings and HEAD in files.shapes

        def read(ours: str, box: Box, device: torch.device) -> Tensor:
            part = table[ours].read(files, box)
            if twice and ours == "embed.weight" and not torch.equal(part, files.read(HEAD, slices(box))):
                raise ConfigError(f"{folder}: {HEAD} differs from the embedding; set model.tie_word_embeddings: false")
            return part.to(device)

        for entry in _entries(chunks, config):
            _fill(entry, read)
    return files


@torch.no_grad()
def save(
    chunks: Sequence[nn.Module],
    config: ModelConfig,
    folder: Path,
    max_shard_bytes: int = weights.MAX_SHARD_BYTES,
    run: TrainerConfig | None = None,
) -> None:
    """Write the model as transformers stores it, in the precision of its parameters;
    every rank calls this, with its chunks as they are wrapped.

    Rank 0 holds one tensor of ours and one file at a time. The configuration of a `run` says what to keep of its source,
    and in which precision.

    Raises:
        ConfigError: the folder already holds weights, or transformers has no such model.
    """
    rank = dist.get_rank()
    weights.hf_config(config)
    agree_on_folder(rank, dist.get_world_size(), folder)
    for chunk in chunks:
        settle(chunk)
    entries = _entries(chunks, config)
    entries_of: dict[str, list[CoreTensor]] = {}
    for entry in entries:
        for ours in dict.fromkeys(piece.ours for piece in entry.pieces):
            entries_of.setdefault(ours, []).append(entry)
    holders: list[dict[str, list[Box]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(
        holders, {name: [p.full for e in entries_ for p in e.pieces if p.ours == name] for name, entries_ in entries_of.items()}
    )
    table = weights.rules(config)
    dtype = torch.bfloat16 if any(e.tensor.dtype == torch.bfloat16 for e in entries) else torch.float32
    plain_dtypes = {rule.ours: torch.float32 if rule.ours.endswith("router.bias") else dtype for rule in table}
    dtypes = weights.export_dtypes(run, table, dtype) if run else plain_dtypes
    with ExitStack() as stack:
        writer = None
        if rank == 0:
            nbytes = weights.nbytes(table, dtypes)
            writer = stack.enter_context(weights.Writer(config, folder, nbytes, max_shard_bytes, source_files(run) if run else None))
        for rule in table:
            parts = _parts(rule.ours, entries_of.get(rule.ours, []))
            full = collect(rule, parts.__getitem__, senders(rule, holders), rank, dtypes[rule.ours])
            if writer is not None and full is not None:
                for name, tensor in zip(rule.theirs, rule.split(full), strict=True):
                    writer.add(name, tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The GPTModel inside megatron-core's wrappers."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model


def place() -> Place:
    """This rank on megatron-core's axes."""
    return Place(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _entries(chunks: Sequence[nn.Module], config: ModelConfig) -> list[CoreTensor]:
    return [entry for chunk in chunks for entry in core_tensors(unwrapped(chunk), config, place())]


def _fill(entry: CoreTensor, read: Callable[[str, Box, torch.device], Tensor]) -> None:
    """Set a tensor from its pieces; put together first, since 8-bit parameters take whole values only."""
    tensor = entry.tensor
    values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    for piece in sorted(entry.pieces, key=lambda piece: piece.ours):
        values[slices(piece.local)] = read(piece.ours, piece.full, tensor.device).to(torch.float32).reshape(sizes(piece.local))
    tensor.copy_(values)
    # Transformer Engine keeps the first values of an 8-bit parameter, those of its own construction, for the optimizer to start from.
    first_values = tensor.get_high_precision_init_val() if hasattr(tensor, "get_high_precision_init_val") else None
    if first_values is not None:
        first_values.copy_(values)


def _parts(ours: str, entries: Sequence[CoreTensor]) -> dict[Box, Tensor]:
    """What this rank holds of one of our tensors. Ranks that share out a tensor of this list come here together, in the same order."""
    out = {}
    for entry in entries:
        full = gathered(entry.tensor)
        for piece in entry.pieces:
            if piece.ours == ours:
                part = full[slices(piece.local)].reshape(sizes(piece.full))
                out[piece.full] = part if full is entry.tensor else part.clone()
    return out
