"""A plan of data and context parallelism as something to start with Hugging Face Accelerate:
FSDP2, a model of transformers, a plain loop on random tokens.

Source: accelerate 1.15.0, `accelerate/parallelism_config.py`, `accelerate/utils/dataclasses.py` (FSDP), `accelerate/commands/launch.py`;
transformers 5, `models/<model_type>/configuration_<model_type>.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from playbook.planner.huggingface import from_huggingface
from playbook.planner.models import fields_of
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook_trainer.export import launch
from playbook_trainer.export.launch import Launchable

RELEASE = "accelerate 1.15.0"
_EXPRESSED: Mapping[str, tuple[Any, ...]] = {
    "sharding": ("fsdp2", "optimizer"),
    "recompute": ((), ("full",)),
    "compiled": (True, False),
    "cp_comm": ("", "all_gather"),
}
"""Values of options that it has words for."""
_DEGREES = ("tp", "pp", "ep", "etp", "vpp")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_PRESET: Mapping[str, str] = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "tie_word_embeddings": "tie_word_embeddings", "rope_theta": "rope_theta",
    "ffn_size": "intermediate_size",
    "num_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_ffn_size": "moe_intermediate_size", "head_dim": "head_dim",
}  # fmt: skip
"""Fields of this trainer's presets, as Qwen3's configuration calls them."""

_SCRIPT = '''"""Trains a model of transformers on random tokens; prints a JSON line for each step."""

import json
import time

import torch
from accelerate import Accelerator, init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, SAMPLES, ACCUMULATE, TOKENS, CP = {steps}, {samples}, {accumulate}, {tokens}, {cp}

accelerator = Accelerator()
fields = json.load(open("model.json"))
config = AutoConfig.for_model(fields.pop("model_type"), **fields)
if accelerator.is_main_process:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation={attention!r})
else:  # the first rank sends its weights
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation={attention!r})
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model, optimizer = accelerator.prepare(model, optimizer)
cross_entropy = {loss}
generator = torch.Generator().manual_seed(accelerator.process_index // CP)  # ranks that share a sequence draw the same one


def passed():
    """One micro-batch, forward and backward; its loss."""
    rows = torch.randint(config.vocab_size, (SAMPLES, TOKENS + 1), generator=generator).to(accelerator.device)
    ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(TOKENS, device=accelerator.device).repeat(SAMPLES, 1)
    buffers = [ids, labels, positions]
    with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        accelerator.backward(loss / ACCUMULATE)
    return loss.detach()


for step in range(1, STEPS + 1):
    start = time.perf_counter()
    loss = sum(passed() for _ in range(ACCUMULATE)) / ACCUMULATE
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss, "mean").item()  # waits for the step
    if accelerator.is_main_process:
        tokens = ACCUMULATE * SAMPLES * TOKENS * accelerator.num_processes // CP
        print(json.dumps({{"step": step, "seconds": time.perf_counter() - start, "loss": loss, "tokens": tokens}}), flush=True)
accelerator.end_training()
'''


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for Accelerate on random tokens.

    Raises:
        ConfigError: Accelerate has no words for the plan, or transformers' configuration none for its model.
    """
    config = huggingface(plan.shape, fields_of(plan.model))
    launch.require(plan, RELEASE, _EXPRESSED, lacks(plan, config))
    script = _SCRIPT.format(
        steps=launch.STEPS, samples=plan.mbs, accumulate=plan.microbatches, tokens=plan.seq_len, cp=plan.cp,
        attention="eager" if plan.shape.sinks else "sdpa",
        loss="torch.nn.functional.cross_entropy" if plan.loss == "torch" else "torch.compile(torch.nn.functional.cross_entropy)",
    )  # fmt: skip
    files = {
        "accelerate.yaml": yaml.safe_dump(settings(plan, hardware), sort_keys=False),
        "model.json": json.dumps(config, indent=1) + "\n",
        "train.py": script,
        **launch.table_of(plan, hardware),
    }
    return Launchable(
        "accelerate", RELEASE, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ("accelerate", "launch", "--config_file", "accelerate.yaml", "train.py"), files,
        (*(["layers run as transformers has them, where the prediction supposes compiled ones"] if plan.options.compiled else []),
         "on several nodes set machine_rank and main_process_ip in accelerate.yaml",
         launch.beside(plan, hardware, "tokens / seconds / GPUs of its last lines")),
    )  # fmt: skip


def settings(plan: Plan, hardware: str) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads."""
    return {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
        "num_machines": launch.nodes(plan, hardware),
        "num_processes": plan.gpus, "machine_rank": 0, "rdzv_backend": "static", "main_training_function": "main", "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_reshard_after_forward": plan.options.sharding == "fsdp2",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": plan.options.recompute == ("full",), "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": plan.dp, "parallelism_config_cp_size": plan.cp,
            "parallelism_config_tp_size": 1, **({"parallelism_config_cp_comm_strategy": "allgather"} if plan.cp > 1 else {}),
        },
    }  # fmt: skip


_FOREIGN = ("deepseek", "glm_moe_dsa", "internlm", "internlm2", "mimo")
"""Types that transformers does not know, or builds otherwise than they were published."""


def huggingface(shape: Shape, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The published configuration of transformers with as many layers as the shape; empty where no fields say one."""
    if "model_type" in fields:
        config = {k: v for k, v in fields.items() if not k.startswith("_")}
        config["model_type"] = {"kimi_k2": "deepseek_v3"}.get(str(config["model_type"]), config["model_type"])  # the same layers
        return config | {k: shape.layers for k in _LAYERS if k in config}
    if not fields or shape.vision or shape.mla:
        return {}
    config = {name: fields[key] for key, name in _PRESET.items() if key in fields}
    return {"model_type": "qwen3_moe" if shape.experts else "qwen3", **config, "num_hidden_layers": shape.layers}


def lacks(plan: Plan, config: Mapping[str, Any]) -> Iterator[str]:
    """What the plan asks for and a script on a model of transformers has not, beside options."""
    s, name, loss = plan.shape, plan.model, plan.loss
    degrees = [(degree, getattr(plan, degree)) for degree in _DEGREES]
    foreign = not config or config.get("model_type") in _FOREIGN or from_huggingface(config, "") != replace(s, source="")
    lacking: list[tuple[object, str]] = [
        *((n != 1, f"{d} is {n}; it is exported with data and context parallelism alone: add --fix {d}=1") for d, n in degrees),
        (foreign, f"{name} is not what a published configuration of transformers describes; it has those: give the path of a config.json"),
        (s.vision, f"{name} has a vision tower; its script trains on text alone: choose another target"),
        (
            s.positions and config.get("model_type") == "mpt",
            f"{name} has learned positions; transformers' MPT has ALiBi alone: choose another target",
        ),
        (s.mtp, f"{name} predicts {s.mtp} more tokens; transformers trains the next one alone: choose another target"),
        (
            loss not in launch.LOSSES or plan.moment_bytes != 4,
            f"loss is {loss} and moment_bytes {plan.moment_bytes}; it has loss {' or '.join(launch.LOSSES)} and moment_bytes 4",
        ),
        (
            plan.cp > 1 and (s.sinks or s.linear or s.mamba or s.window),
            f"cp is {plan.cp} for a model with other than plain causal attention; it shares out that alone: add --fix cp=1",
        ),
        (
            plan.cp > 1 and plan.seq_len % (2 * plan.cp),
            f"a sequence has {plan.seq_len} tokens; with cp {plan.cp} it has multiples of {2 * plan.cp}: change --seq",
        ),
    ]
    yield from (words for holds, words in lacking if holds)
