"""Sums of weighted rows by the kernel against float64: tests/trainer runs this as a program under Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from playbook_trainer.torch.kernels.experts import weigh


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm of `b`."""
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


def weighted_sum(tokens: int, k: int, width: int, *, columns_first: bool) -> None:
    """Values and both gradients, of rows that lie row by row or column by column."""
    torch.manual_seed(0)
    place, weight, grad = torch.randperm(tokens * k), torch.rand(tokens, k), torch.randn(tokens, width)
    rows = torch.randn(tokens * k, width)
    given = (rows.t().contiguous().t() if columns_first else rows.clone()).requires_grad_()
    ours = weight.clone().requires_grad_()
    out = weigh(given, place, ours)
    out.backward(grad)
    exact, scale = rows.double().requires_grad_(), weight.double().requires_grad_()
    plain = (exact[place].view(tokens, k, width) * scale.unsqueeze(2)).sum(1)
    plain.backward(grad.double())
    assert given.grad is not None
    assert ours.grad is not None
    assert exact.grad is not None
    assert scale.grad is not None
    errors = relative(out, plain), relative(given.grad, exact.grad), relative(ours.grad, scale.grad)
    assert max(errors) < 1e-6, (tokens, k, width, columns_first, errors)


if __name__ == "__main__":
    for shape in ((1, 2, 64), (5, 3, 513), (7, 1, 130)):
        for columns_first in (False, True):
            weighted_sum(*shape, columns_first=columns_first)
    print("all cases passed")
