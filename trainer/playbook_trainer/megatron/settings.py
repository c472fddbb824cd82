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
from playbook_trainer.config import megatron_fields as fields
from playbook_trainer.config.megatron_checks import GRAPH_WARMUP, installed
from playbook_trainer.config.megatron_fields import ATTENTION, FP8_FORMAT, graph_impl, recompute_layers
from playbook_trainer.config.row_lengths import unlike_lengths, variable_lengths
from playbook_trainer.config.tree import TrainerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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


def _fields_of(cls: type, plain: Mapping[str, Any], requested: Asked) -> dict[str, Any]:
    """The keyword arguments for a dataclass of the installed version.

    Raises:
        ConfigError: the configuration asks for a field that this version lacks.
    """
    names = {f.name for f in dataclasses.fields(cls)}
    missing = [f"{key} needs {cls.__name__}.{name}" for name, (_, key) in requested.items() if name not in names]
    if missing:
        raise ConfigError(f"megatron-core {core_version()} is too old or too new: {'; '.join(missing)}, which it does not have")
    return {k: v for k, v in plain.items() if k in names} | {k: v for k, (v, _) in requested.items()}


def transformer(config: TrainerConfig, cls: type) -> dict[str, Any]:
    """For TransformerConfig, or MLATransformerConfig where the model compresses keys and values."""
    engine = has_transformer_engine(config)
    plain_experts, experts = _experts(config)
    parts = (_sizes(config), _precision(config), _parallel(config), _kernels(config, engine), plain_experts)
    plain = {k: v for part in parts for k, v in part.items()}
    asked = (experts, _memory(config), _graphs(config, cls), _fp8(config), fields.asked(fields.OVERLAPS, config), _compressed(config))
    return _fields_of(cls, plain, {k: v for part in asked for k, v in part.items()})


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
        **fields.plain(fields.SIZES, config),
        "num_query_groups": model.num_kv_heads,
        "activation_func": torch.nn.functional.silu,
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
    return {
        **fields.plain(fields.PARALLEL, config),
        "virtual_pipeline_model_parallel_size": par.vpp if par.vpp > 1 else None,
        "sequence_parallel": par.sequence_parallel and par.tp > 1,
        "variable_seq_lengths": variable_lengths(config),
        "deallocate_pipeline_outputs": par.pp > 1,
        "cp_comm_type": config.megatron.cp_comm_type if par.cp > 1 else None,
        **({"hierarchical_context_parallel_sizes": config.megatron.cp_sizes} if config.megatron.cp_sizes else {}),
        "overlap_p2p_comm": par.vpp > 1,
        "batch_p2p_comm": par.vpp == 1,
    }


def _kernels(config: TrainerConfig, fused: bool) -> dict[str, Any]:
    """What makes the same numbers faster: on with Transformer Engine, off without it."""
    mla = config.model.attention == "mla"
    loss = fused and not config.train.deterministic
    return {
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": fused,
        # For MLA the fused kernel knows stretched frequencies only.
        "apply_rope_fusion": fused and not (mla and config.model.yarn is None),
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": loss,
        "cross_entropy_fusion_impl": "te" if loss else "native",
        "moe_permute_fusion": fused and config.model.num_experts > 0,
        "moe_router_fusion": fused and config.model.num_experts > 0,
        "moe_grouped_gemm": config.model.num_experts > 0 and (config.moe.experts == "grouped" or (config.moe.experts == "auto" and fused)),
        **({"attention_backend": _attention_backend(config)} if fused else {}),
    }


def _attention_backend(config: TrainerConfig) -> Any:
    """The implementation of attention that Transformer Engine is told to take."""
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[ATTENTION[config.train.attention]]


def _experts(config: TrainerConfig) -> tuple[dict[str, Any], Asked]:
    """Fields that a version may lack, and those that the configuration asks for."""
    if not config.model.num_experts:
        # Nothing is dispatched, but the default, allgather, refuses streams of other lengths.
        return {}, {"moe_token_dispatcher_type": ("alltoall", "model.num_experts")}
    out = fields.asked((*fields.EXPERTS, *fields.EXPERT_SWITCHES), config)
    if config.moe.dispatcher == "hybridep" and unlike_lengths(config):
        out["moe_hybridep_pad_uneven_dispatch_inputs"] = (True, "moe.dispatcher hybridep")
    return fields.plain(fields.EXPERTS, config), out


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
        **fields.plain(fields.MLA, config),
        "rotary_base": model.rope_theta,
        "rope_type": "yarn" if model.yarn else "rope",
        **(fields.plain((*fields.YARN, *fields.YARN_CORE), config) if model.yarn else {}),
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
        out |= {
            "recompute_granularity": ("full", "train.recompute"),
            "recompute_method": (mg.recompute_method, "megatron.recompute_method"),
            "recompute_num_layers": (recompute_layers(config), "train.recompute"),
        }
    elif modules:
        out |= {"recompute_granularity": ("selective", "train.recompute"), "recompute_modules": (modules, "train.recompute_modules")}
    if mg.offload_modules:
        key = "megatron.offload_modules"
        out |= {"fine_grained_activation_offloading": (True, key), "offload_modules": (list(mg.offload_modules), key)}
    if config.offload.activations:
        key = "offload.activations"
        out |= {"cpu_offloading": (True, key), "cpu_offloading_num_layers": (config.model.num_layers - 1, key)}
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


def _fp8(config: TrainerConfig) -> Asked:
    recipe, mg = config.precision.fp8, config.megatron
    key = f"precision.fp8 {recipe}"
    if recipe == "none":
        return {}
    if recipe == "nvfp4":
        return {"fp4": ("e2m1", key), "fp4_recipe": ("nvfp4", key)}
    out: Asked = {"fp8": (FP8_FORMAT[recipe], key), "fp8_recipe": (recipe, key)}
    if mg.fp8_param:
        out["fp8_param"] = (True, "megatron.fp8_param")
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
    requested: Asked = {}
    if config.parallel.dp_replicate > 1:
        requested["num_distributed_optimizer_instances"] = (config.parallel.dp_replicate, "parallel.dp_replicate")
    if mg.fp8_param:
        requested["fp8_param_gather"] = (True, "megatron.fp8_param")
    if mg.data_parallel == "megatron_fsdp":
        # Since 0.19 these stand where grad_reduce_in_fp32 stood, which it no longer reads;
        # and gradients lie where the optimizer looks for them by the second.
        plain |= {
            "megatron_fsdp_main_grads_dtype": DTYPES[mg.grad_reduce_dtype],
            "megatron_fsdp_use_decoupled_grad": mg.precision_aware_optimizer,
        }
        requested |= {
            "use_megatron_fsdp": (True, "megatron.data_parallel"),
            "data_parallel_sharding_strategy": (mg.sharding_strategy, "megatron.sharding_strategy"),
        }
    return _fields_of(cls, plain, requested)


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
    requested: Asked = {}
    if mg.precision_aware_optimizer:
        key = "megatron.precision_aware_optimizer"
        moments = DTYPES[opt.moments_dtype]
        requested |= {
            "use_precision_aware_optimizer": (True, key),
            "main_grads_dtype": (DTYPES[mg.grad_reduce_dtype], key),
            "exp_avg_dtype": (moments, key),
            "exp_avg_sq_dtype": (moments, key),
        }
    if mg.precision_aware_optimizer and mg.fp8_param:
        # 8-bit weights lack more than 16 bits of a master weight, which is whole then; megatron-core keeps it but for delayed scaling, and
        # asks for the recipe to know. Without it, the optimizer would get None in the place of each 8-bit weight.
        requested |= {"fp8_recipe": (config.precision.fp8, "megatron.fp8_param"), "store_param_remainders": (False, "megatron.fp8_param")}
    if config.offload.optimizer or mg.optimizer_offload_fraction:
        requested |= {
            "optimizer_cpu_offload": (True, "offload.optimizer"),
            "optimizer_offload_fraction": (mg.optimizer_offload_fraction or 1.0, "megatron.optimizer_offload_fraction"),
            "overlap_cpu_optimizer_d2h_h2d": (True, "offload.optimizer"),
        }
    return _fields_of(cls, plain, requested)
