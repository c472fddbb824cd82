"""A plan of data parallelism as something to start with DeepSpeed: its JSON, a model of transformers (with peft's adapters),
a plain loop on random tokens.

Source: DeepSpeed 0.19.6, `deepspeed/runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py` and
`runtime/zero/offload_config.py`; peft 0.18, `tuners/lora/config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from playbook.planner.models import fields_of
from playbook.planner.options import LORA_TARGETS
from playbook.planner.plan import Plan
from playbook_trainer.export import launch, plan_accelerate
from playbook_trainer.export.launch import Launchable, torchrun

RELEASE = "deepspeed 0.19.6"
_STAGE = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_LARGEST_RANK = 1 << 20

_SCRIPT = '''"""Trains a model of transformers on random tokens with DeepSpeed; prints a JSON line for each step."""

import json
import time

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, SAMPLES, ACCUMULATE, TOKENS = {steps}, {samples}, {accumulate}, {tokens}

settings = json.load(open("ds_config.json"))
deepspeed.init_distributed()
torch.cuda.set_device(int(deepspeed.comm.get_local_rank()))
fields = json.load(open("model.json"))
config = AutoConfig.for_model(fields.pop("model_type"), **fields)
with deepspeed.zero.Init(config_dict_or_path=settings, enabled={init}):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation={attention!r})
{adapters}{recompute}model.train()
trained = [p for p in model.parameters() if p.requires_grad]
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
for step in range(1, STEPS + 1):
    start = time.perf_counter()
    for _ in range(ACCUMULATE):
        rows = torch.randint(config.vocab_size, (SAMPLES, TOKENS + 1), generator=generator).to(engine.device)
        logits = engine(input_ids=rows[:, :-1].contiguous(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
    value = loss.item()  # waits for the step
    if deepspeed.comm.get_rank() == 0:
        tokens = ACCUMULATE * SAMPLES * TOKENS * deepspeed.comm.get_world_size()
        print(json.dumps({{"step": step, "seconds": time.perf_counter() - start, "loss": value, "tokens": tokens}}), flush=True)
'''


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for DeepSpeed on random tokens.

    Raises:
        ConfigError: DeepSpeed has no words for the plan, or transformers' configuration none for its model.
    """
    o = plan.options
    config = plan_accelerate.huggingface(plan.shape, fields_of(plan.model))
    expressed = {
        "sharding": tuple(_STAGE), "recompute": ((), ("full",)), "compiled": (False,), "optimizer_offload": (0, 100),
        "lora": range(_LARGEST_RANK),
        "lora_targets": (o.lora_targets,),
    }  # fmt: skip
    launch.require(plan, RELEASE, expressed, _lacks(plan, config), {"master_bytes": 4})
    recompute = "model.gradient_checkpointing_enable(dict(use_reentrant=False))\n" if o.recompute else ""
    script = _SCRIPT.format(
        steps=launch.STEPS, samples=plan.mbs, accumulate=plan.microbatches, tokens=plan.seq_len, init=o.sharding == "zero3",
        attention="eager" if plan.shape.sinks else "sdpa", adapters=_adapters(plan), recompute=recompute,
    )  # fmt: skip
    files = {
        "ds_config.json": json.dumps(settings(plan), indent=1) + "\n", "model.json": json.dumps(config, indent=1) + "\n",
        "train.py": script,
        **launch.table_of(plan, hardware),
    }  # fmt: skip
    return Launchable(
        "deepspeed", RELEASE, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, (*torchrun(plan.gpus), "train.py"), files,
        ("ds_config.json is what transformers' Trainer, ms-swift, axolotl and LLaMA-Factory take by their setting deepspeed",
         launch.beside(plan, hardware, "tokens / seconds / GPUs of its last lines")),
    )  # fmt: skip


def settings(plan: Plan) -> dict[str, Any]:
    """What DeepSpeed reads."""
    o = plan.options
    zero = {
        "stage": _STAGE[o.sharding], "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
        **launch.chosen((o.optimizer_offload, {"offload_optimizer": {"device": "cpu", "pin_memory": True}})),
    }  # fmt: skip
    return {
        "train_batch_size": plan.global_batch, "train_micro_batch_size_per_gpu": plan.mbs, "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": {2: "bf16", 4: "fp32"}[plan.grad_bytes]}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}, "zero_optimization": zero,
    }  # fmt: skip


def _adapters(plan: Plan) -> str:
    """The lines that add peft's adapters."""
    o = plan.options
    if not o.lora:
        return ""
    names = [f"{name}_proj" for group in o.lora_targets or ("attention", "mlp") for name in LORA_TARGETS.get(group, (group,))]
    lora_config = f"LoraConfig(r={o.lora}, target_modules={names!r})"
    imports = "from peft import LoraConfig, get_peft_model  # noqa: E402\n\n"
    return f"{imports}model = get_peft_model(model, {lora_config}, autocast_adapter_dtype=False)\n"


def _lacks(plan: Plan, config: Mapping[str, Any]) -> Iterator[str]:
    """What the plan asks for and DeepSpeed has not, beside options."""
    lora = plan.options.lora
    lacking = (
        (plan.cp != 1, f"cp is {plan.cp}; it is exported with data parallelism alone: add --fix cp=1"),
        (
            "experts" in plan.options.lora_targets,
            "lora_targets has experts, whose stacked weights peft names in another way for each model: leave experts out",
        ),
        (
            lora and plan.shape.mla,
            f"lora on {plan.model}, whose compressed attention names its matrices in its own way: choose another target",
        ),
    )
    yield from (*plan_accelerate.lacks(plan, config), *(words for holds, words in lacking if holds))
