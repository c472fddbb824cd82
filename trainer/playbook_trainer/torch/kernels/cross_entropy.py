"""Softmax, loss and gradient of a chunk of logits, in place: two reads and one write of 16-bit logits, where the plain path makes six passes in 32 bits.

One program per token. With tensor parallelism a token's maximum and sum are joined over the ranks between the two readings.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from playbook_trainer.axes import Axis

BLOCK = 4096
"""Logits of a row that one program holds at once."""


@triton.jit
def _stats(logits, target, top, total, aimed, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * width
    best = -float("inf")
    mass = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(best, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row may begin with words that are ruled out
        mass = mass * tl.exp(best - base) + tl.sum(tl.exp(x - base), 0)
        best = higher
    place = tl.load(target + row)
    inside = (place >= 0) & (place < width)
    tl.store(top + row, best)
    tl.store(total + row, mass)
    tl.store(aimed + row, tl.load(here + place, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, target, lse, valid, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * width
    place = tl.load(target + row)
    keep = tl.load(valid + row).to(tl.float32)
    base = tl.load(lse + row)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < width, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - base) - tl.where(at == place, 1.0, 0.0)
        tl.store(here + at, (p * keep).to(logits.dtype.element_ty), mask=at < width)


def fused_rows(logits: Tensor, target: Tensor, valid: Tensor, tp: Axis, need: bool) -> tuple[Tensor, Tensor]:
    """As `parallel.tensor.plain_rows`; the logits are overwritten by their gradient."""
    rows, width = logits.shape
    top, total, aimed = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3))
    _stats[(rows,)](logits, target, top, total, aimed, width, BLOCK=BLOCK, num_warps=16)
    if tp.size > 1:
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        sums = torch.stack([total * (top - highest).exp(), aimed])
        dist.all_reduce(sums, group=tp.group)
        top, (total, aimed) = highest, sums
    lse = top + total.log()
    loss = torch.where(valid, lse - aimed, 0.0).sum()
    if need:
        _gradient[(rows,)](logits, target, lse, valid, width, BLOCK=BLOCK, num_warps=16)
    return loss, logits
