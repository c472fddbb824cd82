"""What is made of a GPU's timeline: names, launches, and how much of a collective's time something else was computed."""

from playbook_trainer.observe.receipt import GpuEvent, count_kernels, gpu_events


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
