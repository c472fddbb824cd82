"""Fields of megatron-core that follow from a configuration alone: one table for the run itself and for what is exported. Torch-free.

Sources: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`, `megatron/core/model_parallel_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from playbook_trainer.config.megatron_checks import pads_experts
from playbook_trainer.config.tree import TrainerConfig

FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""e4m3 in both passes where scales are local enough for gradients, e5m2 for gradients elsewhere. Source: Transformer Engine, recipes."""

ATTENTION = {"auto": "auto", "plain": "unfused", "flash": "flash", "cudnn": "fused"}
"""`train.attention` as `megatron.core.transformer.enums.AttnBackend` names it."""


@dataclass(frozen=True)
class Field:
    """A field of megatron-core, the key of the configuration that it says (none where there is no choice), and its value.

    At None, False or `neutral` it asks for nothing that megatron-core would not do without it.
    """

    name: str
    key: str
    value: Callable[[TrainerConfig], Any]
    neutral: Any = None

    def asks(self, config: TrainerConfig) -> bool:
        """Whether a version that lacks the field cannot run the configuration."""
        value = self.value(config)
        return not (value is None or value is False or value == self.neutral)


def _model(name: str, key: str, neutral: Any = None) -> Field:
    """A field that has the value of a key of the section `model`; 0 there stands for none."""

    def value(config: TrainerConfig) -> Any:
        size = getattr(config.model, key)
        return None if size == 0 and isinstance(size, int) and not isinstance(size, bool) else size

    return Field(name, f"model.{key}", value, neutral)


SIZES = (
    _model("num_layers", "num_layers"),
    _model("hidden_size", "hidden_size"),
    _model("num_attention_heads", "num_heads"),
    _model("kv_channels", "head_dim"),
    _model("layernorm_epsilon", "rms_norm_eps"),
    _model("init_method_std", "init_std"),
    _model("qk_layernorm", "qk_norm"),
    Field("ffn_hidden_size", "model.ffn_size", lambda c: c.model.ffn_size or c.model.hidden_size),
    Field("normalization", "", lambda _: "RMSNorm"),
    Field("gated_linear_unit", "", lambda _: True),
    Field("add_bias_linear", "", lambda _: False),
    Field("hidden_dropout", "", lambda _: 0.0),
    Field("attention_dropout", "", lambda _: 0.0),
    Field("gradient_accumulation_fusion", "", lambda _: False),
)
"""The decoder's sizes, and what all models here have in common."""

MLA = (
    Field("multi_latent_attention", "model.attention", lambda _: True),
    _model("q_lora_rank", "q_lora_rank"),
    _model("kv_lora_rank", "kv_lora_rank"),
    _model("qk_head_dim", "qk_nope_head_dim"),
    _model("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    _model("v_head_dim", "v_head_dim"),
)
"""Multi-head latent attention."""


def _yarn(name: str, key: str) -> Field:
    return Field(name, f"model.yarn.{key}", lambda c: getattr(c.model.yarn, key))


YARN = (_yarn("rotary_scaling_factor", "factor"), _yarn("mscale", "mscale"), _yarn("mscale_all_dim", "mscale_all_dim"))
"""Stretched frequencies of multi-head latent attention; Megatron-LM has no flags for the next three."""

YARN_CORE = (
    _yarn("original_max_position_embeddings", "original_seq_len"), _yarn("beta_fast", "beta_fast"), _yarn("beta_slow", "beta_slow"),
)  # fmt: skip


def _dispatcher(config: TrainerConfig) -> str:
    name = config.moe.dispatcher
    return "flex" if name in ("deepep", "hybridep") else "alltoall" if name == "dedup" else name


def _moe_layers(config: TrainerConfig) -> Any:
    first = config.model.first_dense_layers
    return [int(i >= first) for i in range(config.model.num_layers)] if first else 1


EXPERTS = (
    _model("num_moe_experts", "num_experts"),
    _model("moe_router_topk", "top_k"),
    _model("moe_ffn_hidden_size", "expert_ffn_size"),
    Field("moe_router_pre_softmax", "model.norm_topk_prob", lambda c: not c.model.norm_topk_prob or c.model.top_k == 1),
    Field("moe_layer_freq", "model.first_dense_layers", _moe_layers, 1),
    _model("moe_shared_expert_intermediate_size", "shared_expert_ffn_size"),
    _model("moe_router_score_function", "router_score", "softmax"),
    _model("moe_router_num_groups", "router_groups"),
    _model("moe_router_group_topk", "router_group_top_k"),
    Field("moe_router_topk_scaling_factor", "model.router_scale", lambda c: c.model.router_scale if c.model.router_scale != 1 else None),
    _model("moe_router_enable_expert_bias", "router_bias"),
    Field("moe_token_dispatcher_type", "moe.dispatcher", _dispatcher),
    Field("moe_router_dtype", "moe.router_dtype", lambda c: "fp32" if c.moe.router_dtype == "fp32" else None),
    Field("moe_expert_capacity_factor", "moe.capacity_factor", lambda c: c.moe.capacity_factor),
    Field("moe_router_load_balancing_type", "moe.aux_loss_coeff", lambda c: "aux_loss" if c.moe.aux_loss_coeff else "none", "none"),
    Field("moe_aux_loss_coeff", "moe.aux_loss_coeff", lambda c: c.moe.aux_loss_coeff, 0.0),
)
"""Experts, their router and their dispatcher; of models that have experts."""

EXPERT_SWITCHES = (
    Field("moe_flex_dispatcher_backend", "moe.dispatcher", lambda c: c.moe.dispatcher if _dispatcher(c) == "flex" else None),
    Field("moe_pad_expert_input_to_capacity", "moe.capacity_factor", pads_experts),
)
"""Of the same models; said only where they ask for something."""

PARALLEL = (
    Field("tensor_model_parallel_size", "parallel.tp", lambda c: c.parallel.tp),
    Field("pipeline_model_parallel_size", "parallel.pp", lambda c: c.parallel.pp),
    Field("context_parallel_size", "parallel.cp", lambda c: c.parallel.cp),
    Field("expert_model_parallel_size", "parallel.ep", lambda c: c.parallel.ep),
    # Dense models have no experts, and megatron-core wants no width for them.
    Field("expert_tensor_parallel_size", "parallel.etp", lambda c: (c.parallel.etp or c.parallel.tp) if c.model.num_experts else None),
)
"""Degrees."""

OVERLAPS = (
    Field("tp_comm_overlap", "megatron.tp_comm_overlap", lambda c: c.megatron.tp_comm_overlap),
    Field("overlap_moe_expert_parallel_comm", "megatron.overlap_expert_parallel", lambda c: c.megatron.overlap_expert_parallel),
)
"""Communication beside computation."""


def plain(table: Sequence[Field], config: TrainerConfig) -> dict[str, Any]:
    """Fields with their values."""
    return {field.name: field.value(config) for field in table}


def asked(table: Sequence[Field], config: TrainerConfig) -> dict[str, tuple[Any, str]]:
    """Fields that ask for something, with their values and keys."""
    return {field.name: (field.value(config), field.key) for field in table if field.asks(config)}


def graph_impl(config: TrainerConfig) -> str:
    """Who captures graphs: Transformer Engine where parts are named and nobody else is."""
    impl = config.megatron.cuda_graph_impl
    return "transformer_engine" if impl == "none" and config.train.cuda_graphs else impl


def _longest_chunk(config: TrainerConfig) -> int:
    """Decoder layers of the pipeline's longest chunk."""
    par = config.parallel
    return max(par.pipeline_layout) if par.pipeline_layout else config.model.num_layers // (par.pp * par.vpp)


def recompute_layers(config: TrainerConfig) -> int:
    """Layers per checkpoint (uniform), or layers of a chunk that are made again (block): those chosen, else one, or all of every chunk.

    Chunks count one by one, and a number beyond a chunk's length means all of it.
    Source: Megatron-LM, `megatron/core/recompute.py` (0.16.1: `megatron/core/transformer/transformer_block.py`).
    """
    mg = config.megatron
    return mg.recompute_layers or (1 if mg.recompute_method == "uniform" else _longest_chunk(config))
