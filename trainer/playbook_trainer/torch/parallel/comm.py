"""Collectives that carry gradients. Each is the identity on an axis of one rank.

Suffixes follow the caller; dimension 0 is the one that is gathered, scattered or exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from playbook_trainer.axes import Axis


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' tensors end to end along dimension 0; the backward pass reduce-scatters."""
    return x if axis.size == 1 else _AllGather.apply(x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the sum over ranks; the backward pass all-gathers."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    """Rows to each rank by `send`, rows from each by `receive`; the backward pass sends them back."""
    return x if axis.size == 1 else _AllToAll.apply(x, list(send), list(receive), axis)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """`x`; the backward pass sums the gradient over the axis (entry of a tensor-parallel region)."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis; the backward pass hands the gradient through (exit of a tensor-parallel region)."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def split(x: Tensor, axis: Axis) -> Tensor:
    """This rank's stretch of rows that all ranks have in common; the backward pass gathers the stretches' gradients."""
    return x if axis.size == 1 else _Split.apply(x, axis)


def join(x: Tensor, axis: Axis) -> Tensor:
    """The ranks' stretches end to end, for all in common from here; the backward pass keeps this rank's stretch of the gradient."""
    return x if axis.size == 1 else _Join.apply(x, axis)


def gather_plain(x: Tensor, axis: Axis) -> Tensor:
    """As `all_gather`, without a gradient."""
    if axis.size == 1:
        return x
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=axis.group)
    return out


def exchange_counts(counts: Tensor, axis: Axis) -> Tensor:
    """Row i of the result is what rank i meant for this rank; counts (ranks, ...)."""
    if axis.size == 1:
        return counts
    out = torch.empty_like(counts)
    dist.all_to_all_single(out, counts.contiguous(), group=axis.group)
    return out


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=axis.group)
    return out


def _stretch(x: Tensor, axis: Axis) -> Tensor:
    size = x.shape[0] // axis.size
    assert size * axis.size == x.shape[0], "rows that do not divide over the ranks"
    return x.narrow(0, axis.rank * size, size).contiguous()


def _exchange(x: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=axis.group)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_plain(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.axis), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return gather_plain(grads[0], ctx.axis), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _stretch(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return gather_plain(grads[0], ctx.axis), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_plain(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _stretch(grads[0], ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return _exchange(x, send, receive, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.axis), None, None, None


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        out = x.contiguous().clone()
        dist.all_reduce(out, group=axis.group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None
