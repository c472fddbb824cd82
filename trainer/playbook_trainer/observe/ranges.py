"""Ranges: named spans of the step, for Nsight Systems (NVTX), for Kineto, and for the receipt.

    with range_("attention") as r:
        x = r.enter(x)
        ...
        y = r.exit(y)

`enter` and `exit` mark the same span in the backward pass, as `attention.bwd`: autograd runs `exit`'s backward first. They are the
identity, and nothing at all while no sink listens, so a timed run pays one list check per range. An embedding looks its input up, so no
gradient reaches a mark there: `until` marks the end by the weight.

Names: step, data, forward, embedding, vision, projector, decoder, attention, mlp, router, dispatch, experts, combine, loss (with the head's
product), backward, optimizer; and where the switches of that name are on, recompute,
offload (a layer whose saved tensors leave) and prefetch (they start on their way back).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

BACKWARD = ".bwd"


class Sink(Protocol):
    """Receives the beginning and end of named ranges of a step, and counts."""

    def push(self, name: str) -> None:
        """A range begins on this thread."""

    def pop(self, name: str) -> None:
        """The innermost range ends on this thread."""

    def tally(self, name: str, amount: int) -> None:
        """Add `amount` to the counter `name`."""


# Annotation is about the process, not about one object in it; the list is empty in a timed run.
_sinks: list[Sink] = []
_open: list[str] = []
"""The ranges of the forward pass that are open, outermost first; kept without sinks too, for the report of a hang."""


def open_ranges() -> list[str]:
    """Names of the ranges that are open now, outermost first."""
    return list(_open)


@contextmanager
def listening(sink: Sink) -> Iterator[None]:
    """A block in which ranges and counts are sent to `sink`."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def tally(name: str, amount: int = 1) -> None:
    """Add `amount` to the counter `name` of every sink; receipts report these counters."""
    for sink in _sinks:
        sink.tally(name, amount)


def moment(on_gpu: bool) -> Any:
    """Now, on the host's clock, or where the GPU has come to once it has done what was issued until now."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(a: Any, b: Any) -> float:
    """Seconds between two moments of one clock; waits for the second."""
    if isinstance(a, float):
        return float(b - a)
    b.synchronize()
    return float(a.elapsed_time(b)) / 1000


class NvtxSink:
    """Ranges as NVTX push/pop ranges, which Nsight Systems records."""

    def __init__(self) -> None:
        import nvtx

        self._push, self._pop = nvtx.push_range, nvtx.pop_range

    def push(self, name: str) -> None:
        """Push on this thread's NVTX stack."""
        self._push(name)

    def pop(self, name: str) -> None:
        """Pop this thread's NVTX stack."""
        self._pop()

    def tally(self, name: str, amount: int) -> None:
        """Do nothing: traces hold no counters."""


class KinetoSink:
    """Ranges as record_function spans, which torch.profiler records."""

    def __init__(self) -> None:
        self._open: defaultdict[str, list[Any]] = defaultdict(list)

    def push(self, name: str) -> None:
        """Enter a record_function."""
        span = torch.profiler.record_function(name)
        span.__enter__()
        self._open[name].append(span)

    def pop(self, name: str) -> None:
        """Leave the innermost record_function of this name."""
        if self._open[name]:
            self._open[name].pop().__exit__(None, None, None)

    def tally(self, name: str, amount: int) -> None:
        """Do nothing: traces hold no counters."""


class range_:
    """A named span of the step, forward and (through `enter` and `exit`) backward."""

    __slots__ = ("_entered", "_on", "_until", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._on = self._entered = False
        self._until: Tensor | None = None

    def __enter__(self) -> range_:
        _open.append(self.name)
        if _sinks:
            self._on = True
            for sink in _sinks:
                sink.push(self.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        _open.pop()
        if self._on:
            for sink in reversed(_sinks):
                sink.pop(self.name)

    def enter(self, x: Tensor) -> Tensor:
        """`x`; in the backward pass, the end of the span."""
        self._entered = self._on and x.requires_grad
        return _Mark.apply(x, self, False) if self._entered else x

    def exit(self, y: Tensor) -> Tensor:
        """`y`; in the backward pass, the beginning of the span, where that pass also reaches its end (not below what is frozen)."""
        return _Mark.apply(y, self, True) if self._entered and y.requires_grad else y

    def until(self, weight: Tensor) -> Tensor:
        """`weight`, a leaf; in the backward pass, the end of the span, once its gradient has been added to what it had."""
        if self._on and weight.is_leaf and weight.requires_grad:
            self._entered, self._until = True, weight
        return weight

    def _pass(self, *, opens: bool) -> None:
        for sink in _sinks:
            (sink.push if opens else sink.pop)(self.name + BACKWARD)
        if opens and self._until is not None:
            self._end_with(self._until)

    def _end_with(self, weight: Tensor) -> None:
        def added(*_: Any) -> None:
            handle.remove()
            self._pass(opens=False)

        with torch.enable_grad():
            view: Any = weight.view_as(weight)
        # Registered in the backward pass, the hook runs after those that gather or reduce gradients, and once for each beginning.
        handle = view.grad_fn.next_functions[0][0].register_hook(added)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: range_, opens: bool) -> Tensor:
        ctx.span, ctx.opens = span, opens
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        ctx.span._pass(opens=ctx.opens)
        return grads[0], None, None
