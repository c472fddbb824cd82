"""The vision tower's rotary embedding: queries, keys and values out of one projection, two of them rotated,
each as wide as attention wants it.

Suffixes: P patches, H heads, d head size, r = d / 2 rotary pairs, W width of a head in the result (d, or more, filled with zeros).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, out, cos, sin, x_patch, x_head, out_patch, out_head, heads, half, fill, sign,
    TURNS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Copy a patch's heads [heads, 2 half], one program a patch, turned by its angles (`cos`, `sin` [P, half]; `sign` -1 turns back) with
    TURNS, and followed by `fill` zeros.
    """
    patch = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (dim < half)
    x_ptr = x + patch * x_patch + head * x_head + dim
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + half, mask=mask, other=0.0).to(tl.float32)
    if TURNS:
        c = tl.load(cos + patch * half + dim, mask=dim < half, other=0.0)
        s = tl.load(sin + patch * half + dim, mask=dim < half, other=0.0) * sign
        a, b = a * c - b * s, b * c + a * s
    out_ptr = out + patch * out_patch + head * out_head
    tl.store(out_ptr + dim, a.to(out.dtype.element_ty), mask=mask)
    tl.store(out_ptr + half + dim, b.to(out.dtype.element_ty), mask=mask)
    if FILL:
        padding = tl.arange(0, FILL)[None, :]
        zero = tl.zeros((HEADS, FILL), dtype=tl.float32)
        tl.store(out_ptr + 2 * half + padding, zero.to(out.dtype.element_ty), mask=(head < heads) & (padding < fill))


def _launch(x: Tensor, out: Tensor, cos_Pr: Tensor, sin_Pr: Tensor, sign: float, *, turns: bool) -> None:
    patches, heads, width = out.shape
    half = cos_Pr.shape[1]
    if not patches:
        return
    fill = width - 2 * half
    _turn[(patches,)](
        x, out, cos_Pr, sin_Pr, x.stride(0), x.stride(1), out.stride(0), out.stride(1), heads, half, fill, sign,
        TURNS=turns, HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(half),
        FILL=triton.next_power_of_2(fill) if fill else 0,
    )  # fmt: skip


def split_turned(qkv_P3Hd: Tensor, cos_Pr: Tensor, sin_Pr: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated in float32 by halves and rounded once, and values: each (P, H, W), with zeros beyond d.

    Shapes: qkv (P, 3, H, d), whose last dimension lies together; cos and sin (P, r), float32.
    """
    return _SplitTurned.apply(qkv_P3Hd, cos_Pr, sin_Pr, width)


class _SplitTurned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_P3Hd: Tensor, cos_Pr: Tensor, sin_Pr: Tensor, width: int) -> tuple[Tensor, ...]:
        cos_Pr, sin_Pr = cos_Pr.contiguous(), sin_Pr.contiguous()
        ctx.save_for_backward(cos_Pr, sin_Pr)
        ctx.shape = qkv_P3Hd.shape
        patches, _, heads, _ = qkv_P3Hd.shape
        outs = []
        for which, x in enumerate(qkv_P3Hd.unbind(1)):
            outs.append(x.new_empty((patches, heads, width)))
            _launch(x, outs[-1], cos_Pr, sin_Pr, 1.0, turns=which < 2)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        cos_Pr, sin_Pr = ctx.saved_tensors
        out = grads[0].new_empty(ctx.shape)
        for which, (grad, x) in enumerate(zip(grads, out.unbind(1), strict=True)):
            _launch(grad if grad.stride(2) == 1 else grad.contiguous(), x, cos_Pr, sin_Pr, -1.0, turns=which < 2)
        return out, None, None, None
