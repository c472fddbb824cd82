"""Seconds of a training step: layers by stage, the pipeline's schedule, what data parallelism and the optimizer add, and an interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp

from playbook.planner import activations, flops, parameters, pipeline
from playbook.planner.memory import own_master
from playbook.planner.options import DEEPSPEED, SHARDING, Options
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.planner.time import collectives, layer, spread
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.constants import CPU_ADAM, DP_OVERLAP, HOST_STEP, IN_STEP
from playbook.planner.time.layer import BF16, Kind, Parts, Work

_FP32 = 4
_ADAM_BYTES = 28
"""Bytes that an update moves for each value: gradient, and master weight and two moments, read and written."""
_LOGIT_BYTES = 52
"""Bytes moved for each logit where the loss is not fused: to float32, its maximum, exponentials, sum and gradient."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class StepTime:
    """What a step takes. `parts` add up to the seconds of the slowest stage, the wait for the pipeline among them.

    Units: seconds, tokens per second and GPU, 1e12 model FLOPs per second and GPU; `mfu` is a share of the peak of the products' precision.
    """

    seconds: Estimate
    tokens_per_s_per_gpu: Estimate
    tflops_per_gpu: float
    mfu: float
    parts: Mapping[str, float]
    spread: float
    """Standard deviation of the logarithm of the seconds."""
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage: seconds per micro-batch by pass and part, and parameters of a rank before data parallelism shards them."""

    forward: Parts
    backward: Parts
    dense: float
    experts: float
    trained: tuple[float, float]
    """Of the dense ones and of experts, those with gradients; adapters are dense."""

    @property
    def seconds(self) -> float:
        return sum(self.forward) + sum(self.backward)


def step_time(plan: Plan, cluster: Cluster) -> StepTime:
    """The time of one training step of a plan on a cluster; rules are not checked here.

    Raises:
        ConfigError: the pipeline has more chunks than layers.
    """
    shape, work = plan.shape, layer.work(plan)
    kinds = _chunks(shape, plan.pp, plan.vpp)
    stages = [_stage(cluster, shape, work, counts, i == 0, i == plan.pp - 1) for i, counts in enumerate(kinds)]
    slow = _slowest(plan, stages)
    m = plan.microbatches
    parts = {name: m * (a + b) for name, a, b in zip(Parts._fields, slow.forward, slow.backward, strict=True)}
    parts |= _between(plan, cluster, stages, slow) | _offloaded(plan, cluster, slow)
    parts |= _data_parallel(plan, cluster, slow)
    largest = max(stages, key=lambda s: s.dense / max(plan.dp * plan.cp, 1) + s.experts / max(plan.edp, 1))
    parts["optimizer"] = _optimizer(plan, cluster, largest)
    if plan.gpus > 1:
        parts["stragglers"] = cluster.straggling(plan.gpus) * sum(parts.values())
    seconds = sum(parts.values())
    deviation = spread.deviation(parts, plan, cluster)
    tokens = plan.global_batch * plan.seq_len / plan.gpus
    model = flops.trained_per_token(shape, plan.seq_len, plan.options) * tokens
    peak = cluster.fp8_flops_per_s if plan.options.fp8 else cluster.bf16_flops_per_s
    wide = exp(spread.QUANTILE * deviation)
    return StepTime(
        Estimate(seconds, seconds / wide, seconds * wide),
        Estimate(tokens / seconds, tokens / seconds / wide, tokens / seconds * wide),
        model / seconds / 1e12,
        model / seconds / peak,
        {name: value for name, value in parts.items() if value > 0},
        deviation,
        spread.assumptions(plan, cluster),
    )


def network_share(plan: Plan, cluster: Cluster) -> float | None:
    """The share of a step that the network between domains costs: what the step would save if a GPU sent there as fast as within its own;
    None within one domain.
    """
    if plan.gpus <= cluster.domain:
        return None
    return 1 - step_time(plan, _as_within(cluster)).seconds.value / step_time(plan, cluster).seconds.value


@lru_cache(maxsize=64)
def _as_within(cluster: Cluster) -> Cluster:
    return replace(cluster, nic_bytes_per_s=max(cluster.nic_bytes_per_s, cluster.link_bytes_per_s))


def least_seconds(plan: Plan, cluster: Cluster) -> float:
    """What a step takes at least: its layers and its output layer, as if spread evenly over the stages, with the pipeline's wait and that
    for the slowest rank.
    """
    whole = _whole(cluster, plan.shape, layer.work(plan))
    passes = plan.microbatches / plan.pp + (1 - 1 / plan.pp) / plan.vpp
    return whole * passes * (1 + cluster.straggling(plan.gpus))


@lru_cache(maxsize=65536)
def _whole(cluster: Cluster, shape: Shape, work: Work) -> float:
    """Seconds of one micro-batch in all stages together."""
    (counts,) = _chunks(shape, 1, 1)
    depths = [(layer.kind(shape, shape.layers), shape.mtp)] if shape.mtp else []
    costs = ((layer.cost(cluster, shape, kind, work), number) for kind, number in (*counts, *depths))
    whole, product = _head(cluster, shape, work)
    return sum(number * (sum(cost.forward) + sum(cost.backward)) for cost, number in costs) + whole - (product if work.frozen else 0.0)


@lru_cache(maxsize=4096)
def _chunks(shape: Shape, pp: int, vpp: int) -> tuple[tuple[tuple[Kind, int], ...], ...]:
    """How many layers of each kind each stage has."""
    sizes = pipeline.split(shape.layers, pp, vpp)
    of = [layer.kind(shape, i) for i in range(shape.layers)]
    return tuple(tuple(Counter(of[i] for chunk in pipeline.indices(sizes, pp, s) for i in chunk).items()) for s in range(pp))


def _slowest(plan: Plan, stages: list[_Stage]) -> _Stage:
    """The stage that the others wait for. Where layers do not divide, whoever lists them weighs output layer and prediction depths too.

    Such a list makes stages equal but for half a layer.
    """
    slow = max(stages, key=lambda s: s.seconds)
    if plan.pp == 1 or plan.shape.layers % (plan.pp * plan.vpp) == 0:
        return slow
    mean = sum(s.seconds for s in stages) / plan.pp
    half = mean * plan.pp / plan.shape.layers / 2
    share = min(1.0, (mean + half) / slow.seconds)
    whole = [sum(column) for column in zip(*((*s.forward, *s.backward) for s in stages), strict=True)]
    scale = share * slow.seconds / sum(whole)
    width = len(Parts._fields)
    return _Stage(
        Parts(*(x * scale for x in whole[:width])), Parts(*(x * scale for x in whole[width:])), slow.dense, slow.experts, slow.trained
    )


@lru_cache(maxsize=65536)
def _stage(cluster: Cluster, shape: Shape, work: Work, counts: tuple[tuple[Kind, int], ...], first: bool, last: bool) -> _Stage:
    """One pipeline stage for one micro-batch: seconds of both passes, and its rank's parameters; `counts` are its layers by kind."""
    forward, backward, dense, experts, beside = Parts(), Parts(), 0.0, 0.0, 0.0
    options = Options(backend="torch" if work.torch else "megatron", lora=work.lora, lora_targets=work.lora_targets)
    placed = list(counts)
    if last and shape.mtp:
        placed.append((layer.kind(shape, shape.layers), shape.mtp))
    for kind, number in placed:
        cost = layer.cost(cluster, shape, kind, work)
        forward, backward = forward.plus(cost.forward, number), backward.plus(cost.backward, number)
        index = layer.index_of(shape, kind)
        one = parameters.layer(shape, index)
        dense += number * (one.sharded / work.tp + one.repeated)
        experts += number * one.experts / (work.ep * work.etp)
        beside += number * parameters.adapter_parameters(shape, index, options) if work.lora else 0.0
    table = shape.vocab * shape.hidden / work.tp
    if first:
        dense += table
        forward = forward._replace(elementwise=forward.elementwise + _lookup(cluster, shape, work))
        backward = backward._replace(
            elementwise=backward.elementwise + 2 * _lookup(cluster, shape, work) + _table_gradient(cluster, table, work)
        )
    if last:
        dense += 0 if shape.tied and first else table
        head, product = _head(cluster, shape, work)
        forward = forward._replace(products=forward.products + head / 3)
        backward = backward._replace(
            products=backward.products + 2 * head / 3 - (product if work.frozen else 0.0),
            elementwise=backward.elementwise + (0.0 if work.frozen else layer.moving(cluster, work.added * table)),
        )
    return _Stage(forward, backward, dense, experts, (beside, 0.0) if work.frozen else (dense, experts))


def _lookup(cluster: Cluster, shape: Shape, work: Work) -> float:
    return layer.moving(cluster, 2 * BF16 * work.seq_len * work.mbs / work.cp * shape.hidden)


def _table_gradient(cluster: Cluster, values: float, work: Work) -> float:
    """Seconds of the embedding's gradient, which a micro-batch makes whole, however few of its rows have any: zeros, then the sum with what
    earlier ones left.

    megatron-core adds 16 bits to a float32 buffer; FSDP2 scatters it as it is, and its bytes are data parallelism's. Source: torch,
    `aten/src/ATen/native/cuda/Embedding.cu`
    (`embedding_dense_backward_cuda`); Megatron-LM, `megatron/core/distributed/distributed_data_parallel.py` (`_make_backward_post_hook`).
    """
    if work.frozen:
        return 0.0
    moved = BF16 + (0 if work.torch else BF16 + 2 * _FP32)
    return layer.moving(cluster, moved * values)


def _head(cluster: Cluster, shape: Shape, work: Work) -> tuple[float, float]:
    """Output layer, loss and their gradients, for each depth of prediction, with the products that join a depth's two inputs; and one of
    its three products alone.
    """
    rows = work.seq_len * work.mbs / work.cp
    work_flops = 6.0 * rows * shape.hidden * (shape.vocab / work.tp * (1 + shape.mtp) + 2 * shape.hidden / work.tp * shape.mtp)
    moved = _LOGIT_BYTES * rows * shape.vocab / work.tp if work.native_loss else 0.0
    fused = work_flops / (cluster.laws.loss_share * cluster.bf16_flops_per_s * IN_STEP.value)
    return fused + layer.moving(cluster, moved), fused / 3


def _between(plan: Plan, cluster: Cluster, stages: list[_Stage], slow: _Stage) -> dict[str, float]:
    """Messages between stages, and the time that the slowest stage waits for the pipeline to fill and drain.

    The interleaved schedule sends beside other chunks' work, one message each way while a micro-batch passes a chunk forth and back: what
    takes longer is waited
    for. The plain one waits for each message.
    """
    if plan.pp == 1:
        return {}
    tokens = plan.mbs * plan.seq_len / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    farthest = (
        plan.gpus - plan.gpus // plan.pp
    )  # the pipeline goes at the pace of its slowest boundary, over the network where the stages fill more than one domain
    one = collectives.send(cluster, farthest, BF16 * tokens * plan.shape.hidden)
    hidden = plan.vpp > 1 and plan.options.overlap_p2p
    sends = 2 * one * (plan.pp - 1 if hidden else plan.microbatches * plan.vpp + plan.pp - 1)
    sends += plan.microbatches * max(0.0, plan.vpp * one - slow.seconds) if hidden else 0.0
    waited = max(0.0, sum(s.seconds for s in stages) - slow.seconds) / plan.vpp
    table = plan.grad_bytes * plan.shape.vocab * plan.shape.hidden / plan.tp if plan.shape.tied else 0.0
    shared = (
        2 * collectives.ring(cluster, 2, plan.gpus // plan.pp * (plan.pp - 1), table) if table else 0.0
    )  # the first and the last stage's copy
    return {"pp": sends + shared, "bubble": waited}


def _offloaded(plan: Plan, cluster: Cluster, stage: _Stage) -> dict[str, float]:
    """What of the activations' way to host memory and back the passes beside it do not hide."""
    if not (plan.options.offload or plan.options.offload_modules):
        return {}
    shape = plan.shape
    first = {layer.kind(shape, i): i for i in reversed(range(shape.layers))}
    sent = (
        sum(n * activations.layer(plan, first[kind]).sent for kind, n in _chunks(shape, plan.pp, plan.vpp)[0]) / cluster.laws.host_to_device
    )
    return {"offload": plan.microbatches * (max(0.0, sent - sum(stage.forward)) + max(0.0, sent - sum(stage.backward)))}


def _rings(plan: Plan, cluster: Cluster, counts: tuple[float, float], num_bytes: float, pieces: int) -> float:
    """One gather or scatter of parameters (dense, experts) at so many bytes each, over both grids, in so many pieces.

    Copies of what is sharded (HSDP, instances of the optimizer) are shared within; `_copies` has what goes between them.
    """
    (dense, inner), (experts, outer) = _grids(plan)
    copies = _instances(plan)
    seconds = collectives.ring(cluster, dense // copies, inner, num_bytes * counts[0], pieces)
    return seconds + collectives.ring(cluster, max(1, experts // copies), outer, num_bytes * counts[1], pieces)


def _grids(plan: Plan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ranks of data parallelism, and how far they are apart, of everything but the experts and of these."""
    return (plan.dp * plan.cp, plan.tp), (plan.edp, plan.etp * plan.ep)


def _instances(plan: Plan) -> int:
    """Copies of what data parallelism shards."""
    return plan.options.optimizer_instances if SHARDING[plan.options.sharding].optimizer else 1


def _copies(plan: Plan, cluster: Cluster, counts: tuple[float, float]) -> float:
    """The all-reduce of each rank's share of the gradients between copies, once a step."""
    copies = _instances(plan)
    if copies == 1:
        return 0.0
    shares = [(max(1, ranks // copies), apart, count) for (ranks, apart), count in zip(_grids(plan), counts, strict=True)]
    return 2 * sum(collectives.ring(cluster, copies, apart * shared, plan.grad_bytes * count / shared) for shared, apart, count in shares)


def _data_parallel(plan: Plan, cluster: Cluster, stage: _Stage) -> dict[str, float]:
    """What of the gradients' and parameters' travel the passes beside it do not hide; what is frozen has no gradient, and travels where it
    is sharded.

    Full sharding gathers in each pass and scatters in each backward pass, layer by layer. Sharded gradients are scattered in each backward
    pass; otherwise
    they travel beside the last one. Parameters then travel beside the first forward pass, with DeepSpeed before it.
    Sources: ZeRO, arXiv 1910.02054, section 7; DeepSpeed 0.19.6, `runtime/zero/stage_1_and_2.py` (`step`).
    """
    if plan.dp * plan.cp * plan.edp == 1:
        return {}
    forward, backward = sum(stage.forward), sum(stage.backward)
    o, layers = plan.options, max(1, plan.shape.layers // plan.pp)
    split, whole = SHARDING[o.sharding], (stage.dense, stage.experts)
    scatter = _rings(plan, cluster, stage.trained, plan.grad_bytes, layers if split.parameters else 1)
    between = _copies(plan, cluster, stage.trained)
    if split.parameters:
        gather = _rings(plan, cluster, whole, BF16, layers)
        exposed = _beside(gather, forward) + _beside(gather + scatter, backward)
        last = _beside(gather + scatter + between, backward) - _beside(gather + scatter, backward)
        return {"dp": plan.microbatches * (exposed + (2 * gather + scatter) / layers) + last}
    if not split.optimizer:
        return {"dp": _beside(2 * scatter, backward)}
    gather = _rings(plan, cluster, stage.trained, BF16, 1)
    gathered = gather if o.backend == "torch" and o.sharding in DEEPSPEED else _beside(gather, forward)
    before = plan.microbatches - 1 if split.gradients else 0
    return {"dp": before * _beside(scatter, backward) + _beside(scatter + between, backward) + gathered}


def _beside(sent: float, computed: float) -> float:
    return max(sent - DP_OVERLAP.value * computed, 0.05 * sent)


def _optimizer(plan: Plan, cluster: Cluster, stage: _Stage) -> float:
    """The update, the norm of the gradients before it, and what the host does once a step; FSDP2's shares on the host come to the GPU in
    each pass. Float32 parameters are cast in every micro-batch: each rank's share for FSDP2's gather in either pass, or all of them
    once, and their gradients back (`param_dtype` of torch's `MixedPrecisionPolicy`; `.to` in the forward pass without FSDP2).
    """
    split = SHARDING[plan.options.sharding]
    (dense, _), (experts, _) = _grids(plan)
    over = (dense // _instances(plan), experts // _instances(plan)) if split.optimizer else (1, 1)
    trained_dense, trained_experts = stage.trained
    count = trained_dense / max(over[0], 1) + trained_experts / max(over[1], 1)
    whole = count if split.parameters else trained_dense + trained_experts
    each = plan.grad_bytes + 2 * plan.master_bytes + 4 * plan.moment_bytes + BF16
    rate = cluster.laws.optimizer_share * cluster.memory_bytes_per_s
    seconds = (each * count + plan.grad_bytes * count + plan.grad_bytes * whole) / rate + HOST_STEP.value / cluster.host_speed
    if own_master(plan.options) and plan.master_bytes == _FP32:
        seconds += plan.microbatches * (3 if split.parameters else 2) * (_FP32 + BF16) * count / rate
    share = plan.options.optimizer_offload / 100
    seconds += share * count * ((_FP32 + BF16) / cluster.laws.host_to_device + _ADAM_BYTES / CPU_ADAM.value)
    if own_master(plan.options) and share:
        shard = stage.dense / max(over[0], 1) + stage.experts / max(over[1], 1)
        seconds += plan.microbatches * 2 * BF16 * share * shard / cluster.laws.host_to_device
    return seconds
