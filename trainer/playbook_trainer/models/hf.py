"""Weights to and from the files of Hugging Face transformers: Qwen3, Qwen3-MoE, Qwen3-VL and Qwen3-VL-MoE. safetensors only, no pickle.

The layouts differ in names, and in how matrices are stacked: our `w13` is gate over up in one matrix; text checkpoints keep each expert's
matrices apart; published vision-language checkpoints stack the experts with input and output swapped; the patch embedding is stored as a
Conv3d. Every pair of layouts is one Rule, so that both directions, the shapes and the list of names come from the same table.

Letters in shapes: E experts, F expert (or MLP) width, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from playbook.errors import ConfigError
from playbook_trainer.config import ModelConfig, VisionConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9
SHOWN = 8
"""Names listed for each kind of mismatch; a wrong preset would otherwise print thousands."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One of our tensors and the tensors of the checkpoint that hold the same numbers."""

    ours: str
    shape: Shape
    theirs: Mapping[str, Shape]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]
    as_ours: bool = False
    """The checkpoint's only tensor may also lie in our own shape."""

    def accepted(self) -> dict[str, list[Shape]]:
        """The shapes in which `join` takes each of the checkpoint's tensors."""
        return {name: [shape, self.shape] if self.as_ours else [shape] for name, shape in self.theirs.items()}


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors (views where possible) of a whole, unsharded state.

    Raises:
        ConfigError: tensors are missing, left over or of another shape than the model's.
    """
    table = rules(config)
    _check({rule.ours: [rule.shape] for rule in table}, {name: tuple(t.shape) for name, t in state.items()}, "the model's state")
    return {name: t for rule in table for name, t in zip(rule.theirs, rule.split(state[rule.ours]), strict=True)}


def from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state from a checkpoint's tensors; each is read once, when its turn comes.

    Raises:
        ConfigError: tensors are missing, left over or of another shape than the model's.
    """
    table = rules(config)
    shapes = tensors.shapes if isinstance(tensors, _Files) else {name: tuple(t.shape) for name, t in tensors.items()}
    _check({name: accepted for rule in table for name, accepted in rule.accepted().items()}, shapes, f"the checkpoint for {config.name}")
    return {rule.ours: rule.join([tensors[name] for name in rule.theirs]) for rule in table}


def load_safetensors(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Our state from a folder with `model.safetensors`, or with shards and their index.

    Raises:
        ConfigError: no such files, an unreadable file, an index that does not fit, or tensors or a `config.json` that do not fit the model.
    """
    _check_config(config, folder / "config.json")
    with ExitStack() as stack:
        return from_hf(config, _Files(folder, stack))


def save_safetensors(config: ModelConfig, state: Mapping[str, Tensor], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the whole, unsharded state as transformers stores it: one file, or shards and their index, and `config.json`.

    Raises:
        ConfigError: the folder already holds weights, or the state does not fit the model.
    """
    tensors = to_hf(config, state)
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(p.name for p in folder.glob("*.safetensors*")):
        # An old index beside a new file would be read in its place.
        raise ConfigError(f"{folder} already holds weights ({old[0]}); choose an empty folder")
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n", encoding="utf-8")
    shards = _shards(tensors, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        # A copy of its own for each tensor: safetensors refuses views that share memory.
        whole = {key: tensors[key].detach().to("cpu", copy=True).contiguous() for key in shard}
        save_file(whole, folder / f"{name}.part", metadata={"format": "pt"})
        (folder / f"{name}.part").replace(folder / name)
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        placed = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` under which transformers computes the same model."""
    moe, vision = bool(config.num_experts), config.vision
    text: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size or config.hidden_size,  # a MoE model has no dense MLP, transformers wants a number
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if moe:
        text |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "moe_intermediate_size": config.expert_ffn_size,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if vision is None:
        kind, name = ("qwen3_moe", "Qwen3MoeForCausalLM") if moe else ("qwen3", "Qwen3ForCausalLM")
        return {"architectures": [name], "model_type": kind, **text}
    if moe and not config.norm_topk_prob:
        raise ConfigError("transformers' Qwen3-VL-MoE always normalizes the top-k probabilities; set model.norm_topk_prob to true")
    text["rope_parameters"] |= {"mrope_section": config.mrope_section, "mrope_interleaved": True}
    kind, name = ("qwen3_vl_moe", "Qwen3VLMoe") if moe else ("qwen3_vl", "Qwen3VL")
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": False,
        "image_token_id": config.image_token_id,
        "vision_start_token_id": config.vision_start_token_id,
        "vision_end_token_id": config.vision_end_token_id,
        "text_config": {"model_type": f"{kind}_text", **text},
        "vision_config": {"model_type": f"{kind}_vision", **_vision_config(config, vision)},
    }


def rules(config: ModelConfig) -> list[Rule]:
    """The table between the two layouts, in the order of the model."""
    base = "model." if config.vision is None else "model.language_model."
    vocab = (config.vocab_size, config.hidden_size)
    table = [_same("embed.weight", f"{base}embed_tokens.weight", vocab)]
    for i in range(config.num_layers):
        table += _layer(config, f"layers.{i}.", f"{base}layers.{i}.")
    table += [
        _same("norm.weight", f"{base}norm.weight", (config.hidden_size,)),
        _same("head.weight", "lm_head.weight", vocab),
    ]
    return table + (_vision(config.vision, config.hidden_size) if config.vision is not None else [])


def _layer(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """A decoder layer."""
    size, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (q, size),
        "k_proj": (kv, size),
        "v_proj": (kv, size),
        "o_proj": (size, q),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    table = [_same(f"{ours}attn.{name}.weight", f"{theirs}self_attn.{name}.weight", shape) for name, shape in attention.items()]
    table.append(_same(f"{ours}attn_norm.weight", f"{theirs}input_layernorm.weight", (size,)))
    table.append(_same(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight", (size,)))
    if not config.num_experts:
        width = config.ffn_size
        halves = {f"{theirs}mlp.{name}_proj.weight": (width, size) for name in ("gate", "up")}
        table.append(Rule(f"{ours}mlp.w13.weight", (2 * width, size), halves, lambda t: t.chunk(2), torch.cat))
        table.append(_same(f"{ours}mlp.w2.weight", f"{theirs}mlp.down_proj.weight", (size, width)))
        return table
    table.append(_same(f"{ours}moe.router.weight", f"{theirs}mlp.gate.weight", (config.num_experts, size)))
    experts = _experts_apart if config.vision is None else _experts_stacked
    return table + experts(config, f"{ours}moe.experts.", f"{theirs}mlp.experts.")


def _experts_apart(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """Text checkpoints: a gate, an up and a down matrix for each expert."""
    num, width, size = config.num_experts, config.expert_ffn_size, config.hidden_size
    gate_up = {f"{theirs}{e}.{name}_proj.weight": (width, size) for e in range(num) for name in ("gate", "up")}
    down = {f"{theirs}{e}.down_proj.weight": (size, width) for e in range(num)}
    return [
        Rule(
            f"{ours}w13",
            (num, 2 * width, size),
            gate_up,
            lambda t: t.reshape(2 * num, width, size).unbind(),
            lambda parts: torch.stack(list(parts)).reshape(num, 2 * width, size),
        ),
        Rule(f"{ours}w2", (num, size, width), down, lambda t: t.unbind(), lambda parts: torch.stack(list(parts))),
    ]


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
    flat = (size, kernel[1] * kernel[2] * kernel[3] * kernel[4])
    conv = {f"{theirs}patch_embed.proj.weight": kernel}
    table = [
        Rule(f"{ours}patch_embed.weight", flat, conv, lambda t: (t.reshape(kernel),), lambda parts: parts[0].reshape(flat)),
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


def _vision_config(config: ModelConfig, vision: VisionConfig) -> dict[str, Any]:
    return {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "num_heads": vision.num_heads,
        "intermediate_size": vision.ffn_size,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "num_position_embeddings": vision.num_position_embeddings,
        "deepstack_visual_indexes": vision.deepstack_layers,
        "out_hidden_size": config.hidden_size,
        "initializer_range": config.init_std,
    }


def _same(ours: str, theirs: str, shape: Shape) -> Rule:
    """The same tensor under another name."""
    return Rule(ours, shape, {theirs: shape}, lambda t: (t,), lambda parts: parts[0])


def _swapped(ours: str, theirs: str, shape: Shape) -> Rule:
    """Stacked matrices, stored with input and output swapped, as published; transformers 5 writes them unswapped, and both are read.

    transformers tells the two apart by shape alone, and takes square matrices for unswapped ones. So must we.
    """
    stored = (shape[0], shape[2], shape[1])
    square = stored == shape

    def join(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if tuple(parts[0].shape) == shape else parts[0].transpose(1, 2).contiguous()

    return Rule(ours, shape, {theirs: stored}, lambda t: (t if square else t.transpose(1, 2),), join, as_ours=True)


def _linear(ours: str, theirs: str, rows: int, cols: int) -> list[Rule]:
    return [_same(f"{ours}.weight", f"{theirs}.weight", (rows, cols)), _same(f"{ours}.bias", f"{theirs}.bias", (rows,))]


def _norm(ours: str, theirs: str, size: int) -> list[Rule]:
    return [_same(f"{ours}.{part}", f"{theirs}.{part}", (size,)) for part in ("weight", "bias")]


def _check(expected: Mapping[str, Sequence[Shape]], found: Mapping[str, Shape], what: str) -> None:
    """Refuse anything but exactly the expected names and shapes, with one message for all that is wrong."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} {found[name]}, expected {' or '.join(map(str, dict.fromkeys(shapes)))}"
            for name, shapes in expected.items()
            if name in found and found[name] not in shapes
        ],
    }
    lines = []
    for kind, names in problems.items():
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        if names:
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:SHOWN])}{more}")
    if lines:
        text = "\n".join(lines)
        raise ConfigError(f"{what} does not fit the model's configuration; compare model.* with the checkpoint's config.json\n{text}")


def _check_config(config: ModelConfig, path: Path) -> None:
    """Refuse a checkpoint whose `config.json`, if there is one, asks for another computation than ours on the same tensors."""
    if not path.is_file():
        return
    ours, theirs = _computation(hf_config(config)), _computation(_read_json(path))
    different = [f"{key} {theirs[key]!r}, here {value!r}" for key, value in ours.items() if key in theirs and theirs[key] != value]
    if different:
        raise ConfigError(f"{path} describes another model than model.name {config.name}: {'; '.join(different)}; change model.*")


def _computation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a `config.json` that change results but no tensor's shape."""
    vision, text = _part(settings, "vision_config"), _part(settings, "text_config") or settings
    # transformers 4 wrote rope_theta beside rope_scaling, transformers 5 writes both into rope_parameters.
    rope = {"rope_theta": text.get("rope_theta"), **(_part(text, "rope_parameters") or _part(text, "rope_scaling"))}
    named: dict[str, tuple[Mapping[str, Any], list[str]]] = {
        "": (settings, ["image_token_id", "tie_word_embeddings"]),
        "text_config.": (text, ["hidden_act", "rms_norm_eps", "num_experts_per_tok", "norm_topk_prob", "attention_bias"]),
        "rope_parameters.": (rope, ["rope_type", "rope_theta", "mrope_section", "mrope_interleaved"]),
        "vision_config.": (vision, ["num_heads", "hidden_act", "spatial_merge_size", "deepstack_visual_indexes"]),
    }
    return {prefix + key: part[key] for prefix, (part, keys) in named.items() for key in keys if part.get(key) is not None}


def _part(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = settings.get(key)
    return part if isinstance(part, dict) else {}


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut so that no shard but a single large tensor exceeds `limit` bytes."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


class _Files(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read from its file when asked for: a large checkpoint never lies in memory twice."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        where = _weight_map(folder)
        names = sorted(set(where.values())) if where is not None else [SINGLE]
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{folder} lacks {', '.join(absent[:SHOWN])}; expected {SINGLE}, or {INDEX} with all its shards")
        self.shapes: dict[str, Shape] = {}
        self._file: dict[str, Any] = {}
        for name in names:
            try:
                handle = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder / name} is no readable safetensors file ({error}); fetch it again") from error
            for key in handle.keys():  # noqa: SIM118  a handle is no mapping
                if where is None or where.get(key) == name:
                    self.shapes[key] = tuple(handle.get_slice(key).get_shape())
                    self._file[key] = handle
        if lost := [key for key in where or {} if key not in self._file]:
            raise ConfigError(f"{folder / INDEX} places {lost[0]} (and {len(lost) - 1} others) in files that do not hold them")

    def __getitem__(self, key: str) -> Tensor:
        return self._file[key].get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Which file holds which tensor, or None without an index.

    An index comes from elsewhere, so it may only name files right in its own folder. Symbolic links are followed: download caches use them.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    where = _read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ConfigError(f"{path} has no weight_map of tensor names to file names; fetch it again")
    for name in where.values():
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{path} points to '{name}'; expected the name of a .safetensors file in the same folder")
    return where


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch it again")
    return found
