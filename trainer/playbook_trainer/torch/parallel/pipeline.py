"""One optimizer step's forward and backward passes: micro-batches in turn, or 1F1B over pipeline stages, plain or interleaved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from playbook_trainer.axes import Axes
from playbook_trainer.data.batch import Batch
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.model.decoder import Decoder
from playbook_trainer.torch.parallel.tensor import local_tokens

# Interleaved 1F1B: each stage holds several chunks of the model, so that a pipeline fills and drains in shorter steps.
# Chunks are numbered through the model; chunk c belongs to stage c modulo pp. Every rank works out the whole schedule, tick by tick: in a
# tick each stage runs at most one pass, and what the passes have made is exchanged in one batch. A rank's exchange in a tick waits only
# for the same tick of its peers, so no order of arrival can lock the stages, two of them included.


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


def _forward_backward_interleaved(model: Decoder, batches: list[Batch], labels: Tensor, axes: Axes) -> Tensor:
    """As `pipeline.forward_backward`, over all chunks of this rank."""
    total = torch.zeros((), device=labels.device)
    chunks = axes.pp.size * len(model.chunks)
    pending: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def run(now: Pass, received: Tensor | None) -> Tensor | None:
        if not now.forward:
            x, out = pending.pop((now.chunk, now.microbatch))
            with range_("backward"):
                torch.autograd.backward(out, received)
            return None if x is None else x.grad
        x = None if received is None else received.requires_grad_()
        with range_("forward"):
            out = model(batches[now.microbatch], x, chunk=now.chunk // axes.pp.size)
        if now.chunk == chunks - 1:
            total.add_(out.detach())
            out = out / labels
        pending[now.chunk, now.microbatch] = (x, out)
        return out.detach()

    _run(schedule(training_order, axes.pp.size, len(model.chunks), len(batches)), run, model, batches[0], axes)
    return total


def losses(model: Decoder, batches: list[Batch], axes: Axes) -> list[Tensor]:
    """The summed loss of each batch, on the last stage; nothing on the others."""
    losses_of_batches: list[Tensor] = []

    def run(now: Pass, received: Tensor | None) -> Tensor:
        out: Tensor = model(batches[now.microbatch], received, chunk=now.chunk // axes.pp.size)
        if now.chunk == axes.pp.size * len(model.chunks) - 1:
            losses_of_batches.append(out)
        return out

    _run(schedule(forward_order, axes.pp.size, len(model.chunks), len(batches)), run, model, batches[0], axes)
    return losses_of_batches


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
        own_pass = tick[pp.rank]
        out = None if own_pass is None else run(own_pass, inbox.pop(own_pass, None))
        ops = []
        for sender, stage_pass in enumerate(tick):
            taking_pass = None if stage_pass is None else stage_pass.then(chunks)
            if taking_pass is None:
                continue
            if sender == pp.rank:
                assert out is not None
                ops.append(dist.P2POp(dist.isend, out.contiguous(), pp.ranks[taking_pass.chunk % pp.size], pp.group))
            elif taking_pass.chunk % pp.size == pp.rank:
                inbox[taking_pass] = torch.empty(shape, dtype=dtype, device=device)
                ops.append(dist.P2POp(dist.irecv, inbox[taking_pass], pp.ranks[sender], pp.group))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()


def forward_backward(model: Decoder, batches: list[Batch], labels: Tensor, axes: Axes) -> Tensor:
    """Accumulate gradients of (summed loss / labels) over the micro-batches; returns this rank's summed loss (zero before the last stage).

    `labels` is the global number of labels of the step, so that every label weighs the same however the batch is cut.
    """
    if len(model.chunks) > 1:
        return _forward_backward_interleaved(model, batches, labels, axes)
    if axes.pp.size > 1:
        return _one_forward_one_backward(model, batches, labels, axes)
    total = torch.zeros((), device=labels.device)
    for batch in batches:
        with range_("forward"):
            loss = model(batch)
        total += loss.detach()
        if loss.requires_grad:  # not where only the tower is trained and the micro-batch has no image
            with range_("backward"):
                (loss / labels).backward()
    return total


def _one_forward_one_backward(model: Decoder, batches: list[Batch], labels: Tensor, axes: Axes) -> Tensor:
    """1F1B: a stage runs as many forward passes ahead as stages follow it, then alternates.

    Source: PipeDream-Flush, arXiv 2006.09503, section 2.2; schedule as in Megatron-LM, arXiv 2104.04473, figure 3.
    """
    total = torch.zeros((), device=labels.device)
    ahead = min(axes.pp.size - axes.pp.rank - 1, len(batches))
    pending: deque[tuple[Tensor | None, Tensor]] = deque()
    link = _Link(axes, batches[0], model)

    def forward(batch: Batch, x: Tensor | None) -> Tensor:
        with range_("forward"):
            out: Tensor = model(batch, x)
        if axes.is_last_stage:
            total.add_(out.detach())
            out = out / labels
        pending.append((x, out))
        return out

    def backward(grad: Tensor | None) -> Tensor | None:
        x, out = pending.popleft()
        with range_("backward"):
            torch.autograd.backward(out, grad)
        return None if x is None else x.grad

    for batch in batches[:ahead]:
        link.send_activation(forward(batch, link.receive_activation()))
    steady = len(batches) - ahead
    x = link.receive_activation() if steady else None
    for i in range(steady):
        out = forward(batches[ahead + i], x)
        grad = link.send_activation_receive_gradient(out)
        grad_in = backward(grad)
        x = link.send_gradient(grad_in, then_receive=i + 1 < steady)
    for _ in range(ahead):
        link.send_gradient(backward(link.receive_gradient()), then_receive=False)
    return total


class _Link:
    """The wires to the stages before and after; every tensor on them has the same shape."""

    def __init__(self, axes: Axes, batch: Batch, model: Decoder) -> None:
        self.axes = axes
        self.shape = (local_tokens(batch.tokens_N.numel(), axes), model.config.hidden_size)
        self.dtype, self.device = model.activation_dtype, batch.tokens_N.device
        self.before = None if axes.is_first_stage else axes.pp.ranks[axes.pp.rank - 1]
        self.after = None if axes.is_last_stage else axes.pp.ranks[axes.pp.rank + 1]

    def receive_activation(self) -> Tensor | None:
        """The next micro-batch's hidden states; None on the first stage."""
        return None if self.before is None else self._run(take=self.before).requires_grad_()

    def receive_gradient(self) -> Tensor | None:
        """The gradient of an earlier output; None on the last stage."""
        return None if self.after is None else self._run(take=self.after)

    def send_activation(self, out: Tensor) -> None:
        """Send hidden states on, without waiting for anything."""
        if self.after is not None:
            self._run(give=(out.detach(), self.after))

    def send_activation_receive_gradient(self, out: Tensor) -> Tensor | None:
        """Hidden states to the next stage, in one exchange with the gradient that comes back from it."""
        if self.after is None:
            return None
        return self._run(give=(out.detach(), self.after), take=self.after)

    def send_gradient(self, grad: Tensor | None, *, then_receive: bool) -> Tensor | None:
        """The gradient to the stage before, in one exchange with the next hidden states from it."""
        if self.before is None or grad is None:
            return None
        if then_receive:
            return self._run(give=(grad, self.before), take=self.before).requires_grad_()
        self._run(give=(grad, self.before))
        return None

    def _run(self, give: tuple[Tensor, int] | None = None, take: int | None = None) -> Tensor:
        group, ops, out = self.axes.pp.group, [], torch.empty(self.shape if take is not None else 0, dtype=self.dtype, device=self.device)
        if give is not None:
            ops.append(dist.P2POp(dist.isend, give[0].contiguous(), give[1], group))
        if take is not None:
            ops.append(dist.P2POp(dist.irecv, out, take, group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out


def _losses(model: Decoder, batches: list[Batch], axes: Axes) -> list[Tensor]:
    """The summed loss of each batch, on the last stage; nothing on the others."""
    if len(model.chunks) > 1:
        return losses(model, batches, axes)
    link, losses_of_batches = _Link(axes, batches[0], model), []
    for batch in batches:
        out = model(batch, link.receive_activation())
        link.send_activation(out)
        if axes.is_last_stage:
            losses_of_batches.append(out)
    return losses_of_batches


@torch.no_grad()
def evaluate(model: Decoder, batches: list[Batch], axes: Axes) -> Tensor:
    """Summed loss and number of labels of the batches, each counted by one of the ranks that share it; float64 [2]."""
    sums = torch.zeros(2, device=batches[0].tokens_N.device, dtype=torch.float64)
    for batch, loss in zip(batches, _losses(model, batches, axes), strict=axes.is_last_stage):
        if axes.tp.rank == 0:
            sums[0] += loss.double()
            sums[1] += batch.num_loss if axes.cp.rank == 0 else 0
    return sums


# Tied embeddings over pipeline stages: the first stage holds the matrix for the input, the last for the output layer.
# Both start from the same values (a parameter's first value follows from its name) and add their gradients before every update, so that
# they stay equal to the last bit.


@torch.no_grad()
def sum_gradients(model: Decoder, axes: Axes) -> None:
    """Add the other stage's gradient of the tied matrix to this rank's; the two stages cut the matrix alike, so parts meet parts."""
    if not model.config.tie_word_embeddings or axes.pp.size == 1 or not (axes.is_first_stage or axes.is_last_stage):
        return
    grad = model.embed.weight.grad
    if grad is None:  # frozen
        return
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if not local.numel():
        return
    other = axes.pp.ranks[-1 if axes.is_first_stage else 0]
    received = torch.empty_like(local)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, local.contiguous(), other, axes.pp.group), dist.P2POp(dist.irecv, received, other, axes.pp.group)]
    )
    for request in work:
        request.wait()
    local.add_(received)
