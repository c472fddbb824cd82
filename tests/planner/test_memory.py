"""Bytes per rank: hand-computed states, and what must never grow with a degree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from playbook.errors import ConfigError
from playbook.planner import activations, memory, pipeline, traffic
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan, parse

# Bf16 moments and gradients, distributed optimizer with bf16 remainders as master copy.
STATES = "gpus=4 grad_bytes=2 master_bytes=2 moment_bytes=2 ep=4"


def plan_of(words: str, model: str = "qwen3_30b_a3b") -> Plan:
    return parse(model, words.split())


def test_the_fitted_constant_is_the_mean_of_what_two_runs_leave():
    """Of 88 and 65 GiB, the first two of `tests/fixtures/memory_runs.yaml`."""
    measured = (("layers=24 mbs=4", 88), ("layers=24 mbs=2", 65))
    rest = [m - (memory.peak(plan_of(f"{STATES} {w}")) - memory.WORKSPACE_BYTES) / memory.GIB for w, m in measured]
    assert pytest.approx(sum(rest) / 2, abs=0.05) == memory.WORKSPACE_BYTES / memory.GIB


def test_recompute_frees_what_it_names_and_brings_it_back_once():
    plain = plan_of(f"{STATES} layers=24")
    for module, names in activations.FREED.items():
        plan = replace(plain, options=replace(plain.options, recompute=(module,)))
        gone = sum(size for name, size in activations.saved(plain, 0).items() if name in names)
        assert activations.kept(plain, 0) - activations.kept(plan, 0) == pytest.approx(gone)
        assert activations.layer(plan, 0).again == pytest.approx(gone)
    full = replace(plain, options=replace(plain.options, recompute=("full",)))
    assert activations.kept(full, 0) == 2 * 4096 * 2048


def test_linear_attention_and_mamba_keep_what_their_kernels_save():
    next80 = plan_of("gpus=1 seq_len=4096", "qwen3_next_80b_a3b")
    linear = sum(size for name, size in activations.saved(next80, 0).items() if name.startswith("linear"))
    assert linear == 2 * 4096 * (2 * 2048 + 2 * 4096 + 64 + 2 * 2048 + 3 * 4096 + 64 * 32 + 2 * 4096)
    nano = plan_of("gpus=1 seq_len=4096", "nemotron_3_nano_30b_a3b")
    assert set(activations.saved(nano, 0)) == {"attention norm in", "attention norm out", "mamba in", "mamba out", "mamba norm out"}
    assert "q, k, v" not in activations.saved(nano, 1)
    assert activations.saved(nano, 0)["mamba in"] == 2 * 4096 * (2 * 4096 + 2 * 8 * 128 + 64)


def test_an_impossible_plan_has_no_estimate():
    with pytest.raises(ConfigError, match="do not divide"):
        memory.estimate(plan_of("gpus=3 ep=2"))


degree = st.sampled_from([1, 2, 4])
models = st.sampled_from(["qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "mixtral_8x7b"])


@given(model=models, tp=degree, cp=degree, pp=degree, ep=degree, axis=st.sampled_from(["tp", "cp", "pp", "ep", "gpus"]))
@settings(max_examples=40, deadline=None)
def test_states_and_activations_never_grow_with_a_degree(model, tp, cp, pp, ep, axis):
    base = Plan(MODELS[model], gpus=512, tp=tp, cp=cp, pp=pp, ep=ep, gbs=1 << 12, options=Options(uneven=True))
    more = replace(base, **{axis: 2 * getattr(base, axis)})
    assume(not base.broken() and not more.broken())
    before, after = memory.estimate(base), memory.estimate(more)
    assert max(s.states for s in after) <= max(s.states for s in before) * (1 + 1e-9)
    if axis in ("tp", "cp"):
        assert max(s.activations for s in after) <= max(s.activations for s in before) * (1 + 1e-9)


@given(model=models, tp=degree, cp=degree, ep=degree, mbs=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_traffic_is_linear_in_the_batch_and_absent_without_peers(model, tp, cp, ep, mbs):
    one = Plan(MODELS[model], gpus=256, tp=tp, cp=cp, ep=ep)
    last = one.shape.layers - 1
    sent, scaled = traffic.per_layer(one, last), traffic.per_layer(replace(one, mbs=mbs), last)
    assert set(sent) == {k for k, n in {"tp": tp, "cp": cp, "ep": ep}.items() if n > 1}
    assert all(scaled[k].total == pytest.approx(mbs * sent[k].total) for k in sent)


def test_tensor_parallel_traffic_of_routed_experts_is_that_of_attention_and_of_their_own_group():
    one = 4096 * 4096 * 2 / 2
    routed = traffic.tensor(Plan(MODELS["qwen3_30b_a3b"], gpus=2, tp=2), 1)
    assert (routed.forward, routed.backward) == (one, 1.5 * one)
    assert traffic.expert_tensor(plan_of("gpus=4 ep=2 etp=2")).forward == 2 * 4096 * 8 * 2048 * 2


def test_a_rank_has_a_whole_key_value_head_where_there_are_fewer_than_ranks():
    plan = plan_of("gpus=16 tp=8 cp=2")  # 4 key-value heads, 32 others
    tokens = 4096 // 2
    assert activations.saved(plan, 0)["q, k, v"] == 2 * tokens * 128 * ((4 + 2) + (4 + 1))
    assert traffic.context(plan).forward == 2 * tokens * 128 * 2


def test_recompute_of_an_mlp_keeps_none_of_its_inner_tensors():
    plan = plan_of("gpus=1", "llama3_8b")
    again = replace(plan, options=Options(recompute=("mlp",)))
    assert activations.kept(plan, 0) - activations.kept(again, 0) == 2 * 4096 * 3 * 14336
    tight = replace(plan, options=Options(recompute=("moe_act", "layernorm")))
    assert activations.kept(plan, 0) - activations.kept(tight, 0) == 2 * 2 * 4096 * 4096


def test_full_sharding_gathers_two_layers_and_mxfp8_copies_carry_scales():
    plan = plan_of("gpus=8 sharding=fsdp", "llama3_8b")
    layer = 218_112_000
    assert memory.estimate(plan)[0].gathered == pytest.approx(2 * 2 * layer, rel=1e-3)
    mx = memory.estimate(plan_of("gpus=8 fp8=mxfp8", "llama3_8b"))[0]
    assert mx.fp8_weights == pytest.approx(32 * (layer - 8192) * 2 * 33 / 32, rel=1e-3)


def test_copies_for_8_bit_products_are_sharded_with_the_weights():
    spread, whole = (memory.estimate(plan_of(f"gpus=8 fp8=blockwise sharding={s}", "llama3_8b"))[0] for s in ("fsdp", "optimizer"))
    assert spread.fp8_weights == pytest.approx(whole.fp8_weights / 8)


def test_overlap_of_experts_holds_a_second_micro_batch_in_pipelines_alone():
    plain, beside = (memory.estimate(plan_of(f"gpus=8 ep=8 gbs=64 {o}"))[0] for o in ("", "ep_overlap=true"))
    assert beside == plain
    assert pipeline.in_flight(pp=2, stage=1, microbatches=8, overlap=True) == [2]


def test_offload_leaves_one_layer_on_the_gpu_and_brings_two_back():
    plain = memory.estimate(plan_of("gpus=8 ep=8"))[0]
    layers = memory.estimate(plan_of("gpus=8 ep=8 offload=true"))[0]
    assert layers.activations == pytest.approx(plain.activations / 48)
    assert layers.replayed == pytest.approx(plain.activations * 2 / 48)
    assert layers.host == pytest.approx(plain.activations * 47 / 48)
    some = memory.estimate(plan_of("gpus=8 ep=8 offload_modules=expert_fc1,moe_act"))[0]
    assert some.host == 47 * 4096 * 8 * (2048 + 2 * 768) * 2
    assert some.activations + some.host == pytest.approx(plain.activations)


@pytest.mark.parametrize(("precision_aware", "leaves"), [(False, 8 / 12), (True, 1.0)])
def test_offload_of_the_optimizer_moves_both_moments_and_masters_with_the_precision_aware_one(precision_aware, leaves):
    """16 bytes a parameter on the host, for each that leaves: float32 weight, gradient and both moments."""
    plain = memory.estimate(plan_of("gpus=8", "llama3_8b"))[0]
    options = Options(optimizer_offload=50, precision_aware=precision_aware)
    half = memory.estimate(replace(plan_of("gpus=8", "llama3_8b"), options=options))[0]
    assert half.optimizer == pytest.approx(plain.optimizer * (1 - 0.5 * leaves))
    assert half.host == pytest.approx(0.5 * plain.optimizer * 16 / 12)


@given(
    model=st.sampled_from(["qwen3_30b_a3b", "deepseek_v3", "qwen3_next_80b_a3b", "nemotron_3_super_120b_a12b", "llama3_8b"]),
    pp=degree, vpp=st.sampled_from([1, 2, 3]), tp=degree, mbs=st.integers(1, 3), again=st.sampled_from(["", "full", "layernorm"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_layers_that_are_alike_counted_once_weigh_what_all_of_them_do(model, pp, vpp, tp, mbs, again):
    options = Options(recompute=(again,) if again else ())
    plan = Plan(MODELS[model], gpus=16 * tp, tp=tp, pp=pp, vpp=vpp if pp > 1 else 1, mbs=mbs, gbs=16 * pp * mbs, options=options)
    assume(not plan.broken())
    sizes = pipeline.split(plan.shape.layers, pp, plan.vpp)
    for found in memory.estimate(plan):
        chunks = pipeline.indices(sizes, pp, found.stage)
        held = memory.weights(plan, found.stage, chunks)
        depths = [plan.shape.layers] * plan.shape.mtp if found.stage == pp - 1 else []
        chunks[-1] = [*chunks[-1], *depths]
        alive = memory.alive(plan, found.stage, [[activations.layer(plan, i) for i in chunk] for chunk in chunks])
        assert found.held == held.dense + held.experts
        assert (found.parameters, found.gradients, found.optimizer) == memory.state_bytes(plan, held)
        assert found.activations == pytest.approx(alive.on_gpu)
        assert (found.in_flight, found.replayed) == (alive.in_flight, alive.again)
    peaks = [found.peak for found in memory.each_stage(plan)]
    assert max(found.peak for found in memory.each_stage(plan, fullest=True)) == max(peaks)
