"""Which group of ranks should have the fast interconnect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playbook.errors import ConfigError
from playbook.planner import traffic
from playbook_bench.statements.layouts import hot_inside

HOST = {"domain": 8, "fast_bytes_per_s": 450e9, "slow_bytes_per_s": 50e9}


def test_peers_outside_by_hand():
    assert traffic.outside(degree=8, stride=1, domain=8) == 0
    assert traffic.outside(degree=8, stride=8, domain=8) == 1
    assert traffic.outside(degree=16, stride=1, domain=8) == 8 / 15
    assert traffic.outside(degree=8, stride=4, domain=8) == 6 / 7
    assert traffic.outside(degree=1, stride=8, domain=8) == 0
    assert traffic.boundaries_outside(pp=4, stride=8, domain=8) == 1
    assert traffic.boundaries_outside(pp=4, stride=4, domain=8) == 1 / 3
    assert traffic.boundaries_outside(pp=8, stride=1, domain=8) == 0


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_expert_and_tensor_traffic_belong_inside(axis):
    model = "qwen3_30b_a3b" if axis == "ep" else "llama3_70b"
    holds, sentence, figures = hot_inside(model=model, axis=axis, degree=8, pp=4, **HOST)
    assert holds
    assert figures["axis_bytes"] > figures["pp_bytes"]
    assert figures["pp_inside_s"] > 3 * figures["axis_inside_s"]
    assert f"with {axis} inside the domain" in sentence


def test_on_a_uniform_network_placement_does_not_matter():
    same = {**HOST, "slow_bytes_per_s": 450e9}
    holds, _, figures = hot_inside(model="qwen3_30b_a3b", axis="ep", degree=8, pp=4, **same)
    assert not holds
    assert figures["axis_inside_s"] == pytest.approx(figures["pp_inside_s"])


@given(axis=st.sampled_from(["tp", "cp", "ep"]), degree=st.sampled_from([2, 4, 8]), pp=st.sampled_from([2, 4, 8]))
def test_a_faster_domain_never_slows_a_microbatch(axis, degree, pp):
    slow = hot_inside(model="deepseek_v3", axis=axis, degree=degree, pp=pp, **HOST)[2]
    fast = hot_inside(model="deepseek_v3", axis=axis, degree=degree, pp=pp, **{**HOST, "fast_bytes_per_s": 900e9})[2]
    assert fast["axis_inside_s"] <= slow["axis_inside_s"]
    assert fast["pp_inside_s"] <= slow["pp_inside_s"]


@pytest.mark.parametrize("wrong", [{"axis": "dp"}, {"model": "nobody"}, {"degree": 3}, {"domain": 0}, {"slow_bytes_per_s": 0}])
def test_impossible_placements_are_refused(wrong):
    with pytest.raises(ConfigError):
        hot_inside(**{"model": "qwen3_30b_a3b", "axis": "ep", "degree": 8, "pp": 4, **HOST, **wrong})
