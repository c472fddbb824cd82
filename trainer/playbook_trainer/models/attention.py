"""Attention over packed documents: one call, no padding, no mask in memory.

Suffixes: N query tokens, M key tokens, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool) -> Tensor:
    """Attention of each query segment over its key segment; causal masks are aligned to the segments' ends.

    On a GPU in 16-bit precision this is one variable-length flash call; elsewhere, the plain reference: one SDPA call per segment.

    Shapes: q (N, H, d), k and v (M, G, d) with H a multiple of G; cu_q, cu_k int32 (segments + 1); returns (N, H, d).
    """
    if q_NHd.is_cuda and q_NHd.dtype in (torch.bfloat16, torch.float16):
        return _flash(q_NHd, k_MGd, v_MGd, cu_q, cu_k, max_q, max_k, causal)
    return _plain(q_NHd, k_MGd, v_MGd, cu_q, cu_k, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool) -> Tensor:
    # torch.nn.attention.varlen wraps the same operator, but renames its arguments between releases.
    out = torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False)
    return out[0]


def _plain(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    outs = []
    bq, bk = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(bq[:-1], bq[1:], bk[:-1], bk[1:], strict=True):
        if q1 == q0:
            continue
        qs, ks, vs = (x.transpose(0, 1).unsqueeze(0) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        lq, lk = q1 - q0, k1 - k0
        if causal and lq != lk:
            mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)
            out = scaled_dot_product_attention(qs, ks, vs, attn_mask=mask)
        else:
            out = scaled_dot_product_attention(qs, ks, vs, is_causal=causal)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs) if outs else q.new_zeros(q.shape)
