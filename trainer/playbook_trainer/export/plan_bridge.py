"""A plan as a script of Megatron-Bridge: its configuration in full, and the call that trains.

Source: Megatron-Bridge 0.6.2, `megatron/bridge/training/config.py`, `megatron/bridge/models/gpt_provider.py`,
`megatron/bridge/models/mla_provider.py`, `megatron/bridge/models/hybrid/hybrid_provider.py`, `megatron/bridge/training/pretrain.py`.
"""

from __future__ import annotations

from typing import Any

from playbook.planner.plan import Plan
from playbook_trainer.export.launch import STEPS, Launchable, refuse, torchrun
from playbook_trainer.export.plan_megatron import environment, inexpressible, notes, settings
from playbook_trainer.export.sheet import RELEASES

_FILE = "plan_bridge.py"
_SECTIONS = {
    "train": "TrainingConfig", "validation": "ValidationConfig", "optimizer": "OptimizerConfig", "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig", "dist": "DistributedInitConfig", "rng": "RNGConfig", "logger": "LoggerConfig",
    "checkpoint": "CheckpointConfig", "rerun_state_machine": "RerunStateMachineConfig", "dataset": "GPTDatasetConfig",
    "tokenizer": "TokenizerConfig",
}  # fmt: skip
"""Sections of its `ConfigContainer`, and their classes."""
_PROVIDERS = {
    "GPTModelProvider": "megatron.bridge.models.gpt_provider",
    "MLAModelProvider": "megatron.bridge.models.mla_provider",
    "HybridModelProvider": "megatron.bridge.models.hybrid.hybrid_provider",
}
_BLOCK, _VARIANT = "get_gpt_decoder_block_spec", "get_transformer_block_with_experimental_attention_variant_spec"
"""What makes layers of several kinds: dense ones before those with experts, and linear attention between full attention."""
_IMPORTED = {
    "squared_relu": "megatron.core.activations", "quick_gelu": "megatron.core.fusions.fused_bias_geglu",
    _VARIANT: "megatron.core.models.gpt.experimental_attention_variant_module_specs", _BLOCK: "megatron.core.models.gpt.gpt_layer_specs",
    "AttnBackend": "megatron.core.transformer.enums",
}  # fmt: skip
_ACTIVATIONS = {
    "silu": "torch.nn.functional.silu", "gelu": "torch.nn.functional.gelu", "quick_gelu": "quick_gelu", "squared_relu": "squared_relu",
}  # fmt: skip
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp8": "torch.uint8"}
_FLAG_ALONE = frozenset({"max_position_embeddings"})
"""Fields that Megatron-LM alone has."""


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for Megatron-Bridge.

    Raises:
        ConfigError: it cannot do what is planned.
    """
    refuse("megatron-bridge", inexpressible(plan))
    return Launchable(
        "megatron-bridge", RELEASES["megatron-bridge"], environment(plan, hardware), (*torchrun(plan.gpus), _FILE), {_FILE: _script(plan)},
        notes=tuple(notes(plan, "megatron-bridge")),
    )  # fmt: skip


def _script(plan: Plan) -> str:
    """The Python script that builds the plan's ConfigContainer and starts the training."""
    sections: dict[str, dict[str, str]] = {name: {} for name in ("model", *_SECTIONS)}
    for s in settings(plan, "megatron-bridge"):
        if s.field not in _FLAG_ALONE:
            sections[s.section][s.field] = _expression(s.field, s.value)
    provider = "HybridModelProvider" if plan.shape.blocks else "MLAModelProvider" if plan.shape.mla else "GPTModelProvider"
    for section, field, value in _besides(plan):
        sections[section][field] = value
    classes = ["ConfigContainer", *sorted(_SECTIONS.values())]
    used = " ".join(sections["model"].values())
    lines = [
        *(["from functools import partial", ""] if "partial(" in used else []),
        "import torch",
        *(f"from {module} import {name}" for name, module in _IMPORTED.items() if name in used),
        "",
        f"from {_PROVIDERS[provider]} import {provider}",
        f"from megatron.bridge.training.config import {', '.join(classes)}",
        "from megatron.bridge.training.gpt_step import forward_step",
        "from megatron.bridge.training.pretrain import pretrain",
        "",
        "config = ConfigContainer(",
    ]
    for section, cls in {"model": provider, **_SECTIONS}.items():
        lines += [f"    {section}={cls}(", *(f"        {field}={value}," for field, value in sections[section].items()), "    ),"]
    return "\n".join([*lines, ")", "", 'if __name__ == "__main__":', "    pretrain(config, forward_step)"])


def _besides(plan: Plan) -> list[tuple[str, str, str]]:
    """What Megatron-LM derives from its flags, and the data."""
    half, sharding, shape = "torch.bfloat16", plan.options.sharding, plan.shape
    fields = [
        ("model", "params_dtype", half), ("model", "pipeline_dtype", half),
        ("optimizer", "bf16", "True"), ("optimizer", "params_dtype", half),
        ("optimizer", "min_lr", "0.0"), ("scheduler", "start_weight_decay", "0.01"), ("scheduler", "end_weight_decay", "0.01"),
        ("scheduler", "lr_decay_iters", str(STEPS)), ("dataset", "seq_length", str(plan.seq_len)), ("dataset", "random_seed", "1234"),
        ("dataset", "reset_position_ids", "False"), ("dataset", "reset_attention_mask", "False"), ("dataset", "eod_mask_loss", "False"),
        ("dataset", "dataloader_type", "'single'"), ("tokenizer", "tokenizer_type", "'NullTokenizer'"),
        ("tokenizer", "vocab_size", str(plan.shape.vocab)),
    ]  # fmt: skip
    asked = [
        (not (shape.experts and shape.output_bias), "model", "bias_dropout_fusion", "True"),
        # It pads the rows of a tokenizer, and takes the model's as they are.
        (shape.vocab % plan.tp > 0, "tokenizer", "use_tokenizer_vocab_size", "True"),
        (sharding in ("optimizer", "fsdp"), "optimizer", "use_distributed_optimizer", "True"),
        (sharding == "fsdp", "ddp", "use_megatron_fsdp", "True"),
        (shape.linear, "model", "transformer_layer_spec", _VARIANT),
        (
            shape.experts and not shape.mamba and not shape.linear,
            "model",
            "transformer_layer_spec",
            f"partial({_BLOCK}, use_transformer_engine=True)",
        ),
        (not shape.mamba, "model", "bias_activation_fusion", str(shape.gated)),
    ]
    return fields + [(section, field, value) for holds, section, field, value in asked if holds]


def _expression(field: str, value: Any) -> str:
    """A value as Python."""
    if field == "activation_func":
        return _ACTIVATIONS[value]
    if field == "attention_backend":
        return f"AttnBackend.{value}"
    if field.endswith("_dtype") and field != "moe_router_dtype":
        return _DTYPES[value]
    return repr(value)
