"""Context parallelism: each rank holds two slices of the token stream, and gathers keys and values.

The stream of N tokens is cut into 2 x cp slices; rank r holds slices r and 2 cp - 1 - r, so that every rank has the same share of the
causal triangle. Documents may cross slices: a slice's queries see the keys from the start of their own document.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from playbook_trainer.data.batch import Batch, Slice
from playbook_trainer.models.attention import attend
from playbook_trainer.parallel.axes import Axis
from playbook_trainer.parallel.comm import all_gather


def local_index(num_tokens: int, axis: Axis) -> Tensor:
    """Which of the N tokens this rank holds, in its order; int64 [N / cp]."""
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


def split(batch: Batch, axis: Axis) -> Batch:
    """This rank's tokens, labels and positions, and its slices; done on the CPU, before the batch moves to the device."""
    if axis.size == 1:
        return batch
    index = local_index(batch.tokens_N.numel(), axis)
    return replace(
        batch,
        tokens_N=batch.tokens_N[index],
        labels_N=batch.labels_N[index],
        positions=batch.positions[..., index],
        slices=slices(batch.cu_seqlens.tolist(), batch.tokens_N.numel(), axis),
    )


def attend_sliced(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, parts: list[Slice], axis: Axis) -> Tensor:
    """Causal attention of this rank's queries over the whole stream's keys.

    Shapes: q (n, H, d), k and v (n, G, d) with n = N / cp; returns (n, H, d).
    """
    kv = _natural_order(all_gather(torch.stack([k_NGd, v_NGd], dim=1), axis), axis.size)
    outs = []
    for part, q in zip(parts, q_NHd.chunk(2), strict=True):
        k, v = kv[part.k0 : part.k1].unbind(1)
        outs.append(attend(q, k, v, part.cu_q, part.cu_k, part.max_q, part.max_k, causal=True))
    return torch.cat(outs)


def _natural_order(x: Tensor, cp: int) -> Tensor:
    """From (rank 0's two slices, rank 1's two slices, ...) to the order of the stream."""
    parts = x.chunk(2 * cp)
    return torch.cat([parts[2 * i] if i < cp else parts[2 * (2 * cp - 1 - i) + 1] for i in range(2 * cp)])
