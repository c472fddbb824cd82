"""What a rank of the megatron backend would hold: states, activations and loss of each pipeline stage. Arithmetic alone, without torch.

States follow from the layout and are exact up to padding. Activations are those of Transformer Engine's fused kernels, an estimate that
measured peaks of text models bear out to within eight percent (`playbook.planner.memory`).
"""

from __future__ import annotations

from dataclasses import replace

from playbook.planner import activations, memory, pipeline
from playbook.planner.activations import Kept
from playbook.planner.memory import StageBytes
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook_trainer.config import megatron_checks as checks
from playbook_trainer.config.megatron_fields import recompute_layers
from playbook_trainer.config.stage_memory import WIDTH, vision
from playbook_trainer.config.tree import TrainerConfig

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Per parameter in float32: the master weight, and both moments."""

_HOST_BYTES = 16
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


def states(config: TrainerConfig, plan: Plan, held: memory.Weights) -> dict[str, float]:
    """Bytes of weights, gradients, optimizer state and 8-bit copies on the GPU, and of what an offloaded optimizer keeps on the `host`."""
    unit = replace(plan, grad_bytes=2, master_bytes=2, moment_bytes=1)
    weights, gradients, optimizer = (n / per for n, per in zip(memory.state_bytes(unit, held), (2, 2, 4), strict=True))
    if config.megatron.data_parallel == "megatron_fsdp" and config.megatron.sharding_strategy == "optim_grads":
        gradients = optimizer
    fraction = _offloaded_fraction(config)
    per_weight, per_gradient, per_state = widths(config)
    if fraction and config.train.dtype == "bf16":
        per_state = MASTER_BYTES + MOMENT_BYTES  # whole, whatever the optimizer on the GPU alone would keep
    stays = MASTER_BYTES * fraction if fraction and not _updates_weights(config) else 0.0
    return {
        "parameters": per_weight * weights,
        "gradients": per_gradient * gradients,
        "optimizer": (per_state * (1 - fraction) + stays) * optimizer,
        "fp8_weights": memory.fp8_weights(plan, held),
        "host": _HOST_BYTES * optimizer * fraction,
    }


def _updates_weights(config: TrainerConfig) -> bool:
    """Whether an optimizer on the host writes the weights themselves, and not float32 copies of them that stay on the GPU.

    Source: Megatron-LM, `megatron/core/optimizer/distrib_optimizer.py` (_build_model_and_main_param_groups).
    """
    return config.train.dtype == "fp32" or config.megatron.precision_aware_optimizer


def _offloaded_fraction(config: TrainerConfig) -> float:
    """The share of the optimizer that lives on the host."""
    return config.megatron.optimizer_offload_fraction or (1.0 if config.offload.optimizer else 0.0)


def stages(config: TrainerConfig, plan: Plan) -> list[StageBytes]:
    """What a rank of each pipeline stage holds."""
    sizes = config.parallel.pipeline_layout or pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return [_stage(config, plan, stage, pipeline.indices(sizes, plan.pp, stage)) for stage in range(plan.pp)]


def _stage(config: TrainerConfig, plan: Plan, stage: int, chunks: list[list[int]]) -> StageBytes:
    held, last = memory.weights(plan, stage, chunks, whole_tower=True), stage == plan.pp - 1
    placed = [list(enumerate(chunk)) for chunk in chunks]
    if last:  # megatron-core makes depths of multi-token prediction again one by one with uniform, and not at all with block
        placed[-1] += [(recompute_layers(config), plan.shape.layers - 1)] * plan.shape.mtp
    width = WIDTH[config.train.dtype] / activations.BF16
    alive = memory.alive(plan, stage, [[_layer(config, plan, i, place, len(chunk)) for place, i in chunk] for chunk in placed])
    state = states(config, plan, held)
    host = state.pop("host")
    return StageBytes(
        stage=stage,
        layers=sum(map(len, chunks)),
        in_flight=alive.in_flight,
        held=held.dense + held.experts,
        **state,
        gathered=memory.gathered(plan, held, WIDTH[config.train.dtype]),
        activations=width * alive.on_gpu,
        vision=alive.in_flight[0] * vision(config, plan) if stage == 0 else 0.0,
        loss=activations.loss(plan) if last else 0.0,
        replayed=width * alive.again,
        workspace=memory.WORKSPACE_BYTES,
        host=host + width * alive.host,
    )


def _layer(config: TrainerConfig, plan: Plan, index: int, place: int, length: int) -> Kept:
    """What a layer keeps; under full recompute that depends on its place in a chunk, and on the chunk's length."""
    if config.train.recompute != "full":
        return activations.layer(plan, index)
    saved = activations.saved(plan, index)
    span, whole, entry = recompute_layers(config), sum(saved.values()), saved["attention norm in"]
    if config.megatron.recompute_method == "block":
        return Kept(entry, 0.0, whole - entry) if place < span else Kept(whole)
    # A stretch ends with its chunk at the latest.
    return Kept(entry if place % span == 0 else 0.0, 0.0, min(span, length) * whole - entry)
