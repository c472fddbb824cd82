"""8-bit products off the GPU, which define the numerics, against float64; the same on a GPU is in tests/gpu/test_switches_gpu.py."""

from __future__ import annotations

import parity
import pytest
import torch
from test_switches import build, document_batch, observed

from playbook_trainer.torch.model import fp8
from playbook_trainer.torch.model.decoder import Options

CPU = torch.device("cpu")
HALF = 2.0**-4
"""e4m3 has three bits behind the point: a normal value moves by at most this share of itself."""
STEP = 2.0**-10
"""Below its normal range e4m3 has steps of 2^-9, so a value moves by at most half of that, in units of its scale."""


def bound(x, scale_x, w, scale_w):
    """The most that rounding both operands can change x @ w.T, value by value: |dx||w| + |x||dw| + |dx||dw|."""
    x, w = x.double().abs(), w.double().abs()
    dx, dw = HALF * x + STEP * scale_x.double(), HALF * w + STEP * scale_w.double()
    return (dx @ w.t() + x @ dw.t() + dx @ dw.t()) * 1.0001 + 1e-30


def wide(scale, values, name):
    if name == "rowwise":
        return scale
    rows = values.shape[0] // scale.shape[0]
    return scale.repeat_interleave(rows, 0).repeat_interleave(fp8.BLOCK, 1)


def operands(m, k, n, spread):
    torch.manual_seed(m + k + n)
    x, w = torch.randn(m, k), torch.randn(n, k) * 0.05
    # Rows, and values within a row, of very different size, and a row of zeros.
    x *= torch.exp(spread * torch.randn(m, 1)) * torch.exp(spread * torch.randn(m, k))
    x[m // 2] = 0
    return x.requires_grad_(), w.requires_grad_(), torch.randn(m, n) * 1e-7


@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
@pytest.mark.parametrize("shape", [(5, 128, 256), (1, 384, 128), (33, 256, 128)])
def test_linear_stays_within_what_rounding_can_do(name, shape, spread):
    x, w, grad = operands(*shape, spread)
    how = fp8.recipe(name, CPU)
    y = fp8.linear(how)(x, w)
    y.backward(grad)
    scales = [wide(f(t.detach())[1], t, name) for f, t in ((how.left, x), (how.right, w))]
    assert bool(((y.double() - x.double() @ w.double().t()).abs() <= bound(x, scales[0], w, scales[1])).all())
    wt = w.detach().t().contiguous()
    scales = [wide(how.left(grad)[1], grad, name), wide(how.right(wt)[1], wt, name)]
    assert bool(((x.grad.double() - grad.double() @ w.double()).abs() <= bound(grad, scales[0], wt, scales[1])).all())
    # The weight gradient is not rounded.
    torch.testing.assert_close(w.grad.double(), grad.double().t() @ x.detach().double(), rtol=1e-4, atol=1e-6 * float(w.grad.abs().max()))


def test_rounding_is_of_the_size_that_the_format_gives_and_no_smaller():
    """A path that quietly multiplies unrounded operands would be far below."""
    x, w, _ = operands(64, 256, 128, 0.0)
    for name in ("rowwise", "blockwise"):
        error = fp8.linear(fp8.recipe(name, CPU))(x, w).double() - x.double() @ w.double().t()
        assert 0.01 < float(error.norm() / (x.double() @ w.double().t()).norm()) < 0.06


def test_one_large_value_harms_a_row_or_a_tile_and_no_more():
    x = operands(8, 256, 128, 0.0)[0]
    spiked = x.detach().clone()
    spiked[3, 200] = 3e4
    for name, untouched in (("rowwise", slice(0)), ("blockwise", slice(0, 128))):
        values, scale = fp8.recipe(name, CPU).left(spiked)
        before, scale_before = fp8.recipe(name, CPU).left(x.detach())
        others = [i for i in range(8) if i != 3]
        assert torch.equal(values[others].float(), before[others].float())
        assert torch.equal(scale[others], scale_before[others])
        assert torch.equal(values[3, untouched].float(), before[3, untouched].float())


@pytest.mark.parametrize("counts", [[100, 3, 0, 57, 1, 0, 7, 88], [0, 0, 0, 0, 0, 0, 0, 5], [16] * 8, [0] * 8])
def test_experts_equal_one_linear_each(counts):
    torch.manual_seed(0)
    how = fp8.recipe("rowwise", CPU)
    x, w = torch.randn(sum(counts), 64, requires_grad=True), torch.randn(8, 32, 64, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y = fp8.grouped(how)(x, w, ends)
    grad = torch.randn_like(y)
    y.backward(grad)
    found = x.grad, w.grad
    x.grad = w.grad = None
    parts = [fp8.linear(how)(part, matrix) for part, matrix in zip(x.split(counts), w, strict=True)]
    torch.cat(parts).backward(grad)
    torch.testing.assert_close(y, torch.cat(parts), rtol=0, atol=0)
    torch.testing.assert_close(found, (x.grad, w.grad), rtol=0, atol=0)


@pytest.mark.parametrize("modules", [["linear"], ["experts"], ["linear", "experts"]])
def test_a_decoder_in_8_bits_is_near_the_plain_one_and_says_what_it_did(modules):
    config = parity.tiny("qwen3_moe_tiny")
    batch = document_batch(config)
    reference, theirs, _ = observed(build(config), batch)
    product, experts = fp8.products("rowwise", modules, CPU)
    options = Options(expert_product=experts) if product is None else Options(linear=product, expert_product=experts)
    loss, ours, observer = observed(build(config, options), batch)
    assert 1e-7 < abs(float(loss / reference) - 1) < 2e-2
    # Forward and input gradient of each; the first layer's projections need the latter too, for the norm before them.
    assert observer.counters["fp8_linear_products"] == ("linear" in modules) * 8 * config.num_layers
    assert observer.counters["fp8_expert_products"] == ("experts" in modules) * 4 * config.num_layers
    # With random weights a token near a tie takes another expert, which no rounding bounds.
    directions = (torch.cat([g.flatten() for g in gradients.values()]) for gradients in (ours, theirs))
    assert float(torch.nn.functional.cosine_similarity(*directions, dim=0)) > 0.9
