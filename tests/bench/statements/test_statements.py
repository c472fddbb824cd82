"""Arithmetic statements against hand sums, and against inputs that must turn them."""

from __future__ import annotations

import math
import random

import pytest

from playbook.errors import ConfigError
from playbook_bench.statements import numerics
from playbook_bench.statements.layouts import interleaving, offload_makes_it_fit, platform_walls, rows_per_rank
from playbook_bench.statements.numerics import coarser, routing_flips
from playbook_bench.statements.utilization import mfu_falls_as_throughput_rises, save_interval

H100 = {"peak_flops_per_s": 989.5e12, "domain": 8, "fast_bytes_per_s": 450e9, "slow_bytes_per_s": 50e9}
GB200 = {"peak_flops_per_s": 2500e12, "domain": 64, "fast_bytes_per_s": 900e9, "slow_bytes_per_s": 50e9}
WALLS = {"model": "deepseek_v3", "ep": 64, "seq_len": 4096, "kernels_per_layer": 60, "launch_s": 5e-6}
LONG = {
    "model": "deepseek_v3", "gpu_gib": 79, "gpus": 256, "seq_len": 131072, "tp": 1, "cp": 32, "pp": 8, "ep": 32, "vpp": 4,
    "recompute": ["mla_up_proj", "layernorm", "moe", "mlp"], "fp8": "blockwise", "global_batch_size": 64,
}  # fmt: skip


def test_the_bubble_of_interleaving_is_that_of_a_hand_sum():
    holds, sentence, figures = interleaving(pp=8, vpp=[1, 4], microbatches=[32])
    assert holds
    assert [r["bubble"] for r in figures["rows"]] == [pytest.approx(7 / 39), pytest.approx(7 / 135)]
    assert "7 -> 31" in sentence
    assert not interleaving(pp=8, vpp=[4, 1], microbatches=[32])[0]
    assert not interleaving(pp=1, vpp=[1, 2], microbatches=[8])[0]


def test_the_walls_of_two_platforms_change_places_with_them():
    assert platform_walls(**WALLS, platforms={"H100": H100, "GB200": GB200})[0]
    assert not platform_walls(**WALLS, platforms={"GB200": GB200, "H100": H100})[0]
    with pytest.raises(ConfigError, match="expected two"):
        platform_walls(**WALLS, platforms={"H100": H100})


def test_offload_makes_a_layout_fit_only_where_the_state_is_what_is_too_much():
    holds, _, figures = offload_makes_it_fit(**LONG)
    assert holds
    assert figures["peak_bytes"] - figures["peak_bytes_with_offload"] == pytest.approx(32.2 * 2**30, rel=0.05)
    assert not offload_makes_it_fit(**{**LONG, "gpu_gib": 141})[0]  # fits as it is
    assert not offload_makes_it_fit(**{**LONG, "gpu_gib": 40})[0]  # does not fit either way
    with pytest.raises(ConfigError, match="expected one of"):
        offload_makes_it_fit(**{**LONG, "model": "deepseek"})


def test_mfu_falls_only_where_throughput_rises_less_than_the_peak():
    row = {"model": "m", "gpu": "H100", "bf16_tflops": 240.5, "bf16_peak": 989.5, "fp8_peak": 1979}
    assert mfu_falls_as_throughput_rises(rows=[{**row, "fp8_tflops": 242.9}])[0]
    assert not mfu_falls_as_throughput_rises(rows=[{**row, "fp8_tflops": 240.0}])[0]
    assert not mfu_falls_as_throughput_rises(rows=[{**row, "fp8_tflops": 500.0}])[0]
    assert not mfu_falls_as_throughput_rises(rows=[])[0]


def test_elements_are_those_of_the_formats():
    e2m1 = numerics.FORMATS["nvfp4"]
    assert [numerics.element(x, e2m1) for x in (0.2, 0.3, 0.7, 1.2, 2.6, 3.4, 4.6, 9.0, -9.0)] == [
        0.0,
        0.5,
        0.5,
        1.0,
        3.0,
        3.0,
        4.0,
        6.0,
        -6.0,
    ]
    torch = pytest.importorskip("torch")
    draw = random.Random(1)
    values = [draw.gauss(0, 100) for _ in range(500)] + [draw.gauss(0, 0.01) for _ in range(500)]
    expected = torch.tensor(values, dtype=torch.float64).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64).tolist()
    e4m3 = numerics.FORMATS["mxfp8"]
    assert [numerics.element(x, e4m3) for x in values] == expected
    narrow = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).tolist()
    assert [numerics.significant(x, 8) for x in torch.tensor(values, dtype=torch.float32).tolist()] == narrow


def test_a_coarser_format_loses_more_and_a_block_of_zeros_stays():
    assert coarser(formats=["mxfp8", "nvfp4"], factor=3)[0]
    assert not coarser(formats=["nvfp4", "mxfp8"], factor=1)[0]
    assert numerics.rounded([0.0] * 20, numerics.FORMATS["nvfp4"]) == [0.0] * 20
    assert all(math.isfinite(x) for x in numerics.rounded([1e30, 1e-30], numerics.FORMATS["mxfp8"]))
    with pytest.raises(ConfigError, match="expected two or more"):
        coarser(formats=["fp6", "nvfp4"], factor=1)


def test_rounding_flips_routing_more_where_more_experts_compete():
    few = routing_flips(experts=8, top_k=2, tokens=500, spread=1.0, least=0.0)[2]["share"]
    many = routing_flips(experts=512, top_k=8, tokens=500, spread=1.0, least=0.0)[2]["share"]
    assert few < many


def test_rows_vary_without_dropping_and_a_larger_capacity_drops_less():
    case = {"tokens": 256, "experts": 32, "top_k": 4, "ranks": 4, "batches": 10}
    holds, _, tight = rows_per_rank(**case, capacity_factor=1.0)
    wide = rows_per_rank(**case, capacity_factor=4.0)[2]
    assert holds
    assert tight["dropped"] > 0 == wide["dropped"]
    assert not rows_per_rank(**{**case, "ranks": 1}, capacity_factor=1.0)[0]  # one rank gets every copy, always


SAVES = {"waits_s": [1, 50], "failures_h": [3], "slack": 0.001, "at_h": 3, "before_s": 50, "after_s": 1, "gain": 0.07}


def test_the_interval_of_saves_is_youngs_and_a_shorter_wait_pays():
    holds, sentence, figures = save_interval(**SAVES)
    assert holds
    assert "every 1039 s" in sentence  # sqrt(2 x 50 x 10800)
    assert figures["lost_before"] == pytest.approx(50 / 1039 + 1039 / 2 / 10800, rel=0.05), "waits, and half an interval for each failure"
    assert all(row["least_lost"] <= row["lost"] <= row["least_lost"] + 1e-4 for row in figures["rows"])
    assert not save_interval(**{**SAVES, "gain": 0.09})[0]
    rare = {**SAVES, "waits_s": [3600], "failures_h": [1]}
    assert not save_interval(**rare)[0], "a wait as long as the time between failures is beyond the rule"
