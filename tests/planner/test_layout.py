"""Layout rules and the arithmetic claims that rest on them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playbook.planner import layout
from playbook_bench.statements.layouts import batch_pressure, dp_floor, min_gpus_families

TINY = {"heads": 4, "kv_heads": 2, "layers": 4, "experts": 8, "seq_len": 256, "micro_batch_size": 1, "global_batch_size": 8}
power = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 3, "tp": 2}, "3 ranks do not divide into tp 2"),
        ({"gpus": 6, "ep": 4}, "6 ranks do not divide into ep 4"),
        ({"gpus": 3, "tp": 3}, "4 attention heads do not divide over tp 3"),
        ({"gpus": 4, "tp": 4, "kv_heads": 3}, "3 key-value heads and tp 4"),
        ({"gpus": 3, "pp": 3}, "4 layers do not divide into pp 3"),
        ({"gpus": 2, "pp": 2, "vpp": 4}, "pp 2 x vpp 4 = 8 chunks"),
        ({"gpus": 1, "vpp": 2}, "vpp 2 needs pp > 1"),
        ({"gpus": 3, "ep": 3}, "8 experts do not divide over ep 3"),
        ({"gpus": 2, "ep": 2, "experts": 0}, "ep 2 on a model without experts"),
        ({"gpus": 2, "cp": 2, "seq_len": 254}, "seq_len 254 is not a multiple of 2 x cp = 4"),
        ({"gpus": 2, "pp": 2, "vpp": 2, "global_batch_size": 3}, "micro-batches in a multiple of pp 2, and a step has 3"),
        ({"gpus": 8, "global_batch_size": 12}, "global batch 12 is not a multiple of micro batch 1 x dp 8 = 8"),
    ],
)
def test_each_rule_is_reported_alone_and_says_what_to_do(change, says):
    broken = [rule for rule in layout.check(**{**TINY, **change}) if says in rule]
    assert len(broken) == 1
    assert any(word in broken[0] for word in ("set ", "change ", "start ", "raise "))


@given(tp=power, pp=power, cp=power, ep=power, etp=power, copies=st.integers(1, 4))
def test_min_gpus_is_the_smallest_grid_of_powers_of_two(tp, pp, cp, ep, etp, copies):
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    least = layout.min_gpus(**degrees)
    assert layout.grid(gpus=least * copies, **degrees) == []
    assert all(layout.grid(gpus=n, **degrees) for n in range(1, least))


def test_products_that_do_not_divide_one_another_need_a_grid_that_both_divide():
    assert layout.min_gpus(cp=6, ep=4, pp=2) == 24
    assert layout.grid(gpus=24, cp=6, ep=4, pp=2) == []
    assert all(layout.grid(gpus=n, cp=6, ep=4, pp=2) for n in range(1, 24))


def test_layouts_without_findings_are_those_whose_two_grids_use_every_gpu_once():
    shape = {**TINY, "heads": 8, "kv_heads": 8, "layers": 8, "global_batch_size": 1 << 10}
    degrees = (1, 2, 4, 8)
    for tp, pp, cp, ep, gpus in product(degrees, degrees, degrees, degrees, (1, 2, 4, 6, 8, 16, 64)):
        dp, edp = gpus // (tp * pp * cp), gpus // (ep * pp)
        fills = tp * pp * cp * dp == gpus and ep * pp * edp == gpus and (1 << 10) % max(dp, 1) == 0
        assert (layout.check(gpus=gpus, tp=tp, pp=pp, cp=cp, ep=ep, **shape) == []) is fills


@given(st.integers(1, 1 << 22))
def test_cp_is_the_smallest_power_of_two_that_keeps_the_shard_target(seq_len):
    cp = layout.cp_for(seq_len)
    assert cp & (cp - 1) == 0
    assert seq_len <= cp * layout.CP_SHARD_TOKENS
    assert cp == 1 or seq_len > cp // 2 * layout.CP_SHARD_TOKENS


@pytest.mark.parametrize("seq_lens", [[4096, 8192], [65536], [131072, 262144], [4096, 65536, 131072]])
def test_dp_floor_is_refuted_where_dp_does_not_fall_to_one_by_halves(seq_lens):
    assert not dp_floor(gpus=64, pp=4, tp=1, seq_lens=seq_lens)[0]


def test_what_is_left_out_of_a_grid_is_one():
    assert layout.grid(gpus=1) == layout.grid(gpus=7) == []
    assert layout.min_gpus() == 1
    assert [layout.cp_for(n) for n in (1, 4096, 4097, 8192, 8193)] == [1, 1, 2, 2, 4]


def test_a_floor_of_data_parallelism_counts_tensor_and_pipeline_ranks():
    """16 GPUs, of which a copy takes 2 x 2 x cp."""
    holds, sentence, figures = dp_floor(gpus=16, pp=2, tp=2, seq_lens=[8192, 16384, 32768])
    assert (holds, figures) == (
        True,
        {
            "rows": [{"seq_len": 8192, "cp": 2, "dp": 2}, {"seq_len": 16384, "cp": 4, "dp": 1}, {"seq_len": 32768, "cp": 8, "dp": 0}],
            "gpus": 16,
            "gpus_needed_next": 32,
        },
    )
    assert sentence == (
        "on 16 GPUs with pp 2 and tp 2, dp halves with each doubling, reaches 1 at 16384 tokens, and 32768 tokens need 32 GPUs"
    )
    holds, sentence, figures = dp_floor(gpus=24, pp=2, tp=2, seq_lens=[8192, 16384])
    assert (holds, figures["rows"]) == (False, [{"seq_len": 8192, "cp": 2, "dp": 3}, {"seq_len": 16384, "cp": 4, "dp": 0}])
    assert "dp goes [3, 0]" in sentence


@pytest.mark.parametrize(
    ("gpus", "batch", "seq_lens", "holds", "says"),
    [
        (
            64,
            64,
            [8192, 16384, 32768],
            True,
            "from 8192 to 32768 tokens on 64 GPUs, dp goes 8 -> 2: a global batch of 64 takes 4 -> 16 micro-batches per rank, or at 4 it shrinks to 16",
        ),
        (64, 64, [8192, 8192], False, "dp goes 8 -> 8: a global batch of 64 takes 4 -> 4 micro-batches per rank, or at 4 it shrinks to 64"),
        (64, 64, [8192, 16384, 16384], False, "takes 4 -> 8 micro-batches per rank, or at 4 it shrinks to 32"),
        (64, 64, [16384, 8192, 32768], False, "dp goes 4 -> 2"),
        (64, 64, [8192], False, "dp goes 8 -> 8"),
        (64, 8, [8192, 16384], False, "8192 tokens: no layout of 64 GPUs with cp 2 takes a global batch of 8"),
        (12, 64, [16384], False, "16384 tokens: no layout of 12 GPUs with cp 4 takes a global batch of 64"),
        (2, 64, [16384], False, "16384 tokens: no layout of 2 GPUs with cp 4 takes a global batch of 64"),
    ],
)
def test_pressure_on_the_batch_counts_tensor_and_pipeline_ranks(gpus, batch, seq_lens, holds, says):
    found = batch_pressure(gpus=gpus, pp=2, tp=2, micro_batch_size=2, global_batch_size=batch, seq_lens=seq_lens)
    assert found[0] is holds
    assert says in found[1]


def test_a_published_layout_needs_its_gpus_and_its_split():
    v3 = {"model": "deepseek_v3", "seq_len": 131072, "cp": 32, "ep": 32, "pp": 8, "vpp": 4, "gpus": 256, "uneven": True}
    even = {"model": "qwen3_30b_a3b", "seq_len": 65536, "cp": 16, "tp": 2, "pp": 4, "vpp": 3, "gpus": 128, "uneven": False}
    holds, sentence, figures = min_gpus_families(families=[v3, even])
    assert holds
    assert sentence == (
        "deepseek_v3 at 131072 tokens needs 256 GPUs and splits 61 layers unevenly over 32 chunks; qwen3_30b_a3b at 65536 tokens needs 128 GPUs"
    )
    assert [(r["layers"], r["chunks"], r["uneven"]) for r in figures["families"]] == [(61, 32, True), (48, 12, False)]
    plain = {"model": "qwen3_30b_a3b", "seq_len": 65536, "pp": 4, "gpus": 4, "uneven": False}
    assert min_gpus_families(families=[plain])[2]["families"][0]["chunks"] == 4
    for wrong in ({"gpus": 128}, {"gpus": 512}, {"uneven": False}, {"vpp": 1, "pp": 61}):
        assert not min_gpus_families(families=[even, {**v3, **wrong}])[0]
    assert not min_gpus_families(families=[{**even, "uneven": True}])[0]
    assert not min_gpus_families(families=[])[0]
