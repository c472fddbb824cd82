"""Selective recompute: outputs that are cheaper to make again than to keep until the backward pass.

    with recomputed(on, f, x, w) as y:      # y = f(x, w)
        z = linear(y, v)                    # saves y for its backward pass; here, it saves how to make y again

What saves `y` inside the block keeps a promise instead; the first use in the backward pass runs `f` once more, with gradients, and the
backward pass of `f` continues from that run. The inputs are kept; as a rule something keeps them anyway. The idea is that of
megatron-core's CheckpointWithoutOutput (core/tensor_parallel/random.py); here no storage is emptied and refilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from playbook_trainer.observe.ranges import range_


@contextmanager
def recomputed(on: bool, f: Callable[..., Tensor], *inputs: Tensor) -> Iterator[Tensor]:
    """`f(*inputs)`, which nothing in the block keeps, where `on`; plainly `f(*inputs)` otherwise.

    Every tensor that needs a gradient must be among the inputs.
    """
    if not (on and torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        yield f(*inputs)
        return
    rerun = _Again(f)
    out = _Run.apply(rerun, *inputs)
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    key = out.untyped_storage().data_ptr()

    def pack(t: Tensor) -> Any:
        if t.untyped_storage().data_ptr() == key and t.dtype == out.dtype:
            return rerun.promise(t)
        return t if outer is None else outer[0](t)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Promise):
            return saved.redeem()
        return saved if outer is None else outer[1](saved)

    # Only the innermost pair of hooks is called, so what is not ours is handed to the pair outside.
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield out


class _Again:
    """One call of a function, its inputs kept by autograd, and, during the backward pass, its second run."""

    def __init__(self, f: Callable[..., Tensor]) -> None:
        self.f = f
        self.ctx: Any = None
        self.inputs: list[Tensor] = []
        self.out: Tensor | None = None

    def promise(self, t: Tensor) -> _Promise:
        return _Promise(self, t.size(), t.stride(), t.storage_offset())

    def run(self) -> Tensor:
        """The output with its graph; made at the first call."""
        if self.out is None:
            with range_("recompute"), torch.enable_grad():
                self.inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.ctx.saved_tensors]
                self.out = self.f(*self.inputs)
        return self.out


class _Promise:
    """A view of the output, to be made when it is asked for."""

    __slots__ = ("again", "offset", "size", "stride")

    def __init__(self, rerun: _Again, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self.again, self.size, self.stride, self.offset = rerun, size, stride, offset

    def redeem(self) -> Tensor:
        return self.again.run().detach().as_strided(self.size, self.stride, self.offset)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rerun: _Again, *inputs: Tensor) -> Tensor:
        ctx.again, rerun.ctx = rerun, ctx
        ctx.save_for_backward(*inputs)
        return rerun.f(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        rerun = ctx.again
        out = rerun.run()
        inputs = [t for t in rerun.inputs if t.requires_grad]
        grads_of_inputs = iter(torch.autograd.grad(out, inputs, grads[0], allow_unused=True))
        result = (None, *(next(grads_of_inputs) if t.requires_grad else None for t in rerun.inputs))
        # The context and this object know each other; the collector is off during training, so the knot is untied by hand.
        rerun.ctx, rerun.out, rerun.inputs, ctx.again = None, None, [], None
        return result
