"""The element-wise parts of a layer, as plain functions: they can be compiled once for all layers, and made again in the backward pass.

Suffixes: N tokens, D hidden size, H heads, d head size, R rows, F expert width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu, softmax


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension, computed in float32."""
    return rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x_NHd: Tensor, cos_Nd: Tensor, sin_Nd: Tensor) -> Tensor:
    """Rotary embedding: halves of the head are rotated against each other."""
    a, b = x_NHd.chunk(2, dim=-1)
    return x_NHd * cos_Nd.unsqueeze(1) + torch.cat([-b, a], dim=-1) * sin_Nd.unsqueeze(1)


def norm_rotate(x_NHd: Tensor, weight: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, eps: float) -> Tensor:
    """Per-head norm, then rotary embedding."""
    return rotate(norm(x_NHd, weight, eps), cos_Nd, sin_Nd)


def swiglu(h_RF: Tensor) -> Tensor:
    """silu(gate) * up, from (R, 2 F) with the gate's columns first."""
    gate, up = h_RF.chunk(2, dim=1)
    return silu(gate) * up


def weighted_swiglu(h_RF: Tensor, weight_R: Tensor) -> Tensor:
    """`swiglu` times each row's weight, in the precision of the rows."""
    return swiglu(h_RF) * weight_R.unsqueeze(1).to(h_RF.dtype)


def route(scores_NE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Experts (N, K) and their probabilities (N, K) from the router's scores."""
    prob_NK, expert_NK = softmax(scores_NE, dim=1).topk(top_k, dim=1)
    return expert_NK, prob_NK / prob_NK.sum(1, keepdim=True) if normalize else prob_NK


def wide_linear(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """A product in float32 that keeps its input in the input's own precision for the backward pass.

    On a GPU, products of 16-bit operands into float32 run on tensor cores: exact products, float32 sums. Their gradients come from the
    scores' gradient rounded to 16 bits, as in every other linear layer.
    """
    return _WideLinear.apply(x_ND, weight_ED)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        if x_ND.is_cuda and x_ND.dtype == weight_ED.dtype == torch.bfloat16:
            return torch.mm(x_ND, weight_ED.t(), out_dtype=torch.float32)
        return linear(x_ND.float(), weight_ED.float())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x_ND, weight_ED = ctx.saved_tensors
        if x_ND.is_cuda and x_ND.dtype == weight_ED.dtype == torch.bfloat16:
            grad_NE = grads[0].to(x_ND.dtype)
            return grad_NE @ weight_ED, grad_NE.t() @ x_ND
        return (grads[0] @ weight_ED.float()).to(x_ND.dtype), (grads[0].t() @ x_ND.float()).to(weight_ED.dtype)


@dataclass(frozen=True)
class Ops:
    """The functions that a model calls: as they stand, or compiled."""

    norm: Callable[..., Tensor] = norm
    norm_rotate: Callable[..., Tensor] = norm_rotate
    swiglu: Callable[..., Tensor] = swiglu
    weighted_swiglu: Callable[..., Tensor] = weighted_swiglu
    route: Callable[..., tuple[Tensor, Tensor]] = route


def compiled(compile_: Callable[..., Callable[..., object]]) -> Ops:
    """Every function, each compiled by itself."""
    return Ops(*map(compile_, (norm, norm_rotate, swiglu, weighted_swiglu, route)))  # type: ignore[arg-type]
