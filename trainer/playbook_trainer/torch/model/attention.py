"""Attention over packed documents: one call, no padding, no mask in memory.

Suffixes: N query tokens, M key tokens, H query heads, G key/value heads, d head size, B documents of one length S.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

_CUDNN_WIDTHS = (64, 128)
"""Head sizes that cuDNN gets. At 72, the size of Qwen3-VL-30B-A3B's tower, packed documents got wrong gradients of the queries (75 % from
flash's, output and other gradients agreeing), and its general backward kernel took six times as long as flash:
H200, cuDNN 9.19, Transformer Engine 2.16."""


def attend(
    q_NHd: Tensor,
    k_MGd: Tensor,
    v_MGd: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    backend: str = "auto",
    scale: float | None = None,
) -> Tensor:
    """Attention of each query segment over its key segment; causal masks are aligned to the segments' ends.

    On a GPU in 16-bit precision this is one call of `backend` (see `choose`); elsewhere, the plain reference: one SDPA call per segment.

    `scale` multiplies the scores; None takes 1 / sqrt(d).

    Shapes: q (N, H, d), k and v (M, G, d) with H a multiple of G; cu_q, cu_k int32 (segments + 1); returns (N, H, d).
    """
    chosen = choose(backend, q_NHd, cu_q, max_q, same_documents=cu_q is cu_k)
    size, width = q_NHd.shape[2], cudnn_width(q_NHd.shape[2])
    if chosen.startswith("cudnn") and width > size:
        q, k, v = (pad(x, (0, width - size)) for x in (q_NHd, k_MGd, v_MGd))
        scale = size**-0.5 if scale is None else scale
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal, backend=backend, scale=scale)[..., :size]
    if chosen == "cudnn":
        return _cudnn_dense(q_NHd, k_MGd, v_MGd, max_q, causal, scale)
    if chosen == "cudnn_packed":
        return _cudnn_packed(q_NHd, k_MGd, v_MGd, cu_q, cu_k, max_q, max_k, causal, scale)
    if chosen == "flash":
        return _flash(q_NHd, k_MGd, v_MGd, cu_q, cu_k, max_q, max_k, causal, scale)
    return _plain(q_NHd, k_MGd, v_MGd, cu_q, cu_k, causal, scale)


def choose(backend: str, q_NHd: Tensor, cu_q: Tensor, max_q: int, *, same_documents: bool) -> str:
    """Which implementation runs: plain, flash, cudnn (documents of one length) or cudnn_packed.

    auto takes cuDNN on a Hopper or later where queries and keys are the same documents and all have one length: forward and backward
    together reached 534 TFLOP/s there, flash 287 (H200, S=8192, 32 query and 4 key-value heads of 128).
    PyTorch's own cuDNN call for packed documents is not used: up to 2.12 its backward pass writes out of bounds (pytorch/pytorch pull
    request 186142). Packed documents go to Transformer Engine's, where cudnn is asked for.
    """
    if backend == "plain" or not (q_NHd.is_cuda and q_NHd.dtype in (torch.bfloat16, torch.float16)):
        return "plain"
    one_length = same_documents and (cu_q.numel() - 1) * max_q == q_NHd.shape[0]
    if backend == "cudnn":
        # Masks aligned to the ends of unequal segments (context parallelism) are flash's.
        return "cudnn" if one_length else "cudnn_packed" if same_documents else "flash"
    return "cudnn" if backend == "auto" and one_length and _is_hopper(q_NHd.device) else "flash"


def cudnn_width(head_dim: int) -> int:
    """The head size to fill up to for cuDNN, with zeros, which change no product."""
    return next((w for w in _CUDNN_WIDTHS if w >= head_dim), head_dim)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the GPU is a Hopper or later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float | None
) -> Tensor:
    # torch.nn.attention.varlen wraps the same operator, but renames its arguments between releases.
    out = torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)
    return out[0]


def _cudnn_dense(q: Tensor, k: Tensor, v: Tensor, size: int, causal: bool, scale: float | None) -> Tensor:
    q_BHSd, k_BGSd, v_BGSd = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def _cudnn_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float | None
) -> Tensor:
    call = _transformer_engine(q.shape[1], k.shape[1], q.shape[2], causal, scale)
    # Plans are built per longest length: rounded up to a power of two, few are ever needed.
    longest_q, longest_k = (1 << (x - 1).bit_length() for x in (max_q, max_k))
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k, max_seqlen_q=longest_q, max_seqlen_kv=longest_k)
    return out.view(q.shape)


@cache
def _transformer_engine(heads: int, kv_heads: int, head_dim: int, causal: bool, scale: float | None) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    mask = "padding_causal" if causal else "padding"
    how = {"qkv_format": "thd", "attn_mask_type": mask, "attention_dropout": 0.0, "softmax_scale": scale}
    return DotProductAttention(heads, head_dim, num_gqa_groups=kv_heads, **how)


def _plain(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Document by document through torch's own attention, with key-value heads repeated: q (N, H, d), k and v (M, G, d), returns (N, H,
    d).
    """
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
            out = scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale)
        else:
            out = scaled_dot_product_attention(qs, ks, vs, is_causal=causal, scale=scale)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs) if outs else q.new_zeros(q.shape)
