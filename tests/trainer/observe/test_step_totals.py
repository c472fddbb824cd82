"""The sums of a step travel as one tensor and come back under their names."""

from __future__ import annotations

import math

import torch

from playbook_trainer.observe.totals import StepTotals

CPU = torch.device("cpu")


def test_what_is_packed_is_unpacked_under_the_same_names() -> None:
    given = StepTotals(**{name: float(i) for i, name in enumerate(StepTotals._fields, start=2)})
    packed = given._replace(loss=torch.tensor(3.0), squared_grad_norm=torch.tensor(2.0)).pack(CPU)
    assert packed.dtype == torch.float64
    assert StepTotals.unpack(packed).read() == given


def test_two_ranks_add_up_in_every_field() -> None:
    one, two = StepTotals(9.0, 1.0, images=2.0), StepTotals(16.0, 3.0, stop_requested=1.0)
    both = StepTotals.unpack(one.pack(CPU) + two.pack(CPU))
    assert both.grad_norm == 5.0
    assert both.read() == StepTotals(25.0, 4.0, stop_requested=1.0, images=2.0)


def test_a_loss_or_norm_that_is_no_number_is_seen_and_counts_are_not_asked() -> None:
    for field in ("loss", "squared_grad_norm"):
        assert not StepTotals.unpack(StepTotals(1.0, 1.0)._replace(**{field: math.inf}).pack(CPU)).is_finite()
    assert StepTotals.unpack(StepTotals(1.0, 1.0).pack(CPU)).is_finite()
