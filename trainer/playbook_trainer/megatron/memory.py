"""What a rank of the megatron backend would hold: states, activations and loss of each pipeline stage. Arithmetic alone, without torch.

States follow from the layout and are exact up to padding. Activations are those of Transformer Engine's fused kernels, an estimate that
measured peaks of text models bear out to within eight percent (`playbook.planner.memory`).
"""

from __future__ import annotations

from dataclasses import replace

from playbook.planner import activations, memory, pipeline
from playbook.planner.plan import Plan
from playbook.planner.rules import Options
from playbook_trainer.config.stage_memory import WIDTH, Stage, vision
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron import checks
from playbook_trainer.megatron.recompute import recompute_layers

OFFLOADED = {
    "attn_norm": "attention norm in",
    "qkv_linear": "attention norm out",
    "core_attn": "q, k, v",
    "attn_proj": "attention out",
    "mlp_norm": "mlp norm in",
    "expert_fc1": "dispatched tokens",
    "moe_act": "expert fc1 out",
}
"""The tensor that each module of fine-grained offloading sends away: its input. Source: `megatron/core/transformer/transformer_config.py`."""

RESIDENT_LAYERS = 3
"""Layers whose offloaded tensors are on the GPU at once: one computes, its neighbours are on their way."""

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Per parameter in float32: the master weight, and both moments."""

HOST_BYTES = 16
"""Per parameter of an optimizer on the host: float32 weight, gradient and both moments.

Source: Megatron-LM, `megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`."""


def options(config: TrainerConfig) -> Options:
    """The features that are chosen, with what Megatron-FSDP shards by its strategy in the planner's words."""
    found = checks.options(config)
    if config.megatron.data_parallel != "megatron_fsdp":
        return found
    shards = {"no_shard": "none", "optim": "optimizer", "optim_grads": "optimizer", "optim_grads_params": "fsdp"}
    return replace(found, sharding=shards[config.megatron.sharding_strategy])


def widths(config: TrainerConfig) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients, and optimizer state (master copy and two moments).

    A precision-aware optimizer keeps moments in `moments_dtype`, and of a float32 master weight only what its bfloat16 weight lacks;
    Megatron-FSDP keeps it whole, and so do 8-bit weights.
    Source: Megatron-LM, `megatron/core/optimizer/optimizer_config.py` and `docs/source/api-guide/dist_optimizer.md`.
    """
    own = config.megatron
    if config.train.dtype == "fp32":
        return 4, 4, 8
    gradient = {"fp32": 4, "bf16": 2}[own.grad_reduce_dtype]
    moments = {"fp32": 4, "bf16": 2}[config.optimizer.moments_dtype] if own.precision_aware_optimizer else 4
    weight = 0 if own.fp8_param and config.precision.fp8 != "none" else memory.PARAM_BYTES
    remainder = own.precision_aware_optimizer and own.data_parallel != "megatron_fsdp" and weight
    return weight, gradient, (2 if remainder else 4) + 2 * moments


def states(config: TrainerConfig, plan: Plan, held: memory.Weights) -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer state on the GPU, and of what an offloaded optimizer keeps on the host."""
    unit = replace(plan, grad_bytes=2, master_bytes=2, moment_bytes=1)
    weights, gradients, optimizer = (n / per for n, per in zip(memory.state_bytes(unit, held), (2, 2, 4), strict=True))
    if config.megatron.data_parallel == "megatron_fsdp" and config.megatron.sharding_strategy == "optim_grads":
        gradients = optimizer
    fraction = offloaded_fraction(config)
    per_weight, per_gradient, per_state = widths(config)
    if fraction and config.train.dtype == "bf16":
        per_state = MASTER_BYTES + MOMENT_BYTES  # whole, whatever the optimizer on the GPU alone would keep
    copies = memory.fp8_copies(plan.options.fp8) * held.linear * weights / (held.dense + held.experts)
    stays = MASTER_BYTES * fraction if fraction and not _updates_weights(config) else 0.0
    on_gpu = per_weight * weights + per_gradient * gradients + (per_state * (1 - fraction) + stays) * optimizer + copies
    return on_gpu, HOST_BYTES * optimizer * fraction


def _updates_weights(config: TrainerConfig) -> bool:
    """Whether an optimizer on the host writes the weights themselves, and not float32 copies of them that stay on the GPU.

    Source: Megatron-LM, `megatron/core/optimizer/distrib_optimizer.py` (_build_model_and_main_param_groups).
    """
    return config.train.dtype == "fp32" or config.megatron.precision_aware_optimizer


def offloaded_fraction(config: TrainerConfig) -> float:
    """The share of the optimizer that lives on the host."""
    return config.megatron.optimizer_offload_fraction or (1.0 if config.offload.optimizer else 0.0)


def stages(config: TrainerConfig, plan: Plan) -> list[Stage]:
    """What a rank of each pipeline stage holds."""
    sizes = config.parallel.pipeline_layout or pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return [_stage(config, plan, stage, pipeline.indices(sizes, plan.pp, stage)) for stage in range(plan.pp)]


def _stage(config: TrainerConfig, plan: Plan, stage: int, chunks: list[list[int]]) -> Stage:
    held, last = memory.weights(plan, stage, chunks, whole_tower=True), stage == plan.pp - 1
    state, host = states(config, plan, held)
    placed = [list(enumerate(chunk)) for chunk in chunks]
    if last:  # megatron-core makes depths of multi-token prediction again one by one with uniform, and not at all with block
        placed[-1] += [(recompute_layers(config), plan.shape.layers - 1)] * plan.shape.mtp
    width = WIDTH[config.train.dtype] / activations.BF16
    layers = [[_layer(config, plan, i, place, len(chunk)) for place, i in chunk] for chunk in placed]
    alive = pipeline.in_flight(
        pp=plan.pp, stage=stage, microbatches=plan.microbatches, vpp=plan.vpp, overlap=plan.options.ep_overlap,
        sizes=[sum(stays for stays, _, _ in chunk) for chunk in layers],
    )  # fmt: skip
    kept = [(n, *layer) for n, chunk in zip(alive, layers, strict=True) for layer in chunk]
    away = sum(n * sent for n, _, sent, _ in kept)
    resident = min(away, RESIDENT_LAYERS * max((sent for _, _, sent, _ in kept), default=0.0))
    return Stage(
        stage=stage,
        layers=sum(map(len, chunks)),
        parameters=held.dense + held.experts,
        state_bytes=state,
        gathered_bytes=2 * WIDTH[config.train.dtype] * held.largest if plan.options.sharding in ("fsdp", "fsdp2") else 0.0,
        activation_bytes=width * (sum(n * stays for n, stays, _, _ in kept) + resident),
        vision_bytes=alive[0] * vision(config, plan) if stage == 0 else 0.0,
        loss_bytes=activations.loss(plan) * (1 + plan.shape.mtp) if last else 0.0,
        replayed_bytes=width * max((again for _, _, _, again in kept), default=0.0),
        workspace_bytes=memory.WORKSPACE_BYTES,
        host_bytes=host + width * (away - resident),
    )


def _layer(config: TrainerConfig, plan: Plan, index: int, place: int, length: int) -> tuple[float, float, float]:
    """Bytes that a layer keeps on the GPU, those that it sends to the host, and those that come back when it is run again; it has a place in a chunk."""
    saved = activations.saved(plan, index)
    if config.train.recompute != "full":
        stay = {name: size for name, size in saved.items() if name not in activations.freed(plan)}
        sent = sum(stay.get(OFFLOADED[m], 0.0) for m in config.megatron.offload_modules if m in OFFLOADED)
        return sum(stay.values()) - sent, sent, sum(saved.values()) - sum(stay.values())
    span, whole, entry = recompute_layers(config), sum(saved.values()), saved["attention norm in"]
    if config.megatron.recompute_method == "block":
        return (entry, 0.0, whole - entry) if place < span else (whole, 0.0, 0.0)
    # A stretch ends with its chunk at the latest.
    return (entry if place % span == 0 else 0.0), 0.0, min(span, length) * whole - entry
