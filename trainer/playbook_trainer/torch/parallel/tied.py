"""Tied embeddings over pipeline stages: the first stage holds the matrix for the input, the last for the output layer.

Both start from the same values (a parameter's first value follows from its name) and add their gradients before every update, so that they
stay equal to the last bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from playbook_trainer.axes import Axes
from playbook_trainer.torch.model.decoder import Decoder


@torch.no_grad()
def sum_gradients(model: Decoder, axes: Axes) -> None:
    """Add the other stage's gradient of the tied matrix to this rank's; the two stages cut the matrix alike, so parts meet parts."""
    if not model.config.tie_word_embeddings or axes.pp.size == 1 or not (axes.is_first_stage or axes.is_last_stage):
        return
    grad = model.embed.weight.grad
    if grad is None:  # frozen
        return
    mine = grad.to_local() if isinstance(grad, DTensor) else grad
    if not mine.numel():
        return
    other = axes.pp.ranks[-1 if axes.is_first_stage else 0]
    theirs = torch.empty_like(mine)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine.contiguous(), other, axes.pp.group), dist.P2POp(dist.irecv, theirs, other, axes.pp.group)]
    )
    for request in work:
        request.wait()
    mine.add_(theirs)
