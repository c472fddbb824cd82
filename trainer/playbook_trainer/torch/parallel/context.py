"""Context parallelism: each rank holds a share of the token stream, and attention reaches the rest in one of three ways.

allgather: keys and values of all ranks are gathered. ring: they travel block by block (see `ring`). For both, the stream of N tokens is
cut into 2 x cp slices and rank r holds slices r and 2 cp - 1 - r, so that every rank has the same share of the causal triangle.
ulysses: an all-to-all gives each rank the whole stream for its share of the heads, so rank r holds the r-th of cp equal stretches.
Documents may cross slices: a slice's queries see the keys from the start of their own document.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from playbook_trainer.axes import Axis
from playbook_trainer.data.batch import IGNORE, Batch, Slice, VisionBatch, share_of
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.parallel import ring
from playbook_trainer.torch.parallel.comm import all_gather, all_to_all


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
        ring=ring.plan(cu, num_tokens, axis) if comm == "ring" else None,
        vision=None if batch.vision is None else _own_visual_tokens(batch.vision, index, num_tokens),
    )


def _own_visual_tokens(vision: VisionBatch, index: Tensor, num_tokens: int) -> VisionBatch:
    # All ranks of the group encode all images, so that their towers run in step. What a rank keeps reaches its own loss alone:
    # the gradients of the towers are parts, which the reduction over dp x cp adds up.
    place_N = torch.full((num_tokens,), -1)
    place_N[index] = torch.arange(index.numel())
    return share_of(vision, place_N)


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
        return ring.attend_ring(q_NHd, k_NGd, v_NGd, plan.ring, axis)
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
