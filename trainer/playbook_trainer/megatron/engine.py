"""The megatron backend on one rank: megatron-core's model, schedules and optimizer behind the interface of the loop."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from playbook.errors import ConfigError
from playbook_trainer.axes import Axes
from playbook_trainer.config import megatron_fields as fields
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import Batch
from playbook_trainer.engine import Saver
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.megatron import gpt as model
from playbook_trainer.megatron import graphs, groups, inputs, settings, vision_language, weights, wrap
from playbook_trainer.megatron.checkpoints import MegatronSaver, gather_parameters
from playbook_trainer.megatron.experts import balances, mask_padding
from playbook_trainer.megatron.hooks import announced
from playbook_trainer.megatron.inputs import Inputs
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.build import part_of

_HOPPER = 9
"""The major number of its compute capability."""


class MegatronEngine:
    """megatron-core on one rank: the protocol `Engine` by its model, schedules and optimizer."""

    def __init__(self, config: TrainerConfig, rank: int, world: int, device: torch.device) -> None:
        """Join the groups, build this rank's chunks and the optimizer, and give the weights their first values."""
        require(config, device, world)
        self.config, self.device = config, device
        prepare(config, device)
        groups.initialise(config)
        graphs.forget(config)
        self.axes: Axes = groups.axes(config)
        seed(config)
        if config.megatron.tp_comm_overlap:
            _open_buffers(config)
        self.transformer_config = transformer_config(config)
        chunks = build_chunks(config, self.transformer_config, device)
        if balances(config):
            mask_padding(chunks, self.axes)
        self._moe_layers = (
            sum(len(c.decoder.layers) for c in chunks),
            sum(hasattr(x.mlp, "router") for c in chunks for x in c.decoder.layers),
        )
        with graphs.wrapping(config):
            self.chunks = wrap.wrap(config, self.transformer_config, chunks)
        self.optim = wrap.optimizer(config, self.chunks)
        self.model = nn.ModuleList(chunks)
        self.saver: Saver = MegatronSaver(config, self.axes, self.chunks, self.optim)
        self._norm = 0.0
        self._graphs = graphs.Graphs(config, self.transformer_config, self.chunks, self.optim)
        self._schedule = self._graphs.schedule(get_forward_backward_func())

    def local(self, batches: list[Batch]) -> list[Inputs]:
        """This rank's share of each micro-batch, on its device. Only the first stage, which has the vision tower, gets images."""
        micro_batches = [inputs.make(b, self.config, self.axes) for b in batches]
        if not self.axes.is_first_stage:
            for each in micro_batches:
                each.vision = None
        if not balances(self.config):
            for each in micro_batches:
                each.padding = None
        return [each.to(self.device) for each in micro_batches]

    def forward_backward(self, batches: list[Inputs], labels: Tensor) -> Tensor:
        """Accumulate gradients of (summed loss / `labels`); return this rank's summed loss.

        megatron-core averages gradients over data-parallel ranks and micro-batches, so the loss is multiplied by both numbers before.
        """
        self._graphs.before_step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optim.zero_grad()
        scale = len(batches) * self.axes.dp.size / labels
        return self._run(batches, scale, forward_only=False)

    def _run(self, batches: list[Inputs], scale: Tensor, *, forward_only: bool) -> Tensor:
        """Pass the micro-batches through megatron-core's schedule. Returns the summed loss of this rank, 0 where it has no last stage."""
        # Dictionaries of tensors, which a graph of the whole iteration copies into memory that stays.
        iterators: Any = [iter([{**vars(b), "scale": scale} for b in batches]) for _ in self.chunks]
        rows, length = batches[0].tokens.shape
        outputs = self._schedule(
            forward_step_func=partial(_forward_step, config=self.config),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            # Of the whole row: schedules take off the shares of other context and sequence ranks themselves.
            seq_length=length * self.axes.cp.size,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
        losses = [each["loss"] for each in outputs if isinstance(each, dict)]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def squared_norm(self) -> Tensor:
        """The squared gradient norm of the whole model on rank 0, and zero on all others:
        megatron-core has summed it over the ranks already.
        """
        self.optim.prepare_grads()
        self._norm = float(self.optim.get_grad_norm() or 0.0)
        squared = self._norm**2 if self.axes.world.rank == 0 else 0.0
        return torch.full((), squared, device=self.device, dtype=torch.float64)

    def update(self, rate: float, norm: Tensor) -> None:
        """Clip by the norm of the last `squared_norm`, then update at the learning rate `rate`.
        Gradients are set to zero when the next step begins.
        """
        wrap.set_rate(self.optim, rate, self.config.optimizer.weight_decay)
        wrap.clip(self.optim, self.config.optimizer.clip_norm, self._norm)
        self.optim.step_with_ready_grads()

    def count_load(self, on: bool) -> None:
        """Nothing counts: `moe.load_every` is refused on this backend."""

    def load(self) -> Tensor:
        """Nothing was counted."""
        return torch.zeros(self.config.model.num_layers, self.config.model.num_experts, device=self.device)

    def drop_gradients(self) -> None:
        """Do nothing: the next step begins by setting all gradients to zero."""

    @torch.no_grad()
    def evaluate(self, batches: list[Inputs]) -> Tensor:
        """This rank's share of summed loss and number of labels over `batches`, without building a graph."""
        for chunk in self.chunks:
            chunk.eval()
        loss = self._run(batches, torch.ones((), device=self.device), forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        counts_loss = self.axes.tp.rank == 0
        counts_labels = counts_loss and self.axes.cp.rank == 0 and self.axes.is_last_stage
        sums = torch.tensor(
            [0.0, float(sum(b.num_loss for b in batches)) if counts_labels else 0.0], device=self.device, dtype=torch.float64
        )
        sums[0] = loss.double() if counts_loss else 0.0
        return sums

    def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face transformers loads them, gathering one tensor at a time."""
        gather_parameters(self.config, self.chunks)
        weights.save(self.chunks, self.config.model, folder, run=self.config)

    def count_parameters(self) -> tuple[int, int]:
        """Number of parameters of the whole model, and of those that are trained, by the table of its Hugging Face tensors."""
        sizes = {rule.ours: math.prod(rule.shape) for rule in hf.rules(self.config.model) if not rule.ours.endswith("router.bias")}
        return sum(sizes.values()), sum(size for name, size in sizes.items() if part_of(name) not in self.config.train.freeze)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state on this rank. Gradients lie in buffers that are never freed."""
        return wrap.state_bytes(self.chunks, self.optim)

    def moe_layers(self) -> tuple[int, int]:
        """Number of decoder layers in all chunks of this rank, and how many of them are mixture-of-experts layers."""
        return self._moe_layers

    def ranges(self) -> AbstractContextManager[None]:
        """A block inside which hooks announce the ranges of each layer; timed steps have no hooks.

        Layers that megatron-core has captured as CUDA graphs take no hooks, so with `cuda_graph_impl: local` the block does nothing.
        """
        return nullcontext() if self._graphs.impl == "local" else announced(self.model)


def _forward_step(
    batches: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False, *, config: TrainerConfig
) -> tuple[Any, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """One micro-batch through one chunk, as megatron-core's schedules call it: the output, and what makes a loss of it on the last stage.

    With `return_schedule_plan` the forward pass is only planned, layer by layer, for a schedule that overlaps two micro-batches.
    """
    batch = next(batches)
    kwargs: dict[str, Any] = {"labels": batch["labels"], "packed_seq_params": packed(batch["borders"], batch["longest"])}
    if config.model.mtp_layers:
        kwargs["loss_mask"] = batch["weight"]
    if config.model.vision is not None:
        kwargs |= {"positions_3N": batch["positions"], "vision": batch["vision"]}
    if batch["padding"] is not None:
        kwargs["padding_mask"] = batch["padding"]
    loss = partial(_summed_loss, weight=batch["weight"], scale=batch["scale"])
    if return_schedule_plan:
        return model.build_schedule_plan(batch["tokens"], batch["positions"], None, **kwargs), loss
    with range_("forward"):
        return model(batch["tokens"], batch["positions"], None, **kwargs), loss


def packed(borders: Tensor | None, longest: int) -> PackedSeqParams | None:
    """The borders of packed documents in the form that megatron-core takes; None for plain rows."""
    if borders is None:
        return None
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest)


def _summed_loss(losses: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss times `scale`, which gradients are taken of, and the unscaled sum over labels (nats), which is reported."""
    total = (losses.float() * weight.view_as(losses)).sum()
    return total * scale, {"loss": total.detach().clone()}


def require(config: TrainerConfig, device: torch.device, world: int) -> None:
    """Refuse a configuration that this rank's device or packages cannot run on `world` ranks.

    Raises:
        ConfigError: one line for each.
    """
    problems = _device_problems(config, device) + wrap.gradient_problems(config, world, megatron.core.__version__)
    if settings.has_transformer_engine(config):
        try:
            import transformer_engine.pytorch  # noqa: F401
        except Exception as e:  # whatever a binary package says when it does not fit
            problems.append(
                f"Transformer Engine cannot be loaded ({_first_line(e)}); install one that fits torch {torch.__version__}, or set "
                "megatron.kernels: local"
            )
    dispatcher = config.moe.dispatcher
    if dispatcher in ("deepep", "hybridep") and config.model.num_experts:
        try:
            deep_ep = importlib.import_module("deep_ep")
            if not hasattr(deep_ep, "Buffer" if dispatcher == "deepep" else "HybridEPBuffer"):
                raise ImportError(f"it has no {'Buffer' if dispatcher == 'deepep' else 'HybridEPBuffer'}")
        except Exception as e:
            problems.append(
                f"moe.dispatcher '{dispatcher}': the package deep_ep does not serve it ({_first_line(e)}); set moe.dispatcher: alltoall"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def prepare(config: TrainerConfig, device: torch.device) -> None:
    """Set the process up before the first tensor: unset Transformer Engine's attention variables,
    and leave the default stream if graphs are captured.

    Source: Megatron-LM, `megatron/training/initialize.py` (stream), and megatron-core, `LanguageModule._set_attention_backend` (variables).
    """
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    if fields.graph_impl(config) == "transformer_engine":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _open_buffers(config: TrainerConfig) -> None:
    """Allocate Transformer Engine's user buffers, with which tensor-parallel collectives overlap matrix products in pieces.

    Source: Megatron-LM, `megatron/training/initialize.py` (_initialize_tp_communicators).
    """
    from transformer_engine.pytorch.module import base

    par, eight = config.parallel, config.precision.fp8 != "none"
    how: dict[str, Any] = {
        "shape": [config.data.seq_len * config.train.micro_batch_size // par.cp, config.model.hidden_size],
        "tp_size": par.tp,
        "bootstrap_backend": "nccl",
    }
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:
        modes = base.UserBufferQuantizationMode
        how["quantization_modes"] = [modes.FP8 if eight else modes.NONE]
    else:
        how["use_fp8"] = eight
    base.initialize_ub(**how)


def _device_problems(config: TrainerConfig, device: torch.device) -> list[str]:
    """Problems of the configuration on this device: no GPU, or a generation without the asked-for units."""
    if device.type != "cuda":
        return ["backend megatron needs a GPU, and there is none: set backend: torch"]
    have, recipe = torch.cuda.get_device_capability(device), config.precision.fp8
    name = torch.cuda.get_device_name(device)
    if recipe in ("mxfp8", "nvfp4") and have < (10, 0):
        unit = "blocks of 32 values with a scale each" if recipe == "mxfp8" else "4-bit values"
        return [f"precision.fp8 {recipe}: {name} has no units for {unit}, which GPUs have from Blackwell on; set blockwise or tensorwise"]
    if recipe != "none" and have < (9, 0):
        return [f"precision.fp8 {recipe} needs a Hopper GPU or a later one, and this is {name}; set it to none"]
    if config.megatron.grouped_gemm == "cutlass" and have[0] != _HOPPER:
        return [f"megatron.grouped_gemm cutlass: Transformer Engine has that kernel for Hopper alone, and this is {name}; set it to cublas"]
    return []


def seed(config: TrainerConfig) -> None:
    """Seed the random states of this rank: one that all tensor-parallel ranks share, and one of its own.

    Graphs need states that a graph can read, and an earlier run in this process may have left others.
    """
    torch.manual_seed(config.seed)
    captured = fields.graph_impl(config) != "none"
    model_parallel_cuda_manual_seed(config.seed, te_rng_tracker=captured, use_cudagraphable_rng=captured, force_reset_rng=True)


def transformer_config(config: TrainerConfig) -> Any:
    """megatron-core's configuration of the model.

    Raises:
        ConfigError: the installed version lacks a field, or refuses the combination.
    """
    cls = MLATransformerConfig if config.model.attention == "mla" else TransformerConfig
    chosen = settings.transformer(config, cls)
    settings.refuse_lone_experts(config, cls)
    try:
        return cls(**chosen)
    except (ValueError, AssertionError, NotImplementedError) as e:
        raise ConfigError(f"megatron-core {settings.core_version()} refuses this configuration: {_first_line(e)}") from e


def build_chunks(config: TrainerConfig, transformer: Any, device: torch.device) -> list[nn.Module]:
    """Build this rank's model chunks (one per virtual pipeline stage) and initialise their weights."""
    count = config.parallel.vpp
    chunks = [_chunk(config, transformer, stage if count > 1 else None) for stage in range(count)]
    dtype = settings.DTYPES[config.train.dtype]
    chunks = [chunk.to(dtype=dtype, device=device) for chunk in chunks]
    _widen_routers(chunks)
    weights.initialise(chunks, config)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # whole tensors were drawn for the sake of their parts
    return chunks


def _widen_routers(chunks: list[nn.Module]) -> None:
    """Routers' biases and counts of tokens in float32: in 16 bits, biases would be rounded as they are read,
    and counts stand still beyond some size.

    megatron-core widens the biases itself, but with the first pass, when their values have been read.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name in ("expert_bias", "local_tokens_per_expert"):
            if isinstance(buffer := getattr(module, name, None), Tensor):
                setattr(module, name, buffer.float())


def _chunk(config: TrainerConfig, transformer: Any, stage: int | None) -> nn.Module:
    ends = {"ignore_virtual": False, "vp_stage": stage}
    first, last = parallel_state.is_pipeline_first_stage(**ends), parallel_state.is_pipeline_last_stage(**ends)
    where = {"pre_process": first, "post_process": last, "vp_stage": stage}
    make = model.build_text if config.model.vision is None else vision_language.build
    chunk: nn.Module = make(config, transformer, **where)
    return chunk


def _first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
