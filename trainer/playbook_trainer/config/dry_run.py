"""A dry run: whether a configuration can run on so many ranks, and what each would hold, with neither ranks, torch nor a process group.

State bytes follow from the layout and are exact up to padding. Activations are an estimate (`playbook.planner.activations`): those of fused
kernels in 16 bits, or with the megatron backend those of Transformer Engine's, which measured peaks of text models bear out to within eight
percent (`playbook.planner.memory`). Source: Megatron Core's `--fake-init-process-group`, which builds the groups of a large job in one
process for the same purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from playbook.errors import ConfigError
from playbook.planner import activations, memory, parameters, pipeline
from playbook.planner.activations import Kept
from playbook.planner.choice.routing import Routing
from playbook.planner.memory import StageBytes
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import StepTime, step_time
from playbook_trainer.config import automatic, checks, megatron_checks
from playbook_trainer.config.megatron_fields import recompute_layers
from playbook_trainer.config.sections import shape_of
from playbook_trainer.config.tree import TrainerConfig, dump, flatten

_MASTER_BYTES = 4
"""Bytes per float32 master weight; also when stored as a bf16 weight plus a 16-bit remainder."""

_RESIDENT_LAYERS = 3
"""Layers whose offloaded tensors are on the GPU at once: one computes, its neighbours are on their way. Source:
`playbook_trainer.torch`."""

_LOGIT_BYTES = {"fp32": 8, "bf16": 6}
"""Per logit of a chunk without the fused kernel: the product's output and its float32 softmax."""


@dataclass(frozen=True)
class Report:
    """A legal layout with its degrees and stages."""

    layout: dict[str, Any]
    num_parameters: int
    stages: list[StageBytes]


def dry_run(config: TrainerConfig, world: int) -> Report:
    """The layout of `config` on `world` ranks, stage by stage; frozen parts count as if they were trained.

    Raises:
        ConfigError: it cannot run there; one line names every broken rule.
    """
    problems = checks.layout_problems(config, world) + checks.feature_problems(config) + checks.switch_problems(config, world)
    if problems:
        raise ConfigError(f"this configuration cannot run on {world} rank{'s' if world > 1 else ''}: {'; '.join(problems)}")
    config = automatic.switched(config, automatic.Target(gpu="a GPU", ranks=world))
    plan = plan_of(config, world)
    keys = ("gpus", "tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "gbs", "seq_len", "microbatches")
    layout = {"model": plan.model, **{k: getattr(plan, k) for k in keys}}
    return Report(layout, parameters.total(plan.shape), stages(config, plan))


def stages(config: TrainerConfig, plan: Plan) -> list[StageBytes]:
    """What a rank of each pipeline stage holds."""
    one = _megatron_stage if config.backend == "megatron" else _stage
    sizes = config.parallel.pipeline_layout or pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return [one(config, plan, stage, pipeline.indices(sizes, plan.pp, stage)) for stage in range(plan.pp)]


def plan_of(config: TrainerConfig, world: int) -> Plan:
    """The configuration as layout arithmetic knows it."""
    par, train = config.parallel, config.train
    return Plan(
        shape_of(config.model), config.model.name, gpus=world, tp=par.tp, cp=par.cp, pp=par.pp, ep=par.ep, etp=par.etp or par.tp,
        vpp=par.vpp,
        mbs=train.micro_batch_size, gbs=train.global_batch_size, seq_len=config.data.seq_len, even_rows=False,
        options=_megatron_options(config) if config.backend == "megatron" else _options(config),
    )  # fmt: skip


def predicted(config: TrainerConfig, world: int, on: Cluster, routing: Routing | None = None) -> StepTime | None:
    """What a step of `config` is predicted to take on so many GPUs of a cluster, with this routing of its tokens;
    None in float32, which no law of the planner is about.
    """
    plan = plan_of(config, world)
    plan = routing.on(plan) if routing else plan
    if config.train.dtype != "bf16":
        return None
    mg, moment_bytes = config.megatron, {"fp32": 4, "bf16": 2}[config.optimizer.moments_dtype]
    if config.backend == "megatron":
        aware = mg.precision_aware_optimizer
        plan = replace(
            plan, grad_bytes={"fp32": 4, "bf16": 2}[mg.grad_reduce_dtype], moment_bytes=moment_bytes if aware else 4,
            master_bytes=2 if aware else 4, gradients_added=mg.data_parallel in ("ddp", "distributed_optimizer"),
            experts_at_once=mg.grouped_gemm == "cutlass",
            options=replace(plan.options, optimizer_offload=round(100 * mg.optimizer_offload_fraction)),
        )  # fmt: skip
        return step_time(plan, on)
    routed = plan.ep * plan.etp > 1 and bool(config.model.num_experts)
    sent = {"dedup": "alltoall"}.get(config.moe.dispatcher, config.moe.dispatcher) if routed else ""
    config = automatic.switched(config, automatic.meant_for(on.name, world))
    shared = config.wants_fsdp(plan.dp * plan.cp, plan.edp)
    options = replace(
        plan.options, backend="torch", sharding="fsdp2" if shared else "none", dispatcher=sent, attention=attention(config, on.name),
        cp_comm=_CONTEXT[config.parallel.cp_comm] if plan.cp > 1 else "",
        optimizer_offload=100 if config.offload.optimizer else 0,
    )  # fmt: skip
    if not shared:
        plan = replace(plan, grad_bytes=_gradient(config, plan))
    master_bytes = 2 if config.optimizer.master_weights == "remainder" else 4
    return step_time(replace(plan, options=options, moment_bytes=moment_bytes, master_bytes=master_bytes), on)


def attention(config: TrainerConfig, hardware: str) -> str:
    """The kernel of attention on that kind of GPU, as the planner names it:
    rows that are one document each go through cuDNN wherever `auto` may take it.

    A slice of context parallelism has more keys than queries, which only flash's masks express. `plain` is torch's own attention, which
    is flash too. Source: `playbook_trainer.torch.model.attention.choose`.
    """
    flat = flatten(dump(config))
    kernel = automatic.resolve(flat, automatic.meant_for(hardware))["train.attention"]
    one_length = config.data.kind == "mock" and not config.data.pack and not _is_sliced(config)
    return {"plain": "flash2", "flash": "flash2", "cudnn": "cudnn"}.get(kernel, "cudnn" if one_length else "flash2")


_CONTEXT = {"allgather": "all_gather", "ring": "p2p", "ulysses": "a2a"}
"""The planner's word for each `parallel.cp_comm`."""


def _is_sliced(config: TrainerConfig) -> bool:
    """Whether a rank has slices of the token stream in attention, and not the whole stream for some heads."""
    return config.parallel.cp > 1 and config.parallel.cp_comm != "ulysses"


def _gathered_keys(config: TrainerConfig, plan: Plan, index: int) -> float:
    """Bytes that a layer keeps beside `activations.kept` with gathered keys:
    those and values of all CP ranks, and attention's output once for its slices, once joined.

    Source: `playbook_trainer.torch.parallel.context`.
    """
    shape = plan.shape
    runs_again = config.train.recompute == "full"
    if plan.cp == 1 or config.parallel.cp_comm != "allgather" or runs_again or parameters.parts(shape, index)[0] != "attention":
        return 0.0
    keys = 2 * plan.cp * max(shape.kv_heads, plan.tp)
    return WIDTH[config.train.dtype] * activations.tokens(plan) * (keys + shape.heads) * shape.head_dim / plan.tp


def _options(config: TrainerConfig) -> Options:
    par, train = config.parallel, config.train
    modules = {"none": (), "full": ("full",), "selective": tuple(config.train.recompute_modules)}[train.recompute]
    return Options(sp=par.sequence_parallel and par.tp > 1, sharding="fsdp" if par.fsdp else "none", recompute=modules)


def _gradient(config: TrainerConfig, plan: Plan) -> int:
    """Bytes of a gradient: float32, or bfloat16 as reduced where the optimizer holds a 16-bit remainder and a step reduces once."""
    reduces_once = plan.microbatches == 1 and plan.pp == 1
    return 2 if config.optimizer.master_weights == "remainder" and reduces_once else 4


class TransientBytes(NamedTuple):
    """Bytes that come and go within a step: weights that FSDP has gathered, and what the loss holds."""

    gathered: float
    loss: float


def _peak_transient(
    config: TrainerConfig, plan: Plan, weights: memory.Weights, dense_shards: int, expert_shards: int, layers: int, last: bool
) -> TransientBytes:
    """The transient bytes when they are most: with two layers gathered in a pass,
    or on the last stage in the loss's forward or backward pass.

    FSDP hands out weights in the precision of training. Layers come and go, two at a time; the output layer stays until its backward pass,
    which the last layer's weights are gathered beside. Where nothing is shared out, or `parallel.reshard_after_forward` is off,
    all of them stay.
    Source: `playbook_trainer.torch.build.shard`.
    """
    bytes_per_value, forward, backward = WIDTH[config.train.dtype], *_loss(config, plan)
    if not config.wants_fsdp(plan.dp * plan.cp, plan.edp):
        return TransientBytes(0.0, max(forward, backward) if last else 0.0)
    reshards = config.parallel.reshard_after_forward
    dense_stay, experts_stay = dense_shards == 1 or not reshards, expert_shards == 1 or not reshards
    stay = bytes_per_value * (weights.dense * dense_stay + weights.experts * experts_stay)
    experts = weights.experts / layers
    layer = bytes_per_value * ((0.0 if dense_stay else weights.largest - experts) + (0.0 if experts_stay else experts))
    head = 0.0 if dense_stay else bytes_per_value * parameters.embedding(plan.shape) / plan.tp
    candidates = [TransientBytes(stay + 2 * layer, 0.0)]
    if last:
        candidates += [TransientBytes(stay + head, forward), TransientBytes(stay + head + layer, backward)]
    return max(candidates, key=sum)


def _loss(config: TrainerConfig, plan: Plan) -> tuple[float, float]:
    """Bytes that the loss holds in its forward and its backward pass, beside the output layer's weight.

    The forward pass makes all gradients: that of the output layer in float32, that of its input, and a chunk of logits,
    which the fused kernel overwrites by their gradient.
    The backward pass scales both, and rounds the first. Source: `playbook_trainer.torch.parallel.tensor` (`_LinearCrossEntropy`).
    """
    bytes_per_value, tokens = WIDTH[config.train.dtype], activations.tokens(plan)
    weight = parameters.embedding(plan.shape) / plan.tp
    rows = bytes_per_value * tokens * plan.shape.hidden
    logit = bytes_per_value if config.train.fused_loss is True else _LOGIT_BYTES[config.train.dtype]
    chunk = logit * min(config.train.loss_chunk, tokens) * plan.shape.vocab / plan.tp
    return _MASTER_BYTES * weight + rows + chunk, (2 * _MASTER_BYTES + bytes_per_value) * weight + 3 * rows


def _stage(config: TrainerConfig, plan: Plan, stage: int, chunks: list[list[int]]) -> StageBytes:
    """Bytes per rank of one pipeline stage of the torch backend.

    `chunks[c]` lists the layer indices of the stage's c-th virtual-pipeline chunk.
    """
    weights = memory.weights(plan, stage, chunks, whole_tower=True)
    moment_bytes = {"fp32": 4, "bf16": 2}[config.optimizer.moments_dtype]
    dense_replicas, expert_replicas = config.parallel.copies(plan.dp * plan.cp, plan.edp)
    dense_shards = plan.dp * plan.cp // dense_replicas
    params_per_rank = weights.dense / dense_shards + weights.experts * expert_replicas / plan.edp
    bytes_per_value = WIDTH[config.train.dtype]
    offloaded = config.offload.activations
    saved_bytes = [
        [activations.kept(plan, i) * bytes_per_value / activations.BF16 + _gathered_keys(config, plan, i) for i in chunk]
        for chunk in chunks
    ]
    live_activations = memory.alive(
        plan, stage, [[Kept(0.0, size) if offloaded else Kept(size) for size in chunk] for chunk in saved_bytes], _RESIDENT_LAYERS
    )
    state_bytes_per_param = {"parameters": _MASTER_BYTES, "gradients": _gradient(config, plan), "optimizer": 2 * moment_bytes}
    state_bytes_on_gpu = {name: 0.0 if config.offload.optimizer else params_per_rank * size for name, size in state_bytes_per_param.items()}
    # The backward pass of the only micro-batch makes each gradient where its layer's activations have gone.
    gradients_replace_activations = plan.microbatches == 1 and plan.pp == 1
    layers = sum(map(len, chunks))
    transient = _peak_transient(config, plan, weights, dense_shards, plan.edp // expert_replicas, layers, stage == plan.pp - 1)
    return StageBytes(
        stage=stage,
        layers=layers,
        in_flight=live_activations.in_flight,
        held=weights.dense + weights.experts,
        **state_bytes_on_gpu,
        gathered=transient.gathered,
        activations=live_activations.on_gpu,
        vision=live_activations.in_flight[0] * vision(config, plan) if stage == 0 else 0.0,
        loss=transient.loss,
        workspace=memory.PLAIN_BYTES,
        grown=state_bytes_on_gpu["gradients"] if gradients_replace_activations else 0.0,
        host=params_per_rank * sum(state_bytes_per_param.values()) - sum(state_bytes_on_gpu.values()) + live_activations.host,
    )


_MOMENT_BYTES = 8
"""Per parameter: both moments of AdamW in float32."""

_HOST_BYTES = 16
"""Per parameter of an optimizer on the host: float32 weight, gradient and both moments.

Source: Megatron-LM, `megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`."""


def _megatron_options(config: TrainerConfig) -> Options:
    """The features that are chosen, with what Megatron-FSDP shards by its strategy in the planner's words."""
    options = megatron_checks.options(config)
    if config.megatron.data_parallel != "megatron_fsdp":
        return options
    shards = {"no_shard": "none", "optim": "optimizer", "optim_grads": "optimizer", "optim_grads_params": "fsdp"}
    return replace(options, sharding=shards[config.megatron.sharding_strategy])


class BytesPerParam(NamedTuple):
    """Bytes per parameter of each state of training; that of the optimizer is the master weight and two moments."""

    weight: float
    gradient: float
    optimizer: float


def _megatron_bytes_per_param(config: TrainerConfig) -> BytesPerParam:
    """Bytes per parameter of weights, gradients, and optimizer state (master weight and two moments).

    In fp32 the weight is its own master, so the optimizer has two moments only. Weight is 0 with FP8 parameters: `memory.fp8_weights`
    counts those.
    A precision-aware optimizer keeps moments in `moments_dtype`, and of a float32 master weight only what its bfloat16 weight lacks;
    Megatron-FSDP keeps it whole, and so do 8-bit weights.
    Source: Megatron-LM, `megatron/core/optimizer/optimizer_config.py` and `docs/source/api-guide/dist_optimizer.md`.
    """
    mg = config.megatron
    if config.train.dtype == "fp32":
        return BytesPerParam(weight=4, gradient=4, optimizer=8)
    gradient = {"fp32": 4, "bf16": 2}[mg.grad_reduce_dtype]
    moment_bytes = {"fp32": 4, "bf16": 2}[config.optimizer.moments_dtype] if mg.precision_aware_optimizer else 4
    weight = 0 if mg.fp8_param and config.precision.fp8 != "none" else memory.PARAM_BYTES
    remainder = mg.precision_aware_optimizer and mg.data_parallel != "megatron_fsdp" and weight
    return BytesPerParam(weight, gradient, optimizer=(2 if remainder else 4) + 2 * moment_bytes)


def _megatron_states(config: TrainerConfig, plan: Plan, weights: memory.Weights) -> dict[str, float]:
    """Bytes of weights, gradients, optimizer state and 8-bit copies on the GPU, and of what an offloaded optimizer keeps on the `host`."""
    unit = replace(plan, grad_bytes=2, master_bytes=2, moment_bytes=1)
    weight_values, gradient_values, optimizer_values = (
        n / per for n, per in zip(memory.state_bytes(unit, weights), (2, 2, 4), strict=True)
    )
    if config.megatron.data_parallel == "megatron_fsdp" and config.megatron.sharding_strategy == "optim_grads":
        gradient_values = optimizer_values
    fraction = megatron_checks.offloaded_fraction(config)
    per_param = _megatron_bytes_per_param(config)
    if fraction and config.train.dtype == "bf16":
        per_param = per_param._replace(optimizer=_MASTER_BYTES + _MOMENT_BYTES)  # whole, whatever the optimizer on the GPU alone would keep
    stays = _MASTER_BYTES * fraction if fraction and not _updates_weights(config) else 0.0
    return {
        "parameters": per_param.weight * weight_values,
        "gradients": per_param.gradient * gradient_values,
        "optimizer": (per_param.optimizer * (1 - fraction) + stays) * optimizer_values,
        "fp8_weights": memory.fp8_weights(plan, weights),
        "host": _HOST_BYTES * optimizer_values * fraction,
    }


def _updates_weights(config: TrainerConfig) -> bool:
    """Whether an optimizer on the host writes the weights themselves, and not float32 copies of them that stay on the GPU.

    Source: Megatron-LM, `megatron/core/optimizer/distrib_optimizer.py` (_build_model_and_main_param_groups).
    """
    return config.train.dtype == "fp32" or config.megatron.precision_aware_optimizer


def _megatron_stage(config: TrainerConfig, plan: Plan, stage: int, chunks: list[list[int]]) -> StageBytes:
    """Bytes per rank of one pipeline stage of the megatron backend.

    `chunks[c]` lists the layer indices of the stage's c-th virtual-pipeline chunk.
    """
    weights, last = memory.weights(plan, stage, chunks, whole_tower=True), stage == plan.pp - 1
    placed = [list(enumerate(chunk)) for chunk in chunks]
    if last:  # megatron-core makes depths of multi-token prediction again one by one with uniform, and not at all with block
        placed[-1] += [(recompute_layers(config), plan.shape.layers - 1)] * plan.shape.mtp
    width = WIDTH[config.train.dtype] / activations.BF16
    live_activations = memory.alive(
        plan, stage, [[_megatron_layer(config, plan, i, layer_in_chunk, len(chunk)) for layer_in_chunk, i in chunk] for chunk in placed]
    )
    state = _megatron_states(config, plan, weights)
    host = state.pop("host")
    return StageBytes(
        stage=stage,
        layers=sum(map(len, chunks)),
        in_flight=live_activations.in_flight,
        held=weights.dense + weights.experts,
        **state,
        gathered=memory.gathered(plan, weights, WIDTH[config.train.dtype]),
        activations=width * live_activations.on_gpu,
        vision=live_activations.in_flight[0] * vision(config, plan) if stage == 0 else 0.0,
        loss=activations.loss(plan) if last else 0.0,
        replayed=width * live_activations.again,
        workspace=memory.WORKSPACE_BYTES,
        host=host + width * live_activations.host,
    )


def _megatron_layer(config: TrainerConfig, plan: Plan, index: int, layer_in_chunk: int, length: int) -> Kept:
    """What a layer keeps; under full recompute that depends on its index in the chunk, and on the chunk's length."""
    if config.train.recompute != "full":
        return activations.layer(plan, index)
    saved = activations.saved(plan, index)
    span, whole, entry = recompute_layers(config), sum(saved.values()), saved["attention norm in"]
    if config.megatron.recompute_method == "block":
        return Kept(entry, 0.0, whole - entry) if layer_in_chunk < span else Kept(whole)
    # A stretch ends with its chunk at the latest.
    return Kept(entry if layer_in_chunk % span == 0 else 0.0, 0.0, min(span, length) * whole - entry)


WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of a number in each `train.dtype`."""


def vision(config: TrainerConfig, plan: Plan) -> float:
    """Bytes that the vision tower keeps of a micro-batch in which every token is an image's; real rows hold text too.

    A block keeps per patch: the inputs and outputs of both norms, queries, keys and values before and after rotation, the output of
    attention, and the MLP before and after its activation. Source: Hugging Face transformers,
    `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
    """
    tower = config.model.vision
    if tower is None or config.data.kind not in ("vqa", "chat") or "vision" in config.train.freeze:
        return 0.0
    rows = plan.mbs * plan.seq_len  # whole ones: a context-parallel rank holds a part of them, and encodes the images of all
    entry = rows * tower.spatial_merge_size**2 * tower.hidden_size * WIDTH[config.train.dtype]
    block = entry * (10 + 2 * tower.ffn_size / tower.hidden_size)
    recomputes = "vision" in config.train.recompute_modules
    return entry * tower.depth + block if recomputes else block * tower.depth
