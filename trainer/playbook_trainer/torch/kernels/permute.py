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
def _spread(x, place, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * width + at, mask=at < width)
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            tl.store(rows + row * width + at, value, mask=at < width)


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
def _unweigh(rows, place, grad, weight, out, grad_weight, width, K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    known = choice < K
    row = tl.load(place + token * K + choice, mask=known, other=0).to(tl.int64)[:, None]
    scale = tl.load(weight + token * K + choice, mask=known, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((CHOICES,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = (start + tl.arange(0, BLOCK))[None, :]
        mask = known[:, None] & (at < width)
        value = tl.load(rows + row * width + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + token * width + at, mask=at < width, other=0.0).to(tl.float32)
        total += tl.sum(value * g, 1)
        tl.store(out + row * width + at, (g * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(grad_weight + token * K + choice, total, mask=known)


def _block(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def spread(x_ND: Tensor, place_R: Tensor, k: int) -> Tensor:
    """Copy each token's row to its K places: (R, D)."""
    n, width = x_ND.shape
    rows = x_ND.new_empty((n * k, width))
    if n:
        _spread[(n,)](x_ND.contiguous(), place_R, rows, width, K=k, BLOCK=_block(width))
    return rows


def collect(rows_RD: Tensor, place_R: Tensor, weight_NK: Tensor | None, k: int) -> Tensor:
    """The sum of each token's K rows, weighted where weights are given, in float32: (N, D) in the rows' precision."""
    n, width = place_R.numel() // k, rows_RD.shape[1]
    out = rows_RD.new_empty((n, width))
    if n:
        weight = rows_RD if weight_NK is None else weight_NK.contiguous()
        _collect[(n,)](rows_RD.contiguous(), place_R, weight, out, width, K=k, WEIGHED=weight_NK is not None, BLOCK=_block(width))
    return out


def _sum_gradients(rows_RD: Tensor, place_R: Tensor, grad_ND: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weighted sum: of the rows (R, D), and of the weights, float32 (N, K); one reading of the rows serves both."""
    (n, width), k = grad_ND.shape, weight_NK.shape[1]
    rows_RD = rows_RD.contiguous()
    out = torch.empty_like(rows_RD)  # laid out as the kernel writes it, row by row
    grad_weight = torch.empty((n, k), device=rows_RD.device, dtype=torch.float32)
    if n:
        _unweigh[(n,)](
            rows_RD, place_R, grad_ND.contiguous(), weight_NK.contiguous(), out, grad_weight, width,
            K=k, CHOICES=triton.next_power_of_2(k), BLOCK=min(512, triton.next_power_of_2(width)),
        )  # fmt: skip
    return out, grad_weight


def expand(x_ND: Tensor, place_R: Tensor, k: int) -> Tensor:
    """Token rows, each K times, in the order of their experts: (R, D)."""
    return _Expand.apply(x_ND, place_R, k)


def weigh(rows_RD: Tensor, place_R: Tensor, prob_NK: Tensor) -> Tensor:
    """Sum of each token's K rows times their probabilities, for rows in any order: (N, D)."""
    return _Weigh.apply(rows_RD, place_R, prob_NK)


def join(rows_RD: Tensor, place_R: Tensor, k: int) -> Tensor:
    """Sum of each token's K rows, for rows in any order: (N, D)."""
    return _Join.apply(rows_RD, place_R, k)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, place_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.k = k
        return collect(rows_RD, place_R, None, k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return spread(grads[0], place_R, ctx.k), None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.k = k
        return spread(x_ND, place_R, k)

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
        grad_rows, grad_prob = _sum_gradients(rows_RD, place_R, grads[0], prob_NK)
        return grad_rows, None, grad_prob.to(prob_NK.dtype)
