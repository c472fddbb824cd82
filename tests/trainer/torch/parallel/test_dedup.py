"""The dedup dispatcher, rank by rank in one process, against a dense sum over experts in float64."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook_trainer.axes import Axis
from playbook_trainer.torch.parallel import dispatch
from playbook_trainer.torch.parallel.dispatch import Dedup, count_sorted


class Wires:
    """Collectives among threads that stand for ranks; each rank posts what it sends and reads what was sent to it."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.posts = threading.Barrier(ranks), [None] * ranks
        self.rows_sent = 0

    def exchange(self, parts, axis):
        self.posts[axis.rank] = parts
        self.barrier.wait(timeout=600)
        got = [self.posts[source][axis.rank] for source in range(axis.size)]
        self.barrier.wait(timeout=600)
        return got

    def exchange_counts(self, counts, axis):
        return torch.cat(self.exchange(list(counts.split(1)), axis))

    def all_to_all(self, x, send, receive, axis):
        assert x.shape[0] == sum(send)
        return _Exchange.apply(x, send, receive, axis, self)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, axis, wires):
        ctx.how = (send, receive, axis, wires)
        got = wires.exchange(list(x.split(send)), axis)
        assert [len(g) for g in got] == receive
        return torch.cat(got)

    @staticmethod
    def backward(ctx, grad):
        send, receive, axis, wires = ctx.how
        got = wires.exchange(list(grad.split(receive)), axis)
        assert [len(g) for g in got] == send
        return torch.cat(got), None, None, None, None


def dispatched(monkeypatch, ranks, experts, x, chosen, prob, weight, grad, dtype=torch.float64):
    """Outputs and gradients of all ranks' tokens, through the dispatcher; an expert is a matrix."""
    wires = Wires(ranks)
    monkeypatch.setattr(dispatch, "all_to_all", wires.all_to_all)
    monkeypatch.setattr(dispatch, "exchange_counts", wires.exchange_counts)
    held = experts // ranks

    def rank(r):
        axis = Axis("ep", ranks, r)
        xs, ps = x[r].to(dtype).requires_grad_(), prob[r].clone().requires_grad_()
        ws = weight[r * held : (r + 1) * held].to(dtype).clone().requires_grad_()
        dispatcher = Dedup(experts, axis)
        rows, counts, route = dispatcher.dispatch(xs, chosen[r], ps)
        assert counts.sum() == len(rows)
        pieces = [piece @ ws[e] for e, piece in enumerate(rows.split(counts.tolist()))]
        y = dispatcher.combine(torch.cat(pieces), route)
        y.backward(grad[r].to(dtype))
        return y.detach(), xs.grad, ps.grad, ws.grad, sum(route.send)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def dense(x, chosen, prob, weight, grad):
    x, prob, weight = (t.detach().clone().requires_grad_() for t in (torch.cat(x), torch.cat(prob), weight))
    y = (torch.einsum("nd,nkde->nke", x, weight[torch.cat(chosen)]) * prob.unsqueeze(2)).sum(1)
    y.backward(torch.cat(grad))
    return y.detach(), x.grad, prob.grad, weight.grad


def make(experts, top_k, lengths, size, seed, only=None):
    g = torch.Generator().manual_seed(seed)
    pool = experts if only is None else only
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x, grad = [draw(n, size) for n in lengths], [draw(n, size) for n in lengths]
    chosen = [
        torch.stack([torch.randperm(pool, generator=g)[:top_k] for _ in range(n)]) if n else torch.zeros(0, top_k).long() for n in lengths
    ]
    prob = [torch.rand(n, top_k, generator=g, dtype=torch.float64) for n in lengths]
    return x, chosen, prob, draw(experts, size, size), grad


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_outputs_and_all_gradients_equal_the_dense_sum(data):
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    experts = ranks * data.draw(st.integers(1, 4))
    pool = data.draw(st.integers(1, experts), label="experts that anyone chooses")
    top_k = data.draw(st.integers(1, pool))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    inputs = make(experts, top_k, lengths, 5, data.draw(st.integers(0, 1000)), only=pool)
    with pytest.MonkeyPatch.context() as patch:
        parts = dispatched(patch, ranks, experts, *inputs)
    for mine, exact in zip(zip(*parts, strict=True), dense(*inputs), strict=False):
        torch.testing.assert_close(torch.cat(mine), exact, rtol=1e-12, atol=1e-12)


def test_bf16_tokens_are_weighed_and_added_in_float32(monkeypatch):
    x, chosen, prob, weight, grad = make(256 * 2, 8, [64, 64], 16, 0)
    x, weight, grad = ([t.bfloat16().double() for t in v] if isinstance(v, list) else v.bfloat16().double() for v in (x, weight, grad))
    prob = [p.float() for p in prob]
    parts = dispatched(monkeypatch, 2, 512, x, chosen, prob, weight, grad, dtype=torch.bfloat16)
    exact = dense(x, chosen, [p.double() for p in prob], weight, grad)
    assert parts[0][0].dtype == torch.bfloat16
    assert parts[0][2].dtype == torch.float32
    for mine, whole in zip(zip(*parts, strict=True), exact, strict=False):
        got = torch.cat(mine).double()
        assert (got - whole).norm() / whole.norm() < 8e-3


def test_a_pair_travels_once(monkeypatch):
    inputs = make(32, 8, [200] * 4, 4, 1)
    parts = dispatched(monkeypatch, 4, 32, *inputs)
    chosen = torch.cat(inputs[1])
    pairs = sum(len(set((row // 8).tolist())) for row in chosen)
    assert sum(p[4] for p in parts) == pairs
    assert 8 / (pairs / len(chosen)) > 2.1, "top-8 over 4 ranks: under half the rows of an all-to-all"


@given(st.lists(st.integers(0, 6), max_size=30))
def test_sorted_keys_are_counted(keys):
    expected = torch.bincount(torch.tensor(keys, dtype=torch.int64), minlength=7)[:5]
    assert torch.equal(count_sorted(torch.tensor(sorted(keys), dtype=torch.int64), 5), expected)
