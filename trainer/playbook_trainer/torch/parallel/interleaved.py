"""Interleaved 1F1B: each stage holds several chunks of the model, so that a pipeline fills and drains in shorter steps.

Chunks are numbered through the model; chunk c belongs to stage c modulo pp. Every rank works out the whole schedule, tick by tick: in a tick
each stage runs at most one pass, and what the passes have made is exchanged in one batch. A rank's exchange in a tick waits only for the
same tick of its peers, so no order of arrival can lock the stages, two of them included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from playbook_trainer.axes import Axes
from playbook_trainer.data.batch import Batch
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.model.decoder import Decoder
from playbook_trainer.torch.parallel.sequence import local_tokens


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk, forward or backward."""

    forward: bool
    chunk: int
    microbatch: int

    def then(self, chunks: int) -> Pass | None:
        """The pass of another stage that takes this one's result; None at the ends of the model."""
        chunk = self.chunk + (1 if self.forward else -1)
        return Pass(self.forward, chunk, self.microbatch) if 0 <= chunk < chunks else None

    def needs(self, chunks: int) -> Pass | None:
        """The pass of another stage whose result this one takes."""
        chunk = self.chunk - (1 if self.forward else -1)
        return Pass(self.forward, chunk, self.microbatch) if 0 <= chunk < chunks else None


def training_order(rank: int, pp: int, vpp: int, microbatches: int) -> list[Pass]:
    """A stage's passes: micro-batches in groups of pp through one chunk after the other; as many ahead as keep the later stages busy.

    Source: Megatron-LM, arXiv 2104.04473, section 2.2; `megatron/core/pipeline_parallel/schedules.py`.
    """
    total = microbatches * vpp
    ahead = min(total, 2 * (pp - rank - 1) + (vpp - 1) * pp)
    forward, backward = [], []
    for k in range(total):
        group, inside = divmod(k, pp * vpp)
        chunk, microbatch = inside // pp, group * pp + inside % pp
        forward.append(Pass(True, chunk * pp + rank, microbatch))
        backward.append(Pass(False, (vpp - 1 - chunk) * pp + rank, microbatch))
    steady = [p for pair in zip(forward[ahead:], backward, strict=False) for p in pair]
    return forward[:ahead] + steady + backward[total - ahead :]


def forward_order(rank: int, pp: int, vpp: int, microbatches: int) -> list[Pass]:
    """A stage's passes where nothing goes back."""
    return [Pass(True, chunk, m) for m in range(microbatches) for chunk in range(rank, pp * vpp, pp)]


@cache
def schedule(order: Callable[[int, int, int, int], list[Pass]], pp: int, vpp: int, microbatches: int) -> list[list[Pass | None]]:
    """The pass of each stage in each tick: its next one, as soon as the pass that it needs is over."""
    waiting = [deque(order(rank, pp, vpp, microbatches)) for rank in range(pp)]
    done: set[Pass] = set()
    ticks: list[list[Pass | None]] = []
    while any(waiting):
        now = [q[0] if q and ((need := q[0].needs(pp * vpp)) is None or need in done) else None for q in waiting]
        assert any(now), "an order of passes that waits for itself"
        for queue, ran in zip(waiting, now, strict=True):
            if ran is not None:
                queue.popleft()
                done.add(ran)
        ticks.append(now)
    return ticks


def forward_backward(model: Decoder, batches: list[Batch], labels: Tensor, axes: Axes) -> Tensor:
    """As `pipeline.forward_backward`, over all chunks of this rank."""
    total = torch.zeros((), device=labels.device)
    chunks = axes.pp.size * len(model.chunks)
    held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def run(now: Pass, received: Tensor | None) -> Tensor | None:
        if not now.forward:
            x, out = held.pop((now.chunk, now.microbatch))
            with range_("backward"):
                torch.autograd.backward(out, received)
            return None if x is None else x.grad
        x = None if received is None else received.requires_grad_()
        with range_("forward"):
            out = model(batches[now.microbatch], x, chunk=now.chunk // axes.pp.size)
        if now.chunk == chunks - 1:
            total.add_(out.detach())
            out = out / labels
        held[now.chunk, now.microbatch] = (x, out)
        return out.detach()

    _run(schedule(training_order, axes.pp.size, len(model.chunks), len(batches)), run, model, batches[0], axes)
    return total


def losses(model: Decoder, batches: list[Batch], axes: Axes) -> list[Tensor]:
    """The summed loss of each batch, on the last stage; nothing on the others."""
    found: list[Tensor] = []

    def run(now: Pass, received: Tensor | None) -> Tensor:
        out: Tensor = model(batches[now.microbatch], received, chunk=now.chunk // axes.pp.size)
        if now.chunk == axes.pp.size * len(model.chunks) - 1:
            found.append(out)
        return out

    _run(schedule(forward_order, axes.pp.size, len(model.chunks), len(batches)), run, model, batches[0], axes)
    return found


def _run(
    ticks: list[list[Pass | None]], run: Callable[[Pass, Tensor | None], Tensor | None], model: Decoder, batch: Batch, axes: Axes
) -> None:
    """Run this stage's passes and carry every result to the stage that takes it; all of them have one shape."""
    pp, chunks = axes.pp, axes.pp.size * len(model.chunks)
    shape, dtype, device = (
        (local_tokens(batch.tokens_N.numel(), axes), model.config.hidden_size),
        model.activation_dtype,
        batch.tokens_N.device,
    )
    inbox: dict[Pass, Tensor] = {}
    for tick in ticks:
        own = tick[pp.rank]
        out = None if own is None else run(own, inbox.pop(own, None))
        ops = []
        for sender, made in enumerate(tick):
            taker = None if made is None else made.then(chunks)
            if taker is None:
                continue
            if sender == pp.rank:
                assert out is not None
                ops.append(dist.P2POp(dist.isend, out.contiguous(), pp.ranks[taker.chunk % pp.size], pp.group))
            elif taker.chunk % pp.size == pp.rank:
                inbox[taker] = torch.empty(shape, dtype=dtype, device=device)
                ops.append(dist.P2POp(dist.irecv, inbox[taker], pp.ranks[sender], pp.group))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
