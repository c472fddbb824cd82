"""Peak allocated memory per rank, stage by stage: parameters, gradients, optimizer state, activations, loss.

Sources: Megatron-LM, `docs/source/api-guide/dist_optimizer.md` (bytes per parameter), `megatron/core/optimizer/optimizer_config.py`
(types of states) and `megatron/core/pipeline_parallel/schedules.py` (activations in flight).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from playbook.planner import parameters, pipeline
from playbook.planner.activations import FP32, Kept, layer, loss
from playbook.planner.options import DEEPSPEED, SHARDING, Options
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.text import GIB as GIB

PARAM_BYTES = 2
"""Bytes of a bf16 parameter."""

WORKSPACE_BYTES = 2.2 * GIB
"""What no formula here covers: GEMM and attention workspaces, an output layer's weight gradient, communication buffers, rounding.

The one fitted constant. Fitted on two runs, Qwen3-30B-A3B cut to 24 layers on four H200s (megatron-core 0.19.2, Transformer Engine 2.16.1,
EP 4, all-to-all, sequences of 4096, 2 and 4 per microbatch, no recompute), where it is the mean of what was left over."""


PLAIN_BYTES = 0.1 * GIB
"""The same of transformers' layers without sharding: workspaces of cuBLAS and cuBLASLt, 32 MiB each on Hopper, and what rounding adds; no
buffers of
communication. Gradients are gone between steps there, as `zero_grad` leaves them. Source: torch, `docs/source/notes/cuda.rst` (cuBLAS
workspaces)."""


@dataclass(frozen=True)
class Weights:
    """Parameters that a rank of one stage holds before data parallelism shards them, and those of its largest layer."""

    dense: int
    """All but the experts, tables and vision tower included."""
    experts: int
    linear: int
    """Those of matrix products in layers, of which 8-bit copies are made."""
    largest: int
    frozen_dense: int = 0
    """Of the dense ones, those without gradient."""
    frozen_experts: int = 0
    adapters: int = 0
    """Those of low-rank adapters, beside the others."""


@dataclass(frozen=True)
class StageBytes:
    """What each rank of one pipeline stage holds. Units: bytes per rank, except for `stage`, `layers`, `in_flight` and `held`, which are
    counts.
    """

    stage: int
    layers: int
    in_flight: list[int]
    """Micro-batches whose activations are held at once, per chunk."""
    held: int
    """Parameters of this stage before data parallelism shards them."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    fp8_weights: float = 0.0
    """Row-wise and column-wise copies of weights for 8-bit products."""
    gathered: float = 0.0
    """Layers gathered at once under full sharding."""
    vision: float = 0.0
    """Upper bound of the vision tower's activations: as if every token of a row belonged to an image."""
    loss: float = 0.0
    replayed: float = 0.0
    """Activations of a layer while it is run again or comes back from the host; never held at the same time as the loss."""
    workspace: float = 0.0
    """Workspaces and communication buffers, where a backend's were measured."""
    grown: float = 0.0
    """Of the gradients, what comes in the backward pass as activations go and is gone before the next step: the larger of the two counts at
    the peak."""
    update: float = 0.0
    """What the optimizer's update holds beside the states, when activations have gone."""
    host: float = 0.0
    """In host memory, with offload."""

    @property
    def number(self) -> int:
        """The stage as answers call it, counted from 1."""
        return self.stage + 1

    @property
    def states(self) -> float:
        """Everything that lives from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.fp8_weights

    @property
    def transient(self) -> float:
        """What lives for a moment: the logits with their loss, or a layer that is run again."""
        return max(self.loss, self.replayed)

    @property
    def peak(self) -> float:
        """The most that is allocated at once on the GPU."""
        passing = self.gathered + self.activations + self.vision + self.transient
        return self.states - self.grown + max(self.grown + self.update, passing) + self.workspace

    def row(self) -> dict[str, Any]:
        """All figures, by name; the stage is counted from 1."""
        return {**asdict(self), "stage": self.number, "states": self.states, "transient": self.transient, "peak": self.peak}


@dataclass(frozen=True)
class Alive:
    """Activations of a stage at its peak, in bytes: on the GPU, in host memory, and the most that offload and recompute bring back
    (`again`).
    """

    in_flight: list[int]
    on_gpu: float
    host: float
    again: float


RESIDENT_LAYERS = 1
"""Layers whose offloaded tensors are on the GPU while the loss is: the last. Four rows of `docs/experiments/megatron-switches.md` bear it
out."""

RETURNING_LAYERS = 2
"""Layers whose offloaded tensors come back in the backward pass, beside the one that computes."""


def alive(plan: Plan, stage: int, chunks: Sequence[Sequence[Kept]], resident_layers: int = RESIDENT_LAYERS) -> Alive:
    """What the layers of a stage keep, over all its chunks and all micro-batches in flight."""
    return _alive(plan, stage, [[(1, layer) for layer in chunk] for chunk in chunks], resident_layers)


def _alive(plan: Plan, stage: int, chunks: Sequence[Sequence[tuple[int, Kept]]], resident_layers: int = RESIDENT_LAYERS) -> Alive:
    """The same of chunks that say how often they have each layer."""
    flying = pipeline.in_flight(
        pp=plan.pp, stage=stage, microbatches=plan.microbatches, vpp=plan.vpp, overlap=plan.options.ep_overlap,
        sizes=[sum(count * layer.stays for count, layer in chunk) for chunk in chunks],
    )  # fmt: skip
    layers = [(n * count, layer) for n, chunk in zip(flying, chunks, strict=True) for count, layer in chunk]
    away = sum(n * layer.sent for n, layer in layers)
    most = max((layer.sent for _, layer in layers), default=0.0)
    resident = min(away, resident_layers * most)
    returning = min(away - resident, RETURNING_LAYERS * most)
    stays = sum(n * layer.stays for n, layer in layers)
    return Alive(flying, stays + resident, away - resident, returning + max((layer.again for _, layer in layers), default=0.0))


def estimate(plan: Plan) -> list[StageBytes]:
    """The memory of each pipeline stage. A vision tower counts with its states, split over TP; its activations are left out.

    Raises:
        ConfigError: the plan breaks a rule, or its model has layers without a formula.
    """
    plan.require()
    return stages(plan)


def stages(plan: Plan) -> list[StageBytes]:
    """The same of a plan whose rules were checked before."""
    return list(each_stage(plan))


def each_stage(plan: Plan, *, fullest: bool = False) -> Iterator[StageBytes]:
    """The same one by one: who asks whether a plan fits need not know the stages after one that does not.

    With `fullest` without those that cannot be the fullest: a stage with the layers of the one before it has fewer micro-batches in flight.
    """
    placed = _placed(plan.shape, plan.pp, plan.vpp)
    bytes_of = {index: layer(plan, index) for index in {i for chunks in placed for chunk in chunks for i, _ in chunk}}
    o = plan.options
    weights_of = _weights(plan.shape, plan.tp, plan.pp, plan.vpp, plan.ep, plan.etp, o.backend, o.lora, o.lora_targets, o.frozen)
    for stage, chunks in enumerate(placed):
        if fullest and 0 < stage < plan.pp - 1 and (chunks, weights_of[stage]) == (placed[stage - 1], weights_of[stage - 1]):
            continue
        yield _stage(plan, stage, weights_of[stage], [[(n, bytes_of[i]) for i, n in chunk] for chunk in chunks])


def least(plan: Plan) -> float:
    """Bytes of the fullest stage's states with the optimizer where the plan has it: under the peak, whatever the batch."""
    o = plan.options
    most = 0.0
    for stage_weights in _weights(plan.shape, plan.tp, plan.pp, plan.vpp, plan.ep, plan.etp, o.backend, o.lora, o.lora_targets, o.frozen):
        parameters_, gradients, optimizer = state_bytes(plan, stage_weights)
        away = _on_host(plan, parameters_, gradients, optimizer)
        parameters_ = (parameters_ - away.parameters) * (not o.fp8_params)
        most = max(most, parameters_ + gradients - away.gradients + optimizer - away.optimizer)
    return most


@lru_cache(maxsize=4096)
def _placed(shape: Shape, pp: int, vpp: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """How often each chunk of each stage has each kind of layer, which goes by the index of one of them; depths of prediction close the
    last.
    """
    sizes = pipeline.split(shape.layers, pp, vpp)
    first = {parameters.parts(shape, i): i for i in reversed(range(shape.layers + (shape.mtp > 0)))}
    of = [first[parameters.parts(shape, i)] for i in range(shape.layers)]
    placed = [[[of[i] for i in chunk] for chunk in pipeline.indices(sizes, pp, stage)] for stage in range(pp)]
    placed[-1][-1] += [first[parameters.parts(shape, shape.layers)] for _ in range(shape.mtp)]
    return tuple(tuple(tuple(Counter(chunk).items()) for chunk in chunks) for chunks in placed)


@lru_cache(maxsize=1 << 16)
def _weights(
    shape: Shape, tp: int, pp: int, vpp: int, ep: int, etp: int, backend: str, lora: int, targets: tuple[str, ...], frozen: tuple[str, ...]
) -> tuple[Weights, ...]:
    """The parameters of each stage, which neither the batch nor recompute change."""
    options = Options(backend=backend, lora=lora, lora_targets=targets, frozen=frozen)
    plan = Plan(shape, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, options=options)
    sizes = pipeline.split(shape.layers, pp, vpp)
    return tuple(weights(plan, stage, pipeline.indices(sizes, pp, stage)) for stage in range(pp))


TIGHT = 0.05
"""The share of a GPU's memory that an estimate should leave: its own error, and what the allocator and the driver take."""


AT_THE_LIMIT = 0.02
"""The share of what a plan may allocate within which an estimate cannot tell that it fits: its median error
(`docs/experiments/peak-memory.md`)."""


def at_the_limit(peak: float, limit: float) -> bool:
    """Whether a peak that fits under a limit, in the same unit, lies within the error of its estimate from it."""
    return peak > (1 - AT_THE_LIMIT) * limit


def fits(peak_bytes: float, gpu_gib: float) -> bool:
    """Whether a peak is at most what the driver shows of a GPU's memory: the meaning of *fits* in every command."""
    return peak_bytes <= gpu_gib * GIB


def verdict(peak_bytes: float, gpu_gib: float) -> str:
    """Whether a peak fits a GPU: fits, tight, or does not fit."""
    return "does not fit" if not fits(peak_bytes, gpu_gib) else "fits" if fits(peak_bytes, gpu_gib * (1 - TIGHT)) else "tight"


def peak(plan: Plan) -> float:
    """Peak allocated bytes of the fullest rank.

    Raises:
        ConfigError: as for `estimate`.
    """
    return max(stage.peak for stage in estimate(plan))


def weights(plan: Plan, stage: int, chunks: list[list[int]], *, whole_tower: bool = False) -> Weights:
    """The parameters of one rank of a stage. Layers are split over TP, experts over EP x ETP; embedding and vision tower are on the first
    stage, output layer and MTP on the last.

    Multi-token prediction on another stage than the first has a copy of the embedding there, and leaves the final norm with the last
    decoder layer. The vision tower is split over TP, as megatron-core's own layers are; a `whole_tower` is on every TP rank, as this
    trainer's is. Source: Megatron-LM, `megatron/core/models/gpt/gpt_model.py` and `megatron/core/transformer/transformer_block.py`.
    """
    shape, last = plan.shape, stage == plan.pp - 1
    one = {k: parameters.layer(shape, i) for k, i in {parameters.parts(shape, i): i for chunk in chunks for i in chunk}.items()}
    layers = [one[parameters.parts(shape, i)] for chunk in chunks for i in chunk] + ([parameters.mtp(shape)] * shape.mtp if last else [])
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
    largest = max((a + b for a, b in zip(dense, experts, strict=True)), default=0)
    if plan.options.backend == "torch":  # its units are layers, the embedding, and the output layer
        largest = max(largest, tables * -(-parameters.embedding(shape) // plan.tp))
    adapters = sum(parameters.adapter_parameters(shape, i, plan.options) for chunk in chunks for i in chunk) if plan.options.lora else 0
    decoder, frozen = sum(dense) + table, "decoder" in plan.options.frozen or plan.options.lora > 0
    idle = decoder * frozen + tower * ("vision" in plan.options.frozen or plan.options.lora > 0)
    return Weights(decoder + tower, sum(experts), linear, largest, idle, sum(experts) * frozen, adapters)


def shards(plan: Plan) -> dict[str, int]:
    """Number of ranks that share one copy of what is sharded: DP x CP for dense parameters, EDP for experts, each divided by the optimizer
    instances.

    Source: Megatron-LM, `megatron/core/distributed/fsdp/mcore_fsdp_adapter.py` (instances make copies of everything, not of the optimizer
    alone) and `torch_fully_sharded_data_parallel.py` (which has none); torch, `distributed/fsdp/_fully_shard/_fully_shard.py` (two
    dimensions of a
    mesh: copies, and shards within each).
    """
    instances = 1 if plan.options.sharding == "fsdp2" and plan.options.backend != "torch" else plan.options.optimizer_instances
    over = {"dense": plan.dp * plan.cp, "experts": plan.edp}
    return {k: 1 if plan.options.sharding == "none" else max(1, d // instances) for k, d in over.items()}


def own_master(options: Options) -> bool:
    """Whether parameters are their own master copy: those of torch's FSDP2 and DDP are float32, gathered or cast in bf16."""
    return options.backend == "torch" and options.sharding not in DEEPSPEED


def state_bytes(plan: Plan, held: Weights) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on a rank; what is frozen has parameters alone.

    Optimizer state is the fp32 master copy and two moments; `master_bytes` 2 is the remainder that completes a bf16 parameter. Where
    parameters are their own master copy, their gradients wait unsharded for the last micro-batch in a pipeline; a base under adapters is
    bf16 there too.
    """
    o, is_master, split = plan.options, own_master(plan.options), SHARDING.get(plan.options.sharding, SHARDING["none"])
    over, whole = shards(plan), dict.fromkeys(("dense", "experts"), 1)
    frozen = {"dense": held.frozen_dense, "experts": held.frozen_experts}
    trained = {"dense": held.dense + held.adapters - held.frozen_dense, "experts": held.experts - held.frozen_experts}

    def each(counts: Mapping[str, int], divided: Mapping[str, int]) -> float:
        return sum(counts[k] / divided[k] for k in counts)

    stored = over if is_master or split.parameters else whole
    width = plan.master_bytes if is_master else PARAM_BYTES
    params = width * each(trained, stored) + (PARAM_BYTES if o.lora else width) * each(frozen, stored)
    if o.base:
        quantised = {"dense": held.linear - held.experts, "experts": held.experts}
        params -= (PARAM_BYTES - BASE_BYTES[o.base]) * each(quantised, stored)
    grads = each(trained, over if (is_master or split.gradients) and not (is_master and plan.pp > 1) else whole)
    return params, plan.grad_bytes * grads, ((0 if is_master else plan.master_bytes) + 2 * plan.moment_bytes) * each(trained, over)


BASE_BYTES = {"nf4": 0.5 + FP32 / 64}
"""Bytes of a weight of a frozen base: half a byte, and a float32 scale for 64 weights. Norms, embedding and output layer stay in bf16.

Source: QLoRA, arXiv 2305.14314, section 3; bitsandbytes, `functional.py` (`quantize_4bit`), whose second quantisation of scales
transformers leaves off."""


def _stage(plan: Plan, stage: int, stage_weights: Weights, chunks: list[list[tuple[int, Kept]]]) -> StageBytes:
    """What a rank of one stage holds, in bytes; `chunks` have, chunk by chunk, how often each kind of layer is there and what it keeps."""
    last = stage == plan.pp - 1
    params, grads, optimizer = state_bytes(plan, stage_weights)
    copies = fp8_weights(plan, stage_weights)
    if plan.options.fp8_params:
        params -= PARAM_BYTES * copies / max(fp8_copies(plan.options.fp8), 1)
    away = _on_host(plan, params, grads, optimizer)
    live = _alive(plan, stage, chunks)
    alone = not plan.options.compiled and plan.options.backend == "torch" and plan.options.sharding == "none"
    return StageBytes(
        stage=stage,
        layers=sum(count for chunk in chunks for count, _ in chunk) - (plan.shape.mtp if last else 0),
        in_flight=live.in_flight,
        held=stage_weights.dense + stage_weights.experts,
        parameters=params - away.parameters,
        gradients=grads - away.gradients,
        optimizer=optimizer - away.optimizer,
        fp8_weights=copies,
        gathered=gathered(plan, stage_weights, PARAM_BYTES),
        activations=live.on_gpu,
        loss=loss(plan) if last else 0.0,
        replayed=live.again,
        workspace=PLAIN_BYTES if alone else WORKSPACE_BYTES,
        grown=grads - away.gradients if alone and plan.microbatches == 1 else 0.0,
        update=_update(plan, optimizer) if not away.optimizer else 0.0,
        host=live.host + away.host,
    )


def _update(plan: Plan, optimizer: float) -> float:
    """Bytes of the update by DeepSpeed's ZeRO-1 and ZeRO-2: the rank's gradients once more, flattened in bf16 and cast to float32.

    Source: DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py` (`step`: `single_grad_partition`); measured on one H200,
    docs/experiments/fine-tuning-on-one-gpu.md. ZeRO-3 updates a group of parameters at a time.
    """
    if plan.options.sharding not in DEEPSPEED - {"zero3"}:
        return 0.0
    return (PARAM_BYTES + FP32) * optimizer / (plan.master_bytes + 2 * plan.moment_bytes)


class Offloaded(NamedTuple):
    """Bytes that leave the GPU for the host, and what they take there."""

    parameters: float
    gradients: float
    optimizer: float
    host: float


HOST_BYTES = 16
"""Per parameter of an optimizer on the host: float32 weight, gradient and both moments.

Source: Megatron-LM, `megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`."""


def _on_host(plan: Plan, params: float, grads: float, optimizer: float) -> Offloaded:
    """What leaves the GPU where a share of the optimizer lives on the host.

    Megatron's float32 master weights stay, unless the optimizer is the precision-aware one; DeepSpeed's go, and with them the gradients
    that it shards. FSDP2
    keeps shares of parameters, gradients and moments alike on the host, and has on the GPU what is gathered.

    Sources: as for the trainer's own `playbook_trainer.config.dry_run`; Megatron Bridge's card on offload measured 15.2 GB less of 47.2
    where this says 15.3. DeepSpeed 0.19.6, `runtime/zero/stage_1_and_2.py` and `stage3.py`; ZeRO-Offload, arXiv 2101.06840; torch,
    `distributed/fsdp/_fully_shard/_fsdp_api.py` (`CPUOffloadPolicy`).
    """
    o, share = plan.options, plan.options.optimizer_offload / 100
    if o.backend == "torch":
        is_master = own_master(o)
        params, grads = params if is_master else 0.0, grads if is_master or SHARDING[o.sharding].gradients else 0.0
        host_bytes = params + grads + optimizer if is_master else HOST_BYTES * optimizer / (plan.master_bytes + 2 * plan.moment_bytes)
        return Offloaded(*(share * n for n in (params, grads, optimizer, host_bytes)))
    each = plan.master_bytes + 2 * plan.moment_bytes
    leaving = each if o.precision_aware else 2 * plan.moment_bytes
    return Offloaded(0.0, 0.0, optimizer * share * leaving / each, HOST_BYTES * optimizer / each * share)


def fp8_weights(plan: Plan, stage_weights: Weights) -> float:
    """Bytes of the copies of a rank's weights for 8-bit products; full sharding shards them too."""
    copies = fp8_copies(plan.options.fp8)
    each = plan.master_bytes if plan.options.backend == "torch" else PARAM_BYTES
    return (
        copies * stage_weights.linear * state_bytes(plan, stage_weights)[0] / (each * max(1, stage_weights.dense + stage_weights.experts))
        if copies
        else 0.0
    )


def fp8_copies(recipe: str) -> float:
    """Bytes per weight of the row-wise and the column-wise FP8 copy; MXFP8 adds a scale for 32 values.

    Source: Transformer Engine, `pytorch/tensor/float8_blockwise_tensor.py` and `mxfp8_tensor.py`.
    """
    return {"": 0.0, "mxfp8": 2 * 33 / 32}.get(recipe, 2.0)


def gathered(plan: Plan, held: Weights, width: float) -> float:
    """Bytes of the two layers that full sharding gathers at once: the one that computes and the next. `width` is in bytes per weight.

    In a pipeline the torch backend keeps all of them gathered between micro-batches, and so it does where it shards only what its optimizer
    has.

    Source: Megatron-LM, `megatron/core/distributed/fsdp/src` (double buffer of gathered units).
    """
    o = plan.options
    if o.sharding == "zero3" and o.backend == "torch":
        return width * min(LIVE_PARAMETERS, held.dense + held.experts)
    if own_master(o) and not (o.compiled or o.lora or o.sharding != "none"):
        return width * (held.linear + parameters.embedding(plan.shape) / plan.tp)  # autocast's copies of weights live as long as the pass
    if own_master(o) and (o.sharding == "optimizer" or (plan.pp > 1 and o.sharding == "fsdp2")):
        return width * (held.dense + held.experts)
    return 2 * width * held.largest if o.sharding in ("fsdp", "fsdp2") else 0.0


LIVE_PARAMETERS = 10**9
"""Parameters that ZeRO-3 keeps gathered at most. Source: DeepSpeed 0.19.6, `runtime/zero/config.py` (`stage3_max_live_parameters`)."""
