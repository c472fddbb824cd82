"""Ring attention: keys and values travel around the context-parallel ranks, block by block, while the block before is computed.

In step i a rank computes with the keys of the rank i places before it. A block goes straight from its owner to the rank that computes
with it, and holds only the keys that some document of that rank needs: with packed documents most blocks are small or empty, and an empty
block is neither sent nor computed. With two slices per rank (see `context`) a block between two ranks is always one rectangle of one
document, without a mask. Source: Ring Attention, arXiv 2310.01889; the merge of blocks is `models.attention_blocks`.

Suffixes: N tokens of this rank, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from playbook_trainer.axes import Axis
from playbook_trainer.data.batch import Block, Ring
from playbook_trainer.torch.model import attention_blocks as blocks
from playbook_trainer.torch.model.attention_blocks import Borders


def plan(cu_seqlens: list[int], num_tokens: int, axis: Axis) -> Ring:
    """What this rank sends and computes in each step, from the documents' borders over the whole stream."""
    cp, size = axis.size, num_tokens // (2 * axis.size)
    first, second = axis.rank * size, (2 * cp - 1 - axis.rank) * size
    places = np.concatenate([np.arange(first, first + size), np.arange(second, second + size)])
    documents = np.searchsorted(cu_seqlens, places, side="right")
    cu = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1, [2 * size]])
    receive, send = [], []
    for step in range(1, cp):
        block = _rectangle(cu_seqlens, size, cp, axis.rank, (axis.rank - step) % cp)
        receive.append(None if block is None else _block(*block))
        given = _rectangle(cu_seqlens, size, cp, (axis.rank + step) % cp, axis.rank)
        send.append(None if given is None else given[2:])
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


def _document(cu: list[int], place: int) -> tuple[int, int]:
    i = bisect_right(cu, place)
    return cu[i - 1], cu[i]


def _block(q0: int, q1: int, k0: int, k1: int) -> Block:
    return Block(q0, q1, k0, k1, torch.tensor([0, q1 - q0], dtype=torch.int32), torch.tensor([0, k1 - k0], dtype=torch.int32))


def attend_ring(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ring: Ring, axis: Axis) -> Tensor:
    """Causal attention of this rank's queries over the whole stream's keys, (N, H, d)."""
    return _RingAttention.apply(q_NHd, k_NGd, v_NGd, ring, axis)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ring: Ring, axis: Axis) -> Tensor:
        kv = torch.stack([k_NGd, v_NGd], dim=1)
        coming = _send_keys(kv, ring, axis, 1)
        part, lse_HN = blocks.forward(q_NHd, kv[:, 0], kv[:, 1], _own(ring))
        out_NHd = part.to(blocks.wide(part.dtype))
        for step, block in enumerate(ring.receive, 1):
            keys, coming = coming.take(), _send_keys(kv, ring, axis, step + 1)
            if block is not None:
                assert keys is not None
                rows = slice(block.q0, block.q1)
                part, part_lse = blocks.forward(q_NHd[rows], keys[:, 0], keys[:, 1], _whole(block))
                blocks.merge(out_NHd[rows], lse_HN[:, rows], part, part_lse)
        out_NHd = out_NHd.to(q_NHd.dtype)
        ctx.save_for_backward(q_NHd, kv, out_NHd, lse_HN)
        ctx.ring, ctx.axis = ring, axis
        return out_NHd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_NHd, kv, out_NHd, lse_HN = ctx.saved_tensors
        ring, axis, grad_NHd = ctx.ring, ctx.axis, grads[0].contiguous()
        coming = _send_keys(kv, ring, axis, 1)
        dq, dk, dv = blocks.backward(grad_NHd, q_NHd, kv[:, 0], kv[:, 1], out_NHd, lse_HN, _own(ring))
        dq_NHd, dkv = dq.to(blocks.wide(dq.dtype)), torch.stack([dk, dv], dim=1).to(blocks.wide(dk.dtype))
        returning: list[tuple[int, _Exchange]] = []
        for step, block in enumerate(ring.receive, 1):
            keys, coming = coming.take(), _send_keys(kv, ring, axis, step + 1)
            grad_keys = None
            if block is not None:
                assert keys is not None
                rows = slice(block.q0, block.q1)
                dq, dk, dv = blocks.backward(
                    grad_NHd[rows], q_NHd[rows], keys[:, 0], keys[:, 1], out_NHd[rows], lse_HN[:, rows], _whole(block)
                )
                dq_NHd[rows] += dq
                grad_keys = torch.stack([dk, dv], dim=1)
            returning.append((step, _return_gradients(grad_keys, kv, ring, axis, step)))
            if step > 1:
                _add(dkv, *returning[step - 2], ring)
        _add(dkv, *returning[-1], ring)
        dk_NGd, dv_NGd = dkv.to(kv.dtype).unbind(1)
        return dq_NHd.to(q_NHd.dtype), dk_NGd, dv_NGd, None, None


def _own(ring: Ring) -> Borders:
    return Borders(ring.cu_seqlens, ring.cu_seqlens, ring.max_seqlen, ring.max_seqlen, causal=True)


def _whole(block: Block) -> Borders:
    return Borders(block.cu_q, block.cu_k, block.q1 - block.q0, block.k1 - block.k0, causal=False)


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
