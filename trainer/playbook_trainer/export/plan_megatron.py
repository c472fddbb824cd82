"""A plan as fields of megatron-core and of the training loop around it, which Megatron-LM and Megatron-Bridge share.

The model's fields follow from its shape; what a preset knows beyond its shape comes from the preset.

Sources: megatron-core 0.19.2, `megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`,
`megatron/core/transformer/pipeline_parallel_layer_layout.py`; Megatron-Bridge 0.6.2, `megatron/bridge/training/config.py`; the settings of
GPT-OSS and of windows by Megatron-Bridge 0.6.2, `megatron/bridge/models/gpt_oss/gpt_oss_bridge.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from playbook.paths import data_root
from playbook.planner import pipeline
from playbook.planner.memory import GIB, stages
from playbook.planner.options import FLEX
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.yaml_files import read
from playbook_trainer.config.environment import Platform, needed
from playbook_trainer.config.megatron_fields import FP8_FORMAT
from playbook_trainer.config.sections import ModelConfig
from playbook_trainer.config.tree import model_names
from playbook_trainer.export.launch import STEPS, Launchable, by_flag, chosen, refuse, torchrun
from playbook_trainer.export.render import flag, override
from playbook_trainer.export.sheet import RELEASES, Setting

Target = Literal["megatron-lm", "megatron-bridge"]
_LR = 1e-4
_SAID_GIB = 0.1
_PLATFORMS: Mapping[str, Platform] = {"gb": "nvl72", "b": "blackwell"}
_DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}
_ATTENTION = {"": "auto", "cudnn": "fused", "flash1": "flash", "flash2": "flash", "unfused": "unfused"}
_ORDERS = {"tp-cp-ep-dp-pp": False, "tp-cp-ep-pp-dp": True}
"""Orders of ranks, and whether `use_tp_pp_dp_mapping` says them."""


def inexpressible(plan: Plan) -> list[str]:
    """What of a plan neither target can do."""
    o = plan.options
    bare = o.sharding not in ("optimizer", "fsdp")
    limits = {
        f"backend {o.backend}": o.backend != "megatron",
        f"rank order {o.rank_order}": o.rank_order not in _ORDERS,
        "dispatcher flex without a backend; name deepep, hybridep or ncclep": o.dispatcher == "flex",
        f"loss {plan.loss}": plan.loss == "compiled",
        f"adapters of rank {o.lora} without a checkpoint to adapt": bool(o.lora),
        f"frozen {', '.join(o.frozen)}": bool(o.frozen),
        f"optimizer state in fewer bits with sharding {o.sharding}": bare and _is_precision_aware(plan),
        "torch FSDP2 with one matrix for embedding and output": o.sharding == "fsdp2" and plan.shape.tied,
        "8-bit weights without shards": o.fp8_params and bare,
        "8-bit weights beside an optimizer on the host": o.fp8_params and o.optimizer_offload > 0 and o.fp8 != "delayed",
    }
    return [*lacking(plan.shape), *(words for words, holds in limits.items() if holds)]


def settings(plan: Plan, target: Target) -> list[Setting]:
    """Every field that the plan asks for, by section of Megatron-Bridge's configuration."""
    # The model's own rows, or rows that ranks of TP divide.
    vocabulary = {"vocab_size": plan.shape.vocab, "should_pad_vocab": plan.shape.vocab % plan.tp > 0}
    parts: Mapping[str, Mapping[str, Any]] = {
        "model": {**model_fields(plan), **vocabulary, **_layout(plan), **_memory(plan), **_switches(plan, target)},
        "ddp": _data_parallel(plan),
        "dist": {"use_megatron_fsdp": plan.options.sharding == "fsdp", "use_torch_fsdp2": plan.options.sharding == "fsdp2"}
        | ({"use_tp_pp_dp_mapping": True} if _ORDERS[plan.options.rank_order] else {}),
        "optimizer": _optimizer(plan),
        "scheduler": {"lr_decay_style": "constant"},
        "train": {"train_iters": STEPS, "micro_batch_size": plan.mbs, "global_batch_size": plan.global_batch},
        "validation": {"eval_iters": 0, "eval_interval": STEPS},
        "rng": {"te_rng_tracker": bool(plan.options.graphs)},
        "logger": {"log_interval": 1, "log_throughput": True},
        "checkpoint": {"ckpt_format": "fsdp_dtensor" if plan.options.sharding == "fsdp" else "torch_dist"},
        "rerun_state_machine": {"check_for_nan_in_loss": "full_iteration" not in plan.options.graphs},
    }
    return [Setting((), section, field, value) for section, fields in parts.items() for field, value in fields.items()]


def environment(plan: Plan, hardware: str) -> dict[str, str]:
    """Variables that the plan needs; memory that grows in segments leaves fewer gaps, so that what fits on paper fits."""
    o = plan.options
    variables = needed(
        platform_of(hardware), tp=plan.tp, cp=plan.cp, ep=plan.ep, dispatcher=o.dispatcher, overlap=o.ep_overlap,
        sharded=o.sharding in ("fsdp", "fsdp2"),
        megatron=True, graphs=o.graphs, offload=o.offload_modules,
    )  # fmt: skip
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | variables


def platform_of(hardware: str) -> Platform:
    """The exporter's platform of a kind of GPU."""
    return next((p for start, p in _PLATFORMS.items() if hardware.lower().startswith(start)), "hopper")


def notes(plan: Plan, target: Target) -> list[str]:
    """What is assumed, and where the run differs from what was predicted."""
    dispatcher = plan.options.dispatcher
    assumed = (
        (True, f"{STEPS} steps on mock data, a constant learning rate, no checkpoint"),
        (
            plan.shape.experts and plan.even_rows,
            "routing is forced to be even, as predicted; leave moe_router_force_load_balancing out to train",
        ),
        (
            dispatcher in ("deepep", "hybridep"),
            f"{dispatcher} needs the package deep_ep, which is built from source; --fix dispatcher=alltoall plans without it",
        ),
        (plan.model not in model_names(), UNKNOWN),
    )
    remarks = [words for holds, words in assumed if holds]
    if target == "megatron-lm" and plan.loss == "te":
        more = max(s.peak for s in stages(replace(plan, loss="native"))) - max(s.peak for s in stages(plan))
        if more >= _SAID_GIB * GIB:
            remarks.append(
                f"Megatron-LM refuses Transformer Engine's loss, which was planned; its own takes {more / GIB:.1f} GiB more at the peak"
            )
    return remarks


def chunk_sizes(plan: Plan) -> list[int]:
    """Decoder layers of each chunk, in the order of the model."""
    return pipeline.split(plan.shape.layers, plan.pp, plan.vpp)


def _layout(plan: Plan) -> dict[str, Any]:
    """Fields of degrees, row length, and how layers and context are split."""
    o, hybrid, sizes = plan.options, plan.shape.blocks, chunk_sizes(plan)
    uneven = len(set(sizes)) > 1
    return {
        "tensor_model_parallel_size": plan.tp, "pipeline_model_parallel_size": plan.pp, "context_parallel_size": plan.cp,
        "seq_length": plan.seq_len, "max_position_embeddings": max(plan.seq_len, plan.shape.positions),
        "sequence_parallel": plan.sequence_parallel,
        **chosen(
            (plan.shape.experts, {"expert_model_parallel_size": plan.ep, "expert_tensor_parallel_size": plan.etp}),
            (hybrid, {"hybrid_layer_pattern": pattern(plan, sizes)}),
            (uneven and not hybrid, {"pipeline_model_parallel_layout": pipeline.string(sizes, plan.shape.mtp)}),
            (plan.vpp > 1 and not uneven and not hybrid, {"virtual_pipeline_model_parallel_size": plan.vpp}),
            (plan.vpp > 1, {"overlap_p2p_comm": o.overlap_p2p}),
            (plan.cp > 1, {"cp_comm_type": o.cp_comm or "p2p"}),
            (plan.cp > 1 and o.cp_sizes, {"hierarchical_context_parallel_sizes": list(o.cp_sizes)}),
        ),
    }  # fmt: skip


def _memory(plan: Plan) -> dict[str, Any]:
    o = plan.options
    full, on_host = "full" in o.recompute, (plan.shape.layers - 1) * o.offload_percent // 100
    return chosen(
        (full, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (o.recompute and not full, {"recompute_granularity": "selective", "recompute_modules": list(o.recompute)}),
        (o.offload, {"cpu_offloading": True, "cpu_offloading_num_layers": on_host}),
        (o.offload_modules, {"fine_grained_activation_offloading": True, "offload_modules": list(o.offload_modules)}),
    )


def _switches(plan: Plan, target: Target) -> dict[str, Any]:
    """Fields of precision, fused kernels, dispatcher, overlaps and CUDA graphs."""
    o, shape, lm = plan.options, plan.shape, target == "megatron-lm"
    backend, whole = o.dispatcher if o.dispatcher in FLEX else None, "full_iteration" in o.graphs
    return {
        "bf16": True, "attention_backend": _ATTENTION[o.attention],
        "cross_entropy_loss_fusion": plan.loss != "torch", "cross_entropy_fusion_impl": "te" if plan.loss == "te" and not lm else "native",
        # For multi-latent attention the fused kernel of the rotary embedding knows stretched frequencies only.
        "apply_rope_fusion": (shape.mla is None or model_fields(plan).get("rope_type") == "yarn") and not shape.mamba,
        # The fused sum wants a kernel of Apex.
        "gradient_accumulation_fusion": False,
        **chosen(
            (shape.experts, {"moe_token_dispatcher_type": "flex" if backend else o.dispatcher or "alltoall"}),
            (shape.experts and backend, {"moe_flex_dispatcher_backend": backend}),
            (shape.experts and plan.even_rows, {"moe_router_force_load_balancing": True}),
            (shape.experts and o.capacity, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
            (o.ep_overlap, {"overlap_moe_expert_parallel_comm": True}),
            (o.delay_wgrad, {"delay_wgrad_compute": True}),
            (o.shared_overlap and shape.shared_ffn > 0, {"moe_shared_expert_overlap": True}),
            (o.fp8_params, {"fp8_param": True}),
            (o.sharding == "fsdp", {"init_model_with_meta_device": True}),
            (o.graphs, {"cuda_graph_impl": "full_iteration" if whole else "transformer_engine"}),
            (o.graphs and not whole, {"cuda_graph_modules": list(o.graphs)}),
            (o.fp8, {"fp8": FP8_FORMAT.get(o.fp8), "fp8_recipe": o.fp8}),
        ),
    }  # fmt: skip


def _data_parallel(plan: Plan) -> dict[str, Any]:
    o = plan.options
    sharded, gradients = o.sharding in ("optimizer", "fsdp"), _DTYPES[plan.grad_bytes]
    return {
        "use_distributed_optimizer": sharded, "overlap_grad_reduce": o.sharding != "fsdp2", "overlap_param_gather": sharded,
        "grad_reduce_in_fp32": plan.grad_bytes == 4,
        **chosen(
            (o.optimizer_instances > 1, {"num_distributed_optimizer_instances": o.optimizer_instances}),
            (o.sharding == "fsdp",
             {"data_parallel_sharding_strategy": "optim_grads_params", "megatron_fsdp_main_grads_dtype": gradients}),
        ),
    }  # fmt: skip


def _is_precision_aware(plan: Plan) -> bool:
    o = plan.options
    return o.precision_aware or min(plan.master_bytes, plan.moment_bytes) < 4 or o.optimizer_offload > 0


def _optimizer(plan: Plan) -> dict[str, Any]:
    """Adam, with its state as planned; that of fewer bits, or on the host, is the precision-aware one's.

    It keeps of a master weight the 16 bits that the weight lacks.
    """
    moments, gradients = _DTYPES[plan.moment_bytes], _DTYPES[plan.grad_bytes]
    share = plan.options.optimizer_offload / 100
    return {
        "optimizer": "adam", "lr": _LR,
        **chosen(
            (_is_precision_aware(plan),
             {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "main_grads_dtype": gradients}),
            (share,
             {"optimizer_cpu_offload": True, "optimizer_offload_fraction": share, "overlap_cpu_optimizer_d2h_h2d": True}),
        ),
    }  # fmt: skip


_SPOKEN = frozenset(
    {"vocab_size", "should_pad_vocab", "activation_func", "window_size", "cpu_offloading", "megatron_fsdp_main_grads_dtype"}
)
"""Fields whose flag is not made of their name and value."""
_SILENT = {"add_bias_linear": True, "bf16": False, "num_query_groups": None}
_CHECKOUT = "run it in a checkout of Megatron-LM, tag core_v0.19.2, which has {}"


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for Megatron-LM's own script of training.

    Raises:
        ConfigError: it cannot do what is planned.
    """
    refuse("megatron-lm", inexpressible(plan))
    script = "pretrain_hybrid.py" if plan.shape.blocks else "pretrain_gpt.py"
    return Launchable(
        "megatron-lm", RELEASES["megatron-lm"], environment(plan, hardware), (*torchrun(plan.gpus), script, *flags(plan)),
        notes=(_CHECKOUT.format(script), *notes(plan, "megatron-lm")),
    )  # fmt: skip


def flag_lines(plan: Plan) -> list[str]:
    """Megatron-LM's flags, each with its values in one line."""
    return by_flag(flags(plan))


def override_lines(plan: Plan) -> list[str]:
    """The settings as Megatron-Bridge's recipes take them behind `--recipe`."""
    return [f"{s.section}.{s.field}={override(s.value)}" for s in settings(plan, "megatron-bridge") if s.field not in _SPOKEN]


def flags(plan: Plan) -> list[str]:
    """The command line of Megatron-LM, in words."""
    all_settings = settings(plan, "megatron-lm")
    values = {s.field: s.value for s in all_settings}
    words = [
        w
        for s in all_settings
        if s.field not in _SPOKEN and not (s.field in _SILENT and s.value == _SILENT[s.field])
        for w in flag(s.field, s.value)
    ]
    words += {"quick_gelu": ["--quick-geglu"], "squared_relu": ["--squared-relu"]}.get(values["activation_func"], [])
    if values["activation_func"] == "quick_gelu":
        words.remove("--swiglu")
    rows = str(plan.shape.vocab)
    behind = (
        ("num_query_groups" in values, ["--group-query-attention"]),
        ("window_size" in values, ["--window-size", ",".join(map(str, values.get("window_size", ())))]),
        (plan.options.sharding == "fsdp", ["--megatron-fsdp-main-grads-dtype", _DTYPES[plan.grad_bytes]]),
        (True, ["--tokenizer-type", "NullTokenizer", "--vocab-size", rows]),
        (not values["should_pad_vocab"], ["--padded-vocab-size", rows]),
        (True, ["--mock-data", "--no-create-attention-mask-in-dataloader"]),
    )
    return [*words, *(word for holds, more in behind if holds for word in more)]


UNKNOWN = (
    "the planner knows no rotary base, no norm's epsilon and no router's score of this model: these are the target's defaults, and change "
    "no time"
)
_CONV = 4
"""Tokens of Mamba's convolution, for which there is no field. Source: `megatron/core/ssm/mamba_mixer.py`."""
_CLAMP = 7.0
"""The limit of the activation of GPT-OSS. Source: `gpt_oss_bridge.py`."""


def lacking(shape: Shape) -> list[str]:
    """What of a shape GPT and hybrid models of megatron-core cannot have."""
    uneven_bias = len({shape.output_bias, shape.expert_bias if shape.experts else shape.mlp_bias}) > 1
    limits = {
        "a vision tower": shape.vision is not None,
        f"{shape.norms} norms in a layer": shape.norms != 2,
        "biases in some of its linear layers alone": uneven_bias,
        f"a convolution over {shape.mamba.conv} tokens" if shape.mamba else "": shape.mamba is not None and shape.mamba.conv != _CONV,
    }
    return [words for words, holds in limits.items() if holds]


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
    """The layers of a hybrid model as megatron-core writes them, cut into the chunks of the pipeline;
    depths of prediction behind a slash.
    """
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
    """Fields of attention: multi-latent, grouped, in windows, gated, with sinks, or linear."""
    mla, linear = shape.mla, shape.linear
    fields: dict[str, Any] = {"num_query_groups": shape.kv_heads}
    if mla:
        fields = {
            "multi_latent_attention": True, "q_lora_rank": mla.q_rank or None, "kv_lora_rank": mla.kv_rank, "qk_head_dim": mla.nope_dim,
            "qk_pos_emb_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim, "rope_type": "rope",
        }  # fmt: skip
    fields |= chosen(
        (shape.attention_gate, {"attention_output_gate": True}),
        (shape.sinks, {"softmax_type": "learnable"}),
        (shape.window, {"window_size": (shape.window - 1, 0)}),
        (shape.window and shape.window_every, {"window_attn_skip_freq": shape.window_every}),
    )
    if linear:
        fields |= {
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": linear.full_every,
            "linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads, "linear_key_head_dim": linear.head_dim,
            "linear_value_head_dim": linear.head_dim, "linear_conv_kernel_dim": linear.conv,
        }  # fmt: skip
    return fields


def _experts(shape: Shape) -> dict[str, Any]:
    """Fields of experts and their router; none for a dense model."""
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


def _preset(model: str) -> Mapping[str, Any]:
    """What the preset of a model says beyond its shape: positions, norms and the router's arithmetic."""
    if model not in model_names():
        return {}
    m = ModelConfig.model_validate({"name": model, **read(data_root("configs") / "models" / f"{model}.yaml")[0]})
    fields: dict[str, Any] = {"rotary_base": int(m.rope_theta), "layernorm_epsilon": m.rms_norm_eps, "init_method_std": m.init_std}
    if m.num_experts:
        fields |= {
            "moe_router_pre_softmax": not m.norm_topk_prob or m.top_k == 1, "moe_router_score_function": m.router_score,
            "moe_router_enable_expert_bias": m.router_bias,
            **chosen(
                (m.router_groups, {"moe_router_num_groups": m.router_groups, "moe_router_group_topk": m.router_group_top_k}),
                (m.router_scale != 1, {"moe_router_topk_scaling_factor": m.router_scale}),
            ),
        }  # fmt: skip
    if m.yarn:
        fields |= {
            "rope_type": "yarn", "rotary_scaling_factor": m.yarn.factor, "mscale": m.yarn.mscale, "mscale_all_dim": m.yarn.mscale_all_dim,
        }  # fmt: skip
    return fields
