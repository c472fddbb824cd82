"""A plan as a configuration of this trainer, and the command that trains it."""

from __future__ import annotations

from typing import Any

import yaml

from playbook import __version__
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.models import MODELS
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.yaml_files import read
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import from_data, model_names
from playbook_trainer.export.launch import STEPS, Launchable, chosen, refuse, torchrun
from playbook_trainer.export.plan_megatron import chunk_sizes

_FILE = "plan.yaml"
_OUTPUT = "run"
_WARM_UP = 5
"""Steps that are not counted; graphs are captured after three."""
_NAMES = {2: "bf16", 4: "fp32"}
_DATA_PARALLEL = {"none": "ddp", "optimizer": "distributed_optimizer", "fsdp": "megatron_fsdp", "fsdp2": "fsdp2"}
_ATTENTION = {"cudnn": "cudnn", "flash2": "flash", "unfused": "plain"}
_SHAPE = {
    "layers": "num_layers", "hidden": "hidden_size", "vocab": "vocab_size", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "qk_norm": "qk_norm", "ffn": "ffn_size", "experts": "num_experts", "top_k": "top_k",
    "expert_ffn": "expert_ffn_size",
    "shared_ffn": "shared_expert_ffn_size", "mtp": "mtp_layers", "tied": "tie_word_embeddings",
}  # fmt: skip
"""Counts of a shape as the configuration calls them."""
_SPECIAL = {"eos_token_id": 256, "pad_token_id": 257}
"""The first ids that are no bytes: random tokens end in none, but the trainer asks for ids inside the vocabulary."""
_LATENT = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for this trainer, which finds the variables that it needs for itself.

    Raises:
        ConfigError: the trainer cannot do what is planned.
    """
    refuse("playbook", inexpressible(plan))
    config = configuration(plan)
    config["model"] = _with_special_ids(config["model"])
    config["data"] = {"kind": "mock", "seq_len": plan.seq_len} | ({"pack": False} if plan.options.graphs else {})
    config["output"] = _OUTPUT
    config["train"] |= {"steps": STEPS, "warmup_steps": _WARM_UP}
    try:
        dry_run(from_data(dict(config), {}, _FILE, {}), plan.gpus)
    except ConfigError as e:
        refuse("playbook", [str(e)])
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=120)
    return Launchable(
        "playbook", f"playbook {__version__}", {}, (*torchrun(plan.gpus), "-m", "playbook_trainer", _FILE), {_FILE: text}, log=_OUTPUT,
        notes=(f"{STEPS} steps on random tokens", *([] if is_preset(plan) else ["rotary base and norms are those of a preset's defaults"])),
    )  # fmt: skip


def inexpressible(plan: Plan) -> list[str]:
    """What of a plan this trainer cannot do."""
    o, megatron = plan.options, plan.options.backend == "megatron"
    limits = {
        f"attention kernel {o.attention}": o.attention not in ("", *_ATTENTION),
        f"rank order {o.rank_order}": o.rank_order != "tp-cp-ep-dp-pp",
        f"dispatcher {o.dispatcher}": o.dispatcher in ("flex", "ncclep"),
        f"recompute {', '.join(o.recompute)}": not megatron and "selective" in o.recompute,
        f"moments of {plan.moment_bytes} byte": plan.moment_bytes == 1,
        "weight gradients behind the others": o.delay_wgrad,
        "shared experts beside the dispatcher": o.shared_overlap,
        f"adapters of rank {o.lora} on frozen weights": bool(o.lora),
        "frozen parts": bool(o.frozen),
        "activations of some layers on the host": o.offload and (o.offload_percent != 100 or not megatron),
    }
    return [*(_unlike(plan.shape) if not is_preset(plan) else []), *(words for words, holds in limits.items() if holds)]


def configuration(plan: Plan) -> dict[str, Any]:
    """The plan in the words of the trainer's configuration."""
    o, sizes = plan.options, chunk_sizes(plan)
    modules = o.recompute
    recompute = "none" if not modules else "full" if "full" in modules else "selective"
    graphs = [g for g in o.graphs if g != "full_iteration"]
    config: dict[str, Any] = {
        "backend": o.backend,
        "model": _model(plan),
        "data": {"kind": "text", "seq_len": plan.seq_len},
        "parallel": {
            **{k: getattr(plan, k) for k in ("tp", "cp", "pp", "vpp", "ep", "etp")}, "sequence_parallel": plan.sequence_parallel,
            **({"pipeline_layout": sizes} if len(set(sizes)) > 1 and o.backend == "megatron" else {}),
            **({"dp_replicate": o.optimizer_instances} if o.optimizer_instances > 1 else {}),
        },
        "train": {
            "micro_batch_size": plan.mbs, "global_batch_size": plan.global_batch, "dtype": "bf16", "recompute": recompute,
            **({"recompute_modules": list(modules)} if recompute == "selective" and o.backend == "megatron" else {}),
            **({"cuda_graphs": graphs} if graphs else {}),
            **({"attention": _ATTENTION[o.attention]} if o.attention in _ATTENTION else {}),
        },
    }  # fmt: skip
    moe = {"dispatcher": o.dispatcher or "alltoall", **chosen((o.capacity, {"capacity_factor": 1.0}))}
    megatron = {
        "data_parallel": _DATA_PARALLEL.get(o.sharding), "grad_reduce_dtype": _NAMES[plan.grad_bytes],
        "precision_aware_optimizer": o.precision_aware, "overlap_expert_parallel": o.ep_overlap,
        "optimizer_offload_fraction": o.optimizer_offload / 100,
        **chosen(
            (o.cp_comm, {"cp_comm_type": o.cp_comm}),
            (o.cp_sizes, {"cp_sizes": list(o.cp_sizes)}),
            (o.offload_modules, {"offload_modules": list(o.offload_modules)}),
            (o.fp8_params, {"fp8_param": True}),
            ("full_iteration" in o.graphs, {"cuda_graph_impl": "full_iteration"}),
        ),
    }  # fmt: skip
    return config | chosen(
        (plan.shape.experts, {"moe": moe}),
        (o.backend == "megatron", {"megatron": megatron}),
        (plan.moment_bytes == 2, {"optimizer": {"moments_dtype": "bf16"}}),
        (o.fp8, {"precision": {"fp8": o.fp8}}),
        (o.offload, {"offload": {"activations": True}}),
    )


def is_preset(plan: Plan) -> bool:
    """Whether the trainer has a preset of the plan's model."""
    return plan.model in model_names()


def _model(plan: Plan) -> Any:
    """The preset's name, with another number of layers where they were cut; the counts of a model that has no preset."""
    shape, whole = plan.shape, MODELS.get(plan.model)
    if is_preset(plan) and whole is not None:
        preset = read(data_root("configs") / "models" / f"{plan.model}.yaml")[0]
        return plan.model if shape.layers == whole.layers else {"name": plan.model, **preset, "num_layers": shape.layers, **_dense(shape)}
    counts = {word: getattr(shape, key) for key, word in _SHAPE.items()}
    model: dict[str, Any] = {"name": plan.model, **counts, **_dense(shape)}
    if shape.mla:
        model |= {"attention": "mla", "qk_norm": True, **{word: getattr(shape.mla, key) for key, word in _LATENT.items()}}
    return model


def _with_special_ids(model: Any) -> Any:
    """The model with ids of special tokens that the bytes of random text leave free, where its own are not."""
    fields = read(data_root("configs") / "models" / f"{model}.yaml")[0] if isinstance(model, str) else model
    if fields.get("eos_token_id", 0) >= _SPECIAL["eos_token_id"]:
        return model
    return {"name": model if isinstance(model, str) else model["name"], **fields, **_SPECIAL}


def _dense(shape: Shape) -> dict[str, int]:
    return {"first_dense_layers": shape.dense_layers} if shape.experts and shape.dense_layers else {}


def _unlike(shape: Shape) -> list[str]:
    """What a decoder of this trainer does not have."""
    biases = shape.attention_bias or shape.output_bias or shape.mlp_bias or shape.norm_bias or shape.expert_bias
    limits = {
        "biases": biases, "ungated MLPs": not shape.gated, "learned positions": shape.positions > 0, "attention sinks": shape.sinks,
        "attention in windows": shape.window > 0, "gated attention": shape.attention_gate, "linear attention": shape.linear is not None,
        "Mamba's layers": shape.mamba is not None, "experts in a latent space": shape.latent > 0, "gated shared experts": shape.shared_gate,
        f"{shape.norms} norms in a layer": shape.norms != 2, "a vision tower without a preset": shape.vision is not None,
    }  # fmt: skip
    return [words for words, holds in limits.items() if holds]
