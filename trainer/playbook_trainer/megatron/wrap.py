"""What data parallelism puts around the model's chunks, and the optimizer over them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron import settings as mapping
from playbook_trainer.torch.model.vision import VisionBlock


def wrap(config: TrainerConfig, transformer_config: Any, chunks: list[nn.Module]) -> list[Any]:
    """Each chunk in the wrapper that `megatron.data_parallel` names, and the schedules told how to reduce their gradients."""
    settings = DistributedDataParallelConfig(**mapping.data_parallel(config, DistributedDataParallelConfig))
    kind = config.megatron.data_parallel
    if kind == "megatron_fsdp":
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        units = None
        if config.model.vision is not None and config.megatron.sharding_strategy == "optim_grads_params":
            units = [TransformerLayer, VisionBlock]
        # It takes its mean in place, with each micro-batch. Where a parameter's data-parallel group is one rank (an expert's, with EP as
        # wide as data parallelism), what earlier micro-batches have left there shrinks each time.
        # So it sums, and the loss is divided before.
        # Source: megatron-core 0.19.2, `param_and_grad_buffer.py` (gradient_reduce_preprocessing), and Megatron-LM's issue 6660.
        transformer_config.calculate_per_token_loss = True  # that it sums; for schedules, it would mean more
        wrapped = [FullyShardedDataParallel(transformer_config, settings, chunk, fsdp_unit_modules=units) for chunk in chunks]
        transformer_config.calculate_per_token_loss = False
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        transformer_config.grad_scale_func = lambda loss: loss / ranks
    elif kind == "fsdp2":
        from megatron.core.distributed import TorchFullyShardedDataParallel

        wrapped = [TorchFullyShardedDataParallel(transformer_config, settings, chunk) for chunk in chunks]
    else:
        # Buckets beyond the first chunk would be reduced before the next chunk's backward pass ends.
        wrapped = [DistributedDataParallel(transformer_config, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    _tell_schedules(config, transformer_config, wrapped)
    return wrapped


SHORT = (
    "megatron-core {} counts experts too little in the gradient norm, so it clips too late; set optim_grads_params, "
    "or megatron.data_parallel: distributed_optimizer or ddp"
)


def gradient_problems(config: TrainerConfig, world: int, version: str) -> list[str]:
    """What a megatron-core gets wrong of Megatron-FSDP's gradients on so many ranks, in one line each.

    Before 0.19 a reduced gradient is added to the memory that it was made of, where that memory is a whole rank's. 0.19 counts experts too
    little in the norm that clips, where nothing is sharded. Found on 0.16.1 and 0.19.2 by gradient norms beside those of the distributed
    optimizer.
    """
    mg, par, release = config.megatron, config.parallel, tuple(int(n) for n in version.split(".")[:2])
    if mg.data_parallel != "megatron_fsdp":
        return []
    if release >= (0, 19):
        short = release == (0, 19) and mg.sharding_strategy == "no_shard" and config.model.num_experts and par.ep > 1
        return [f"megatron.sharding_strategy no_shard with parallel.ep {par.ep}: {SHORT.format(version)}"] if short else []
    wrong = f"megatron-core {version} takes wrong gradients or norms"
    dense, experts = world // (par.tp * par.pp), world // (par.pp * par.ep * (par.etp or par.tp))
    alone = "parameters" if dense == 1 else f"experts at parallel.ep {par.ep}"
    problems = (
        (
            mg.sharding_strategy not in ("optim_grads", "optim_grads_params"),
            f"megatron.sharding_strategy {mg.sharding_strategy}: {wrong} of it; set optim_grads_params, or install 0.19 or later",
        ),
        (
            config.model.vision is not None,
            f"megatron_fsdp with a vision tower: {wrong} of it; set megatron.data_parallel: distributed_optimizer, "
            "or install 0.19 or later",
        ),
        (
            dense == 1 or (config.model.num_experts and experts == 1),
            f"megatron_fsdp where {alone} share data with no other rank: {wrong}; set megatron.data_parallel: distributed_optimizer, "
            "spread over more ranks, or install 0.19 or later",
        ),
    )
    return [words for holds, words in problems if holds]


def _tell_schedules(config: TrainerConfig, transformer_config: Any, wrapped: list[Any]) -> None:
    """Source: Megatron-LM, `megatron/training/training.py` (train): what overlap asks of the schedules."""
    mg, one = config.megatron, len(wrapped) == 1
    transformer_config.finalize_model_grads_func = finalize_model_grads
    if mg.data_parallel == "fsdp2":
        return
    if mg.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        transformer_config.no_sync_func = waits[0] if one else waits
        if not one and mg.data_parallel != "megatron_fsdp":
            transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]


def optimizer(config: TrainerConfig, wrapped: list[Any]) -> Any:
    """megatron-core's optimizer; norms, biases and other parameters of one dimension are not decayed."""
    settings = OptimizerConfig(**mapping.optimizer(config, OptimizerConfig))
    parameters = inspect.signature(get_megatron_optimizer).parameters
    more = {"use_gloo_process_groups": False} if "use_gloo_process_groups" in parameters else {}
    return get_megatron_optimizer(settings, wrapped, **more)


def parts(optim: Any) -> list[Any]:
    """The optimizers of dense parameters, of experts, and so on, that one stands for; those that hold nothing here left out."""
    each = getattr(optim, "chained_optimizers", [optim])
    return [part for part in each if not getattr(part, "is_stub_optimizer", False)]


def clip(optim: Any, limit: float, norm: float) -> None:
    """Scale the gradients down to the limit. Source: megatron-core, `megatron/core/optimizer/optimizer.py` (ChainedOptimizer.step)."""
    for part in parts(optim):
        params = part.get_parameters()
        if not params:
            continue
        sharded = part.config.use_precision_aware_optimizer and getattr(params[0], "__fsdp_param__", False)
        apart = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or sharded
        clip_grad_by_total_norm_fp32(params, max_norm=limit, total_norm=norm, use_decoupled_grad=apart)


def set_rate(optim: Any, rate: float, decay: float) -> None:
    """The learning rate and weight decay of every group, by its own multipliers, which only megatron's scheduler would apply."""
    for group in optim.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)


def make_state(optim: Any) -> None:
    """Give torch's own optimizer the state that its first step would, so that a checkpoint has somewhere to go;
    others make it themselves.
    """
    for part in parts(optim):
        if (
            isinstance(part.optimizer, torch.optim.Adam)
            and not part.optimizer.state
            and hasattr(part, "_init_optimizer_states_with_dummy_values")
        ):
            part._init_optimizer_states_with_dummy_values()


def hold_state(part: Any) -> None:
    """Give a part, whichever optimizer it has, the state that its first step would, without a step.

    megatron-core has a function for that, which up to 0.19.2 asks the precision-aware optimizer of Transformer Engine 2 without the
    argument it wants (`initialize_state` of `transformer_engine/pytorch/optimizers/fused_adam.py`; its `step` says what to give).
    """
    inner = part.optimizer
    if "store_param_remainders" not in inspect.signature(getattr(inner, "initialize_state", hold_state)).parameters:
        if part.init_state_fn is not None:
            part.init_state_fn(inner, part.config)
        return
    for p in (p for group in inner.param_groups for p in group["params"] if not inner.state[p]):
        inner.initialize_state(p, inner.store_param_remainders and p.dtype == torch.bfloat16)


def own_settings(saved: Any, optim: Any) -> None:
    """Give the groups of a loaded state this run's settings of Adam, as a run on the torch backend has its own after a resumption.

    From 0.19 on, megatron-core finds a group again by its rates, and would not find those of a run with another learning rate.
    """
    settings = {key: group[key] for group in optim.param_groups for key in ("max_lr", "min_lr", "betas", "eps") if key in group}
    for group in _groups(saved):
        group.update(settings)


def _groups(state: Any) -> Iterator[dict[str, Any]]:
    """The groups of parameters anywhere in a state, which each optimizer lays out in its own way."""
    if isinstance(state, dict) and "wd_mult" in state:
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _groups(value)


def own_steps(optim: Any) -> None:
    """Give each parameter of torch's own optimizer its count of steps, which megatron-core loads into the groups,
    or into one tensor for all.
    """
    for part in parts(optim):
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                if state := part.optimizer.state.get(param):
                    state["step"] = torch.as_tensor(group.get("step", state["step"]), dtype=torch.float32).clone()


def state_bytes(chunks: list[Any], optim: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    sharded = [g for chunk in chunks for g in getattr(getattr(chunk, "param_and_grad_buffer", None), "parameter_groups", ())]
    # A chunk under Megatron-FSDP names the optimizer's shards as its parameters, beside the weights that it computes with.
    params = [t for group in sharded for t in _weights(group)] or [p for chunk in chunks for p in chunk.parameters()]
    weight_memory = {_memory(p) for p in params}
    buffers = [b for chunk in chunks for name in ("buffers", "expert_parallel_buffers") for b in _list(getattr(chunk, name, None))]
    buffered = [b.grad_data for b in buffers] + [group.main_grad_buffer.data for group in sharded if group.main_grad_buffer is not None]
    grads = sum(_size(data) for data in buffered if data is not None)
    if not buffered:
        grads = sum(_size(p.grad) for p in params if p.grad is not None)
    optimizer_params = [
        p for part in parts(optim) for group in part.optimizer.param_groups for p in group["params"] if _memory(p) not in weight_memory
    ]
    states = [v for part in parts(optim) for state in part.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    each_once = {id(t): t for t in (*optimizer_params, *(t for t in states if t.numel() > 1))}
    sizes = {
        "param_bytes_per_rank": sum(_size(p) for p in params),
        "grad_bytes_per_rank": grads,
        "optimizer_bytes_per_rank": sum(_size(t) for t in each_once.values()),
    }
    return {**sizes, "state_bytes_per_rank": sum(sizes.values())}


def _weights(group: Any) -> list[Any]:
    """The weights of a group of Megatron-FSDP's, as they are kept: in buffers, or as they were."""
    buffers = [getattr(group, name, None) for name in ("model_weight_buffer", "transpose_weight_buffer")]
    return [buffer.data for buffer in buffers if buffer is not None and buffer.data is not None] or list(group.params)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _size(tensor: Any) -> int:
    return sum(int(t.numel() * t.element_size()) for t in _held(tensor))


def _memory(tensor: Any) -> int:
    tensors = _held(tensor)
    return int(tensors[0].untyped_storage().data_ptr()) if tensors else 0


def _held(tensor: Any) -> list[Any]:
    """The plain tensors that hold a parameter here: its local shard, or the 8-bit copies of a quantized one,
    which has no memory of its own.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not hasattr(local, "get_data_tensors"):
        return [local]
    parts = local.get_data_tensors()
    return [t for t in (parts if isinstance(parts, tuple | list) else (parts,)) if t is not None]


def tops(chunks: list[Any], optim: Any) -> list[tuple[str, Tensor]]:
    """Names of this rank's weights and moments, each with its largest value, which is not finite where any of its values is not."""
    tensors = [(name, p) for chunk in chunks for name, p in chunk.named_parameters()]
    states = (state for part in parts(optim) for state in part.optimizer.state.values())
    tensors += [(f"optimizer.{key}", v) for state in states for key, v in state.items() if isinstance(v, Tensor)]
    local = [(name, t.to_local() if hasattr(t, "to_local") else t) for name, t in tensors]
    wide = [(name, t.detach()) for name, t in local if t.is_floating_point() and t.element_size() > 1 and t.numel()]
    return [(name, torch.linalg.vector_norm(t, float("inf"))) for name, t in wide]
