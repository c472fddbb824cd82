"""The section `megatron` of the configuration: what only the megatron backend has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from playbook.yaml_files import Strict
from playbook_trainer.config.labels import OFFLOAD_MODULES, known


class MegatronConfig(Strict):
    """Settings of megatron-core that the torch backend has no counterpart of; `parallel.fsdp` and what belongs to it are the torch backend's."""

    kernels: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layers by Transformer Engine, or by this trainer and megatron-core alone; auto takes Transformer Engine where it is installed."""
    grouped_gemm: Literal["cublas", "cutlass"] = "cublas"
    """How Transformer Engine multiplies a rank's experts. cublas: a product for each expert. cutlass, on Hopper in 16 bits: one kernel for all
    experts, forward and for the gradient of the input; gradients of the weights stay a product for each."""
    data_parallel: Literal["ddp", "distributed_optimizer", "megatron_fsdp", "fsdp2"] = "distributed_optimizer"
    """What data-parallel ranks hold. ddp: copies of everything. distributed_optimizer: shares of the optimizer state. megatron_fsdp: what
    sharding_strategy says. fsdp2: shares of everything, by torch."""
    sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What Megatron-FSDP shards: nothing, optimizer state, gradients too (ZeRO-2), or parameters too (ZeRO-3)."""
    precision_aware_optimizer: bool = False
    """Moments in optimizer.moments_dtype and gradients in grad_reduce_dtype, with the part of the float32 master weights that bf16 weights
    lack beside them; without it all are float32."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are accumulated and summed over ranks."""
    overlap_grad_reduce: bool = True
    """Sum gradients over data-parallel ranks beside the backward pass."""
    overlap_param_gather: bool = True
    """Gather updated parameters beside the forward pass that needs them."""
    tp_comm_overlap: bool = False
    """Cut tensor-parallel collectives up and run them beside the matrix products (Transformer Engine's user buffers)."""
    overlap_expert_parallel: bool = False
    """Run the expert all-to-all of one micro-batch beside the computation of another."""
    cuda_graph_impl: Literal["none", "transformer_engine", "local", "full_iteration"] = "none"
    """Who captures. none: Transformer Engine, where train.cuda_graphs names parts. local: megatron-core. full_iteration: forward and backward
    pass of a step as one graph, without named parts."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How attention reaches the tokens of other context ranks: a ring, a gather of keys and values, an exchange of tokens for heads, or
    exchanges inside groups (of cp_sizes) and a ring among them."""
    cp_sizes: list[int] = Field(default_factory=list)
    """Ranks of the exchange and of the ring, with a2a+p2p."""
    offload_modules: list[str] = Field(default_factory=list)
    """Parts of a layer whose inputs wait in host memory for the backward pass."""
    optimizer_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer state that lives, and is updated, on the host; offload.optimizer alone means all of it."""
    fp8_param: bool = False
    """Keep weights in 8 bits and gather them so; with a recipe of precision.fp8."""
    recompute_layers: int | None = Field(default=None, gt=0)
    """With train.recompute full: layers per checkpoint (uniform), or layers of a chunk that are made again (block). None means 1, or all."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """uniform: every stretch of recompute_layers layers is made again from its input. block: only the first recompute_layers of a chunk are."""

    @field_validator("offload_modules")
    @classmethod
    def _known_modules(cls, value: list[str]) -> list[str]:
        return known(value, OFFLOAD_MODULES)
