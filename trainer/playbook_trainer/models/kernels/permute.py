"""Rows to their experts' order and back, one program per token: the fused counterpart of the gathers and sums in `parallel.dispatch`.

Suffixes: N tokens, K experts per token, D hidden size, R = N K rows in the order of their experts. `place` [R] holds, for choice k of token n,
the row at which it stands (the inverse of the sort).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _spread(x, place, rows, weight, width, K: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * width + at, mask=at < width)
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            out = value
            if WEIGHED:
                out = (value.to(tl.float32) * tl.load(weight + token * K + k).to(tl.float32)).to(value.dtype)
            tl.store(rows + row * width + at, out, mask=at < width)


@triton.jit
def _collect(rows, place, weight, out, width, K: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            value = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            if WEIGHED:
                value = value * tl.load(weight + token * K + k).to(tl.float32)
            total += value
        tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _weight_gradient(rows, place, grad, out, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k).to(tl.int64)
        total = 0.0
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            a = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            b = tl.load(grad + token * width + at, mask=at < width, other=0.0).to(tl.float32)
            total += tl.sum(a * b, 0)
        tl.store(out + token * K + k, total)


def _block(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def spread(x_ND: Tensor, place_R: Tensor, weight_NK: Tensor | None, k: int) -> Tensor:
    """Each token's row at its K places, times its weight where one is given: (R, D)."""
    n, width = x_ND.shape
    rows = x_ND.new_empty((n * k, width))
    if n:
        weight = x_ND if weight_NK is None else weight_NK.contiguous()
        _spread[(n,)](x_ND.contiguous(), place_R, rows, weight, width, K=k, WEIGHED=weight_NK is not None, BLOCK=_block(width))
    return rows


def collect(rows_RD: Tensor, place_R: Tensor, weight_NK: Tensor | None, k: int) -> Tensor:
    """The sum of each token's K rows, weighted where weights are given, in float32: (N, D) in the rows' precision."""
    n, width = place_R.numel() // k, rows_RD.shape[1]
    out = rows_RD.new_empty((n, width))
    if n:
        weight = rows_RD if weight_NK is None else weight_NK.contiguous()
        _collect[(n,)](rows_RD.contiguous(), place_R, weight, out, width, K=k, WEIGHED=weight_NK is not None, BLOCK=_block(width))
    return out


def weight_gradient(rows_RD: Tensor, place_R: Tensor, grad_ND: Tensor, k: int) -> Tensor:
    """The product of each row with its token's gradient, float32 (N, K)."""
    n, width = grad_ND.shape
    out = torch.empty((n, k), device=rows_RD.device, dtype=torch.float32)
    if n:
        _weight_gradient[(n,)](rows_RD.contiguous(), place_R, grad_ND.contiguous(), out, width, K=k, BLOCK=_block(width))
    return out


def expand(x_ND: Tensor, place_R: Tensor, k: int) -> Tensor:
    """Token rows, each K times, in the order of their experts: (R, D)."""
    return _Expand.apply(x_ND, place_R, k)


def weigh(rows_RD: Tensor, place_R: Tensor, prob_NK: Tensor) -> Tensor:
    """Each token's K rows, wherever they stand, weighted and added up: (N, D)."""
    return _Weigh.apply(rows_RD, place_R, prob_NK)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.k = k
        return spread(x_ND, place_R, None, k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return collect(grads[0], place_R, None, ctx.k), None, None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, place_R: Tensor, prob_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, place_R, prob_NK)
        return collect(rows_RD, place_R, prob_NK, prob_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor]:
        rows_RD, place_R, prob_NK = ctx.saved_tensors
        k = prob_NK.shape[1]
        grad_prob = weight_gradient(rows_RD, place_R, grads[0], k).to(prob_NK.dtype)
        return spread(grads[0], place_R, prob_NK, k), None, grad_prob
