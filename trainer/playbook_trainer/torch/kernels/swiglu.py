"""silu(gate) * up and its gradient, each in one pass over the rows.

Suffixes: R rows, F width; `h` holds the gate's columns first, then those of up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Rows of one program."""


@triton.jit
def _forward(h, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < width)
    gate = tl.load(h + row * (2 * width) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * (2 * width) + width + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(h, grad, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < width)
    at = row * (2 * width) + col
    gate = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + at + width, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + col, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(out + at, (g * up * s * (1 + gate * (1 - s))).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + width, (g * gate * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted(h, weight, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < width)
    gate = tl.load(h + row * (2 * width) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * (2 * width) + width + col, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (gate * tl.sigmoid(gate) * up * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_backward(h, weight, grad, out, grad_weight, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = line[:, None]
    w = tl.load(weight + row, mask=row < rows, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        mask = (row < rows) & (col < width)
        at = row * (2 * width) + col
        gate = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h + at + width, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + col, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        total += tl.sum(g * gate * s * up, 1)
        tl.store(out + at, (g * w * up * s * (1 + gate * (1 - s))).to(out.dtype.element_ty), mask=mask)
        tl.store(out + at + width, (g * w * gate * s).to(out.dtype.element_ty), mask=mask)
    tl.store(grad_weight + line, total, mask=line < rows)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    # The largest power of two that divides the width, so that no lane idles, within what is worth a program.
    cols = max(128, min(512, width & -width))
    return (triton.cdiv(rows, ROWS), triton.cdiv(width, cols)), cols


def swiglu(h_RF: Tensor) -> Tensor:
    """silu(gate) * up, (R, F) from (R, 2 F), computed in float32 and rounded once."""
    return _Swiglu.apply(h_RF)


def weighted_swiglu(h_RF: Tensor, weight_R: Tensor) -> Tensor:
    """silu(gate) * up times the row's weight, (R, F) from (R, 2 F) and (R); the weights' gradient comes from the same pass."""
    return _WeightedSwiglu.apply(h_RF, weight_R)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RF: Tensor, weight_R: Tensor) -> Tensor:
        h_RF, weight_R = h_RF.contiguous(), weight_R.contiguous()
        ctx.save_for_backward(h_RF, weight_R)
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out = h_RF.new_empty((rows, width))
        if rows:
            grid, cols = _grid(rows, width)
            _weighted[grid](h_RF, weight_R, out, rows, width, ROWS=ROWS, COLS=cols)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        h_RF, weight_R = ctx.saved_tensors
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out, grad_weight = torch.empty_like(h_RF), torch.empty_like(weight_R, dtype=torch.float32)
        if rows:
            (lines, _), cols = _grid(rows, width)
            _weighted_backward[(lines,)](h_RF, weight_R, grads[0].contiguous(), out, grad_weight, rows, width, ROWS=ROWS, COLS=cols)
        return out, grad_weight.to(weight_R.dtype)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RF: Tensor) -> Tensor:
        h_RF = h_RF.contiguous()
        ctx.save_for_backward(h_RF)
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out = h_RF.new_empty((rows, width))
        if rows:
            grid, cols = _grid(rows, width)
            _forward[grid](h_RF, out, rows, width, ROWS=ROWS, COLS=cols)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (h_RF,) = ctx.saved_tensors
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out = torch.empty_like(h_RF)
        if rows:
            grid, cols = _grid(rows, width)
            _backward[grid](h_RF, grads[0].contiguous(), out, rows, width, ROWS=ROWS, COLS=cols)
        return out
