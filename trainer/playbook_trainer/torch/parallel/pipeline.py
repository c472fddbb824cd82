"""One optimizer step's forward and backward passes: micro-batches in turn, or 1F1B over pipeline stages, plain or interleaved."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from playbook_trainer.axes import Axes
from playbook_trainer.data.batch import Batch
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.model.decoder import Decoder
from playbook_trainer.torch.parallel import interleaved
from playbook_trainer.torch.parallel.sequence import local_tokens


def forward_backward(model: Decoder, batches: list[Batch], labels: Tensor, axes: Axes) -> Tensor:
    """Accumulate gradients of (summed loss / labels) over the micro-batches; returns this rank's summed loss (zero before the last stage).

    `labels` is the global number of labels of the step, so that every label weighs the same however the batch is cut.
    """
    if len(model.chunks) > 1:
        return interleaved.forward_backward(model, batches, labels, axes)
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
        return interleaved.losses(model, batches, axes)
    link, found = _Link(axes, batches[0], model), []
    for batch in batches:
        out = model(batch, link.receive_activation())
        link.send_activation(out)
        if axes.is_last_stage:
            found.append(out)
    return found


@torch.no_grad()
def evaluate(model: Decoder, batches: list[Batch], axes: Axes) -> Tensor:
    """Summed loss and number of labels of the batches, each counted by one of the ranks that share it; float64 [2]."""
    sums = torch.zeros(2, device=batches[0].tokens_N.device, dtype=torch.float64)
    for batch, loss in zip(batches, _losses(model, batches, axes), strict=axes.is_last_stage):
        if axes.tp.rank == 0:
            sums[0] += loss.double()
            sums[1] += batch.num_loss if axes.cp.rank == 0 else 0
    return sums
