"""A plan as a configuration of this trainer, and of others through its exporter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from playbook.errors import ConfigError

if TYPE_CHECKING:
    from playbook.planner.plan import Plan

TARGETS = ("megatron-lm", "megatron-bridge", "torchtitan", "playbook")
_NAMES = {2: "bf16", 4: "fp32"}
_DATA_PARALLEL = {"none": "ddp", "optimizer": "distributed_optimizer", "fsdp": "megatron_fsdp", "fsdp2": "fsdp2"}
_PLATFORMS = {"gb": "nvl72", "b": "blackwell"}
_PLANNED = ("backend", "model", "parallel", "moe.experts", "megatron", "precision", "offload")
"""Sections and keys of the configuration that a plan is about, whether or not it names them."""


def exported(plan: Plan, target: str, hardware: str) -> str:
    """The plan for another trainer, or as a file of this one.

    Learning rate, steps, balancing, data and checkpoints are the reader's own: another trainer is told the model and what was planned. A model that
    this trainer does not train has its layout alone; flags of the model itself are left to the reader.

    Raises:
        ConfigError: the target is not known, or has no words for this model.
    """
    from playbook_trainer.config.tree import from_data, model_names
    from playbook_trainer.export.render import export
    from playbook_trainer.export.sheet import Remark, Setting

    if target not in TARGETS:
        raise ConfigError(f"--export is '{target[:40]}'; expected one of {', '.join(TARGETS)}")
    if plan.model not in model_names():
        return layout_alone(plan, target)
    told = configuration(plan)
    config = from_data(told, {}, "plan", {})
    if target == "playbook":
        return str(yaml.safe_dump(told, sort_keys=False, default_flow_style=None, width=120))
    named = {f"{section}.{key}" for section, keys in told.items() if isinstance(keys, Mapping) for key in keys}

    def planned(said: Setting | Remark) -> bool:
        keys = (said.keys or (said.section,)) if isinstance(said, Setting) else (said.key,)
        return any(k in named or k in _PLANNED or k.partition(".")[0] in _PLANNED for k in keys)

    head = "# the model, and what is planned; learning rate, steps, balancing, data and checkpoints are your own\n"
    return head + export(config, target, platform_of(hardware), planned).text()  # type: ignore[arg-type]


def platform_of(hardware: str) -> str:
    """The exporter's platform of a kind of GPU."""
    return next((p for start, p in _PLATFORMS.items() if hardware.lower().startswith(start)), "hopper")


def configuration(plan: Plan) -> dict[str, Any]:
    """The plan in the words of the trainer's configuration."""
    from playbook.planner import pipeline

    o, sizes = plan.options, pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    again = o.recompute
    kind = "none" if not again else "full" if "full" in again else "selective"
    found: dict[str, Any] = {
        "backend": o.backend,
        "model": plan.model,
        "data": {"kind": "text", "seq_len": plan.seq_len},
        "parallel": {
            **{k: getattr(plan, k) for k in ("tp", "cp", "pp", "vpp", "ep", "etp")}, "sequence_parallel": plan.sequence_parallel,
            **({"pipeline_layout": sizes} if len(set(sizes)) > 1 and o.backend == "megatron" else {}),
        },
        "train": {
            "micro_batch_size": plan.mbs, "global_batch_size": plan.global_batch, "dtype": "bf16", "recompute": kind,
            **({"recompute_modules": list(again)} if kind == "selective" and o.backend == "megatron" else {}),
            **({"cuda_graphs": list(o.graphs)} if o.graphs else {}),
        },
    }  # fmt: skip
    if plan.shape.experts:
        found["moe"] = {"dispatcher": o.dispatcher or "alltoall"}
    if o.backend == "megatron":
        found["megatron"] = {
            "data_parallel": _DATA_PARALLEL[o.sharding], "grad_reduce_dtype": _NAMES[plan.grad_bytes],
            "precision_aware_optimizer": o.precision_aware, "overlap_expert_parallel": o.ep_overlap,
            "optimizer_offload_fraction": o.optimizer_offload / 100,
        }  # fmt: skip
    if plan.moment_bytes == 2:
        found["optimizer"] = {"moments_dtype": "bf16"}
    if o.fp8:
        found["precision"] = {"fp8": o.fp8}
    return found


_FLAGS: Mapping[str, Mapping[str, str]] = {
    "megatron-lm": {
        "tp": "--tensor-model-parallel-size {}", "pp": "--pipeline-model-parallel-size {}", "cp": "--context-parallel-size {}",
        "ep": "--expert-model-parallel-size {}", "etp": "--expert-tensor-parallel-size {}", "vpp": "--num-virtual-stages-per-pipeline-rank {}",
        "mbs": "--micro-batch-size {}", "global_batch": "--global-batch-size {}", "seq_len": "--seq-length {}",
    },
    "megatron-bridge": {
        "tp": "model.tensor_model_parallel_size={}", "pp": "model.pipeline_model_parallel_size={}", "cp": "model.context_parallel_size={}",
        "ep": "model.expert_model_parallel_size={}", "etp": "model.expert_tensor_parallel_size={}",
        "vpp": "model.virtual_pipeline_model_parallel_size={}", "mbs": "train.micro_batch_size={}",
        "global_batch": "train.global_batch_size={}", "seq_len": "model.seq_length={}",
    },
    "torchtitan": {
        "tp": "--parallelism.tensor_parallel_degree {}", "pp": "--parallelism.pipeline_parallel_degree {}",
        "cp": "--parallelism.context_parallel_degree {}", "ep": "--parallelism.expert_parallel_degree {}",
        "mbs": "--training.local_batch_size {}", "global_batch": "--training.global_batch_size {}", "seq_len": "--training.seq_len {}",
    },
}  # fmt: skip
"""Degrees and batch in other trainers' words, for models that this trainer does not train."""

_MEGATRON = {
    "megatron-lm": ("--sequence-parallel", "--recompute-granularity {} {}", "--moe-token-dispatcher-type {}"),
    "megatron-bridge": ("model.sequence_parallel=true", "model.recompute_granularity={} {}", "model.moe_token_dispatcher_type={}"),
}


def layout_alone(plan: Plan, target: str) -> str:
    """Degrees, batch and recompute of a plan as flags of another trainer.

    Raises:
        ConfigError: the target is this trainer.
    """
    if target == "playbook":
        raise ConfigError(f"this trainer does not train {plan.model}; expected --export megatron-lm, megatron-bridge or torchtitan")
    lines = [f"# the layout alone: this trainer does not train {plan.model}, so flags of the model are not here"]
    lines += [words.format(getattr(plan, key)) for key, words in _FLAGS[target].items() if not (key == "vpp" and plan.vpp == 1)]
    o = plan.options
    if target in _MEGATRON:
        parallel, recompute, dispatcher = _MEGATRON[target]
        modules = (
            f"--recompute-modules {' '.join(o.recompute)}" if target == "megatron-lm" else f"model.recompute_modules={list(o.recompute)}"
        )
        lines += [parallel] if plan.sequence_parallel else []
        lines += [dispatcher.format("flex" if o.dispatcher == "hybridep" else o.dispatcher)] if o.dispatcher else []
        if o.recompute:
            whole = "full" in o.recompute
            lines.append(recompute.format("full" if whole else "selective", "" if whole else modules).strip())
    elif o.recompute:
        lines.append(f"--activation_checkpoint.mode {o.recompute[0]}")
    return "\n".join(lines) + "\n"
