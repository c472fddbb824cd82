"""What a receipt counts: products in float32, chunks and losses, activations that autograd keeps, and kernels and copies on a GPU's timeline."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.observe.ranges import range_
from playbook_trainer.observe.receipt import GpuEvent, Observer, count_kernels, gpu_events, observing
from playbook_trainer.torch.model.balance import Balance
from playbook_trainer.torch.parallel.tensor import linear_cross_entropy

WIDE = {"out_dtype": torch.float32}


@pytest.mark.parametrize(
    ("factors", "result", "inside", "count"),
    [
        (torch.bfloat16, {}, "step", 0),
        (torch.bfloat16, WIDE, "step", 1),  # a router on a GPU
        (torch.float32, {}, "step", 1),
        (torch.float32, {}, None, 1),
        (torch.bfloat16, WIDE, "loss", 0),  # the head's gradient is summed in float32 in every run
    ],
)
def test_a_product_counts_as_float32_where_its_result_is(factors, result, inside, count):
    observer, matrix = Observer(nn.Linear(1, 1), {}), torch.empty(4, 4, dtype=factors, device="meta")
    with observing(observer), range_(inside) if inside else nullcontext():
        torch.mm(matrix, matrix, **result)
    assert observer.counters["float32_products"] == count


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


def test_names_lose_their_arguments_and_copies_are_no_kernels():
    found = count_kernels(
        [
            GpuEvent("void at::native::vectorized<4, float>(int)", 0, 1),
            GpuEvent("void at::native::vectorized<2, half>(int)", 1, 2),
            GpuEvent("k" * 300, 2, 3),
            GpuEvent("Memcpy DtoH (Device -> Pinned)", 3, 4),
            GpuEvent("Memcpy HtoD (Pageable -> Device)", 4, 5),
            GpuEvent("Memset (Device)", 5, 6),
            GpuEvent("cudaLaunchKernel", 0, 1, on_gpu=False),
            GpuEvent("cudaGraphLaunch", 1, 2, on_gpu=False),
        ]
    )
    assert found.names == {"void at::native::vectorized": 2, "k" * 120: 1}
    assert (found.counters["graph_launches"], found.counters["copies_to_host"]) == (1, 1)


def test_the_share_of_a_collective_beside_which_something_computes():
    gemm = [GpuEvent("gemm", 0, 10), GpuEvent("gemm", 5, 12), GpuEvent("gemm", 40, 50)]
    gather = [GpuEvent("ncclDevKernel_AllGather_RING_LL", 8, 16), GpuEvent("ncclDevKernel_AllGather_RING_LL", 44, 46)]
    exposed = [GpuEvent("ncclDevKernel_SendRecv", 20, 30)]
    counters = count_kernels([*gemm, *gather, *exposed]).counters
    assert counters["hidden_percent_all_gather"] == 60.0  # 4 of 8 and 2 of 2 microseconds
    assert counters["hidden_percent_send_recv"] == 0.0
    assert "hidden_percent_all_reduce" not in counters, "what did not run is hidden by nothing"
    beside_another = count_kernels([*exposed, GpuEvent("ncclDevKernel_AllGather_RING_LL", 20, 30)]).counters
    assert beside_another["hidden_percent_send_recv"] == 0.0, "a collective computes nothing"


def test_the_share_of_the_step_in_which_the_gpu_computes():
    work = [GpuEvent("gemm", 100, 110), GpuEvent("gemm", 105, 120), GpuEvent("Memcpy DtoD (Device -> Device)", 130, 135)]
    waits = [GpuEvent("ncclDevKernel_AllGather_RING_LL", 150, 200), GpuEvent("cudaStreamSynchronize", 0, 900, on_gpu=False)]
    assert count_kernels([*work, *waits]).counters["gpu_computing_percent"] == 25.0  # 25 of 100 microseconds
    assert "gpu_computing_percent" not in count_kernels(waits[1:]).counters, "off the GPU nothing is known"


def test_an_exchange_of_experts_by_another_library_computes_nothing():
    exchange = [
        GpuEvent("void deep_ep::intranode::dispatch<8, 768>(int4*)", 20, 30),
        GpuEvent("void hybrid_ep::combine_kernel<16>(int)", 30, 40),
    ]
    counters = count_kernels(
        [GpuEvent("gemm(ncclWindow_t)", 0, 10), *exchange, GpuEvent("ncclDevKernel_ReduceScatter_RING_LL", 0, 40)]
    ).counters
    assert counters["gpu_computing_percent"] == 25.0
    assert counters["hidden_percent_reduce_scatter"] == 25.0


def test_what_the_profiler_recorded_is_what_it_lists_itself():
    import torch

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, torch.profiler.record_function("a range"):
        x = torch.ones(3).add(1)
    assert x.sum() == 6
    found = list(gpu_events(profiler))
    listed = [e for e in profiler.events() if not e.is_user_annotation]
    assert sorted(e.name for e in found) == sorted(e.name for e in listed)
    assert "a range" not in {e.name for e in found}
    lengths = {e.name: e.time_range.elapsed_us() for e in listed}
    assert all(abs(e.end - e.begin - lengths[e.name]) < 0.01 and not e.on_gpu for e in found)
