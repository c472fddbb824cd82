"""The fast paths against the plain ones, on a GPU."""

from __future__ import annotations

import pytest
import torch

from playbook_trainer.config import ModelConfig
from playbook_trainer.models.attention import _plain, attend
from playbook_trainer.models.decoder import Experts, Options

pytestmark = pytest.mark.gpu


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("lengths", [[64], [1, 700, 3, 320], [128] * 8])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_equals_the_plain_path(lengths: list[int], causal: bool) -> None:
    torch.manual_seed(0)
    n = sum(lengths)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    shapes = [(n, 8, 64), (n, 2, 64), (n, 2, 64)]
    fast = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    exact = [t.detach().double().requires_grad_() for t in fast]
    grad = torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16)
    out = attend(*fast, cu, cu, max(lengths), max(lengths), causal=causal)
    ref = _plain(*exact, cu, cu, causal)
    out.backward(grad)
    ref.backward(grad.double())
    assert relative(out, ref) < 1e-2
    for a, b in zip(fast, exact, strict=True):
        assert relative(a.grad, b.grad) < 2e-2


@pytest.mark.parametrize("counts", [[100, 3, 0, 57, 1, 0, 7, 88], [0, 0, 0, 0, 0, 0, 0, 5], [128] * 8])
def test_grouped_experts_equal_the_loop(counts: list[int]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        name="t",
        vocab_size=64,
        hidden_size=256,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        num_experts=8,
        top_k=2,
        expert_ffn_size=192,
    )
    loop, grouped = Experts(config, Options()).cuda().bfloat16(), Experts(config, Options(grouped=True)).cuda().bfloat16()
    with torch.no_grad():
        for a, b in zip(loop.parameters(), grouped.parameters(), strict=True):
            b.copy_(a.normal_(std=0.05))
    x = torch.randn(sum(counts), 256, device="cuda", dtype=torch.bfloat16)
    rows = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [m(r, torch.tensor(counts, device="cuda")) for m, r in zip((loop, grouped), rows, strict=True)]
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    assert relative(outs[1], outs[0]) < 1e-2
    assert relative(rows[1].grad, rows[0].grad) < 1e-2
    for a, b in zip(grouped.parameters(), loop.parameters(), strict=True):
        assert relative(a.grad, b.grad) < 1e-2
