"""A plan as fields of megatron-core and of the training loop around it, which Megatron-LM and Megatron-Bridge share.

Sources: megatron-core 0.19.2, `megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`,
`megatron/core/transformer/pipeline_parallel_layer_layout.py`; Megatron-Bridge 0.6.2, `megatron/bridge/training/config.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from playbook.planner import pipeline
from playbook.planner.memory import GIB, stages
from playbook.planner.options import FLEX
from playbook.planner.plan import Plan
from playbook_trainer.config.environment import Platform, needed
from playbook_trainer.config.megatron_fields import FP8_FORMAT
from playbook_trainer.export.launchable import Launchable, refuse, torchrun
from playbook_trainer.export.planned.model import UNKNOWN, known, lacking, model_fields, pattern
from playbook_trainer.export.render import flag, override
from playbook_trainer.export.sheet import RELEASES, Setting

Target = Literal["megatron-lm", "megatron-bridge"]
STEPS = 20
"""Steps of an exported run: enough for a median behind the first ones, which are slower."""
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
    found = {
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
    return [*lacking(plan.shape), *(words for words, holds in found.items() if holds)]


def settings(plan: Plan, target: Target) -> list[Setting]:
    """Every field that the plan asks for, by section of Megatron-Bridge's configuration."""
    parts: Mapping[str, Mapping[str, Any]] = {
        "model": {**model_fields(plan), **_vocabulary(plan), **_layout(plan), **_memory(plan), **_switches(plan, target)},
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
    found = needed(
        platform_of(hardware), tp=plan.tp, cp=plan.cp, ep=plan.ep, dispatcher=o.dispatcher, overlap=o.ep_overlap, sharded=o.sharding in ("fsdp", "fsdp2"),
        megatron=True, graphs=o.graphs, offload=o.offload_modules,
    )  # fmt: skip
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | found


def platform_of(hardware: str) -> Platform:
    """The exporter's platform of a kind of GPU."""
    return next((p for start, p in _PLATFORMS.items() if hardware.lower().startswith(start)), "hopper")


def notes(plan: Plan, target: Target) -> list[str]:
    """What is assumed, and where the run differs from what was predicted."""
    found = [f"{STEPS} steps on mock data, a constant learning rate, no checkpoint"]
    if plan.shape.experts and plan.even_rows:
        found.append("routing is forced to be even, as predicted; leave moe_router_force_load_balancing out to train")
    if plan.options.dispatcher in ("deepep", "hybridep"):
        found.append(
            f"{plan.options.dispatcher} needs the package deep_ep, which is built from source; --fix dispatcher=alltoall plans without it"
        )
    if not known(plan.model):
        found.append(UNKNOWN)
    if target == "megatron-lm" and plan.loss == "te":
        more = max(s.peak for s in stages(replace(plan, loss="native"))) - max(s.peak for s in stages(plan))
        found += (
            []
            if more < _SAID_GIB * GIB
            else [f"Megatron-LM refuses Transformer Engine's loss, which was planned; its own takes {more / GIB:.1f} GiB more at the peak"]
        )
    return found


def chunk_sizes(plan: Plan) -> list[int]:
    """Decoder layers of each chunk, in the order of the model."""
    return pipeline.split(plan.shape.layers, plan.pp, plan.vpp)


def _vocabulary(plan: Plan) -> dict[str, Any]:
    """The model's own rows, or rows that ranks of TP divide."""
    rows = plan.shape.vocab
    return {"vocab_size": rows, "should_pad_vocab": rows % plan.tp > 0}


def _layout(plan: Plan) -> dict[str, Any]:
    o, sizes = plan.options, chunk_sizes(plan)
    found: dict[str, Any] = {
        "tensor_model_parallel_size": plan.tp, "pipeline_model_parallel_size": plan.pp, "context_parallel_size": plan.cp,
        "seq_length": plan.seq_len, "max_position_embeddings": max(plan.seq_len, plan.shape.positions),
        "sequence_parallel": plan.sequence_parallel,
    }  # fmt: skip
    if plan.shape.experts:
        found |= {"expert_model_parallel_size": plan.ep, "expert_tensor_parallel_size": plan.etp}
    if plan.shape.blocks:
        found["hybrid_layer_pattern"] = pattern(plan, sizes)
    elif len(set(sizes)) > 1:
        found["pipeline_model_parallel_layout"] = pipeline.string(sizes, plan.shape.mtp)
    elif plan.vpp > 1:
        found["virtual_pipeline_model_parallel_size"] = plan.vpp
    if plan.vpp > 1:
        found["overlap_p2p_comm"] = o.overlap_p2p
    if plan.cp > 1:
        found["cp_comm_type"] = o.cp_comm or "p2p"
        found |= {"hierarchical_context_parallel_sizes": list(o.cp_sizes)} if o.cp_sizes else {}
    return found


def _memory(plan: Plan) -> dict[str, Any]:
    o = plan.options
    found: dict[str, Any] = {}
    if "full" in o.recompute:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif o.recompute:
        found |= {"recompute_granularity": "selective", "recompute_modules": list(o.recompute)}
    if o.offload:
        found |= {"cpu_offloading": True, "cpu_offloading_num_layers": (plan.shape.layers - 1) * o.offload_percent // 100}
    if o.offload_modules:
        found |= {"fine_grained_activation_offloading": True, "offload_modules": list(o.offload_modules)}
    return found


def _switches(plan: Plan, target: Target) -> dict[str, Any]:
    o, shape, lm = plan.options, plan.shape, target == "megatron-lm"
    found: dict[str, Any] = {
        "bf16": True, "attention_backend": _ATTENTION[o.attention],
        "cross_entropy_loss_fusion": plan.loss != "torch", "cross_entropy_fusion_impl": "te" if plan.loss == "te" and not lm else "native",
        # For multi-latent attention the fused kernel of the rotary embedding knows stretched frequencies only.
        "apply_rope_fusion": (shape.mla is None or model_fields(plan).get("rope_type") == "yarn") and not shape.mamba,
        # The fused sum wants a kernel of Apex.
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    if shape.experts:
        backend = o.dispatcher if o.dispatcher in FLEX else None
        found |= {"moe_token_dispatcher_type": "flex" if backend else o.dispatcher or "alltoall"}
        found |= {"moe_flex_dispatcher_backend": backend} if backend else {}
        found |= {"moe_router_force_load_balancing": True} if plan.even_rows else {}
        found |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True} if o.capacity else {}
    chosen = {
        "overlap_moe_expert_parallel_comm": o.ep_overlap, "delay_wgrad_compute": o.delay_wgrad,
        "moe_shared_expert_overlap": o.shared_overlap and shape.shared_ffn > 0, "fp8_param": o.fp8_params,
        "init_model_with_meta_device": o.sharding == "fsdp",
    }  # fmt: skip
    found |= {name: True for name, on in chosen.items() if on}
    if o.graphs:
        whole = "full_iteration" in o.graphs
        found["cuda_graph_impl"] = "full_iteration" if whole else "transformer_engine"
        found |= {} if whole else {"cuda_graph_modules": list(o.graphs)}
    if o.fp8:
        found |= {"fp8": FP8_FORMAT[o.fp8], "fp8_recipe": o.fp8}
    return found


def _data_parallel(plan: Plan) -> dict[str, Any]:
    o = plan.options
    sharded = o.sharding in ("optimizer", "fsdp")
    found: dict[str, Any] = {
        "use_distributed_optimizer": sharded, "overlap_grad_reduce": o.sharding != "fsdp2", "overlap_param_gather": sharded,
        "grad_reduce_in_fp32": plan.grad_bytes == 4,
    }  # fmt: skip
    if o.optimizer_instances > 1:
        found["num_distributed_optimizer_instances"] = o.optimizer_instances
    if o.sharding == "fsdp":
        found |= {"data_parallel_sharding_strategy": "optim_grads_params", "megatron_fsdp_main_grads_dtype": _DTYPES[plan.grad_bytes]}
    return found


def _is_precision_aware(plan: Plan) -> bool:
    o = plan.options
    return o.precision_aware or min(plan.master_bytes, plan.moment_bytes) < 4 or o.optimizer_offload > 0


def _optimizer(plan: Plan) -> dict[str, Any]:
    """Adam, with its state as planned; that of fewer bits, or on the host, is the precision-aware one's.

    It keeps of a master weight the 16 bits that the weight lacks.
    """
    found: dict[str, Any] = {"optimizer": "adam", "lr": _LR}
    if _is_precision_aware(plan):
        moments = _DTYPES[plan.moment_bytes]
        found |= {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        found |= {"main_grads_dtype": _DTYPES[plan.grad_bytes]}
    if plan.options.optimizer_offload:
        share = plan.options.optimizer_offload / 100
        found |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": share, "overlap_cpu_optimizer_d2h_h2d": True}
    return found


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
    lines: list[str] = []
    for word in flags(plan):
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def override_lines(plan: Plan) -> list[str]:
    """The settings as Megatron-Bridge's recipes take them behind `--recipe`."""
    return [f"{s.section}.{s.field}={override(s.value)}" for s in settings(plan, "megatron-bridge") if s.field not in _SPOKEN]


def flags(plan: Plan) -> list[str]:
    """The command line of Megatron-LM, in words."""
    found = settings(plan, "megatron-lm")
    values = {s.field: s.value for s in found}
    words = [
        w
        for s in found
        if s.field not in _SPOKEN and not (s.field in _SILENT and s.value == _SILENT[s.field])
        for w in flag(s.field, s.value)
    ]
    words += {"quick_gelu": ["--quick-geglu"], "squared_relu": ["--squared-relu"]}.get(values["activation_func"], [])
    if values["activation_func"] == "quick_gelu":
        words.remove("--swiglu")
    if "num_query_groups" in values:
        words.append("--group-query-attention")
    if "window_size" in values:
        words += ["--window-size", ",".join(map(str, values["window_size"]))]
    if plan.options.sharding == "fsdp":
        words += ["--megatron-fsdp-main-grads-dtype", values["megatron_fsdp_main_grads_dtype"]]
    rows = str(plan.shape.vocab)
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", rows]
    words += [] if values["should_pad_vocab"] else ["--padded-vocab-size", rows]
    return [*words, "--mock-data", "--no-create-attention-mask-in-dataloader"]
