"""The names that are allowed in lists of the configuration, such as `train.recompute_modules`."""

from __future__ import annotations

from playbook.yaml_files import did_you_mean

RECOMPUTE_MODULES = ("layernorm", "core_attn", "moe_act", "mlp", "moe", "shared_experts", "mla_up_proj", "vision")
"""Names as megatron-core has them, and `vision` for the blocks of the vision tower."""

FREEZABLE = ("vision", "projector", "language_model")
"""The parts of a vision-language model that can be frozen."""

GRAPH_PARTS = ("attn", "moe_router", "moe_preprocess", "moe", "mlp")
"""Names as megatron-core has them; the torch backend captures the first three."""

OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp")
"""Parts whose inputs fine-grained offload takes to the host. Source: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`."""

_MEANT = {
    "vision_tower": "vision",
    "vision_model": "vision",
    "visual": "vision",
    "merger": "projector",
    "llm": "language_model",
    "decoder": "language_model",
    "text": "language_model",
    "up_proj": "mla_up_proj",
    "mla": "mla_up_proj",
    "norm": "layernorm",
    "norms": "layernorm",
    "layer_norm": "layernorm",
    "rmsnorm": "layernorm",
    "attn": "core_attn",
    "attention": "core_attn",
    "activation": "moe_act",
    "act": "moe_act",
    "swiglu": "moe_act",
    "ffn": "mlp",
    "experts": "moe",
    "shared_expert": "shared_experts",
}


def known(values: list[str], names: tuple[str, ...]) -> list[str]:
    """The values, refused unless each is one of `names` and none stands twice."""
    for value in values:
        if value not in names:
            meant = _MEANT.get(value)
            hint = f"; did you mean '{meant}'?" if meant in names else did_you_mean(value, list(names))
            raise ValueError(f"'{value}' is not known{hint}; there are {', '.join(names)}")
    if len(set(values)) < len(values):
        raise ValueError(f"{values} names something twice")
    return values
