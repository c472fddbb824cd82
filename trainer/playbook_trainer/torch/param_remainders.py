"""A float32 weight in two halves: its bfloat16 rounding, which the model computes with, and 16 bits that complete it.

The upper half is the weight rounded to nearest, ties to even: what a cast gives. The lower half is the signed distance to it in units of the
weight's last place, between -32768 and 32768. Those are 65,537 numbers, one more than 16 bits tell apart: +32768, a tie that was rounded down,
is kept as -32768 with the sign of the second moment set, which is never negative otherwise. So the halves hold every finite weight exactly.

Source: Megatron Core, `store_param_remainders` of its precision-aware optimizer, which keeps the same 16 bits but rounds ties up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(whole: Tensor, high: Tensor, low: Tensor, second: Tensor) -> None:
    """Write float32 values into `high` (bfloat16), `low` (int16) and the signs of `second`, in place; all of one shape."""
    high.copy_(whole)
    # What is no number is one in its upper half alone: its bits depend on who casts, and a carry could make a number of them.
    rest = (whole.view(torch.int32) - _shifted(high)).masked_fill_(whole.isnan(), 0)
    low.copy_(rest)  # +32768 wraps
    magnitude = second.abs()
    second.copy_(torch.where(rest > 32767, magnitude.neg(), magnitude))


def join(high: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """The float32 values, in memory of their own."""
    bits = _shifted(high).add_(low)
    return bits.add_(second.signbit().int().bitwise_left_shift_(16)).view(torch.float32)


def _shifted(high: Tensor) -> Tensor:
    return high.view(torch.int16).int().bitwise_left_shift_(16)
