"""Fused kernels of a dense layer and of the loss: root-mean-square norms (alone and with the rotary embedding), SwiGLU, and cross-entropy.

Suffixes: N tokens, D hidden size, H heads, d head size, R rows, F width of the feed-forward layer.
Norms read their input once and keep nothing but their input; the gradient of a scale is summed per program, then over programs. SwiGLU is
silu(gate) * up, and its gradient, each in one pass over the rows; `h` holds the gate's columns first, then those of up.
Cross-entropy makes softmax, loss and gradient of a chunk of logits in place: two reads and one write of 16-bit logits, where the plain path
makes six passes in 32 bits. One program per token; with tensor parallelism a token's maximum and sum are joined over the ranks between the
two readings.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from playbook_trainer.axes import Axis

_WAVES = 4
"""Programs per multiprocessor in the backward passes, each of which takes many rows."""


@triton.jit
def _norm(x, scale, out, eps, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * width + at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    s = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (value * inverse * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(x, scale, grad, grad_x, grad_scale, eps, rows, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm's gradients of rows [rows, width]: one program takes every num_programs-th row, and writes its sum of the scale's gradient
    to `grad_scale` [programs, width].
    """
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < width
    s = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for lap in range(tl.cdiv(rows - first, tl.num_programs(0))):
        row = first + lap * tl.num_programs(0)
        offset = row.to(tl.int64) * width + at
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        unit = value * inverse
        total += g * unit
        weighed = g * s
        back = inverse * (weighed - unit * (tl.sum(weighed * unit, 0) / width))
        tl.store(grad_x + offset, back.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_scale + first.to(tl.int64) * width + at, total, mask=mask)


@triton.jit
def _rotate(x, scale, cos, sin, out, eps, heads, HEADS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norm and rotation of a token's heads [heads, 2 HALF], one program a token; `cos` and `sin` are [N, 2 HALF], `scale` is [2 HALF]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = head < heads
    x_ptr = x + token * heads * (2 * HALF) + head * (2 * HALF) + dim
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a = a * inverse * tl.load(scale + dim).to(tl.float32)
    b = b * inverse * tl.load(scale + HALF + dim).to(tl.float32)
    turn = token * (2 * HALF) + dim
    cos_a, cos_b = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + HALF).to(tl.float32)
    sin_a, sin_b = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + HALF).to(tl.float32)
    out_ptr = out + token * heads * (2 * HALF) + head * (2 * HALF) + dim
    tl.store(out_ptr, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=mask)
    tl.store(out_ptr + HALF, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_backward(  # type: ignore[no-untyped-def]
    x, scale, cos, sin, grad, grad_x, grad_scale, eps, tokens, heads, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """The gradients of `_rotate`: one program takes every num_programs-th token, and writes its sum of the scale's gradient to `grad_scale`
    [programs, 2 HALF].
    """
    first = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = head < heads
    scale_a, scale_b = tl.load(scale + dim).to(tl.float32), tl.load(scale + HALF + dim).to(tl.float32)
    total_a, total_b = tl.zeros((HEADS, HALF), dtype=tl.float32), tl.zeros((HEADS, HALF), dtype=tl.float32)
    for lap in range(tl.cdiv(tokens - first, tl.num_programs(0))):
        token = first + lap * tl.num_programs(0)
        offset = token.to(tl.int64) * heads * (2 * HALF) + head * (2 * HALF) + dim
        turn = token.to(tl.int64) * (2 * HALF) + dim
        cos_a, cos_b = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + HALF).to(tl.float32)
        sin_a, sin_b = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + HALF).to(tl.float32)
        g_a = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        g_b = tl.load(grad + offset + HALF, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + offset + HALF, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * inverse, b * inverse
        # Back through the rotation, then through the norm.
        n_a, n_b = g_a * cos_a + g_b * sin_b, g_b * cos_b - g_a * sin_a
        total_a += n_a * a
        total_b += n_b * b
        n_a, n_b = n_a * scale_a, n_b * scale_b
        mean = ((tl.sum(n_a * a, 1) + tl.sum(n_b * b, 1)) / (2 * HALF))[:, None]
        tl.store(grad_x + offset, (inverse * (n_a - a * mean)).to(grad_x.dtype.element_ty), mask=mask)
        tl.store(grad_x + offset + HALF, (inverse * (n_b - b * mean)).to(grad_x.dtype.element_ty), mask=mask)
    scale_ptr = grad_scale + first.to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(scale_ptr, tl.sum(total_a, 0))
    tl.store(scale_ptr + HALF, tl.sum(total_b, 0))


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return _WAVES * torch.cuda.get_device_properties(device).multi_processor_count


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension, computed in float32 and rounded once."""
    return _Norm.apply(x, weight, eps)


def norm_rotate(x_NHd: Tensor, weight_d: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, eps: float) -> Tensor:
    """Per-head norm, then rotary embedding by halves, rounded once; head sizes are powers of two."""
    return _NormRotate.apply(x_NHd, weight_d, cos_Nd, sin_Nd, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out, width = torch.empty_like(x), x.shape[-1]
        if x.numel():
            _norm[(x.numel() // width,)](x, weight, out, eps, width, BLOCK=triton.next_power_of_2(width))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows, grad_x = x.numel() // width, torch.empty_like(x)
        programs = min(rows, _programs(x.device))
        parts = torch.zeros((max(1, programs), width), device=x.device, dtype=torch.float32)
        if rows:
            _norm_backward[(programs,)](
                x, weight, grads[0].contiguous(), grad_x, parts, ctx.eps, rows, width, BLOCK=triton.next_power_of_2(width)
            )
        return grad_x, parts.sum(0).to(weight.dtype), None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHd: Tensor, weight_d: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, eps: float) -> Tensor:
        x_NHd, cos_Nd, sin_Nd = x_NHd.contiguous(), cos_Nd.contiguous(), sin_Nd.contiguous()
        ctx.save_for_backward(x_NHd, weight_d, cos_Nd, sin_Nd)
        ctx.eps = eps
        (tokens, heads, size), out = x_NHd.shape, torch.empty_like(x_NHd)
        if tokens:
            _rotate[(tokens,)](x_NHd, weight_d, cos_Nd, sin_Nd, out, eps, heads, HEADS=triton.next_power_of_2(heads), HALF=size // 2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        x_NHd, weight_d, cos_Nd, sin_Nd = ctx.saved_tensors
        tokens, heads, size = x_NHd.shape
        grad_x, programs = torch.empty_like(x_NHd), min(tokens, _programs(x_NHd.device))
        parts = torch.zeros((max(1, programs), size), device=x_NHd.device, dtype=torch.float32)
        if tokens:
            _rotate_backward[(programs,)](
                x_NHd, weight_d, cos_Nd, sin_Nd, grads[0].contiguous(), grad_x, parts, ctx.eps, tokens, heads,
                HEADS=triton.next_power_of_2(heads), HALF=size // 2,
            )  # fmt: skip
        return grad_x, parts.sum(0).to(weight_d.dtype), None, None, None


ROWS = 8
"""Rows of one program."""


@triton.jit
def _swiglu(h, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < width)
    gate = tl.load(h + row * (2 * width) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * (2 * width) + width + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(h, grad, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _weighted_swiglu(h, weight, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < width)
    gate = tl.load(h + row * (2 * width) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * (2 * width) + width + col, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (gate * tl.sigmoid(gate) * up * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_swiglu_backward(  # type: ignore[no-untyped-def]
    h, weight, grad, out, grad_weight, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """The gradients of `_weighted_swiglu`, for ROWS rows a program: of `h` [rows, 2 width] into `out`, of `weight` [rows] into
    `grad_weight`, from `grad` [rows, width].
    """
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
            _weighted_swiglu[grid](h_RF, weight_R, out, rows, width, ROWS=ROWS, COLS=cols)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        h_RF, weight_R = ctx.saved_tensors
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out, grad_weight = torch.empty_like(h_RF), torch.empty_like(weight_R, dtype=torch.float32)
        if rows:
            (lines, _), cols = _grid(rows, width)
            _weighted_swiglu_backward[(lines,)](h_RF, weight_R, grads[0].contiguous(), out, grad_weight, rows, width, ROWS=ROWS, COLS=cols)
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
            _swiglu[grid](h_RF, out, rows, width, ROWS=ROWS, COLS=cols)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (h_RF,) = ctx.saved_tensors
        rows, width = h_RF.shape[0], h_RF.shape[1] // 2
        out = torch.empty_like(h_RF)
        if rows:
            grid, cols = _grid(rows, width)
            _swiglu_backward[grid](h_RF, grads[0].contiguous(), out, rows, width, ROWS=ROWS, COLS=cols)
        return out


BLOCK = 4096
"""Logits of a row that one program holds at once."""


@triton.jit
def _stats(logits, target, row_max, exp_sum, target_logit, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of logits [rows, width], one program a row: its maximum, the sum of exp(logit - maximum), and the logit at `target`, 0
    where that is not among this rank's columns.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * width
    running_max = -float("inf")
    running_sum = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(running_max, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row may begin with words that are ruled out
        running_sum = running_sum * tl.exp(running_max - base) + tl.sum(tl.exp(x - base), 0)
        running_max = higher
    place = tl.load(target + row)
    inside = (place >= 0) & (place < width)
    tl.store(row_max + row, running_max)
    tl.store(exp_sum + row, running_sum)
    tl.store(target_logit + row, tl.load(row_ptr + place, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, target, lse, valid, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * width
    place = tl.load(target + row)
    keep = tl.load(valid + row).to(tl.float32)
    base = tl.load(lse + row)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < width, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - base) - tl.where(at == place, 1.0, 0.0)
        tl.store(row_ptr + at, (p * keep).to(logits.dtype.element_ty), mask=at < width)


def fused_rows(logits: Tensor, target: Tensor, valid: Tensor, tp: Axis, need: bool) -> tuple[Tensor, Tensor]:
    """As `parallel.tensor.plain_rows`; the logits are overwritten by their gradient."""
    rows, width = logits.shape
    row_max, exp_sum, target_logit = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3))
    _stats[(rows,)](logits, target, row_max, exp_sum, target_logit, width, BLOCK=BLOCK, num_warps=16)
    if tp.size > 1:
        highest = row_max.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        sums = torch.stack([exp_sum * (row_max - highest).exp(), target_logit])
        dist.all_reduce(sums, group=tp.group)
        row_max, (exp_sum, target_logit) = highest, sums
    lse = row_max + exp_sum.log()
    loss = torch.where(valid, lse - target_logit, 0.0).sum()
    if need:
        _gradient[(rows,)](logits, target, lse, valid, width, BLOCK=BLOCK, num_warps=16)
    return loss, logits
