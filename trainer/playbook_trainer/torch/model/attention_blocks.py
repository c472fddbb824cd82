"""Attention of queries over one block of their keys, with the log-sum-exp by which blocks are put together, and its backward pass.

The whole softmax over blocks b is `out = sum_b out_b exp(lse_b - lse)` with `lse = log sum_b exp(lse_b)`. Given the whole `out` and
`lse`, each block's gradients follow from that block's keys alone. Source: FlashAttention-2, arXiv 2307.08691, section 3.1.

Suffixes: N query tokens, M key tokens, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Borders:
    """Segments of queries and the segments of keys that they see; `causal` masks are aligned to the segments' ends."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool


def forward(q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, borders: Borders) -> tuple[Tensor, Tensor]:
    """The block's attention (N, H, d) and its log-sum-exp (H, N, at least float32); every query must see a key."""
    if _has_flash(q_NHd):
        b = borders
        result = torch.ops.aten._flash_attention_forward(
            q_NHd, k_MGd, v_MGd, b.cu_q, b.cu_k, b.max_q, b.max_k, 0.0, b.causal, return_debug_mask=False
        )
        return result[0], result[1]
    out_NHd = torch.empty_like(q_NHd)
    lse_HN = q_NHd.new_empty((q_NHd.shape[1], q_NHd.shape[0]), dtype=wide(q_NHd.dtype))
    for at, scores, _, v in _segments(q_NHd, k_MGd, v_MGd, borders):
        lse = scores.logsumexp(-1)
        lse_HN[:, at] = lse.flatten(0, 1)
        out_NHd[at] = torch.einsum("grnm,mgd->ngrd", (scores - lse.unsqueeze(-1)).exp(), v).flatten(1, 2).to(q_NHd.dtype)
    return out_NHd, lse_HN


def backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, out_NHd: Tensor, lse_HN: Tensor, borders: Borders
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v, from the output and log-sum-exp over all blocks."""
    if _has_flash(q_NHd):
        b, device = borders, q_NHd.device
        # Without dropout the random state is read by nobody.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad_NHd.contiguous(), q_NHd, k_MGd, v_MGd, out_NHd.contiguous(), lse_HN.contiguous()),
            *(b.cu_q, b.cu_k, b.max_q, b.max_k, 0.0, b.causal, state, unused),
        )
        return dq, dk, dv
    dtype, (heads, groups) = wide(q_NHd.dtype), (q_NHd.shape[1], k_MGd.shape[1])
    dq_NHd, dk_MGd, dv_MGd = (torch.zeros_like(t) for t in (q_NHd, k_MGd, v_MGd))
    scale = q_NHd.shape[2] ** -0.5
    for number, (at, scores, k, v) in enumerate(_segments(q_NHd, k_MGd, v_MGd, borders)):
        keys = slice(int(borders.cu_k[number]), int(borders.cu_k[number + 1]))
        q, grad, out = (t[at].to(dtype).unflatten(1, (groups, heads // groups)) for t in (q_NHd, grad_NHd, out_NHd))
        p = (scores - lse_HN[:, at].unflatten(0, (groups, -1)).unsqueeze(-1)).exp()
        ds = p * (torch.einsum("ngrd,mgd->grnm", grad, v) - torch.einsum("ngrd,ngrd->grn", grad, out).unsqueeze(-1)) * scale
        dq_NHd[at] = torch.einsum("grnm,mgd->ngrd", ds, k).flatten(1, 2).to(dq_NHd.dtype)
        dk_MGd[keys] = torch.einsum("grnm,ngrd->mgd", ds, q).to(dk_MGd.dtype)
        dv_MGd[keys] = torch.einsum("grnm,ngrd->mgd", p, grad).to(dv_MGd.dtype)
    return dq_NHd, dk_MGd, dv_MGd


def merge(out_NHd: Tensor, lse_HN: Tensor, part_NHd: Tensor, part_lse_HN: Tensor) -> None:
    """Take a further block into the running output and log-sum-exp, in place."""
    joint = torch.logaddexp(lse_HN, part_lse_HN)
    out_NHd.mul_((lse_HN - joint).exp().t().unsqueeze(-1)).add_(part_NHd * (part_lse_HN - joint).exp().t().unsqueeze(-1))
    lse_HN.copy_(joint)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in: float32, or float64 where the inputs have it."""
    return torch.promote_types(dtype, torch.float32)


def _has_flash(q_NHd: Tensor) -> bool:
    return q_NHd.is_cuda and q_NHd.dtype in (torch.bfloat16, torch.float16)


def _segments(q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, borders: Borders) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Query stretch, masked scores (G, H / G, n, m), keys and values of each segment."""
    groups, dtype = k_MGd.shape[1], wide(q_NHd.dtype)
    bq, bk = borders.cu_q.tolist(), borders.cu_k.tolist()
    for q0, q1, k0, k1 in zip(bq[:-1], bq[1:], bk[:-1], bk[1:], strict=True):
        q = q_NHd[q0:q1].to(dtype).unflatten(1, (groups, -1))
        k, v = k_MGd[k0:k1].to(dtype), v_MGd[k0:k1].to(dtype)
        scores = torch.einsum("ngrd,mgd->grnm", q, k) * q_NHd.shape[2] ** -0.5
        if borders.causal:
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device).triu(1 + k1 - k0 - (q1 - q0))
            scores = scores.masked_fill(hidden, -torch.inf)
        yield slice(q0, q1), scores, k, v
