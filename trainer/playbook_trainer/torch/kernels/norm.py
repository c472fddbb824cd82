"""Root-mean-square norms, alone and with the rotary embedding, and their gradients: each reads its input once and keeps nothing but its input.

Suffixes: N tokens, D hidden size, H heads, d head size. The gradient of a scale is summed per program, then over programs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < width
    s = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for lap in range(tl.cdiv(rows - first, tl.num_programs(0))):
        row = first + lap * tl.num_programs(0)
        here = row.to(tl.int64) * width + at
        value = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        unit = value * inverse
        total += g * unit
        weighed = g * s
        back = inverse * (weighed - unit * (tl.sum(weighed * unit, 0) / width))
        tl.store(grad_x + here, back.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_scale + first.to(tl.int64) * width + at, total, mask=mask)


@triton.jit
def _rotate(x, scale, cos, sin, out, eps, heads, HEADS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = head < heads
    here = x + token * heads * (2 * HALF) + head * (2 * HALF) + dim
    a = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a = a * inverse * tl.load(scale + dim).to(tl.float32)
    b = b * inverse * tl.load(scale + HALF + dim).to(tl.float32)
    turn = token * (2 * HALF) + dim
    cos_a, cos_b = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + HALF).to(tl.float32)
    sin_a, sin_b = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + HALF).to(tl.float32)
    there = out + token * heads * (2 * HALF) + head * (2 * HALF) + dim
    tl.store(there, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=mask)
    tl.store(there + HALF, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_backward(x, scale, cos, sin, grad, grad_x, grad_scale, eps, tokens, heads, HEADS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = head < heads
    scale_a, scale_b = tl.load(scale + dim).to(tl.float32), tl.load(scale + HALF + dim).to(tl.float32)
    total_a, total_b = tl.zeros((HEADS, HALF), dtype=tl.float32), tl.zeros((HEADS, HALF), dtype=tl.float32)
    for lap in range(tl.cdiv(tokens - first, tl.num_programs(0))):
        token = first + lap * tl.num_programs(0)
        here = token.to(tl.int64) * heads * (2 * HALF) + head * (2 * HALF) + dim
        turn = token.to(tl.int64) * (2 * HALF) + dim
        cos_a, cos_b = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + HALF).to(tl.float32)
        sin_a, sin_b = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + HALF).to(tl.float32)
        g_a = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
        g_b = tl.load(grad + here + HALF, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + here + HALF, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * inverse, b * inverse
        # Back through the rotation, then through the norm.
        n_a, n_b = g_a * cos_a + g_b * sin_b, g_b * cos_b - g_a * sin_a
        total_a += n_a * a
        total_b += n_b * b
        n_a, n_b = n_a * scale_a, n_b * scale_b
        mean = ((tl.sum(n_a * a, 1) + tl.sum(n_b * b, 1)) / (2 * HALF))[:, None]
        tl.store(grad_x + here, (inverse * (n_a - a * mean)).to(grad_x.dtype.element_ty), mask=mask)
        tl.store(grad_x + here + HALF, (inverse * (n_b - b * mean)).to(grad_x.dtype.element_ty), mask=mask)
    there = grad_scale + first.to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(there, tl.sum(total_a, 0))
    tl.store(there + HALF, tl.sum(total_b, 0))


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
