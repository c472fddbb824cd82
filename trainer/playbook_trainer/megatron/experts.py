"""Experts for hosts without Transformer Engine: one grouped product on a GPU that has it, a loop elsewhere.

Suffixes: R rows routed to this rank, D hidden size, F expert width on this rank, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn
from torch.nn.functional import silu

from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.torch.model.decoder import grouped_product


class Experts(SequentialMLP):
    """megatron-core's experts, one module each, so that checkpoints are the same; on a Hopper in bf16 all are multiplied in one call."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Any, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """Each expert's SwiGLU on its rows, times the rows' probabilities."""
        rows_RD = permuted_local_hidden_states
        if not _is_grouped(rows_RD):
            return super().forward(rows_RD, tokens_per_expert, permuted_probs)
        counts_E = torch.as_tensor(tokens_per_expert, device=rows_RD.device)
        return self.grouped(rows_RD, counts_E, permuted_probs), None

    def grouped(self, rows_RD: Tensor, counts_E: Tensor, probs_R: Tensor) -> Tensor:
        """All experts in two grouped products."""
        w13_EFD, w2_EDF = (
            torch.stack([getattr(expert, name).weight for expert in self.local_experts]) for name in ("linear_fc1", "linear_fc2")
        )
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_RF, up_RF = grouped_product(rows_RD, w13_EFD, ends_E).chunk(2, dim=1)
        act_RF = (silu(gate_RF) * up_RF * probs_R.unsqueeze(1)).to(rows_RD.dtype)
        return grouped_product(act_RF, w2_EDF, ends_E)


def balances(config: TrainerConfig) -> bool:
    """Whether something evens out the experts' load, by counts of tokens among which padding must not be."""
    return config.model.num_experts > 0 and (config.moe.aux_loss_coeff > 0 or config.model.router_bias)


def mask_padding(chunks: Sequence[nn.Module], axes: Axes) -> None:
    """Let routers leave padding out of what they count, wherever their layers are.

    megatron-core 0.16.1 cuts the mask over tensor-parallel ranks on the first pipeline stage alone, takes it for one of experts where it
    counts choices for the bias, and hands none to the depths of multi-token prediction.
    """
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        router.routing = partial(_routing, router.routing, axes)
        router._apply_expert_bias = partial(_apply_bias, router._apply_expert_bias)
    for chunk in chunks:
        if depths := [module for module in chunk.modules() if isinstance(module, MultiTokenPredictionLayer)]:
            forward: Any = partial(_forward, chunk.forward, [(depth, depth._proj_and_transformer_layer) for depth in depths])
            chunk.forward = forward


def _routing(original: Callable[..., Any], axes: Axes, logits: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
    if padding_mask is None:
        return original(logits, **kwargs)
    if padding_mask.numel() != logits.shape[:2].numel():
        padding_mask = padding_mask.chunk(axes.tp.size)[axes.tp.rank]
    return original(logits, padding_mask=padding_mask, **kwargs)


def _forward(
    original: Callable[..., Any],
    depths: Sequence[tuple[Any, Callable[..., Any]]],
    *args: Any,
    padding_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """A chunk's forward pass. What a depth may run again in the backward pass keeps the mask of this micro-batch."""
    for depth, layer in depths:
        depth._proj_and_transformer_layer = partial(_depth, layer, depth.transformer_layer, padding_mask)
    return original(*args, padding_mask=padding_mask, **kwargs)


def _depth(original: Callable[..., Any], layer: nn.Module, padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    plain = layer.forward
    masked: Any = partial(plain, padding_mask=padding_mask)
    layer.forward = masked
    try:
        return original(*args, **kwargs)
    finally:
        layer.forward = plain


def _apply_bias(original: Callable[..., Any], routing_map: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> None:
    original(routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1), **kwargs)


def _is_grouped(rows_RD: Tensor) -> bool:
    """Whether torch multiplies such rows in one grouped call: bf16 on a Hopper or later."""
    return rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows_RD.device) >= (9, 0)
