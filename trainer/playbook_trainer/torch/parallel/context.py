"""Context parallelism: each rank holds a share of the token stream, and attention reaches the rest in one of three ways.

allgather: keys and values of all ranks are gathered. ring: they travel block by block (see `ring`). For both, the stream of N tokens is
cut into 2 x cp slices and rank r holds slices r and 2 cp - 1 - r, so that every rank has the same share of the causal triangle.
ulysses: an all-to-all gives each rank the whole stream for its share of the heads, so rank r holds the r-th of cp equal stretches.
Documents may cross slices: a slice's queries see the keys from the start of their own document.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from playbook_trainer.axes import Axis
from playbook_trainer.data.batch import IGNORE, Batch, Block, Ring, Slice, VisionBatch, share_of
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.parallel.comm import all_gather, all_to_all

# Attention of queries over one block of their keys, with the log-sum-exp by which blocks are put together, and its backward pass.
# The whole softmax over blocks b is `out = sum_b out_b exp(lse_b - lse)` with `lse = log sum_b exp(lse_b)`. Given the whole `out` and
# `lse`, each block's gradients follow from that block's keys alone. Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
# Suffixes: N query tokens, M key tokens, H query heads, G key/value heads, d head size.


@dataclass(frozen=True)
class SegmentBounds:
    """Segments of queries and the segments of keys that they see; `causal` masks are aligned to the segments' ends."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool


def forward(q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, bounds: SegmentBounds) -> tuple[Tensor, Tensor]:
    """The block's attention (N, H, d) and its log-sum-exp (H, N, at least float32); every query must see a key."""
    if _has_flash(q_NHd):
        b = bounds
        result = torch.ops.aten._flash_attention_forward(
            q_NHd, k_MGd, v_MGd, b.cu_q, b.cu_k, b.max_q, b.max_k, 0.0, b.causal, return_debug_mask=False
        )
        return result[0], result[1]
    out_NHd = torch.empty_like(q_NHd)
    lse_HN = q_NHd.new_empty((q_NHd.shape[1], q_NHd.shape[0]), dtype=wide(q_NHd.dtype))
    for rows, _, scores, _, v in _segments(q_NHd, k_MGd, v_MGd, bounds):
        lse = scores.logsumexp(-1)
        lse_HN[:, rows] = lse.flatten(0, 1)
        out_NHd[rows] = torch.einsum("grnm,mgd->ngrd", (scores - lse.unsqueeze(-1)).exp(), v).flatten(1, 2).to(q_NHd.dtype)
    return out_NHd, lse_HN


def backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, out_NHd: Tensor, lse_HN: Tensor, bounds: SegmentBounds
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v.

    Returns dq (N, H, d), dk, dv (M, G, d) of this block in the inputs' dtype; the caller sums dq over blocks.
    `out` and `lse` (H, N) are those merged over all blocks. `grad` is that of `out`.
    """
    if _has_flash(q_NHd):
        b, device = bounds, q_NHd.device
        # Without dropout the random state is read by nobody.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad_NHd.contiguous(), q_NHd, k_MGd, v_MGd, out_NHd.contiguous(), lse_HN.contiguous()),
            *(b.cu_q, b.cu_k, b.max_q, b.max_k, 0.0, b.causal, state, unused),
        )
        return dq, dk, dv
    dtype, (heads, kv_heads) = wide(q_NHd.dtype), (q_NHd.shape[1], k_MGd.shape[1])
    dq_NHd, dk_MGd, dv_MGd = (torch.zeros_like(t) for t in (q_NHd, k_MGd, v_MGd))
    scale = q_NHd.shape[2] ** -0.5
    for rows, keys, scores, k, v in _segments(q_NHd, k_MGd, v_MGd, bounds):
        q, grad, out = (t[rows].to(dtype).unflatten(1, (kv_heads, heads // kv_heads)) for t in (q_NHd, grad_NHd, out_NHd))
        probs = (scores - lse_HN[:, rows].unflatten(0, (kv_heads, -1)).unsqueeze(-1)).exp()
        dscores = probs * (torch.einsum("ngrd,mgd->grnm", grad, v) - torch.einsum("ngrd,ngrd->grn", grad, out).unsqueeze(-1)) * scale
        dq_NHd[rows] = torch.einsum("grnm,mgd->ngrd", dscores, k).flatten(1, 2).to(dq_NHd.dtype)
        dk_MGd[keys] = torch.einsum("grnm,ngrd->mgd", dscores, q).to(dk_MGd.dtype)
        dv_MGd[keys] = torch.einsum("grnm,ngrd->mgd", probs, grad).to(dv_MGd.dtype)
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


def _segments(q_NHd: Tensor, k_MGd: Tensor, v_MGd: Tensor, bounds: SegmentBounds) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Of each segment in order: its queries among the N and its keys among the M, masked scores (G, H / G, n, m), keys and values;
    the last three in at least float32.
    """
    kv_heads, dtype = k_MGd.shape[1], wide(q_NHd.dtype)
    bq, bk = bounds.cu_q.tolist(), bounds.cu_k.tolist()
    for q0, q1, k0, k1 in zip(bq[:-1], bq[1:], bk[:-1], bk[1:], strict=True):
        q = q_NHd[q0:q1].to(dtype).unflatten(1, (kv_heads, -1))
        k, v = k_MGd[k0:k1].to(dtype), v_MGd[k0:k1].to(dtype)
        scores = torch.einsum("ngrd,mgd->grnm", q, k) * q_NHd.shape[2] ** -0.5
        if bounds.causal:
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device).triu(1 + k1 - k0 - (q1 - q0))
            scores = scores.masked_fill(hidden, -torch.inf)
        yield slice(q0, q1), slice(k0, k1), scores, k, v


# Ring attention: keys and values travel around the context-parallel ranks, block by block, while the block before is computed.
# In step i a rank computes with the keys of the rank i places before it. A block goes straight from its owner to the rank that computes
# with it, and holds only the keys that some document of that rank needs: with packed documents most blocks are small or empty, and an
# empty block is neither sent nor computed. With two slices per rank (see `context`) a block between two ranks is always one rectangle of
# one document, without a mask. Source: Ring Attention, arXiv 2310.01889; the merge of blocks is `models.attention_blocks`.
# Suffixes: N tokens of this rank, H query heads, G key/value heads, d head size.


def plan(cu_seqlens: list[int], num_tokens: int, axis: Axis) -> Ring:
    """What this rank sends and computes in each step, from the documents' borders over the whole stream."""
    cp, size = axis.size, num_tokens // (2 * axis.size)
    documents = np.searchsorted(cu_seqlens, local_index(num_tokens, axis, "ring").numpy(), side="right")
    cu = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1, [2 * size]])
    receive, send = [], []
    for step in range(1, cp):
        block = _rectangle(cu_seqlens, size, cp, axis.rank, (axis.rank - step) % cp)
        receive.append(None if block is None else _block(*block))
        outgoing = _rectangle(cu_seqlens, size, cp, (axis.rank + step) % cp, axis.rank)
        send.append(None if outgoing is None else outgoing[2:])
    return Ring(torch.tensor(cu, dtype=torch.int32), int(np.diff(cu).max()), receive, send)


def _rectangle(cu: list[int], size: int, cp: int, queries: int, keys: int) -> tuple[int, int, int, int] | None:
    """Local queries q0:q1 of one rank that see the local keys k0:k1 of another (q0, q1, k0, k1); None where no document joins them."""
    if keys < queries:
        # The first slice of keys comes before both slices of queries: its last document is the one that may reach them.
        first, second, ends = queries * size, (2 * cp - 1 - queries) * size, (keys + 1) * size
        start, end = _document(cu, ends - 1)
        if end <= first:
            return None
        reach = min(size, end - first) if end <= second else size + min(size, end - second)
        return 0, reach, max(0, start - keys * size), size
    # Both slices of keys lie between the two of queries: the document at the head of the second slice of queries may reach back to them.
    head, first, second = (2 * cp - 1 - queries) * size, keys * size, (2 * cp - 1 - keys) * size
    start, end = _document(cu, head)
    if start >= second + size:
        return None
    back = size + max(0, start - second) if start >= first + size else max(0, start - first)
    return size, size + min(size, end - head), back, 2 * size


def _document(cu: list[int], token_index: int) -> tuple[int, int]:
    i = bisect_right(cu, token_index)
    return cu[i - 1], cu[i]


def _block(q0: int, q1: int, k0: int, k1: int) -> Block:
    return Block(q0, q1, k0, k1, torch.tensor([0, q1 - q0], dtype=torch.int32), torch.tensor([0, k1 - k0], dtype=torch.int32))


def _attend_ring(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ring: Ring, axis: Axis) -> Tensor:
    """Causal attention of this rank's queries over the whole stream's keys, (N, H, d)."""
    return _RingAttention.apply(q_NHd, k_NGd, v_NGd, ring, axis)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ring: Ring, axis: Axis) -> Tensor:
        """Attend to this rank's own keys, then to each block that arrives, merging the outputs by their log-sum-exp."""
        kv = torch.stack([k_NGd, v_NGd], dim=1)
        coming = _send_keys(kv, ring, axis, 1)
        part, lse_HN = forward(q_NHd, kv[:, 0], kv[:, 1], _own(ring))
        out_NHd = part.to(wide(part.dtype))
        for step, block in enumerate(ring.receive, 1):
            keys, coming = coming.take(), _send_keys(kv, ring, axis, step + 1)
            if block is not None:
                assert keys is not None
                rows = slice(block.q0, block.q1)
                part, part_lse = forward(q_NHd[rows], keys[:, 0], keys[:, 1], _whole(block))
                merge(out_NHd[rows], lse_HN[:, rows], part, part_lse)
        out_NHd = out_NHd.to(q_NHd.dtype)
        ctx.save_for_backward(q_NHd, kv, out_NHd, lse_HN)
        ctx.ring, ctx.axis = ring, axis
        return out_NHd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Send the keys around once more; the gradients of a block's keys go back to the rank that owns them."""
        q_NHd, kv, out_NHd, lse_HN = ctx.saved_tensors
        ring, axis, grad_NHd = ctx.ring, ctx.axis, grads[0].contiguous()
        coming = _send_keys(kv, ring, axis, 1)
        dq, dk, dv = backward(grad_NHd, q_NHd, kv[:, 0], kv[:, 1], out_NHd, lse_HN, _own(ring))
        dq_NHd, dkv = dq.to(wide(dq.dtype)), torch.stack([dk, dv], dim=1).to(wide(dk.dtype))
        returning: list[tuple[int, _Exchange]] = []
        for step, block in enumerate(ring.receive, 1):
            keys, coming = coming.take(), _send_keys(kv, ring, axis, step + 1)
            grad_keys = None
            if block is not None:
                assert keys is not None
                rows = slice(block.q0, block.q1)
                dq, dk, dv = backward(grad_NHd[rows], q_NHd[rows], keys[:, 0], keys[:, 1], out_NHd[rows], lse_HN[:, rows], _whole(block))
                dq_NHd[rows] += dq
                grad_keys = torch.stack([dk, dv], dim=1)
            returning.append((step, _return_gradients(grad_keys, kv, ring, axis, step)))
            if step > 1:
                _add(dkv, *returning[step - 2], ring)
        _add(dkv, *returning[-1], ring)
        dk_NGd, dv_NGd = dkv.to(kv.dtype).unbind(1)
        return dq_NHd.to(q_NHd.dtype), dk_NGd, dv_NGd, None, None


def _own(ring: Ring) -> SegmentBounds:
    return SegmentBounds(ring.cu_seqlens, ring.cu_seqlens, ring.max_seqlen, ring.max_seqlen, causal=True)


def _whole(block: Block) -> SegmentBounds:
    return SegmentBounds(block.cu_q, block.cu_k, block.q1 - block.q0, block.k1 - block.k0, causal=False)


def _add(dkv: Tensor, step: int, exchange: _Exchange, ring: Ring) -> None:
    grad, stretch = exchange.take(), ring.send[step - 1]
    if grad is not None and stretch is not None:
        dkv[stretch[0] : stretch[1]] += grad


def _send_keys(kv: Tensor, ring: Ring, axis: Axis, step: int) -> _Exchange:
    """Start step `step`: keys and values to the rank that many places on, and from the one that many before."""
    if step >= axis.size:
        return _Exchange(None, None, axis, 0, 0, 0)
    stretch, block = ring.send[step - 1], ring.receive[step - 1]
    give = None if stretch is None else kv[stretch[0] : stretch[1]]
    take = None if block is None else kv.new_empty((block.k1 - block.k0, *kv.shape[1:]))
    return _Exchange(give, take, axis, step, -step, 2 * step)


def _return_gradients(grad: Tensor | None, kv: Tensor, ring: Ring, axis: Axis, step: int) -> _Exchange:
    """The way back: gradients to the owner of the keys, and those of this rank's own keys from the rank that computed them."""
    stretch = ring.send[step - 1]
    take = None if stretch is None else kv.new_empty((stretch[1] - stretch[0], *kv.shape[1:]))
    return _Exchange(grad, take, axis, -step, step, 2 * step + 1)


class _Exchange:
    """A send and a receive under way; every rank starts its exchanges in the same order, so none waits for another for ever."""

    def __init__(self, give: Tensor | None, take: Tensor | None, axis: Axis, to: int, source: int, tag: int) -> None:
        ops = []
        # Both stay referenced until the transfer is over.
        self._give, self._take = give, take
        if give is not None:
            ops.append(dist.P2POp(dist.isend, give, axis.ranks[(axis.rank + to) % axis.size], axis.group, tag))
        if take is not None:
            ops.append(dist.P2POp(dist.irecv, take, axis.ranks[(axis.rank + source) % axis.size], axis.group, tag))
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def take(self) -> Tensor | None:
        """Wait for the transfer and return what was received."""
        for work in self._works:
            work.wait()
        return self._take


def local_index(num_tokens: int, axis: Axis, comm: str) -> Tensor:
    """Which of the N tokens this rank holds, in its order; int64 [N / cp]."""
    if comm == "ulysses":
        return torch.arange(num_tokens).chunk(axis.size)[axis.rank]
    size = num_tokens // (2 * axis.size)
    first, second = axis.rank, 2 * axis.size - 1 - axis.rank
    return torch.cat([torch.arange(first * size, (first + 1) * size), torch.arange(second * size, (second + 1) * size)])


def slices(cu_seqlens: list[int], num_tokens: int, axis: Axis) -> list[Slice]:
    """The rank's two slices, from the documents' borders over the whole stream."""
    size = num_tokens // (2 * axis.size)
    return [_slice(cu_seqlens, part * size, (part + 1) * size) for part in (axis.rank, 2 * axis.size - 1 - axis.rank)]


def _slice(cu: list[int], q0: int, q1: int) -> Slice:
    cu_q, cu_k, k0 = [0], [0], None
    for start, end in itertools.pairwise(cu):
        lo, hi = max(start, q0), min(end, q1)
        if hi <= lo:
            continue
        k0 = start if k0 is None else k0
        cu_q.append(hi - q0)
        cu_k.append(hi - k0)
    assert k0 is not None, "a slice without tokens"
    q_lens = [b - a for a, b in itertools.pairwise(cu_q)]
    k_lens = [b - a for a, b in itertools.pairwise(cu_k)]
    return Slice(k0, q1, torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32), max(q_lens), max(k_lens))


def split(batch: Batch, axis: Axis, comm: str) -> Batch:
    """This rank's tokens, labels and positions, and its plan of attention; done on the CPU, before the batch moves to the device.

    A stream that 2 x cp does not divide is filled up by a document of padding.
    """
    if axis.size == 1:
        return batch
    batch = _filled(batch, 2 * axis.size)
    real_N = batch.real_N
    num_tokens, cu = batch.tokens_N.numel(), batch.cu_seqlens.tolist()
    index = local_index(num_tokens, axis, comm)
    return replace(
        batch,
        tokens_N=batch.tokens_N[index],
        labels_N=batch.labels_N[index],
        positions=batch.positions[..., index],
        real_N=None if real_N is None else real_N[index],
        slices=slices(cu, num_tokens, axis) if comm == "allgather" else None,
        ring=plan(cu, num_tokens, axis) if comm == "ring" else None,
        vision=None if batch.vision is None else _own_visual_tokens(batch.vision, index, num_tokens),
    )


def _own_visual_tokens(vision: VisionBatch, index: Tensor, num_tokens: int) -> VisionBatch:
    # All ranks of the group encode all images, so that their towers run in step. What a rank keeps reaches its own loss alone:
    # the gradients of the towers are parts, which the reduction over dp x cp adds up.
    token_index_N = torch.full((num_tokens,), -1)
    token_index_N[index] = torch.arange(index.numel())
    return share_of(vision, token_index_N)


def _filled(batch: Batch, multiple: int) -> Batch:
    missing = -batch.tokens_N.numel() % multiple
    if not missing:
        return batch
    return replace(
        batch,
        tokens_N=pad(batch.tokens_N, (0, missing)),
        labels_N=pad(batch.labels_N, (0, missing), value=IGNORE),
        positions=pad(batch.positions, (0, missing)),
        real_N=pad(torch.ones(batch.tokens_N.numel(), dtype=torch.bool) if batch.real_N is None else batch.real_N, (0, missing)),
        cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + missing]),
        max_seqlen=max(batch.max_seqlen, missing),
    )


def attend_across(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, plan: Batch, axis: Axis, backend: str = "auto") -> Tensor:
    """Causal attention of this rank's queries over the whole stream's keys, in the way that the split has prepared.

    Shapes: q (n, H, d), k and v (n, G, d) with n = N / cp; returns (n, H, d).
    """
    if plan.ring is not None:
        return _attend_ring(q_NHd, k_NGd, v_NGd, plan.ring, axis)
    if plan.slices is not None:
        return _attend_gathered(q_NHd, k_NGd, v_NGd, plan.slices, axis, backend)
    return _attend_exchanged(q_NHd, k_NGd, v_NGd, plan.cu_seqlens, plan.max_seqlen, axis, backend)


def _attend_gathered(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, parts: list[Slice], axis: Axis, backend: str = "auto") -> Tensor:
    """Attention over the keys and values of all ranks, gathered."""
    kv = _natural_order(all_gather(torch.stack([k_NGd, v_NGd], dim=1), axis), axis.size)
    outs = []
    for part, q in zip(parts, q_NHd.chunk(2), strict=True):
        k, v = kv[part.k0 : part.k1].unbind(1)
        outs.append(attend(q, k, v, part.cu_q, part.cu_k, part.max_q, part.max_k, causal=True, backend=backend))
    return torch.cat(outs)


def _natural_order(x: Tensor, cp: int) -> Tensor:
    """From (rank 0's two slices, rank 1's two slices, ...) to the order of the stream."""
    parts = x.chunk(2 * cp)
    return torch.cat([parts[2 * i] if i < cp else parts[2 * (2 * cp - 1 - i) + 1] for i in range(2 * cp)])


def _attend_exchanged(
    q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, cu_seqlens: Tensor, max_seqlen: int, axis: Axis, backend: str = "auto"
) -> Tensor:
    """Attention of H / cp heads over the whole stream, between two all-to-alls.

    Where there are fewer key/value heads than ranks, each is sent to the ranks whose query heads use it.

    Source: DeepSpeed Ulysses, arXiv 2309.14509.
    """
    copies = max(1, axis.size // k_NGd.shape[1])
    heads = [q_NHd, *(x.repeat_interleave(copies, dim=1) for x in (k_NGd, v_NGd))]
    shares = [x.unflatten(1, (axis.size, -1)) for x in heads]
    ones = [1] * axis.size
    sent = torch.cat(shares, dim=2).transpose(0, 1)
    whole = all_to_all(sent, ones, ones, axis).flatten(0, 1)
    q, k, v = whole.split([x.shape[2] for x in shares], dim=1)
    out = attend(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, backend=backend)
    back = all_to_all(out.unflatten(0, (axis.size, -1)), ones, ones, axis)
    return back.transpose(0, 1).flatten(1, 2)
