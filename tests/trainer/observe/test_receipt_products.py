"""Which products a receipt counts as float32."""

import pytest
import torch
from torch import nn

from playbook_trainer.observe.ranges import range_
from playbook_trainer.observe.receipt import Observer, observing


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
