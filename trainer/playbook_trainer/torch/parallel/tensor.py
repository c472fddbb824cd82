"""Tensor parallelism: the borders of its regions, and embedding and loss over vocabulary rows that each rank holds a share of.

With sequence parallelism, activations outside the regions are cut along the tokens: a region begins with an all-gather and ends with a
reduce-scatter, in place of nothing and an all-reduce. Source: arXiv 2205.05198, section 4.2.2.

Suffixes: N tokens, D hidden size, W vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.data.batch import IGNORE, Batch, share_of
from playbook_trainer.observe.ranges import tally
from playbook_trainer.torch.model.recompute import recomputed
from playbook_trainer.torch.parallel.comm import all_gather, copy_to, gather_plain, join, reduce_from, reduce_scatter, split

CHUNK = 4096
"""Tokens whose logits exist at once: 4096 x 151,936 in 32 bits are 2.3 GiB."""


def enter(x: Tensor, axes: Axes) -> Tensor:
    """All tokens, at the entry of a region; the backward pass adds up the ranks' gradients."""
    return all_gather(x, axes.tp) if axes.sequence_parallel else copy_to(x, axes.tp)


def entered(x: Tensor, axes: Axes) -> AbstractContextManager[Tensor]:
    """As `enter`; what reads the tokens in the block keeps only this rank's, and gathers all again in its backward pass.

    Source: arXiv 2205.05198, section 4.2.2: without it, the inputs of a region's matrices would be kept whole on every rank.
    """
    return recomputed(axes.sequence_parallel, partial(enter, axes=axes), x)


def leave(x: Tensor, axes: Axes) -> Tensor:
    """The sum of the ranks' parts, at the exit of a region: of all tokens, or of this rank's with sequence parallelism."""
    return reduce_scatter(x, axes.tp) if axes.sequence_parallel else reduce_from(x, axes.tp)


def embed(tokens_N: Tensor, weight_WD: Tensor, axes: Axes) -> Tensor:
    """Token embeddings; with tensor parallelism each rank looks up its own rows and the sum joins them."""
    tp = axes.tp
    if tp.size == 1:
        return embedding(tokens_N, weight_WD)
    local = tokens_N - tp.rank * weight_WD.shape[0]
    is_local = (local >= 0) & (local < weight_WD.shape[0])
    x_ND = embedding(torch.where(is_local, local, 0), weight_WD) * is_local.unsqueeze(1)
    return leave(x_ND, axes)


LossRows = Callable[[Tensor, Tensor, Tensor, Axis, bool], tuple[Tensor, Tensor]]
"""(logits, targets among this rank's rows, which labels count, axis, whether gradients are wanted) to the summed loss and the gradient of
the logits, in their precision; it may overwrite them."""


def linear_cross_entropy(
    x_ND: Tensor, weight_WD: Tensor, labels_N: Tensor, tp: Axis, chunk: int = CHUNK, rows: LossRows | None = None
) -> Tensor:
    """The summed cross-entropy of `x @ weight.T` against the labels, in float32, a chunk of tokens at a time.

    Loss and gradients are made in one pass over the logits, so that no more than a chunk of them ever exists.
    With tensor parallelism each rank holds the logits of its own vocabulary rows; maxima and sums are joined over the axis, while the
    gradient of `x` is this rank's part of it.
    """
    return _LinearCrossEntropy.apply(x_ND, weight_WD, labels_N, tp, chunk, rows or plain_rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_WD: Tensor, labels_N: Tensor, tp: Axis, chunk: int, rows: LossRows) -> Tensor:
        """The summed loss in nats; both gradients are made here, `chunk` tokens at a time, so that logits never exist at once."""
        loss = x_ND.new_zeros((), dtype=torch.float32)
        need = x_ND.requires_grad or weight_WD.requires_grad
        grad_x = torch.empty_like(x_ND) if need else None
        grad_w = torch.zeros_like(weight_WD, dtype=torch.float32) if weight_WD.requires_grad else None
        for x, labels, grad in zip(
            x_ND.split(chunk), labels_N.split(chunk), (x_ND if grad_x is None else grad_x).split(chunk), strict=True
        ):
            tally("loss_chunks")
            target = labels - tp.rank * weight_WD.shape[0]
            part, probs = rows(x @ weight_WD.t(), target, labels != IGNORE, tp, need)
            loss += part
            if need:
                torch.mm(probs, weight_WD, out=grad)
            if grad_w is not None:
                _add_product(grad_w, probs.t(), x)
        if need:
            ctx.save_for_backward(grad_x, grad_w)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        scale = grads[0]
        grad_x = grad_x * scale.to(grad_x.dtype)
        return grad_x, None if grad_w is None else (grad_w * scale).to(grad_x.dtype), None, None, None, None


def _add_product(sum_WD: Tensor, a_WN: Tensor, b_ND: Tensor) -> None:
    """Add `a @ b` to float32 sums in place; on a GPU the product of 16-bit factors adds to them itself, unrounded."""
    if a_WN.is_cuda and a_WN.dtype == b_ND.dtype == torch.bfloat16:
        torch.addmm(sum_WD, a_WN, b_ND, out_dtype=torch.float32, out=sum_WD)
    else:
        sum_WD += a_WN @ b_ND


def plain_rows(logits: Tensor, target: Tensor, valid: Tensor, tp: Axis, need: bool) -> tuple[Tensor, Tensor]:
    """The reference: softmax in float32, one operator after the other."""
    wide, keep = logits.float(), valid.float()
    lse = _logsumexp(wide, tp)
    loss = ((lse - _target_logit(wide, target, tp)) * keep).sum()
    if not need:
        return loss, logits
    # In 32 bits `wide` is `logits` itself, which nobody reads again.
    probs = wide.sub_(lse.unsqueeze(1)).exp_()
    inside = (target >= 0) & (target < probs.shape[1])
    probs.scatter_add_(1, target.clamp(0, probs.shape[1] - 1).unsqueeze(1), -inside.to(probs.dtype).unsqueeze(1))
    return loss, probs.mul_(keep.unsqueeze(1)).to(logits.dtype)


def _logsumexp(logits: Tensor, tp: Axis) -> Tensor:
    if tp.size == 1:
        return logits.logsumexp(1)
    top = logits.amax(1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    total = (logits - top.unsqueeze(1)).exp_().sum(1)
    dist.all_reduce(total, group=tp.group)
    return top + total.log()


def _target_logit(logits: Tensor, target: Tensor, tp: Axis) -> Tensor:
    inside = (target >= 0) & (target < logits.shape[1])
    value = logits.gather(1, target.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1) * inside
    if tp.size > 1:
        dist.all_reduce(value, group=tp.group)
    return value


# Sequence parallelism: outside tensor-parallel regions a rank holds an equal stretch of its tp group's tokens.


def local_tokens(num_tokens: int, axes: Axes) -> int:
    """Number of tokens that a rank holds between layers, out of those of its tp group."""
    return num_tokens // axes.tp.size if axes.sequence_parallel else num_tokens


def routed(real_N: Tensor | None, axes: Axes) -> Tensor | None:
    """Which of the tokens that this rank routes are real, from those of its tp group; None where all are."""
    return real_N.chunk(axes.tp.size)[axes.tp.rank] if real_N is not None and axes.expert_tokens_cut else real_N


def cut(batch: Batch, axes: Axes) -> Batch:
    """The batch with the visual tokens of this rank's stretch; tokens, labels and positions are needed whole inside the regions."""
    if batch.vision is None or not axes.sequence_parallel:
        return batch
    num = local_tokens(batch.tokens_N.numel(), axes)
    token_index_N = torch.full((batch.tokens_N.numel(),), -1)
    token_index_N[axes.tp.rank * num : (axes.tp.rank + 1) * num] = torch.arange(num)
    return replace(batch, vision=share_of(batch.vision, token_index_N))


# From the attention grid to the expert grid and back, around the dispatcher.
# Every rank of an etp group computes its own columns of the same rows, so all of them need the same tokens, and no token may reach two
# etp groups. Three cases:
# in common etp = tp, tokens not cut: the tp ranks have the same tokens already, and the partial sums are all-reduced cut sequence
# parallelism: tokens are gathered over etp, the partial sums reduce-scattered to be cut etp differs from tp, tokens not cut: each tp rank
# takes its share first, and the shares are joined again at the end
# Gathering before the dispatch moves each token once per etp rank; gathering the routed rows, as Megatron-LM does, would move top-k times
# that. Suffixes: n tokens of this rank on the attention grid, N of its etp group, K experts per token, D hidden size.


class Fold:
    """Parallel folding: redistributes tokens between the attention layout (tp) and the expert layout (etp) around a MoE layer."""

    def __init__(self, axes: Axes) -> None:
        self.tp, self.etp = axes.tp, axes.etp
        self.cut = axes.expert_tokens_cut
        self.splits = self.cut and not axes.sequence_parallel

    def own(self, x_nD: Tensor) -> Tensor:
        """The tokens that this rank routes."""
        return split(x_nD, self.tp) if self.splits else x_nD

    def gather(self, x_nD: Tensor, expert_nK: Tensor, prob_nK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of this rank's etp group, with their experts and probabilities."""
        if not self._gathers:
            return copy_to(x_nD, self.etp), expert_nK, copy_to(prob_nK, self.etp)
        return all_gather(x_nD, self.etp), gather_plain(expert_nK, self.etp), all_gather(prob_nK, self.etp)

    def reduce(self, y_ND: Tensor) -> Tensor:
        """The sums over etp of this rank's tokens, from its columns' part of the sums of the whole group's."""
        y_nD = reduce_scatter(y_ND, self.etp) if self._gathers else reduce_from(y_ND, self.etp)
        return join(y_nD, self.tp) if self.splits else y_nD

    @property
    def _gathers(self) -> bool:
        # At tp 1, or with tokens cut, the ranks of an etp group hold different tokens.
        return self.cut or self.tp.size == 1
