"""One AdamW update as one pass: 20 bytes per value with moments in 16 bits, where the plain path makes a dozen passes over float32 copies.

With weights in two halves and gradients in 16 bits it is 18 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Values of one program."""


@triton.jit(do_not_specialize=["beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "keep", "rate", "root"])
def _adamw(  # type: ignore[no-untyped-def]
    p, g, m, v, low, scale, count, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, keep, rate, root,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates BLOCK values of a parameter `p`, by its gradient `g` times `scale`, its moments `m` and `v`; with SPLIT `low`
    holds the lower 16 bits of the float32 master weight, and the sign of `v` their carry.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    grad = tl.load(g + at, mask=mask, other=0.0).to(tl.float32) * tl.load(scale)
    first = tl.load(m + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        # On the bits, so that nothing depends on how a cast rounds; p is read as int16.
        sign = second.to(tl.int32, bitcast=True)
        bits = (tl.load(p + at, mask=mask, other=0).to(tl.int32) << 16) + tl.load(low + at, mask=mask, other=0).to(tl.int32)
        value = (bits + tl.where(sign < 0, 65536, 0)).to(tl.float32, bitcast=True)
        second = (sign & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    else:
        value = tl.load(p + at, mask=mask, other=0.0).to(tl.float32)
    first = first * beta1 + grad * one_minus_beta1
    second = second * beta2 + grad * grad * one_minus_beta2
    value = value * keep - rate * first / (tl.sqrt(second) * root + eps)
    tl.store(m + at, first.to(m.dtype.element_ty), mask=mask)
    if SPLIT:
        bits = value.to(tl.int32, bitcast=True)
        # To nearest, ties to even; what is not a number stays none, instead of being rounded to another sign.
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(value == value, high, 0x7FC0)
        low_half = bits - (high << 16)
        tl.store(p + at, high.to(tl.int16), mask=mask)
        tl.store(low + at, low_half.to(tl.int16), mask=mask)
        sign = second.to(tl.int32, bitcast=True)
        second = tl.where(low_half > 32767, sign | -2147483648, sign).to(tl.float32, bitcast=True)
    else:
        tl.store(p + at, value.to(p.dtype.element_ty), mask=mask)
    tl.store(v + at, second.to(v.dtype.element_ty), mask=mask)


def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scale: Tensor, group: dict[str, Any], step: int, low: Tensor | None = None) -> None:
    """As `playbook_trainer.torch.optimizer.update`, in place, with the gradient times `scale` (one float32 value on the device).

    Shapes: p, g, m, v, low contiguous, of one shape; the first four each of any floating type. With `low` (int16), p is bfloat16: the upper
    half of the weights, see `playbook_trainer.torch.optimizer`. `step` counts from 1.
    """
    beta1, beta2 = group["betas"]
    tensors = (p, g, m, v, p) if low is None else (p.view(torch.int16), g, m, v, low)
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("the fused update takes contiguous tensors")
    grid = (triton.cdiv(p.numel(), BLOCK),)
    _adamw[grid](
        *tensors, scale, p.numel(), beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], 1 - group["lr"] * group["weight_decay"],
        group["lr"] / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), SPLIT=low is not None, BLOCK=BLOCK, num_warps=8,
        # A multiplication and an addition in one round differently, and which ones are put together differs between whole weights and
        # halves.
        enable_fp_fusion=False,
    )  # fmt: skip


def no_scale(device: torch.device) -> Tensor:
    """The factor that leaves gradients as they are."""
    return torch.ones((), device=device, dtype=torch.float32)
