"""Weights in two halves are exact, and an update of halves is that of whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from playbook_trainer.config.tree import OptimizerConfig
from playbook_trainer.torch import optimizer
from playbook_trainer.torch.optimizer import Shard, make


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def every_border() -> Tensor:
    """All upper halves of finite numbers and infinity, of both signs, with lower halves on both sides of where rounding turns, as float32."""
    high = torch.cat([torch.arange(0x7F80), torch.arange(0x8000, 0xFF80)])
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    found = torch.cat([((high << 16)[:, None] + low).flatten(), torch.tensor([0x7F800000, 0xFF800000])])
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().view(torch.float32)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_halves_hold_every_finite_weight_and_the_upper_one_is_its_cast(moments):
    torch.manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 20,)).int().view(torch.float32)
    whole = torch.cat([every_border(), anything[~anything.isnan()]])
    second = torch.rand(whole.shape).to(moments)
    second[::3] = 0
    high, low, signed = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16), second.clone()
    optimizer.split(whole, high, low, signed)
    assert torch.equal(bits(high), bits(whole.bfloat16()))
    assert torch.equal(bits(optimizer.join(high, low, signed)), bits(whole))
    assert torch.equal(bits(signed.abs()), bits(second))
    ties = (bits(whole) & 0x1FFFF) == 0x8000
    assert torch.equal(signed.signbit(), ties)


def test_what_is_no_number_stays_none():
    found = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1]).int().view(torch.float32)
    high, low, second = found.bfloat16(), torch.empty(4, dtype=torch.int16), torch.ones(4)
    optimizer.split(found, high, low, second)
    assert high.isnan().all()
    assert optimizer.join(high, low, second).isnan().all()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_an_update_of_halves_is_that_of_whole_weights(moments, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 128)
    torch.manual_seed(0)
    start = torch.randn(40, 50)
    start.view(-1)[:500] = every_border()[200_000:200_500]
    config = OptimizerConfig(lr=1e-2, moments_dtype=moments)
    params = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.bfloat16())]
    optimizers: list[Any] = []
    for param, master in zip(params, ("fp32", "remainder"), strict=True):
        optimizers.append(make([Shard("w", param, param, True, False)], config.model_copy(update={"master_weights": master})))
    whole, split = optimizers
    split.put(params[1], start)
    clip = torch.tensor(0.37)
    for _ in range(4):
        grad = torch.randn_like(start).bfloat16()
        params[0].grad, params[1].grad = grad.float() * clip, grad
        split.scale = clip
        whole.step()
        split.step()
        assert torch.equal(bits(split.whole(params[1])), bits(params[0].detach()))
        assert torch.equal(bits(params[1].detach()), bits(params[0].detach().bfloat16()))
        ours, theirs = split.state[params[1]], whole.state[params[0]]
        assert torch.equal(bits(ours["exp_avg"]), bits(theirs["exp_avg"]))
        assert torch.equal(bits(ours["exp_avg_sq"].abs()), bits(theirs["exp_avg_sq"]))
        assert ours["remainder"].dtype == torch.int16
