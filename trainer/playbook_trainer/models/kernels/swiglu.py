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


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    # The largest power of two that divides the width, so that no lane idles, within what is worth a program.
    cols = max(128, min(512, width & -width))
    return (triton.cdiv(rows, ROWS), triton.cdiv(width, cols)), cols


def swiglu(h_RF: Tensor) -> Tensor:
    """silu(gate) * up, (R, F) from (R, 2 F), computed in float32 and rounded once."""
    return _Swiglu.apply(h_RF)


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
