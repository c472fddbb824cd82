"""A planned model in fields of megatron-core, from its shape; what a preset knows beyond its shape comes from the preset.

Source: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`, `megatron/training/arguments.py`; the settings of GPT-OSS and of
windows by Megatron-Bridge 0.6.2, `megatron/bridge/models/gpt_oss/gpt_oss_bridge.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from playbook.paths import data_root
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.yaml_files import read
from playbook_trainer.config.model import ModelConfig
from playbook_trainer.config.tree import model_names

UNKNOWN = "the planner knows no rotary base, no norm's epsilon and no router's score of this model: these are the target's defaults, and change no time"
_CONV = 4
"""Tokens of Mamba's convolution, for which there is no field. Source: `megatron/core/ssm/mamba_mixer.py`."""
_CLAMP = 7.0
"""The limit of the activation of GPT-OSS. Source: `gpt_oss_bridge.py`."""


def lacking(shape: Shape) -> list[str]:
    """What of a shape GPT and hybrid models of megatron-core cannot have."""
    uneven_bias = len({shape.output_bias, shape.expert_bias if shape.experts else shape.mlp_bias}) > 1
    found = {
        "a vision tower": shape.vision is not None,
        f"{shape.norms} norms in a layer": shape.norms != 2,
        "biases in some of its linear layers alone": uneven_bias,
        f"a convolution over {shape.mamba.conv} tokens" if shape.mamba else "": shape.mamba is not None and shape.mamba.conv != _CONV,
    }
    return [words for words, holds in found.items() if holds]


def model_fields(plan: Plan) -> dict[str, Any]:
    """Fields of the model by megatron-core's names; `hybrid_layer_pattern` has the pipeline's cuts in it.

    `vocab_size` is the model's own: ranks of TP hold equal parts of it only where it divides.
    """
    shape = plan.shape
    positions = {"position_embedding_type": "learned_absolute" if shape.positions else "none" if shape.mamba else "rope"}
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn or shape.expert_ffn or shape.hidden,
        "normalization": "LayerNorm" if shape.norm_bias else "RMSNorm",
        **_activation(shape),
        "add_bias_linear": shape.output_bias,
        # Transformer Engine's grouped experts add no bias inside that kernel, and refuse to be asked.
        **({"bias_dropout_fusion": False} if shape.experts and shape.output_bias else {}),
        "add_qkv_bias": shape.attention_bias,
        "qk_layernorm": shape.qk_norm or shape.mla is not None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "share_embeddings_and_output_weights": shape.tied,
        **positions,
        **_attention(shape),
        **_experts(shape),
        **_hybrid(plan),
        **({"mtp_num_layers": shape.mtp} if shape.mtp and not shape.blocks else {}),
        **_preset(plan.model),
    }


def pattern(plan: Plan, sizes: list[int]) -> str:
    """The layers of a hybrid model as megatron-core writes them, cut into the chunks of the pipeline; depths of prediction behind a slash."""
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    chunks = [plan.shape.blocks[a:b] for a, b in pairwise(cuts)]
    depth = "/*E" if plan.shape.experts else "/*-"
    return ("|".join(chunks) if len(chunks) > 1 else plan.shape.blocks) + depth * plan.shape.mtp


def _activation(shape: Shape) -> dict[str, Any]:
    """SwiGLU where MLPs are gated; GPT-OSS, which alone has sinks, has a clamped GELU for its gates; hybrids square a ReLU."""
    if shape.sinks:
        return {"gated_linear_unit": True, "activation_func": "quick_gelu", "glu_linear_offset": 1.0, "activation_func_clamp_value": _CLAMP}
    if shape.gated:
        return {"gated_linear_unit": True, "activation_func": "silu"}
    return {"gated_linear_unit": False, "activation_func": "squared_relu" if shape.mamba else "gelu"}


def _attention(shape: Shape) -> dict[str, Any]:
    mla, linear = shape.mla, shape.linear
    found: dict[str, Any] = {}
    if mla:
        found |= {
            "multi_latent_attention": True, "q_lora_rank": mla.q_rank or None, "kv_lora_rank": mla.kv_rank, "qk_head_dim": mla.nope_dim,
            "qk_pos_emb_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim, "rope_type": "rope",
        }  # fmt: skip
    else:
        found["num_query_groups"] = shape.kv_heads
    if shape.attention_gate:
        found["attention_output_gate"] = True
    if shape.sinks:
        found["softmax_type"] = "learnable"
    if shape.window:
        found["window_size"] = (shape.window - 1, 0)
        found |= {"window_attn_skip_freq": shape.window_every} if shape.window_every else {}
    if linear:
        found |= {
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": linear.full_every,
            "linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads, "linear_key_head_dim": linear.head_dim,
            "linear_value_head_dim": linear.head_dim, "linear_conv_kernel_dim": linear.conv,
        }  # fmt: skip
    return found


def _experts(shape: Shape) -> dict[str, Any]:
    if not shape.experts:
        return {}
    dense = shape.dense_layers
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": shape.top_k == 1,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        **({"moe_layer_freq": [0] * dense + [1] * (shape.layers - dense)} if dense else {}),
        **({"moe_shared_expert_intermediate_size": shape.shared_ffn} if shape.shared_ffn else {}),
        **({"moe_shared_expert_gate": True} if shape.shared_gate else {}),
        **({"moe_latent_size": shape.latent} if shape.latent else {}),
    }


def _hybrid(plan: Plan) -> dict[str, Any]:
    """Fields of layers with a state; how they follow each other is said with the pipeline."""
    mamba = plan.shape.mamba
    if mamba is None:
        return {}
    return {
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "mamba_num_groups": mamba.groups,
        "mamba_state_dim": mamba.state,
    }


def known(model: str) -> bool:
    """Whether a preset of this trainer says more of the model than its shape."""
    return model in model_names()


def _preset(model: str) -> Mapping[str, Any]:
    """What the preset of a model says beyond its shape: positions, norms and the router's arithmetic."""
    if not known(model):
        return {}
    m = ModelConfig.model_validate({"name": model, **read(data_root("configs") / "models" / f"{model}.yaml")[0]})
    found: dict[str, Any] = {"rotary_base": int(m.rope_theta), "layernorm_epsilon": m.rms_norm_eps, "init_method_std": m.init_std}
    if m.num_experts:
        groups = {"moe_router_num_groups": m.router_groups, "moe_router_group_topk": m.router_group_top_k} if m.router_groups else {}
        scale = {} if m.router_scale == 1 else {"moe_router_topk_scaling_factor": m.router_scale}
        found |= {
            "moe_router_pre_softmax": not m.norm_topk_prob or m.top_k == 1, "moe_router_score_function": m.router_score,
            "moe_router_enable_expert_bias": m.router_bias, **groups, **scale,
        }  # fmt: skip
    if m.yarn:
        found |= {
            "rope_type": "yarn", "rotary_scaling_factor": m.yarn.factor, "mscale": m.yarn.mscale, "mscale_all_dim": m.yarn.mscale_all_dim,
        }  # fmt: skip
    return found
