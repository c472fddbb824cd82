"""Activations that autograd keeps are counted, and parameters are not, wherever these lie at that moment."""

import torch
from torch import Tensor, nn

from playbook_trainer.observe.receipt import Observer, observing


class Gathered(nn.Module):
    """A linear layer whose weight has memory only while it is used, as FSDP's have."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))
        self.kept = self.weight.detach().clone()
        self.weight.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.untyped_storage().resize_(self.kept.numel() * self.kept.element_size())
        with torch.no_grad():
            self.weight.copy_(self.kept)
        return x @ self.weight


class Swapped(nn.Module):
    """A linear layer whose parameter is of another type between steps."""

    class Shard(nn.Parameter):
        pass

    def __init__(self, size: int) -> None:
        super().__init__()
        self.whole = [nn.Parameter(torch.randn(size, size))]
        self.register_parameter("weight", Swapped.Shard(torch.zeros(1)))

    def forward(self, x: Tensor) -> Tensor:
        self._parameters["weight"] = nn.Parameter(self.whole[0].detach().clone())
        return x @ self.weight


def kept(*layers: nn.Module, rows: int = 4, size: int = 8) -> int:
    model = nn.Sequential(*layers)
    observer = Observer(model, {})
    x = torch.randn(rows, size, requires_grad=True)
    with observing(observer):
        model(x).sum().backward()
    return observer.saved.peak


def test_parameters_are_left_out_wherever_they_lie():
    one = 4 * 8 * 4  # bytes of an activation
    plain = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    assert kept(*plain) == 3 * one, "the input of each"
    assert kept(Gathered(8), Gathered(8)) == 2 * one
    assert kept(Swapped(8), *plain, Gathered(8)) == 5 * one


def test_a_storage_that_is_saved_twice_counts_once():
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin()

    x_and_exp = 2 * 4 * 8 * 4  # exp keeps its result, which sin keeps too; the multiplication keeps its input

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).exp().sin()

    assert kept(Twice()) == x_and_exp // 2
    assert kept(Square()) == x_and_exp
