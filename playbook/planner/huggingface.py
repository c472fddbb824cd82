"""Shapes from a Hugging Face `config.json`, read by what its fields say of attention, MLP and experts.

A `model_type` of the table adds what its code has and its fields do not say; any other type is read by its fields alone, and what they
leave
open is asked for by name.

Source: Hugging Face transformers, `models/<model_type>/configuration_<model_type>.py` and `modeling_<model_type>.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.shapes import DEEPEST, LARGEST, LinearAttention, Mamba, Mla, Shape, Vision

Config = Mapping[str, Any]

_DECODERS = ("text_config", "llm_config", "language_config")
_SECTIONS = ("attn_config", "ffn_config")
"""Where fields of the decoder stand one level deeper."""
_FOREIGN = re.compile(
    r"mamba|ssm|rwkv|state_size|kda_|short_conv|conv_l_cache|cross_attention|lightning|attn_type_list|altup|index_topk|is_encoder_decoder",
    re.IGNORECASE,
)
"""Fields of an unknown type that tell of layers a shape has no word for."""
_GATED = re.compile(r"silu|swish|.*glu", re.IGNORECASE)
"""Activations that come with a gate."""
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_HINTS = {
    "gated_mlp": "gated_mlp (true where an MLP has gate, up and down projection, false where it has two matrices)",
    "tie_word_embeddings": "tie_word_embeddings (true or false)",
}
_SLIDING, _FULL = {"sliding_attention", "chunked_attention"}, {"full_attention"}


class Fields:
    """Fields of a configuration, asked for by one of several names; what is missing is told at once."""

    def __init__(self, fields: Config) -> None:
        self.fields = fields
        self.missing: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number; null counts as absent."""
        name = next((n for n in names if n in self), names[0])
        value = self.fields.get(name)
        if value is None:
            value = self._absent(names[0]) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ConfigError(f"{name} is {str(value)[:40]}; expected a whole number from 0 to {LARGEST}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """A switch; null counts as absent."""
        name = next((n for n in names if n in self), names[0])
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {str(value)[:40]}; expected true or false")
        return default if value is None else value

    def needed_flag(self, name: str) -> bool:
        """A switch without a default."""
        return self.flag(name) if name in self else bool(self._absent(name))

    def word(self, *names: str) -> str:
        """A text, empty where there is none."""
        value = next((self.fields[n] for n in names if n in self), "")
        return value[:100] if isinstance(value, str) else ""

    def places(self, name: str) -> list[int]:
        """A list of layers, empty where there is none."""
        value = self.fields.get(name) or []
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise ConfigError(f"{name} is {str(value)[:40]}; expected a list of whole numbers")
        return value

    def refuse(self, name: str, *plain: Any) -> None:
        """Refuse a field with another value than these, or none: a shape has no word for it."""
        value = self.fields.get(name)
        if value is not None and value not in plain:
            raise ConfigError(f"{name} {str(value)[:60]} is not expressible; expected {plain[0]}")

    def _absent(self, name: str) -> int:
        if name not in self.missing:
            self.missing.append(name)
        return 1

    def checked(self, shape: Shape) -> Shape:
        """The shape, if nothing was missing and no count that divides is zero."""
        if self.missing:
            questions = ", ".join(_HINTS.get(name, name) for name in self.missing)
            raise ConfigError(f"{questions} missing; add {'it' if len(self.missing) == 1 else 'them'}")
        low = [k for k in ("layers", "heads", "kv_heads", "hidden", "vocab", "head_dim") if getattr(shape, k) < 1]
        if low or shape.layers > DEEPEST:
            raise ConfigError(f"{', '.join(low) or 'layers'} out of range; expected 1 or more, and at most {DEEPEST} layers")
        if shape.experts and not 0 < shape.top_k <= shape.experts:
            raise ConfigError(f"{shape.top_k} of {shape.experts} experts for each token; expected 1 to {shape.experts}")
        return shape


def from_huggingface(config: Config, source: str) -> Shape:
    """The shape that a Hugging Face configuration describes; a vision tower that is not of Qwen's kind is left out.

    Raises:
        ConfigError: a field is missing, not a count, or describes what a shape cannot say.
    """
    decoder, tower = _decoder(config)
    kind = str(decoder.get("model_type"))[:40]
    handler = _TYPES.get(kind)
    c = Fields({**(handler or {}), **{k: v for k, v in decoder.items() if v is not None}})
    foreign = sorted(k[:40] for k, v in decoder.items() if v and _FOREIGN.search(k)) if handler is None else []
    if foreign:
        raise ConfigError(f"model_type '{kind}'{_unknown(kind)}, and {', '.join(foreign[:5])} tell of layers that have no arithmetic here")
    try:
        return c.checked(_shape(c, source, tower, known=handler is not None))
    except ConfigError as e:
        if handler is None and c.missing:
            raise ConfigError(f"model_type '{kind}'{_unknown(kind)}, so that its fields have to say all: {e}") from e
        raise


def _unknown(kind: str) -> str:
    near = get_close_matches(kind, _TYPES, n=1, cutoff=0.8)
    return f" is not known{f' (did you mean {near[0]}?)' if near else ''}"


def _decoder(config: Config) -> tuple[dict[str, Any], Config | None]:
    """The fields of the decoder on one level, and those of a vision tower."""
    tower = config.get("vision_config")
    inner = next((config[k] for k in _DECODERS if isinstance(config.get(k), Mapping)), None)
    flat = dict(config)
    if inner is not None:
        flat = {k: config[k] for k in ("model_type", "tie_word_embeddings") if k in config} | dict(inner)
    for section in _SECTIONS:
        if isinstance(flat.get(section), Mapping):
            flat |= {k: v for k, v in flat[section].items() if k not in flat or flat[k] is None}
    return flat, tower if isinstance(tower, Mapping) else None


def _shape(c: Fields, source: str, tower: Config | None, *, known: bool) -> Shape:
    """The shape that the fields of a `config.json` say; `known` is whether its kind of model has a row of its own.

    Raises:
        ConfigError: fields are missing, or out of range.
    """
    heads, hidden = c.count("num_attention_heads", "n_head", "n_heads"), c.count("hidden_size", "n_embd", "d_model")
    vocab = c.count("vocab_size", "padded_vocab_size")
    hybrid = _hybrid(c) if "hybrid_override_pattern" in c or "layers_block_type" in c else {}
    layers: int = hybrid["layers"] if hybrid else c.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > DEEPEST:
        raise ConfigError(f"layers out of range; expected 1 or more, and at most {DEEPEST} layers")
    tied = c.flag("tie_word_embeddings") if known else c.needed_flag("tie_word_embeddings")
    values: dict[str, Any] = {
        "layers": layers, "heads": heads, "experts": 0, "source": source, "hidden": hidden, "vocab": vocab, "tied": tied,
        "norms": c.count("norms", default=2), "norm_bias": c.flag("norm_bias"), "positions": _positions(c),
        "mtp": c.count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0), "vision": _tower(tower) if tower else None,
    }  # fmt: skip
    values |= _attention(c, heads, hidden) | _window(c) | _linear(c)
    return Shape(**values | (hybrid or _ffn(c, layers, hidden, known=known)))


def _attention(c: Fields, heads: int, hidden: int) -> dict[str, Any]:
    """The fields of `Shape` that attention decides: heads, biases, norms, windows and compression."""
    biased = c.flag("attention_bias", default=c.flag("use_bias", "bias", "enable_bias"))
    values: dict[str, Any] = {
        "attention_bias": c.flag("qkv_bias", "use_qkv_bias", "add_qkv_bias", default=biased),
        "output_bias": c.flag("output_bias", default=biased),
        "qk_norm": c.flag("qk_norm", "use_qk_norm", "qk_layernorm"),
        "qk_norm_wide": c.flag("qk_norm_wide"),
        "attention_gate": c.flag("attention_gate", "attn_output_gate"),
        "sinks": c.flag("attention_sinks"),
    }
    if "kv_lora_rank" in c:
        sizes = [c.count(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        latent = Mla(c.count("q_lora_rank", default=0), *sizes)
        return values | {"kv_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim, "mla": latent}
    one = c.flag("multi_query") and not c.flag("new_decoder_architecture")
    shared = c.count("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num", default=1 if one else heads)
    if not c.missing and shared and heads % shared:
        raise ConfigError(f"{shared} heads of keys and values for {heads} heads; expected a number that divides them")
    whole = hidden // heads if heads and hidden % heads == 0 else None
    return values | {"kv_heads": shared, "head_dim": c.count("head_dim", "kv_channels", default=whole)}


def _ffn(c: Fields, layers: int, hidden: int, *, known: bool) -> dict[str, Any]:
    """Plain MLPs, and experts where there are any."""
    biased = c.flag("use_bias", "bias", "enable_bias")
    activation = c.word("hidden_act", "hidden_activation", "activation_function", "activation")
    by_name = "gated_mlp" not in c and (known or _GATED.match(activation) is not None)
    values: dict[str, Any] = {
        "gated": by_name or c.needed_flag("gated_mlp"), "mlp_bias": c.flag("mlp_bias", default=biased), "dense_layers": layers,
    }  # fmt: skip
    times = c.count("expansion_ratio", default=0)
    experts = c.count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0)
    if not experts:
        return values | {"ffn": c.count(*_FFN, default=times * hidden or None)}
    dense = _dense_layers(c, layers)
    alike = not known and not dense and not any(n in c for n in ("n_shared_experts", "num_shared_experts"))
    wide = c.flag("experts_have_intermediate_size", default=alike)
    width = c.count("moe_intermediate_size", *(_FFN if wide else ()))
    shared = c.count("n_shared_experts", "num_shared_experts", default=0) * width
    shared_names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    return values | {
        "experts": experts, "top_k": c.count("num_experts_per_tok", "moe_top_k", "num_experts_per_token"), "expert_ffn": width,
        "dense_layers": dense, "ffn": c.count("intermediate_size_mlp", *_FFN) if dense else 0, "expert_bias": c.flag("expert_bias"),
        "shared_ffn": c.count(*shared_names, default=shared), "shared_gate": c.flag("shared_expert_gate"),
    }  # fmt: skip


def _dense_layers(c: Fields, layers: int) -> int:
    """How many layers have a plain MLP; they come first.

    Raises:
        ConfigError: layers with experts and without take turns.
    """
    for name in ("decoder_sparse_step", "interleave_moe_layer_step"):
        c.refuse(name, 1)
    plain = set(range(min(c.count("first_k_dense_replace", default=0), layers)))
    plain |= set(c.places("mlp_only_layers"))
    if isinstance(c.fields.get("moe_layer_freq"), list):
        if len(c.places("moe_layer_freq")) != layers:
            raise ConfigError(f"moe_layer_freq has {len(c.places('moe_layer_freq'))} entries; expected one for each of {layers} layers")
        plain |= {i for i, sparse in enumerate(c.places("moe_layer_freq")) if not sparse}
    else:
        c.refuse("moe_layer_freq", 1)
    if c.places("moe_layers"):
        plain |= set(range(layers)) - set(c.places("moe_layers"))
    if any(not 0 <= i < layers for i in plain):
        raise ConfigError(f"mlp_only_layers names layer {next(i for i in plain if not 0 <= i < layers)}; expected 0 to {layers - 1}")
    if plain != set(range(len(plain))):
        raise ConfigError(f"layers {str(sorted(plain))[:60]} have no experts; expected the first ones alone")
    return len(plain)


def _window(c: Fields) -> dict[str, int]:
    """How far attention looks back, and which layers see everything.

    Raises:
        ConfigError: layers of both kinds follow no pattern that a shape can say.
    """
    width = c.count("sliding_window", "attention_chunk_size", default=0)
    if not width or not c.flag("use_sliding_window", default=True):
        return {}
    kinds = c.fields.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == c.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    ):
        raise ConfigError(f"layer_types is {str(kinds)[:60]}; expected a list with the kind of each layer")
    if not isinstance(kinds, list):
        if "max_window_layers" in c:  # the layers below it see everything
            first = c.count("max_window_layers")
            if first >= c.count("num_hidden_layers"):
                return {}
            c.refuse("max_window_layers", 0)
        return {"window": width, "window_every": c.count("sliding_window_pattern", "_sliding_window_pattern", default=0)}
    slides = [str(kind) in _SLIDING for kind in kinds]
    if not any(slides):
        return {}
    every = slides.index(False) + 1 if not all(slides) else 0
    regular = all(slide == (not every or (i + 1) % every != 0) for i, slide in enumerate(slides))
    if not regular or {str(kind) for kind in kinds} - _SLIDING - _FULL:
        raise ConfigError("layer_types is not expressible; expected every n-th layer as full_attention and the others as sliding_attention")
    return {"window": width, "window_every": every}


def _positions(c: Fields) -> int:
    """Learned embeddings of positions."""
    field = c.word("learned_positions")
    if not field or c.flag("alibi") or not c.flag("learned_pos_emb", default=True):
        return 0
    return c.count(field) + c.count("extra_positions", default=0)


def _linear(c: Fields) -> dict[str, Any]:
    """Layers of a gated delta net."""
    if "linear_num_key_heads" not in c:
        return {}
    linear = LinearAttention(
        c.count("linear_num_key_heads"), c.count("linear_num_value_heads"), c.count("linear_key_head_dim"),
        c.count("linear_conv_kernel_dim", default=4), c.count("full_attention_interval", default=4),
    )  # fmt: skip
    if not linear.full_every:
        raise ConfigError("full_attention_interval is 0; expected 1 or more")
    c.refuse("linear_value_head_dim", linear.head_dim)
    return {"linear": linear}


_BLOCKS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def _hybrid(c: Fields) -> dict[str, Any]:
    """Layers that are half as much, each of its own kind."""
    kinds = c.fields.get("layers_block_type")
    pattern = c.fields.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        pattern = "".join(_BLOCKS.get(str(kind), "?") for kind in kinds)
    blocks = pattern[:DEEPEST] if isinstance(pattern, str) else ""
    layers = c.count("num_hidden_layers", default=len(blocks))
    if not blocks or set(blocks) - set(_BLOCKS.values()) or len(blocks) != layers:
        raise ConfigError(
            f"hybrid_override_pattern is {str(pattern)[:60]}; expected a letter for each of {layers} layers: M Mamba, * attention, E "
            f"experts, - MLP"
        )
    heads, width, groups, state = (c.count(name) for name in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"))
    mamba = Mamba(heads, width, groups, state, c.count("conv_kernel", default=4))
    values = {"blocks": blocks, "layers": layers, "mamba": mamba, "gated": False, "ffn": c.count("intermediate_size", default=0)}
    if "E" not in blocks:
        return values | {"dense_layers": layers}
    return values | {
        "experts": c.count("n_routed_experts"), "top_k": c.count("num_experts_per_tok"), "expert_ffn": c.count("moe_intermediate_size"),
        "shared_ffn": c.count("moe_shared_expert_intermediate_size", default=0), "latent": c.count("moe_latent_size", default=0),
        "dense_layers": 0,
    }  # fmt: skip


def _tower(config: Config) -> Vision | None:
    """The vision tower of Qwen-VL; None for one of another kind.

    The MLP of Qwen2.5-VL's has a gate: three matrices are counted as two that are 1.5 times as wide.
    """
    if not {"depth", "spatial_merge_size"} <= set(config):
        return None
    second = "embed_dim" in config or str(config.get("model_type", "")).startswith("qwen2") or "fullatt_block_indexes" in config
    c = Fields(config)
    values = (
        c.count("in_channels", "in_chans", default=3) * c.count("temporal_patch_size", default=2) * c.count("patch_size", default=16) ** 2
    )
    hidden = c.count("embed_dim", "hidden_size")
    wide = c.count("intermediate_size", default=c.count("mlp_ratio", default=0) * hidden or None)
    if second:
        tower = Vision(c.count("depth"), hidden, wide if "embed_dim" in c else wide * 3 // 2, 0, values, c.count("spatial_merge_size"), 0)
    else:
        deepstack = config.get("deepstack_visual_indexes", [8, 16, 24])
        levels = len(deepstack) if isinstance(deepstack, list) else 0
        tower = Vision(
            c.count("depth"), hidden, wide, c.count("num_position_embeddings", default=2304), values, c.count("spatial_merge_size"), levels
        )
    if c.missing or tower.depth > DEEPEST or not tower.merge:
        raise ConfigError(f"vision_config: {', '.join(c.missing) or 'depth or spatial_merge_size'} missing or out of range; correct it")
    return tower


_WIDE_QK = {"qk_norm": True, "qk_norm_wide": True}
_LAYER_NORM = {"norm_bias": True}
_OF_GPT = {**_LAYER_NORM, "gated_mlp": False, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "expansion_ratio": 4}
_QWEN2 = {"qkv_bias": True, "output_bias": False, "use_sliding_window": False, "max_window_layers": 28}
_QWEN3 = {"qk_norm": True, "use_sliding_window": False, "max_window_layers": 28}
_QWEN_NEXT = {**_QWEN3, "attention_gate": True, "shared_expert_gate": True}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_MIXTRAL = {"experts_have_intermediate_size": True}

_TYPES: Mapping[str, Config] = {
    "bloom": _OF_GPT,
    "chatglm": {"tie_word_embeddings": False},
    "cohere": {"tie_word_embeddings": True, "norms": 1},
    "cohere2": {"tie_word_embeddings": True, "norms": 1, "sliding_window_pattern": 4},
    "dbrx": {**_MIXTRAL, "gated_mlp": True},
    "deepseek": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "ernie4_5": {"tie_word_embeddings": True},
    "falcon": {**_LAYER_NORM, "gated_mlp": False, "tie_word_embeddings": True, "expansion_ratio": 4, "multi_query": True, "norms": 1},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norms": 4, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {**_GEMMA, "norms": 4, "qk_norm": True, "sliding_window": 4096, "sliding_window_pattern": 6},
    "glm": {"attention_bias": True, "output_bias": False},
    "glm4": {"attention_bias": True, "output_bias": False, "norms": 4},
    "glm4_moe": {"output_bias": False},
    "glm_moe_dsa": {},
    "gpt2": {**_OF_GPT, "learned_positions": "n_positions"},
    "gpt_bigcode": {**_OF_GPT, "learned_positions": "n_positions", "multi_query": True},
    "gpt_neox": {**_OF_GPT, "tie_word_embeddings": False},
    "gpt_oss": {**_MIXTRAL, "attention_bias": True, "expert_bias": True, "attention_sinks": True, "sliding_window_pattern": 2},
    "granite": {},
    "granitemoe": _MIXTRAL,
    "internlm": {"attention_bias": True, "mlp_bias": False},
    "internlm2": {},
    "internlm3": {},
    "kimi_k2": {},
    "llama": {},
    "llama4_text": {**_MIXTRAL, "qk_norm": False, "n_shared_experts": 1, "sliding_window_pattern": 4},
    "minimax_m2": {**_WIDE_QK, **_MIXTRAL},
    "mistral": {},
    "mistral3": {},
    "mixtral": _MIXTRAL,
    "mpt": {"gated_mlp": False, "tie_word_embeddings": True, "expansion_ratio": 4, "learned_positions": "max_seq_len"},
    "nemotron": {**_LAYER_NORM, "gated_mlp": False},
    "nemotron_h": {"gated_mlp": False},
    "olmo": {"norms": 0},
    "olmo2": _WIDE_QK,
    "olmo3": {**_WIDE_QK, "sliding_window_pattern": 4},
    "olmoe": {**_WIDE_QK, **_MIXTRAL},
    "opt": {**_OF_GPT, "learned_positions": "max_position_embeddings", "extra_positions": 2},
    "phi": {**_OF_GPT, "tie_word_embeddings": False, "norms": 1},
    "phi3": {},
    "phimoe": {**_MIXTRAL, **_LAYER_NORM},
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": {**_QWEN2, "shared_expert_gate": True},
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "qwen3_5_text": {**_QWEN3, "attention_gate": True},
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN_NEXT,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "seed_oss": {"attention_bias": True, "output_bias": False},
    "smollm3": {"tie_word_embeddings": True, "use_sliding_window": False},
    "stablelm": _LAYER_NORM,
    "starcoder2": {**_LAYER_NORM, "gated_mlp": False, "use_bias": True, "tie_word_embeddings": True},
}
"""What a `model_type` has where its fields do not say, as fields."""
