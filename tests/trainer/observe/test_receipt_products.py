"""Which products a receipt counts as float32."""

import pytest
import torch
from torch import nn

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.observe.ranges import range_
from playbook_trainer.observe.receipt import Observer, observing
from playbook_trainer.torch.model.balance import Balance
from playbook_trainer.torch.parallel.tensor import linear_cross_entropy


def test_a_product_counts_as_float32_where_its_result_is():
    narrow = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    observer = Observer(nn.Linear(1, 1), {})
    with observing(observer):
        torch.mm(narrow, narrow)
    assert observer.counters["float32_products"] == 0
    with observing(observer):
        torch.mm(narrow, narrow, out_dtype=torch.float32)  # 16-bit factors, float32 sums: a router on a GPU
        torch.mm(narrow.float(), narrow.float())
    assert observer.counters["float32_products"] == 2
    with observing(observer), range_("loss"):
        torch.mm(narrow, narrow, out_dtype=torch.float32)
    assert observer.counters["float32_products"] == 2, "the head's gradient is summed in float32 in every run"


@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_router_product_of_transformer_engine_counts_by_its_result(monkeypatch, dtype, products):
    """On a GPU megatron-core's router multiplies by a kernel that no operator of torch stands for."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    from playbook_trainer.megatron import hooks

    def gemm(weight, rows, out_dtype, **_):
        return (torch.zeros(rows.shape[0], weight.shape[0], dtype=out_dtype),)

    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm, raising=False)
    observer = Observer(nn.Linear(1, 1), {})
    rows, weight = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)
    with hooks.announced(nn.Linear(1, 1)), observing(observer):
        moe_utils.router_gating_linear(rows, weight, None, dtype)
    assert observer.counters["float32_products"] == products
    assert moe_utils.te_general_gemm is gemm, "as it was, once nobody observes"


@pytest.mark.parametrize(("chunk", "count"), [(16, 1), (4, 4), (5, 4)])
def test_chunks_of_logits_are_counted(chunk, count):
    observer = Observer(nn.Linear(1, 1), {})
    x, w, labels = torch.zeros(16, 8, requires_grad=True), torch.zeros(32, 8, requires_grad=True), torch.zeros(16, dtype=torch.int64)
    with observing(observer):
        linear_cross_entropy(x, w, labels, Axis("tp"), chunk)
    assert observer.counters["loss_chunks"] == count


@pytest.mark.parametrize(("weight", "count"), [(0.1, 1), (0.0, 0)])
def test_losses_that_balance_experts_are_counted(weight, count):
    observer = Observer(nn.Linear(1, 1), {})
    scores = torch.randn(6, 4, requires_grad=True)
    chosen = scores.softmax(1).topk(2, 1)
    with observing(observer):
        Balance(4, Axes(), weight, False, torch.device("cpu")).route(scores, (chosen.indices, chosen.values), False)
    assert observer.counters["balance_losses"] == count
