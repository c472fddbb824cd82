"""Softmax, choice of the best and division by their sum in one pass over the router's scores, and the scores' gradient in another.

Suffixes: N tokens, E experts, K experts per token.
Source of the gradients: with weight w over all experts and the gradients g of the chosen probabilities (0 elsewhere), a softmax gives w (g - sum(w g)).
Probabilities divided by the sum of the chosen are the softmax over the chosen alone, so there w is 0 elsewhere, and no score need be kept.
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
def _choose(scores, expert, prob, tokens, experts, K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    known = (row < tokens) & (col < experts)
    x = tl.load(scores + row * experts + col, mask=known, other=-float("inf"))
    # Integers in the order of the scores: both zeros alike, NaN above all, and a value below minus infinity for what is taken. Columns beyond the
    # last expert are minus infinity, and come after every expert that is.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    rank = tl.full((ROWS, COLS), K, dtype=tl.int32)
    for k in tl.static_range(K):
        best = tl.max(key, 1)[:, None]
        here = col == tl.min(tl.where(key == best, col, COLS), 1)[:, None]
        key = tl.where(here, -0x80000000, key)
        rank = tl.where(here, k, rank)
    chosen = rank < K
    mass = tl.exp(x - tl.max(x, 1)[:, None])
    if NORMALIZE:
        mass = tl.where(chosen, mass, 0.0)
    p = mass / tl.sum(mass, 1)[:, None]
    place = row * K + rank
    tl.store(prob + place, p, mask=known & chosen)
    tl.store(expert + place, col.to(tl.int64), mask=known & chosen)


@triton.jit
def _choose_backward(  # type: ignore[no-untyped-def]
    scores, expert, prob, grad, out, tokens, experts,
    K: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, there = line[:, None], line < tokens
    col = tl.arange(0, COLS)[None, :]
    known = (row < tokens) & (col < experts)
    choice = tl.arange(0, CHOICES)[None, :]
    given = (row < tokens) & (choice < K)
    p = tl.load(prob + row * K + choice, mask=given, other=0.0)
    g = tl.load(grad + row * K + choice, mask=given, other=0.0)
    shared = tl.sum(p * g, 1)[:, None]
    weight = tl.zeros((ROWS, COLS), dtype=tl.float32)
    pull = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if not NORMALIZE:
        x = tl.load(scores + row * experts + col, mask=known, other=-float("inf"))
        mass = tl.exp(x - tl.max(x, 1)[:, None])
        weight = mass / tl.sum(mass, 1)[:, None]
    for k in tl.static_range(K):
        here = col == tl.load(expert + line * K + k, mask=there, other=COLS).to(tl.int32)[:, None]
        pull = tl.where(here, tl.load(grad + line * K + k, mask=there, other=0.0)[:, None], pull)
        if NORMALIZE:
            weight = tl.where(here, tl.load(prob + line * K + k, mask=there, other=0.0)[:, None], weight)
    tl.store(out + row * experts + col, weight * (pull - shared), mask=known)


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
