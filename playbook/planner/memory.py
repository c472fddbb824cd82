"""Peak allocated memory per rank, stage by stage: parameters, gradients, optimizer state, activations, loss.

Sources: Megatron-LM, `docs/source/api-guide/dist_optimizer.md` (bytes per parameter), `megatron/core/optimizer/optimizer_config.py`
(types of states) and `megatron/core/pipeline_parallel/schedules.py` (activations in flight).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from playbook.planner import activations, parameters, pipeline
from playbook.planner.plan import Plan

GIB = 1 << 30
PARAM_BYTES = 2
"""bf16."""

WORKSPACE_BYTES = 2.2 * GIB
"""What no formula here covers: GEMM and attention workspaces, an output layer's weight gradient, communication buffers, rounding.

The one fitted constant. Fitted on two runs, Qwen3-30B-A3B cut to 24 layers on four H200s (megatron-core 0.19.2, Transformer Engine 2.16.1,
EP 4, all-to-all, sequences of 4096, 2 and 4 per microbatch, no recompute), where it is the mean of what was left over."""


@dataclass(frozen=True)
class Weights:
    """Parameters that a rank of one stage holds before data parallelism shards them, and those of its largest layer."""

    dense: int
    experts: int
    linear: int
    largest: int


@dataclass(frozen=True)
class Stage:
    """The breakdown of one pipeline stage. Units: bytes on each of its ranks."""

    stage: int
    layers: int
    in_flight: list[int]
    parameters: float
    gradients: float
    optimizer: float
    fp8_weights: float
    gathered: float
    activations: float
    transient: float
    workspace: float

    @property
    def states(self) -> float:
        """Everything that lives from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.fp8_weights

    @property
    def peak(self) -> float:
        """The most that is allocated at once."""
        return self.states + self.gathered + self.activations + self.transient + self.workspace

    def row(self) -> dict[str, Any]:
        """All figures, by name."""
        return {**asdict(self), "states": self.states, "peak": self.peak}


def estimate(plan: Plan) -> list[Stage]:
    """The breakdown of each stage; a vision tower counts with its states, split over TP, and its activations not at all.

    Raises:
        ConfigError: the plan breaks a rule, or its model has layers without a formula.
    """
    plan.require()
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return [_stage(plan, stage, pipeline.indices(sizes, plan.pp, stage)) for stage in range(plan.pp)]


def peak(plan: Plan) -> float:
    """Peak allocated bytes of the fullest rank.

    Raises:
        ConfigError: as for `estimate`.
    """
    return max(stage.peak for stage in estimate(plan))


def weights(plan: Plan, stage: int, chunks: list[list[int]], *, whole_tower: bool = False) -> Weights:
    """What a rank of a stage holds: layers over TP or EP x ETP, embedding first, output layer and MTP last, vision tower first.

    Multi-token prediction on another stage than the first has a copy of the embedding there, and leaves the final norm with the last
    decoder layer. The vision tower is split over TP, as megatron-core's own layers are; a `whole_tower` is on every TP rank, as this
    trainer's is. Source: Megatron-LM, `megatron/core/models/gpt/gpt_model.py` and `megatron/core/transformer/transformer_block.py`.
    """
    shape, last = plan.shape, stage == plan.pp - 1
    layers = [parameters.layer(shape, i) for chunk in chunks for i in chunk] + ([parameters.mtp(shape)] * shape.mtp if last else [])
    grid = plan.ep * plan.etp
    dense = [-(-x.sharded // plan.tp) + x.repeated for x in layers]
    experts = [-(-x.experts // grid) for x in layers]
    predicts = last and shape.mtp > 0
    embeds, normed = stage == 0 or predicts, any(shape.layers - 1 in chunk for chunk in chunks) if shape.mtp else last
    tables = 1 if shape.tied and plan.pp == 1 else embeds + last
    table = tables * -(-parameters.embedding(shape) // plan.tp) + (parameters.final_norm(shape) if normed else 0)
    table += shape.positions * shape.hidden if stage == 0 else 0
    tower = -(-parameters.vision(shape) // (1 if whole_tower else plan.tp)) if stage == 0 else 0
    linear = sum(-(-x.sharded // plan.tp) for x in layers) + sum(experts)
    return Weights(sum(dense) + table + tower, sum(experts), linear, max((a + b for a, b in zip(dense, experts, strict=True)), default=0))


def shards(plan: Plan) -> dict[str, int]:
    """The ranks that one copy of what is sharded lies on: DP x CP for dense parameters, EDP for experts, each over the instances.

    Source: Megatron-LM, `megatron/core/distributed/fsdp/mcore_fsdp_adapter.py` (instances make copies of everything, not of the optimizer
    alone) and `torch_fully_sharded_data_parallel.py` (which has none).
    """
    instances = 1 if plan.options.sharding == "fsdp2" else plan.options.optimizer_instances
    over = {"dense": plan.dp * plan.cp, "experts": plan.edp}
    return {k: 1 if plan.options.sharding == "none" else max(1, d // instances) for k, d in over.items()}


def state_bytes(plan: Plan, held: Weights) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on a rank.

    Optimizer state is the fp32 master copy and two moments; `master_bytes` 2 is the remainder that completes a bf16 parameter.
    """
    optimizer = shards(plan)
    every = optimizer if plan.options.sharding in ("fsdp", "fsdp2") else dict.fromkeys(optimizer, 1)
    counts = {"dense": held.dense, "experts": held.experts}
    split = sum(counts[k] / every[k] for k in counts)
    state = sum(counts[k] / optimizer[k] for k in counts)
    return PARAM_BYTES * split, plan.grad_bytes * split, (plan.master_bytes + 2 * plan.moment_bytes) * state


def _stage(plan: Plan, stage: int, chunks: list[list[int]]) -> Stage:
    held = weights(plan, stage, chunks)
    params, grads, optimizer = state_bytes(plan, held)
    last = stage == plan.pp - 1
    extra = [plan.shape.layers - 1] * plan.shape.mtp if last else []
    depths = [*chunks[:-1], [*chunks[-1], *extra]]
    sizes = [sum(activations.kept(plan, i) for i in chunk) for chunk in depths]
    alive = pipeline.in_flight(
        pp=plan.pp, stage=stage, microbatches=plan.microbatches, vpp=plan.vpp, overlap=plan.options.ep_overlap, sizes=sizes
    )  # fmt: skip
    replay = max((activations.replayed(plan, i) for chunk in depths for i in chunk), default=0.0)
    return Stage(
        stage=stage,
        layers=sum(map(len, chunks)),
        in_flight=alive,
        parameters=params,
        gradients=grads,
        optimizer=optimizer,
        fp8_weights=fp8_copies(plan.options.fp8) * held.linear,
        gathered=_gathered(plan, held),
        activations=sum(n * size for n, size in zip(alive, sizes, strict=True)),
        transient=max(replay, activations.loss(plan) if last else 0.0),
        workspace=WORKSPACE_BYTES,
    )


def fp8_copies(recipe: str) -> float:
    """Bytes per weight of the row-wise and the column-wise FP8 copy; MXFP8 adds a scale for 32 values.

    Source: Transformer Engine, `pytorch/tensor/float8_blockwise_tensor.py` and `mxfp8_tensor.py`.
    """
    return {"": 0.0, "mxfp8": 2 * 33 / 32}.get(recipe, 2.0)


def _gathered(plan: Plan, held: Weights) -> float:
    """Two layers gathered at once under full sharding: the one that computes and the next.

    Source: Megatron-LM, `megatron/core/distributed/fsdp/src` (double buffer of gathered units).
    """
    return 2 * PARAM_BYTES * held.largest if plan.options.sharding in ("fsdp", "fsdp2") else 0.0
