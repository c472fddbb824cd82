"""The router's choice of experts, and rows to their experts' order and back, with their gradients.

Suffixes: N tokens, E experts, K experts per token, D hidden size, R = N K rows in the order of their experts.

Choice: softmax, choice of the best and division by their sum in one pass over the router's scores, and the scores' gradient in another.
Source of the gradients: with weight w over all experts and the gradients g of the chosen probabilities (0 elsewhere), a softmax gives
w (g - sum(w g)). Probabilities divided by the sum of the chosen are the softmax over the chosen alone, so there w is 0 elsewhere, and no
score need be kept.

Order: one program per token, the fused counterpart of the gathers and sums in `parallel.dispatch`. `place` [R] holds, for choice k of token
n, the row at which it stands (the inverse of the sort).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Scores that one program holds."""


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores, expert, prob, tokens, experts, K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """The K best of each token's scores [tokens, experts], ROWS tokens a program:
    numbers and probabilities, best first, each [tokens, K].
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    mask = (row < tokens) & (col < experts)
    x = tl.load(scores + row * experts + col, mask=mask, other=-float("inf"))
    # Integers in the order of the scores: both zeros alike, NaN above all, and a value below minus infinity for what is taken. Columns
    # beyond the last expert are minus infinity, and come after every expert that is.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    rank = tl.full((ROWS, COLS), K, dtype=tl.int32)
    for k in tl.static_range(K):
        best = tl.max(key, 1)[:, None]
        is_best = col == tl.min(tl.where(key == best, col, COLS), 1)[:, None]
        key = tl.where(is_best, -0x80000000, key)
        rank = tl.where(is_best, k, rank)
    chosen = rank < K
    mass = tl.exp(x - tl.max(x, 1)[:, None])
    if NORMALIZE:
        mass = tl.where(chosen, mass, 0.0)
    p = mass / tl.sum(mass, 1)[:, None]
    place = row * K + rank
    tl.store(prob + place, p, mask=mask & chosen)
    tl.store(expert + place, col.to(tl.int64), mask=mask & chosen)


@triton.jit
def _choose_backward(  # type: ignore[no-untyped-def]
    scores, expert, prob, grad, out, tokens, experts,
    K: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The scores' gradient [tokens, experts] into `out`, from that of the probabilities [tokens, K]; CHOICES is K, up to a power of two."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, row_mask = line[:, None], line < tokens
    col = tl.arange(0, COLS)[None, :]
    mask = (row < tokens) & (col < experts)
    choice = tl.arange(0, CHOICES)[None, :]
    choice_mask = (row < tokens) & (choice < K)
    p = tl.load(prob + row * K + choice, mask=choice_mask, other=0.0)
    g = tl.load(grad + row * K + choice, mask=choice_mask, other=0.0)
    shared = tl.sum(p * g, 1)[:, None]
    weight = tl.zeros((ROWS, COLS), dtype=tl.float32)
    pull = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if not NORMALIZE:
        x = tl.load(scores + row * experts + col, mask=mask, other=-float("inf"))
        mass = tl.exp(x - tl.max(x, 1)[:, None])
        weight = mass / tl.sum(mass, 1)[:, None]
    for k in tl.static_range(K):
        is_chosen = col == tl.load(expert + line * K + k, mask=row_mask, other=COLS).to(tl.int32)[:, None]
        pull = tl.where(is_chosen, tl.load(grad + line * K + k, mask=row_mask, other=0.0)[:, None], pull)
        if NORMALIZE:
            weight = tl.where(is_chosen, tl.load(prob + line * K + k, mask=row_mask, other=0.0)[:, None], weight)
    tl.store(out + row * experts + col, weight * (pull - shared), mask=mask)


def _tile(tokens: int, experts: int) -> tuple[tuple[int], int, int]:
    cols = triton.next_power_of_2(experts)
    rows = max(1, _TILE // cols)
    return (triton.cdiv(tokens, rows),), rows, cols


def route(scores_NE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """As `models.ops.route`, from float32 scores: of equal scores, the expert with the lower number comes first."""
    return _Route.apply(scores_NE, top_k, normalize)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        scores_NE = scores_NE.contiguous()
        tokens, ctx.experts = scores_NE.shape
        expert_NK = torch.empty((tokens, top_k), device=scores_NE.device, dtype=torch.int64)
        prob_NK = scores_NE.new_empty((tokens, top_k))
        if tokens:
            grid, rows, cols = _tile(tokens, ctx.experts)
            _choose[grid](scores_NE, expert_NK, prob_NK, tokens, ctx.experts, K=top_k, NORMALIZE=normalize, ROWS=rows, COLS=cols)
        ctx.mark_non_differentiable(expert_NK)
        # Or autograd would make a gradient of zeros for the numbers of the experts.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(expert_NK, prob_NK, *([] if normalize else [scores_NE]))
        return expert_NK, prob_NK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        if grads[1] is None:
            return None, None, None
        expert_NK, prob_NK, *scores = ctx.saved_tensors
        tokens, k = prob_NK.shape
        out = prob_NK.new_empty((tokens, ctx.experts))
        if tokens:
            grid, rows, cols = _tile(tokens, ctx.experts)
            _choose_backward[grid](
                scores[0] if scores else prob_NK, expert_NK, prob_NK, grads[1].contiguous(), out, tokens, ctx.experts,
                K=k, CHOICES=triton.next_power_of_2(k), NORMALIZE=not scores, ROWS=rows, COLS=cols,
            )  # fmt: skip
        return out, None, None


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
def _unweigh(  # type: ignore[no-untyped-def]
    rows, place, grad, weight, out, grad_weight, width, K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of a token's weighted sum [width], one program a token: of its K rows into `out` [R, width], of their weights into
    `grad_weight` [N, K].
    """
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < K
    row = tl.load(place + token * K + choice, mask=choice_mask, other=0).to(tl.int64)[:, None]
    scale = tl.load(weight + token * K + choice, mask=choice_mask, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((CHOICES,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = (start + tl.arange(0, BLOCK))[None, :]
        mask = choice_mask[:, None] & (at < width)
        value = tl.load(rows + row * width + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + token * width + at, mask=at < width, other=0.0).to(tl.float32)
        total += tl.sum(value * g, 1)
        tl.store(out + row * width + at, (g * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(grad_weight + token * K + choice, total, mask=choice_mask)


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
