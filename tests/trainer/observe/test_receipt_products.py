"""Which products a receipt counts as float32."""

import torch
from torch import nn

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
