"""A published config.json as the configuration of a model, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from playbook.errors import ConfigError
from playbook_trainer.config.sections import ModelConfig, VisionConfig

# The JSON files of a published folder, and the parts of a `config.json`, whichever version of transformers wrote it.


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: the file is missing or holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch it again")
    return content


def part_of(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under `key`; an empty one where there is none."""
    part = settings.get(key)
    return part if isinstance(part, dict) else {}


def text_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part about the text model; transformers 5.24 saves the number of experts under a new name."""
    text = dict(part_of(settings, "text_config") or settings)
    if "num_local_experts" in text and "n_routed_experts" not in text:
        text.setdefault("num_experts", text["num_local_experts"])
    return text


def for_transformers_4(text: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's part with what transformers 4 looks for where transformers 5 has written it elsewhere alone."""
    part, rope = text_of(text), part_of(text, "rope_parameters")
    if rope and part.get("rope_theta") is None:
        stretch = {key: value for key, value in rope.items() if key != "rope_theta"}
        plain = stretch.get("rope_type", "default") == "default" and set(stretch) <= {"rope_type"}
        part |= {"rope_theta": rope.get("rope_theta"), "rope_scaling": part.get("rope_scaling") or (None if plain else stretch)}
    return part


# What becomes of each key of a published `config.json`: it is read, it must have the one value that is trained with, or it has no effect
# on training.

_VISION_THETA = 10_000.0
"""With which the vision tower turns positions. Source: transformers, Qwen3VLVisionRotaryEmbedding."""

PARTS = ("text_config", "vision_config", "rope_parameters", "rope_scaling")
"""Keys that hold others."""
_TRAINED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "": {},
    "text_config.": {
        "attention_dropout": (0,),
        "use_sliding_window": (False,),
        "output_router_logits": (False,),  # else transformers adds a balancing loss, as moe.aux_loss_coeff does here
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    "rope_parameters.": {"partial_rotary_factor": (1,)},
    "vision_config.": {"attention_dropout": (0,)},
    "vision_config.rope_parameters.": {"rope_theta": (_VISION_THETA,), "rope_type": ("default", "axial")},
}
"""By part of the file: keys of which some values alone are trained with."""

WITHOUT_EFFECT = frozenset(
    {
        # names and versions
        *("architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "unsloth_fixed", "unsloth_version"),
        # precisions, which train.dtype and checkpoint.export_dtype decide, and ways to compute the same
        *("dtype", "torch_dtype", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache"),
        *("pretraining_tp", "ep_size"),
        # what a call returns
        *("output_hidden_states", "output_attentions", "return_dict"),
        # of other tasks and architectures
        *("is_encoder_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "video_token_id"),
        # where no attention slides
        *("sliding_window", "max_window_layers"),
        # a start that texts of this trainer do not have, weights of losses that moe.aux_loss_coeff decides, and sums of other keys
        *("bos_token_id", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "qk_head_dim"),
    }
)
"""Keys of any part that change nothing that is computed or trained."""


def _untrained(parts: Mapping[str, tuple[Mapping[str, Any], Collection[str]]]) -> list[str]:
    """What the parts of a file ask for that is not trained with here, a clause for each key;
    a part comes with the names of its keys that are read.
    """
    clauses = []
    for prefix, (part, read) in parts.items():
        for key, value in part.items():
            if value is None or key in read or key in WITHOUT_EFFECT:
                continue
            if (trained := _TRAINED[prefix].get(key)) is not None:
                clauses += [f"{prefix}{key} {value!r}, here {trained[0]!r}"] if value not in trained else []
            elif key in PARTS:
                clauses += [] if isinstance(value, dict) else [f"{prefix}{key} {value!r}, here a mapping"]
            elif key == "layer_types":
                full = isinstance(value, list) and set(map(str, value)) <= {"full_attention"}
                clauses += [] if full else [f"{prefix}{key} {value!r}, here full_attention"]
            elif value is not False:  # a switch that is off
                clauses.append(f"{prefix}{key}, which this trainer does not know (take it out of the file if training need not read it)")
    return clauses


# How weights are used once they are trained, as far as rows must be like it: where an answer ends, and how many positions there are.


def end_of(folder: Path, end: Any) -> Any:
    """The token that ends an answer: `end`, by config.json, at which generation_config.json must stop;
    where there is none, the first one there.
    """
    stops = _stops(folder)
    if end is None and not stops:
        raise ConfigError(
            f"{folder}: neither config.json nor generation_config.json has eos_token_id, with which every text and answer ends: add it"
        )
    if end is not None and stops and end not in stops:
        raise ConfigError(
            f"{folder}: config.json ends answers with {end!r}, and generation_config.json ends answers with {stops}: make them agree"
        )
    return stops[0] if end is None else end


def check_rows(config: ModelConfig, folder: Path, seq_len: int) -> None:
    """Refuse rows that may hold longer samples than the weights in `folder` know positions, or that end otherwise than what they generate.

    Raises:
        ConfigError: `seq_len` is beyond max_position_embeddings, or the model's eos_token_id is none of the folder's.
    """
    settings = read_json(folder / "config.json")
    text = text_of(settings)
    most = text.get("max_position_embeddings")
    if isinstance(most, int) and seq_len > most:
        raise ConfigError(
            f"data.seq_len is {seq_len}, and the weights in {folder} are of {most} positions: lower it, or write rope_scaling and "
            "max_position_embeddings for longer samples into their config.json"
        )
    stops = _stops(folder) or _listed({**text, **settings}.get("eos_token_id"))
    if stops and config.eos_token_id not in stops:
        raise ConfigError(
            f"model.eos_token_id is {config.eos_token_id}, and the weights in {folder} end what they say with {stops}: set one of them"
        )


def _stops(folder: Path) -> list[Any]:
    """Tokens at which generation stops, by generation_config.json."""
    file = folder / "generation_config.json"
    return _listed(read_json(file).get("eos_token_id")) if file.is_file() else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# The `config.json` of Hugging Face transformers: written from ours, and checked against ours.

_TEXT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "hidden_act": None,
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": None,
}
"""Their name to ours; None where the model has no choice."""

_DENSE_FIELDS = {"intermediate_size": "ffn_size"}

_MOE_FIELDS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn_size",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": None,
    "mlp_only_layers": None,
}

_MLA_FIELDS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "ffn_size",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn_size",
    "first_k_dense_replace": "first_dense_layers",
    "n_shared_experts": "shared_expert_ffn_size",
    "norm_topk_prob": "norm_topk_prob",
    "n_group": "router_groups",
    "topk_group": "router_group_top_k",
    "routed_scaling_factor": "router_scale",
    "num_nextn_predict_layers": "mtp_layers",
    "rope_interleave": None,
}

_YARN_FIELDS = {
    "factor": "yarn.factor",
    "original_max_position_embeddings": "yarn.original_seq_len",
    "beta_fast": "yarn.beta_fast",
    "beta_slow": "yarn.beta_slow",
    "mscale": "yarn.mscale",
    "mscale_all_dim": "yarn.mscale_all_dim",
}

_ROPE_FIELDS = {"rope_type": None, "rope_theta": "rope_theta", "mrope_section": "mrope_section", "mrope_interleaved": None}

_VISION_FIELDS = {
    "depth": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "intermediate_size": "ffn_size",
    "hidden_act": None,
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "num_position_embeddings": "num_position_embeddings",
    "deepstack_visual_indexes": "deepstack_layers",
    "out_hidden_size": None,
}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` under which transformers computes the same model.

    Raises:
        ConfigError: transformers has no such model.
    """
    if config.attention == "mla":
        return _deepseek_v3(config)
    _refuse(
        "Qwen3",
        {
            "qk_norm: false": not config.qk_norm,
            "first_dense_layers": config.first_dense_layers > 0,
            "shared_expert_ffn_size": config.shared_expert_ffn_size > 0,
            "router_score: sigmoid": config.router_score == "sigmoid",
            "router_groups": config.router_groups > 0,
            "router_scale": config.router_scale != 1.0,
            "mtp_layers": config.mtp_layers > 0,
        },
    )
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
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # where transformers 4 looks, as it does for rope_scaling
        "rope_scaling": None,
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
        text["use_sliding_window"] = False
        kind, name = ("qwen3_moe", "Qwen3MoeForCausalLM") if moe else ("qwen3", "Qwen3ForCausalLM")
        return {"architectures": [name], "model_type": kind, **text}
    if moe and not config.norm_topk_prob:
        raise ConfigError("transformers' Qwen3-VL-MoE always normalizes the top-k probabilities; set model.norm_topk_prob to true")
    sections = {"mrope_section": config.mrope_section, "mrope_interleaved": True}
    text["rope_parameters"] |= sections
    text["rope_scaling"] = {"rope_type": "default", **sections}
    kind, name = ("qwen3_vl_moe", "Qwen3VLMoe") if moe else ("qwen3_vl", "Qwen3VL")
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": config.tie_word_embeddings,
        "image_token_id": config.image_token_id,
        "vision_start_token_id": config.vision_start_token_id,
        "vision_end_token_id": config.vision_end_token_id,
        "text_config": {"model_type": f"{kind}_text", **text},
        "vision_config": {"model_type": f"{kind}_vision", **_vision_config(config, vision)},
    }


def _deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of DeepSeek-V3."""
    shared = config.shared_expert_ffn_size
    _refuse(
        "DeepSeek-V3",
        {
            "a vision tower": config.vision is not None,
            "qk_norm: false": not config.qk_norm,
            "num_experts: 0": config.num_experts == 0,
            "router_score: softmax": config.router_score == "softmax",
            "router_bias: false": not config.router_bias,
            f"shared_expert_ffn_size: {shared}, which is no multiple of expert_ffn_size": bool(shared % max(1, config.expert_ffn_size)),
            "no shared expert": not shared,
        },
    )
    yarn: dict[str, Any] = {"rope_type": "default"}
    longest: dict[str, int] = {}
    if config.yarn is not None:
        longest = {"max_position_embeddings": round(config.yarn.factor * config.yarn.original_seq_len)}
        yarn = {"rope_type": "yarn", **{theirs: getattr(config.yarn, ours.removeprefix("yarn.")) for theirs, ours in _YARN_FIELDS.items()}}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_interleave": True,
        **longest,
        "rope_parameters": {"rope_theta": config.rope_theta, **yarn},
        "rope_theta": config.rope_theta,
        "rope_scaling": yarn if config.yarn is not None else None,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.ffn_size or config.hidden_size,  # transformers wants a number where no layer is dense
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "first_k_dense_replace": config.first_dense_layers,
        "n_shared_experts": shared // config.expert_ffn_size,
        "norm_topk_prob": config.norm_topk_prob,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": config.router_groups or 1,
        "topk_group": config.router_group_top_k or 1,
        "routed_scaling_factor": config.router_scale,
        "num_nextn_predict_layers": config.mtp_layers,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _refuse(family: str, settings: Mapping[str, bool]) -> None:
    if parts := [name for name, is_set in settings.items() if is_set]:
        raise ConfigError(
            f"transformers' {family} has no counterpart of model.{', '.join(parts)}; such weights have no Hugging Face folder"
        )


_KINDS: Mapping[str, Mapping[str, str | None]] = {
    "qwen3": _DENSE_FIELDS,
    "qwen3_moe": _MOE_FIELDS,
    "qwen3_vl": _DENSE_FIELDS,
    "qwen3_vl_moe": _MOE_FIELDS,
    "deepseek_v3": _MLA_FIELDS,
}
"""The models that both this trainer and transformers have, by model_type, with the fields of their own."""
_OWN_FIELDS = {
    name: name for name in ("head_dim", "eos_token_id", "pad_token_id", "image_token_id", "vision_start_token_id", "vision_end_token_id")
} | {"initializer_range": "init_std", "tie_word_embeddings": "tie_word_embeddings"}
"""Their name to ours, of what stands at the top of a file or in its text_config."""


def fields_of(path: Path) -> dict[str, Any]:
    """The fields of our model that a published `config.json` describes, as a preset holds them.

    Raises:
        ConfigError: it describes none that this trainer trains.
    """
    settings = read_json(path)
    kind, text, vision = str(settings.get("model_type")), text_of(settings), part_of(settings, "vision_config")
    if kind not in _KINDS:
        raise ConfigError(f"{path} is of model_type {kind!r}; this trainer trains {', '.join(_KINDS)}")
    rope = _rope(text)
    fields = _taken({**text, **settings}, _OWN_FIELDS) | _taken(text, {**_TEXT_FIELDS, **_KINDS[kind]}) | _taken(rope, _ROPE_FIELDS)
    for name in ("eos_token_id", "pad_token_id"):  # of several, the first ends an answer
        if isinstance(fields.get(name), list):
            fields[name] = next(iter(fields[name]), None)
    fields["eos_token_id"] = end_of(path.parent, fields.get("eos_token_id"))
    if fields.get("rope_theta") is None:
        raise ConfigError(
            f"{path} has no rope_theta, and versions of transformers take different ones then: add the one that the model was trained with"
        )
    if kind == "deepseek_v3":
        fields |= _deepseek_fields(text, fields, rope)
    elif fields.get("num_experts"):
        fields.setdefault("norm_topk_prob", kind == "qwen3_vl_moe")  # what transformers takes where a file does not say
    if vision:
        fields["vision"] = _taken(vision, _VISION_FIELDS)
        if (spread := vision.get("initializer_range")) not in (None, fields.get("init_std")):
            raise ConfigError(
                f"{path}: vision_config.initializer_range {spread!r} is another than the text model's, and here there is one for both"
            )
    try:
        model = ModelConfig(name=path.parent.name, **fields)
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; fetch the folder again, or write the model's fields yourself"
        ) from e
    check_config(model, path)
    return model.model_dump(exclude={"name"})


def _taken(part: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    return {ours: part[theirs] for theirs, ours in names.items() if ours is not None and part.get(theirs) is not None}


def _deepseek_fields(text: Mapping[str, Any], fields: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSeek-V3's file says in other units than ours, or not at all."""

    def number(name: str) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) else 0

    grouped = number("router_groups") > 1
    derived: dict[str, Any] = {
        "attention": "mla",
        "head_dim": number("qk_nope_head_dim") + number("qk_rope_head_dim"),
        "num_kv_heads": fields.get("num_heads"),
        "shared_expert_ffn_size": number("shared_expert_ffn_size") * number("expert_ffn_size"),
        "router_groups": number("router_groups") if grouped else 0,
        "router_group_top_k": text.get("topk_group") if grouped else 0,
        "router_score": "sigmoid",
        "router_bias": True,
        "ffn_size": number("ffn_size") if number("first_dense_layers") else 0,
    }
    if rope.get("rope_type") == "yarn":
        derived["yarn"] = {name.removeprefix("yarn."): value for name, value in _taken(_stretched(rope), _YARN_FIELDS).items()}
    return derived


def check_config(config: ModelConfig, path: Path) -> None:
    """Refuse a `config.json` that describes another model than ours, with one message that names every field that differs.

    What it leaves out is not compared: transformers' defaults are not ours to know, and the tensors' shapes are checked anyway.

    Raises:
        ConfigError: a field differs, or the file does not read.
    """
    settings = read_json(path)
    ours, theirs = _fields(hf_config(config), config), _fields(settings, config)
    text = "" if "text_config" in settings else "text_config."  # a text model's own fields stand at the top of its file
    different = [
        f"{key.removeprefix(text)} {theirs[key][0]!r}, here {value!r}" + (f" ({ours_name})" if ours_name else "")
        for key, (value, ours_name) in ours.items()
        if key in theirs and theirs[key][0] != value
    ]
    different += [clause.removeprefix(text) for clause in _untrained(_parts(settings))]
    if different:
        raise ConfigError(f"{path} describes another model than model.name {config.name}: {'; '.join(different)}; change model.*")


def _parts(settings: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], set[str]]]:
    """The parts of a `config.json`, each with the names of its keys that are read."""
    text, vision = text_of(settings), part_of(settings, "vision_config")
    kind = _KINDS.get(str(settings.get("model_type")), {})
    text_keys = {*_OWN_FIELDS, *_TEXT_FIELDS, *kind, "num_local_experts", "intermediate_size", "rope_theta", "max_position_embeddings"}
    rope_keys = {*_ROPE_FIELDS, *_YARN_FIELDS, "type", "attention_factor", "truncate"}
    parts: dict[str, tuple[Mapping[str, Any], set[str]]] = {
        "text_config.": (text, text_keys),
        "rope_parameters.": (_rope(text), rope_keys),
        "vision_config.": (vision, {*_VISION_FIELDS, "initializer_range"}),
        "vision_config.rope_parameters.": (part_of(vision, "rope_parameters"), set()),
    }
    return {**parts, "": (settings, {*_OWN_FIELDS})} if part_of(settings, "text_config") else parts


def _fields(settings: Mapping[str, Any], config: ModelConfig) -> dict[str, tuple[Any, str | None]]:
    """The entries of a `config.json` that say what is computed: their name to value and our name."""
    vision, text = part_of(settings, "vision_config"), text_of(settings)
    if settings.get("model_type") == "qwen3_moe":
        text = {"norm_topk_prob": False, **text}  # what transformers takes where a file does not say
    rope = _rope(text)
    yarn: Mapping[str, str | None] = {}
    if rope.get("rope_type") == "yarn":
        rope, yarn = _stretched(rope), {**_YARN_FIELDS, "attention_factor": None, "truncate": None}
    # transformers keeps this number but neither reads nor saves such layers:
    # without them here, the tensors tell whether the folder has them.
    widths: Mapping[str, str | None] = {k: v for k, v in _MLA_FIELDS.items() if config.mtp_layers or v != "mtp_layers"}
    if not config.first_dense_layers:  # the width of layers that there are none of
        widths = {k: v for k, v in widths.items() if v != "ffn_size"}
    if config.attention == "gqa":
        widths = {"head_dim": "head_dim"} | (_MOE_FIELDS if config.num_experts else _DENSE_FIELDS)
    top = {"model_type": None} | {f"{name}_token_id": f"{name}_token_id" for name in ("image", "vision_start", "vision_end")}
    top |= {"tie_word_embeddings": "tie_word_embeddings"}
    parts: list[tuple[str, str, Mapping[str, Any], Mapping[str, str | None]]] = [
        ("", "model.", settings, top),
        ("text_config.", "model.", text, {**_TEXT_FIELDS, **widths}),
        ("rope_parameters.", "model.", rope, {**_ROPE_FIELDS, **yarn}),
        ("vision_config.", "model.vision.", vision, _VISION_FIELDS),
    ]
    return {
        prefix + key: (part[key], ours + name if name else None)
        for prefix, ours, part, keys in parts
        for key, name in keys.items()
        if part.get(key) is not None
    }


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """How positions turn: transformers 4 wrote rope_theta beside rope_scaling, transformers 5 writes both into rope_parameters.

    Where there are both, as after adding rope_scaling by hand for longer rows, transformers 5 goes by rope_scaling.
    """
    rope = {"rope_theta": text.get("rope_theta")}
    for part in (part_of(text, "rope_parameters"), part_of(text, "rope_scaling")):
        kind = part.get("rope_type", part.get("type"))  # published before transformers renamed it
        rope |= {**part, "rope_type": kind} if kind is not None else part
    return rope


def _stretched(rope: Mapping[str, Any]) -> dict[str, Any]:
    """With what transformers takes or computes where a file does not say.

    Source: transformers, `modeling_rope_utils.py` (_compute_yarn_parameters) and `DeepseekV3Attention`,
    which scales scores by mscale_all_dim.
    """
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 0.0, "truncate": True} | {k: v for k, v in rope.items() if v is not None}
    factor, mscale, every = (yarn.get(key, 0) for key in ("factor", "mscale", "mscale_all_dim"))
    if "attention_factor" not in yarn and all(isinstance(number, (int, float)) for number in (factor, mscale, every)):
        wide = math.log(factor) / 10 if factor > 1 else 0.0
        yarn["attention_factor"] = (mscale * wide + 1) / (every * wide + 1) if mscale > 0 and every > 0 else wide + 1
    if isinstance(yarn.get("attention_factor"), float):
        yarn["attention_factor"] = round(yarn["attention_factor"], 6)
    return yarn


def _vision_config(config: ModelConfig, vision: VisionConfig) -> dict[str, Any]:
    """The section `vision_config` of Qwen3-VL's config.json."""
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
