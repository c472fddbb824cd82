"""From the configuration to the fields of megatron-core's own configurations.

Every function is pure and returns keyword arguments. A field is dropped where the installed version lacks it, unless the configuration asks
for it: that is an error, which names version and field. Names differ between versions (0.16.1: cuda_graph_scope, 0.19.2:
cuda_graph_modules), so what there is, is looked up in the dataclasses themselves.
Source: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`, `megatron/core/model_parallel_config.py`,
`megatron/core/distributed/distributed_data_parallel_config.py`, `megatron/core/optimizer/optimizer_config.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from playbook.errors import ConfigError
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron.checks import GRAPH_WARMUP, installed, pads_experts
from playbook_trainer.megatron.recompute import recompute_layers
from playbook_trainer.megatron.rows import unlike_lengths, variable_lengths

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""e4m3 in both passes where scales are local enough for gradients, e5m2 for gradients elsewhere. Source: Transformer Engine, recipes."""

_ATTENTION = {"auto": "auto", "plain": "unfused", "flash": "flash", "cudnn": "fused"}
"""`train.attention` as `megatron.core.transformer.enums.AttnBackend` names it."""

Asked = dict[str, tuple[Any, str]]
"""Field to its value and the key of the configuration that asks for it."""


def has_transformer_engine(config: TrainerConfig) -> bool:
    """Whether layers are Transformer Engine's: asked for, or there, with a GPU, and not declined."""
    if config.megatron.kernels == "auto":
        return torch.cuda.is_available() and installed("transformer_engine")
    return config.megatron.kernels == "transformer_engine"


def core_version() -> str:
    """The installed megatron-core."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "of unknown version"


def fields_of(cls: type, plain: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The keyword arguments for a dataclass of the installed version.

    Raises:
        ConfigError: the configuration asks for a field that this version lacks.
    """
    known = {f.name for f in dataclasses.fields(cls)}
    missing = [f"{key} needs {cls.__name__}.{name}" for name, (_, key) in asked.items() if name not in known]
    if missing:
        raise ConfigError(f"megatron-core {core_version()} is too old or too new: {'; '.join(missing)}, which it does not have")
    return {k: v for k, v in plain.items() if k in known} | {k: v for k, (v, _) in asked.items()}


def transformer(config: TrainerConfig, cls: type) -> dict[str, Any]:
    """For TransformerConfig, or MLATransformerConfig where the model compresses keys and values."""
    engine = has_transformer_engine(config)
    parts = (_sizes(config), _precision(config), _parallel(config), _kernels(config, engine))
    plain = {k: v for part in parts for k, v in part.items()}
    asked: Asked = {}
    for more in (_experts(config, engine), _memory(config), _graphs(config, cls), _fp8(config), _overlaps(config), _compressed(config)):
        asked |= more
    return fields_of(cls, plain, asked)


def refuse_lone_experts(config: TrainerConfig, cls: type) -> None:
    """Up to 0.16.1 the gradients of experts that no rank shares are not added up over the tensor-parallel ranks that have each a copy
    (layers of Transformer Engine; this trainer's own are marked right).

    Raises:
        ConfigError: the installed version does so, and the configuration has such experts.
    """
    par = config.parallel
    alone = config.model.num_experts > 0 and par.ep == 1 and (par.etp or par.tp) != par.tp
    if alone and has_transformer_engine(config) and "cuda_graph_modules" not in {f.name for f in dataclasses.fields(cls)}:
        raise ConfigError(
            f"megatron-core {core_version()} adds up gradients of experts wrongly with ep 1 and etp {par.etp} beside tp {par.tp}; "
            "raise parallel.ep, or leave parallel.etp out"
        )


def _sizes(config: TrainerConfig) -> dict[str, Any]:
    model = config.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size or model.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "qk_layernorm": model.qk_norm,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": model.init_std,
        **({"mrope_section": model.mrope_section} if model.mrope_section else {}),
    }


def _precision(config: TrainerConfig) -> dict[str, Any]:
    dtype = DTYPES[config.train.dtype]
    return {
        "bf16": config.train.dtype == "bf16",
        "params_dtype": dtype,
        "autocast_dtype": dtype,
        "pipeline_dtype": dtype,
        "deterministic_mode": config.train.deterministic,
    }


def _parallel(config: TrainerConfig) -> dict[str, Any]:
    par = config.parallel
    etp = par.etp or par.tp
    return {
        "tensor_model_parallel_size": par.tp,
        "pipeline_model_parallel_size": par.pp,
        "virtual_pipeline_model_parallel_size": par.vpp if par.vpp > 1 else None,
        "context_parallel_size": par.cp,
        "expert_model_parallel_size": par.ep,
        # Dense models have no experts, and megatron-core wants no width for them.
        "expert_tensor_parallel_size": etp if config.model.num_experts else None,
        "sequence_parallel": par.sequence_parallel and par.tp > 1,
        "variable_seq_lengths": variable_lengths(config),
        "deallocate_pipeline_outputs": par.pp > 1,
        "cp_comm_type": config.megatron.cp_comm_type if par.cp > 1 else None,
        **({"hierarchical_context_parallel_sizes": config.megatron.cp_sizes} if config.megatron.cp_sizes else {}),
        "overlap_p2p_comm": par.vpp > 1,
        "batch_p2p_comm": par.vpp == 1,
    }


def _kernels(config: TrainerConfig, engine: bool) -> dict[str, Any]:
    """What makes the same numbers faster: on with Transformer Engine, off without it."""
    fused = engine
    mla = config.model.attention == "mla"
    loss = fused and not config.train.deterministic
    return {
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": fused,
        # For MLA the fused kernel knows stretched frequencies only.
        "apply_rope_fusion": fused and not (mla and config.model.yarn is None),
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": loss,
        "cross_entropy_fusion_impl": "te" if loss else "native",
        "moe_permute_fusion": fused and config.model.num_experts > 0,
        "moe_router_fusion": fused and config.model.num_experts > 0,
        "moe_grouped_gemm": grouped(config, engine),
        **({"attention_backend": attention_backend(config)} if engine else {}),
    }


def attention_backend(config: TrainerConfig) -> Any:
    """The implementation of attention that Transformer Engine is told to take."""
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[_ATTENTION[config.train.attention]]


def grouped(config: TrainerConfig, engine: bool) -> bool:
    """Whether all experts are one product."""
    return config.model.num_experts > 0 and (config.moe.experts == "grouped" or (config.moe.experts == "auto" and engine))


def _experts(config: TrainerConfig, engine: bool) -> Asked:
    model, moe, mg = config.model, config.moe, config.megatron
    if not model.num_experts:
        # Nothing is dispatched, but the default, allgather, refuses streams of other lengths.
        return {"moe_token_dispatcher_type": ("alltoall", "model.num_experts")}
    flex = moe.dispatcher in ("deepep", "hybridep")
    out: Asked = {
        "num_moe_experts": (model.num_experts, "model.num_experts"),
        "moe_ffn_hidden_size": (model.expert_ffn_size, "model.expert_ffn_size"),
        "moe_router_topk": (model.top_k, "model.top_k"),
        "moe_router_pre_softmax": (not model.norm_topk_prob or model.top_k == 1, "model.norm_topk_prob"),
        "moe_token_dispatcher_type": ("flex" if flex else moe.dispatcher, "moe.dispatcher"),
        "moe_router_load_balancing_type": ("aux_loss" if mg.aux_loss_coeff else "none", "megatron.aux_loss_coeff"),
        "moe_aux_loss_coeff": (mg.aux_loss_coeff, "megatron.aux_loss_coeff"),
        "moe_router_dtype": ("fp32" if moe.router_dtype == "fp32" else None, "moe.router_dtype"),
    }
    if flex:
        out["moe_flex_dispatcher_backend"] = (moe.dispatcher, f"moe.dispatcher {moe.dispatcher}")
    if moe.dispatcher == "hybridep" and unlike_lengths(config):
        out["moe_hybridep_pad_uneven_dispatch_inputs"] = (True, "moe.dispatcher hybridep")
    if moe.capacity_factor is not None:
        out["moe_expert_capacity_factor"] = (moe.capacity_factor, "moe.capacity_factor")
        out["moe_pad_expert_input_to_capacity"] = (pads_experts(config), "moe.capacity_factor")
    if model.first_dense_layers:
        pattern = [int(i >= model.first_dense_layers) for i in range(model.num_layers)]
        out["moe_layer_freq"] = (pattern, "model.first_dense_layers")
    if model.shared_expert_ffn_size:
        out["moe_shared_expert_intermediate_size"] = (model.shared_expert_ffn_size, "model.shared_expert_ffn_size")
    return out | _routing(config)


def _routing(config: TrainerConfig) -> Asked:
    """How DeepSeek-V3 chooses experts. Source: arXiv 2412.19437, section 2.1.2."""
    model, out = config.model, Asked()
    if model.router_score != "softmax":
        out["moe_router_score_function"] = (model.router_score, "model.router_score")
    if model.router_groups:
        out["moe_router_num_groups"] = (model.router_groups, "model.router_groups")
        out["moe_router_group_topk"] = (model.router_group_top_k, "model.router_group_top_k")
    if model.router_scale != 1.0:
        out["moe_router_topk_scaling_factor"] = (model.router_scale, "model.router_scale")
    if model.router_bias:
        out["moe_router_enable_expert_bias"] = (True, "model.router_bias")
    return out


def _compressed(config: TrainerConfig) -> Asked:
    """Multi-head latent attention, and depths of multi-token prediction."""
    model, out = config.model, Asked()
    if model.mtp_layers:
        out["mtp_num_layers"] = (model.mtp_layers, "model.mtp_layers")
    if config.parallel.pipeline_layout is not None:
        out["pipeline_model_parallel_layout"] = (pipeline_layout(config), "parallel.pipeline_layout")
    if model.attention != "mla":
        return out
    sizes = {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_nope_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "rotary_base": model.rope_theta,
        "rope_type": "yarn" if model.yarn else "rope",
    }
    if model.yarn is not None:
        sizes |= {
            "rotary_scaling_factor": model.yarn.factor,
            "original_max_position_embeddings": model.yarn.original_seq_len,
            "beta_fast": model.yarn.beta_fast,
            "beta_slow": model.yarn.beta_slow,
            "mscale": model.yarn.mscale,
            "mscale_all_dim": model.yarn.mscale_all_dim,
        }
    return out | {name: (value, "model.attention mla") for name, value in sizes.items()}


def pipeline_layout(config: TrainerConfig) -> list[list[str]]:
    """The chunks of a pipeline as megatron-core lists them: decoder layers, with the embedding in the first and the loss in the last.

    Depths of multi-token prediction stand before the loss.
    """
    counts = config.parallel.pipeline_layout or []
    chunks = [["decoder"] * n for n in counts]
    chunks[0].insert(0, "embedding")
    chunks[-1] += ["mtp"] * config.model.mtp_layers + ["loss"]
    return chunks


def _memory(config: TrainerConfig) -> Asked:
    """Recomputation and offload of activations."""
    train, mg, out = config.train, config.megatron, Asked()
    modules = [m for m in train.recompute_modules if m != "vision"]
    if train.recompute == "full":
        out["recompute_granularity"] = ("full", "train.recompute")
        out["recompute_method"] = (mg.recompute_method, "megatron.recompute_method")
        out["recompute_num_layers"] = (recompute_layers(config), "train.recompute")
    elif modules:
        out["recompute_granularity"] = ("selective", "train.recompute")
        out["recompute_modules"] = (modules, "train.recompute_modules")
    if mg.offload_modules:
        out["fine_grained_activation_offloading"] = (True, "megatron.offload_modules")
        out["offload_modules"] = (list(mg.offload_modules), "megatron.offload_modules")
    if config.offload.activations:
        out["cpu_offloading"] = (True, "offload.activations")
        out["cpu_offloading_num_layers"] = (config.model.num_layers - 1, "offload.activations")
    return out


def _graphs(config: TrainerConfig, cls: type) -> Asked:
    """CUDA graphs, under the names of the installed version."""
    impl, parts = graph_impl(config), list(config.train.cuda_graphs)
    if impl == "none":
        return {}
    modern = "cuda_graph_modules" in {f.name for f in dataclasses.fields(cls)}
    out: Asked = {"use_te_rng_tracker": (True, "train.cuda_graphs"), "cuda_graph_warmup_steps": (GRAPH_WARMUP, "train.cuda_graphs")}
    if impl == "full_iteration":
        out["cuda_graph_impl"] = ("full_iteration" if modern else "local", "megatron.cuda_graph_impl")
        return out if modern else out | {"cuda_graph_scope": (["full_iteration"], "megatron.cuda_graph_impl")}
    name = "cuda_graph_modules" if modern else "cuda_graph_scope"
    return out | {"cuda_graph_impl": (impl, "megatron.cuda_graph_impl"), name: (parts, "train.cuda_graphs")}


def graph_impl(config: TrainerConfig) -> str:
    """Who captures graphs: Transformer Engine where parts are named and nobody else is."""
    impl = config.megatron.cuda_graph_impl
    return "transformer_engine" if impl == "none" and config.train.cuda_graphs else impl


def _fp8(config: TrainerConfig) -> Asked:
    recipe, mg = config.precision.fp8, config.megatron
    key = f"precision.fp8 {recipe}"
    if recipe == "none":
        return {}
    if recipe == "nvfp4":
        return {"fp4": ("e2m1", key), "fp4_recipe": ("nvfp4", key)}
    out: Asked = {"fp8": (_FP8_FORMAT[recipe], key), "fp8_recipe": (recipe, key)}
    if mg.fp8_param:
        out["fp8_param"] = (True, "megatron.fp8_param")
    return out


def _overlaps(config: TrainerConfig) -> Asked:
    mg, out = config.megatron, Asked()
    for field, key in (
        ("tp_comm_overlap", "tp_comm_overlap"),
        ("overlap_moe_expert_parallel_comm", "overlap_expert_parallel"),
        ("delay_wgrad_compute", "delay_wgrad"),
    ):
        if getattr(mg, key):
            out[field] = (True, f"megatron.{key}")
    return out


def data_parallel(config: TrainerConfig, cls: type) -> dict[str, Any]:
    """For DistributedDataParallelConfig."""
    mg = config.megatron
    sharded = mg.data_parallel in ("distributed_optimizer", "megatron_fsdp")
    plain: dict[str, Any] = {
        "use_distributed_optimizer": sharded,
        "grad_reduce_in_fp32": mg.grad_reduce_dtype == "fp32",
        "overlap_grad_reduce": mg.overlap_grad_reduce,
        "overlap_param_gather": sharded and mg.overlap_param_gather,
        "check_for_nan_in_grad": False,
    }
    asked: Asked = {}
    if config.parallel.dp_replicate > 1:
        asked["num_distributed_optimizer_instances"] = (config.parallel.dp_replicate, "parallel.dp_replicate")
    if mg.fp8_param:
        asked["fp8_param_gather"] = (True, "megatron.fp8_param")
    if mg.delay_wgrad:
        asked["delay_wgrad_compute"] = (True, "megatron.delay_wgrad")
    if mg.data_parallel == "megatron_fsdp":
        # Since 0.19 these stand where grad_reduce_in_fp32 stood, which it no longer reads; and gradients lie where the optimizer looks for them by the second.
        plain |= {
            "megatron_fsdp_main_grads_dtype": DTYPES[mg.grad_reduce_dtype],
            "megatron_fsdp_use_decoupled_grad": mg.precision_aware_optimizer,
        }
        asked["use_megatron_fsdp"] = (True, "megatron.data_parallel")
        asked["data_parallel_sharding_strategy"] = (mg.sharding_strategy, "megatron.sharding_strategy")
    return fields_of(cls, plain, asked)


def optimizer(config: TrainerConfig, cls: type) -> dict[str, Any]:
    """For OptimizerConfig."""
    opt, mg = config.optimizer, config.megatron
    sharded = mg.data_parallel in ("distributed_optimizer", "megatron_fsdp")
    plain = {
        "optimizer": "adam",
        "lr": opt.lr,
        "min_lr": opt.lr * opt.min_lr_ratio,
        "weight_decay": opt.weight_decay,
        "adam_beta1": opt.betas[0],
        "adam_beta2": opt.betas[1],
        "adam_eps": opt.eps,
        "clip_grad": opt.clip_norm,
        "bf16": config.train.dtype == "bf16",
        "params_dtype": DTYPES[config.train.dtype],
        "use_distributed_optimizer": sharded,
        "overlap_param_gather": sharded and mg.overlap_param_gather,
    }
    asked: Asked = {}
    if mg.precision_aware_optimizer:
        key = "megatron.precision_aware_optimizer"
        moments = DTYPES[opt.moments_dtype]
        asked |= {
            "use_precision_aware_optimizer": (True, key),
            "main_grads_dtype": (DTYPES[mg.grad_reduce_dtype], key),
            "exp_avg_dtype": (moments, key),
            "exp_avg_sq_dtype": (moments, key),
        }
    if mg.precision_aware_optimizer and mg.fp8_param:
        # 8-bit weights lack more than 16 bits of a master weight, which is whole then; megatron-core keeps it but for delayed scaling, and asks
        # for the recipe to know. Without it, the optimizer would get None in the place of each 8-bit weight.
        asked |= {"fp8_recipe": (config.precision.fp8, "megatron.fp8_param"), "store_param_remainders": (False, "megatron.fp8_param")}
    if config.offload.optimizer or mg.optimizer_offload_fraction:
        asked |= {
            "optimizer_cpu_offload": (True, "offload.optimizer"),
            "optimizer_offload_fraction": (mg.optimizer_offload_fraction or 1.0, "megatron.optimizer_offload_fraction"),
            "overlap_cpu_optimizer_d2h_h2d": (True, "offload.optimizer"),
        }
    return fields_of(cls, plain, asked)
