"""Layout rules and the arithmetic claims that rest on them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playbook import layout

TINY = {"heads": 4, "kv_heads": 2, "layers": 4, "experts": 8, "seq_len": 256, "micro_batch_size": 1, "global_batch_size": 8}
power = st.sampled_from([1, 2, 4, 8])


def test_a_plain_layout_breaks_no_rule():
    assert layout.check(gpus=1, **TINY) == []
    assert layout.check(gpus=8, tp=2, pp=2, cp=2, etp=2, **TINY) == []


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


def test_dp_floor_holds_and_names_the_next_size():
    holds, sentence, figures = layout.dp_floor(gpus=64, pp=4, tp=1, seq_lens=[4096, 8192, 16384, 32768, 65536, 131072])
    assert holds
    assert [r["dp"] for r in figures["rows"]] == [16, 8, 4, 2, 1, 0]
    assert "131072 tokens need 128 GPUs" in sentence


@pytest.mark.parametrize("seq_lens", [[4096, 8192], [65536], [131072, 262144], [4096, 65536, 131072]])
def test_dp_floor_is_refuted_where_dp_does_not_fall_to_one_by_halves(seq_lens):
    assert not layout.dp_floor(gpus=64, pp=4, tp=1, seq_lens=seq_lens)[0]


@given(st.integers(0, 5), st.integers(1, 6))
def test_batch_pressure_keeps_tokens_or_accumulation(first, doublings):
    lens = [4096 << i for i in range(first, first + doublings)]
    holds, _, figures = layout.batch_pressure(gpus=2048, pp=1, tp=1, micro_batch_size=1, global_batch_size=4096, seq_lens=lens)
    assert holds is (len(lens) > 1)
    for row in figures["rows"]:
        assert row["dp"] * row["accumulation"] == 4096


def test_batch_pressure_is_refuted_where_no_layout_takes_the_batch():
    holds, sentence, _ = layout.batch_pressure(gpus=6, pp=1, tp=1, micro_batch_size=1, global_batch_size=8, seq_lens=[4096, 8192])
    assert not holds
    assert "no layout" in sentence


FAMILY = {"model": "deepseek_v3", "seq_len": 131072, "cp": 32, "ep": 32, "pp": 8, "vpp": 4, "gpus": 256, "uneven": True}


def test_published_families_need_what_they_say():
    assert layout.min_gpus_families(families=[FAMILY])[0]


@pytest.mark.parametrize("wrong", [{"gpus": 128}, {"gpus": 512}, {"uneven": False}, {"cp": 64}])
def test_a_wrong_family_refutes_the_claim(wrong):
    assert not layout.min_gpus_families(families=[FAMILY, {**FAMILY, **wrong}])[0]


def test_no_family_is_no_proof():
    assert not layout.min_gpus_families(families=[])[0]
