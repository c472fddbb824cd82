"""From a configuration to a model on this rank: built without memory, wrapped, then given its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import linear

from playbook.errors import ConfigError
from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config import automatic
from playbook_trainer.config.sections import broken
from playbook_trainer.config.tree import CompileConfig, TrainConfig, TrainerConfig
from playbook_trainer.torch import weights
from playbook_trainer.torch.model import fp8, graphs
from playbook_trainer.torch.model.decoder import Decoder, Options
from playbook_trainer.torch.model.ops import Ops, compiled
from playbook_trainer.torch.parallel.sharding import Put, fill, initial_value, set_values
from playbook_trainer.torch.parallel.tensor import LossRows, plain_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(config: TrainerConfig, axes: Axes, device: torch.device) -> Decoder:
    """This rank's stage of the model, sharded and initialised; with `optimizer.master_weights: remainder`,
    only the optimizer can do the latter.
    """
    train = config.train
    check_device(config, device)
    leave_multiprocessors(config.parallel.comm_sms)
    meet(axes, device)
    grouped = config.moe.experts == "grouped" or (
        config.moe.experts == "auto" and automatic.grouped_experts("torch", "", train.dtype, has_gpu=device.type == "cuda")
    )
    product, expert_product = fp8.products(config.precision.fp8, config.precision.fp8_modules, device)
    options = Options(
        axes=axes,
        linear=product or linear,
        expert_product=expert_product,
        dispatcher=config.moe.dispatcher,
        grouped=grouped,
        recompute=frozenset(train.recompute_modules if train.recompute == "selective" else [train.recompute]),
        offload=config.offload.activations,
        graphs=frozenset(train.cuda_graphs),
        attention=train.attention,
        router_wide=config.moe.router_dtype == "fp32",
        fused_permutation=config.moe.fused_permutation is True,
        fused_vision=train.fused_norms is True,
        early_probs=config.moe.apply_probs_on == "activation",
        loss_chunk=train.loss_chunk,
        loss_rows=loss_rows(train),
        ops=operators(config),
        vision_always=config.data.kind in ("vqa", "chat"),
        chunks=stage_chunks(config.model.num_layers, axes.pp, config.parallel.vpp),
    )
    with torch.device("meta"):
        model = Decoder(config.model, options)
    model.activation_dtype = DTYPES[train.dtype]
    freeze(model, train.freeze)
    if config.optimizer.master_weights == "remainder":
        narrow(model)
    compile_regions(model, train.compile)
    if config.wants_fsdp(axes.dp_cp.size, axes.edp.size):
        shard(model, config, axes, device)
    model.to_empty(device=torch.device("cpu") if config.offload.optimizer else device)
    if config.optimizer.master_weights != "remainder":
        initialise(model, config, axes, device)
    if train.cuda_graphs:
        graphs.capture(model.layers.values(), config.model, model.activation_dtype, train.micro_batch_size * config.data.seq_len, device)
    return model


def initialise(model: Decoder, config: TrainerConfig, axes: Axes, device: torch.device, write: Put = set_values) -> None:
    """Set the parameters to their first values, drawn from the seed or read from `init.weights`."""
    if config.init.weights is None:
        fill(model, axes, initial_value(config.model, config.seed, DTYPES[config.train.dtype]), device, write)
    else:
        weights.load(model, axes, Path(config.init.weights), write)


def narrow(model: nn.Module) -> None:
    """Convert parameters to bfloat16, so that nothing casts them in a step; the optimizer and `Frozen` hold what that rounds away."""
    for param in model.parameters():
        param.data = param.data.bfloat16()


def leave_multiprocessors(number: int) -> None:
    """Keep `number` multiprocessors free of this process's matrix products (grouped ones, and those through cuBLASLt), for collectives.

    Source: `_SMCarveout_EXPERIMENTAL` of torch's ATen/Context.h, which GroupMM.cu subtracts from the blocks of its persistent kernel.
    """
    torch._C._set_sm_carveout_experimental(number or None)


def freeze(model: Decoder, parts: Sequence[str]) -> None:
    """Parameters of the named parts get no gradient and no optimizer state, and keep their values."""
    for name, param in model.named_parameters():
        param.requires_grad_(part_of(name) not in parts)


def part_of(name: str) -> str:
    """The part of a vision-language model that a parameter belongs to."""
    if name.startswith(("vision.merger.", "vision.deepstack.")):
        return "projector"
    return "vision" if name.startswith("vision.") else "language_model"


def check_device(config: TrainerConfig, device: torch.device) -> None:
    """Refuse switches that this rank's device or its packages cannot serve.

    Raises:
        ConfigError: one message for all of them.
    """
    train, gpu, in_8_bits = config.train, device.type == "cuda", config.precision.fp8 != "none"
    fused = {
        "train.fused_loss": train.fused_loss,
        "train.fused_activation": train.fused_activation,
        "train.fused_norms": train.fused_norms,
        "moe.fused_permutation": config.moe.fused_permutation,
        "moe.fused_router": config.moe.fused_router,
        "optimizer.fused": config.optimizer.fused,
    }
    unequal = config.data.pack or config.data.pad or config.model.vision
    rules = {
        f"train.cuda_graphs {train.cuda_graphs} needs a GPU, and there is none: set it to []": not gpu and train.cuda_graphs,
        **{f"{name} needs a GPU, and there is none: set it to false": not gpu and on is True for name, on in fused.items()},
        "parallel.comm_sms needs a GPU, and there is none: set it to 0": not gpu and config.parallel.comm_sms,
        f"train.attention '{train.attention}' needs a GPU, and there is none: set it to auto or plain": (
            not gpu and train.attention in ("flash", "cudnn")
        ),
        "train.attention 'plain': the blocks of a ring are computed by flash on a GPU; set parallel.cp_comm: allgather": (
            gpu and train.attention == "plain" and config.parallel.cp > 1 and config.parallel.cp_comm == "ring"
        ),
        "train.attention 'cudnn': documents of unequal length go through Transformer Engine, which is not installed; "
        "run pip install '.[gpu]' in a clone of Playbook, or set train.attention: auto": (
            gpu and train.attention == "cudnn" and not automatic.is_installed("transformer_engine") and unequal
        ),
        "precision.fp8 multiplies into 16-bit results on a GPU: set train.dtype: bf16": gpu and in_8_bits and train.dtype != "bf16",
        "precision.fp8 needs a Hopper GPU or a later one: set it to none": (
            gpu and in_8_bits and torch.cuda.get_device_capability(device) < (9, 0)
        ),
    }
    if problems := broken(rules):
        raise ConfigError("\n".join(problems))


def operators(config: TrainerConfig) -> Ops:
    """The element-wise functions of a layer: plain, compiled, or Triton kernels, as the configuration says;
    an `auto` that is left in it is plain.
    """
    train = config.train
    ops = compiled(partial(_compiled, config=train.compile)) if train.compile.decoder is True else Ops()
    if train.fused_activation is True:
        from playbook_trainer.torch.kernels.dense import swiglu, weighted_swiglu

        ops = replace(ops, swiglu=swiglu, weighted_swiglu=weighted_swiglu)
    if train.fused_norms is True:
        from playbook_trainer.torch.kernels.dense import norm, norm_rotate

        ops = replace(ops, norm=norm, norm_rotate=norm_rotate)
    if config.moe.fused_router is True:
        from playbook_trainer.torch.kernels.experts import route

        ops = replace(ops, route=route)
    return ops


def loss_rows(train: TrainConfig) -> LossRows:
    """The function that turns a chunk of logits into loss and gradient: plain, compiled, or a Triton kernel."""
    if train.fused_loss is True:
        from playbook_trainer.torch.kernels.dense import fused_rows

        return fused_rows
    return _compiled(plain_rows, config=train.compile) if train.compile.loss is True else plain_rows


def meet(axes: Axes, device: torch.device) -> None:
    """Run one small all-reduce in every group that later carries point-to-point transfers.

    NCCL wants all ranks of a group in its first operation, and a step of point-to-point exchanges may leave some out.
    Source: PyTorch, `torch.distributed.batch_isend_irecv`, note.
    """
    for axis in (axes.cp, axes.pp):
        if axis.group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=axis.group)


def stage_chunks(num_layers: int, pp: Axis, vpp: int) -> tuple[range, ...]:
    """The equal stretches of layers that a pipeline stage holds: chunk c of stage r is the (c x pp + r)-th of pp x vpp."""
    size = num_layers // (pp.size * vpp)
    return tuple(range(i * size, (i + 1) * size) for i in range(pp.rank, pp.size * vpp, pp.size))


def shard(model: Decoder, config: TrainerConfig, axes: Axes, device: torch.device) -> None:
    """FSDP2: each layer, the head and the vision blocks are units; experts shard over edp, the rest over dp x cp (in each copy,
    with HSDP).
    """
    dtype = DTYPES[config.train.dtype]
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[config.parallel.reduce_dtype], cast_forward_inputs=False)
    }
    if config.offload.optimizer:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    dense, sparse = mesh(axes.dp_cp, axes.replicate, axes.shard, device), mesh(axes.edp, axes.edp_replicate, axes.edp_shard, device)
    reshard_after_forward = config.parallel.reshard_after_forward

    def unit(module: nn.Module, where: DeviceMesh, size: int, reshard: bool = True) -> None:
        # On one rank there is nothing to gather a second time, so the copy made in the forward pass stays.
        fully_shard(module, mesh=where, reshard_after_forward=reshard and size > 1, **policy)
        assert isinstance(module, FSDPModule)
        # Losses are divided by the global number of labels, so gradients are sums, not means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    for layer in model.layers.values():
        if hasattr(layer, "moe") and axes.edp.ranks != axes.dp_cp.ranks:
            unit(layer.moe.experts, sparse, axes.edp_shard.size, reshard_after_forward)
        unit(layer, dense, axes.shard.size, reshard_after_forward)
    if hasattr(model, "vision"):
        for block in model.vision.blocks:
            unit(block, dense, axes.shard.size, reshard_after_forward)
        unit(model.vision, dense, axes.shard.size, reshard_after_forward)
    if hasattr(model, "embed"):
        unit(model.embed, dense, axes.shard.size, reshard_after_forward)
    if hasattr(model, "head"):
        unit(model.head, dense, axes.shard.size, reshard=False)
    unit(model, dense, axes.shard.size, reshard=False)


def mesh(whole: Axis, replicate: Axis, shard: Axis, device: torch.device) -> DeviceMesh:
    """The ranks of `whole` as FSDP wants them: a line to shard over, or a plane of copies and shards."""
    if replicate.size == 1:
        return DeviceMesh.from_group(_group(shard), device.type)
    plane = torch.tensor(whole.ranks).view(replicate.size, shard.size)
    return DeviceMesh.from_group([_group(replicate), _group(shard)], device.type, mesh=plane, mesh_dim_names=("replicate", "shard"))


def _group(axis: Axis) -> Any:
    # FSDP asks for a group even where there is one rank; that group never carries anything.
    if axis.group is not None:
        return axis.group
    return [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]


def compile_regions(model: Decoder, config: CompileConfig) -> None:
    """torch.compile, block by block; attention and collectives stay outside the compiled parts."""
    if config.vision is True and hasattr(model, "vision"):
        for block in model.vision.blocks:
            for name in ("projected", "before", "after"):
                setattr(block, name, _compiled(getattr(block, name), config=config))


def _compiled(f: Callable[..., Any], *, config: CompileConfig) -> Callable[..., Any]:
    dynamic = {"auto": None, "static": False, "marked": True}[config.dynamic]
    return torch.compile(f, backend=config.backend, dynamic=dynamic)
