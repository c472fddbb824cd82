"""Sums of weighted rows by the kernel against float64: tests/trainer runs this as a program under Triton's interpreter."""

from __future__ import annotations

import torch
from measures import errors
from torch import Tensor

from playbook_trainer.torch.kernels.experts import weigh


def weighted_sum(tokens: int, k: int, width: int, *, columns_first: bool) -> None:
    """Values and both gradients, of rows that lie row by row or column by column."""
    torch.manual_seed(0)
    place, weight, grad = torch.randperm(tokens * k), torch.rand(tokens, k), torch.randn(tokens, width)
    rows = torch.randn(tokens * k, width)
    given = rows.t().contiguous().t() if columns_first else rows

    def plain(rows: Tensor, weight: Tensor) -> Tensor:
        return (rows[place].view(tokens, k, width) * weight.unsqueeze(2)).sum(1)

    assert max(errors(lambda rows, weight: weigh(rows, place, weight), plain, [given, weight], grad)) < 1e-6


if __name__ == "__main__":
    for shape in ((1, 2, 64), (5, 3, 513), (7, 1, 130)):
        for columns_first in (False, True):
            weighted_sum(*shape, columns_first=columns_first)
    print("all cases passed")
