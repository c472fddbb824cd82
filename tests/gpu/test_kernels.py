"""The fast paths against the plain ones, on a GPU."""

from __future__ import annotations

import pytest
import torch
from measures import errors, relative

from playbook_trainer.config.tree import ModelConfig
from playbook_trainer.torch.model.attention import _plain, attend
from playbook_trainer.torch.model.decoder import Experts, Options
from playbook_trainer.torch.parallel import context as blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [[64], [1, 700, 3, 320], [128] * 8])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_equals_the_plain_path(lengths: list[int], causal: bool) -> None:
    torch.manual_seed(0)
    n = sum(lengths)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    given = [torch.randn(n, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    grad = torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16)
    out, *gradients = errors(
        lambda *t: attend(*t, cu, cu, max(lengths), max(lengths), causal=causal), lambda *t: _plain(*t, cu, cu, causal, None), given, grad
    )
    assert out < 1e-2
    assert max(gradients) < 2e-2


def test_blocks_of_keys_put_together_equal_one_call() -> None:
    """Queries over their own segment, and then over a stretch of an earlier rank's keys, as ring attention does it."""
    torch.manual_seed(0)
    n, before = 384, 256
    exact = [
        torch.randn(s, device="cuda").bfloat16().double().requires_grad_() for s in [(n, 8, 64), (before + n, 2, 64), (before + n, 2, 64)]
    ]
    grad = torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16)
    ends = [torch.tensor([0, size], device="cuda", dtype=torch.int32) for size in (n, before, before + n)]
    ref = _plain(*exact, ends[0], ends[2], True, None)
    ref.backward(grad.double())
    q, k, v = (t.detach().bfloat16() for t in exact)
    own, other = blocks.SegmentBounds(ends[0], ends[0], n, n, causal=True), blocks.SegmentBounds(ends[0], ends[1], n, before, causal=False)
    out, lse = blocks.forward(q, k[before:], v[before:], own)
    assert lse.shape == (8, n)
    assert lse.dtype == torch.float32
    out = out.float()
    blocks.merge(out, lse, *blocks.forward(q, k[:before], v[:before], other))
    error = relative(out, ref)
    first = blocks.backward(grad, q, k[before:], v[before:], out.bfloat16(), lse, own)
    second = blocks.backward(grad, q, k[:before], v[:before], out.bfloat16(), lse, other)
    found = [first[0] + second[0], torch.cat([second[1], first[1]]), torch.cat([second[2], first[2]])]
    gradients = [relative(a, b.grad) for a, b in zip(found, exact, strict=True)]
    print(f"output {error:.1e}, gradients of q, k, v {gradients}")
    assert error < 1e-2
    assert max(gradients) < 2e-2


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
