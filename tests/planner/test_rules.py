"""Rules on features, plans read from words, and the legal layouts nearest to an illegal one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.errors import ConfigError
from playbook.planner import layout
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import KEYS, Plan, nearest, parse

# Each row: a model, a plan that breaks one rule, what the rule says, and the same plan repaired.
BROKEN = [
    ("qwen3_30b_a3b", "gpus=8 tp=2 sp=false", "only with sequence parallelism", "gpus=8 tp=2 sp=true"),
    ("llama3_8b", "gpus=2 tp=2 seq_len=1023", "is not a multiple of tp 2", "gpus=2 tp=2 seq_len=1024"),
    ("qwen3_30b_a3b", "gpus=512 etp=512", "does not divide over etp 512", "gpus=512 etp=256"),
    ("qwen3_next_80b_a3b", "gpus=32 cp=32", "of linear attention do not divide", "gpus=32 cp=16"),
    ("qwen3_30b_a3b", "gpus=8 pp=2 cp=2 ep=1 rank_order=tp-cp-pp-ep-dp", "needs edp = dp", "gpus=8 pp=2 rank_order=tp-cp-pp-ep-dp"),
    ("qwen3_30b_a3b", "gpus=2 pp=2 vpp=2 overlap_p2p=false", "on pp 2 needs overlap", "gpus=2 pp=2 vpp=2"),
    ("deepseek_v3", "gpus=64 pp=64 uneven=true", "do not fill", "gpus=32 pp=32 uneven=true"),
    ("deepseek_v3", "gpus=8 pp=8 uneven=false", "do not divide into pp 8", "gpus=8 pp=8"),
    ("qwen3_30b_a3b", "gpus=4 pp=4 vpp=2 gbs=5", "multiple of pp 4, and a step has 5", "gpus=4 pp=4 vpp=2 gbs=4"),
    ("qwen3_30b_a3b", "gpus=8 dispatcher=hybridep", "needs etp x ep > 1", "gpus=8 ep=2 dispatcher=hybridep"),
    ("qwen3_30b_a3b", "gpus=8 ep=2 dispatcher=deepep capacity=true", "excludes padding", "gpus=8 ep=2 dispatcher=deepep"),
    ("llama3_8b", "gpus=8 dispatcher=alltoall", "without experts", "gpus=8"),
    ("qwen3_30b_a3b", "gpus=64 cp=64 cp_comm=a2a", "do not divide over tp 1 x cp 64", "gpus=64 cp=64 cp_comm=p2p"),
    ("qwen3_30b_a3b", "gpus=8 cp=8 cp_comm=a2a", "the 4 key-value heads of a tp rank", "gpus=4 cp=4 cp_comm=a2a"),
    ("qwen3_30b_a3b", "gpus=8 cp=8 cp_comm=a2a+p2p", "needs the sizes", "gpus=8 cp=8 cp_comm=a2a+p2p cp_sizes=2,4"),
    ("qwen3_30b_a3b", "gpus=8 cp=8 cp_comm=a2a+p2p cp_sizes=2,2", "is not cp 8", "gpus=8 cp=8 cp_comm=a2a+p2p cp_sizes=4,2"),
    ("qwen3_30b_a3b", "gpus=8 optimizer_instances=3", "optimizer instances", "gpus=8 optimizer_instances=2"),
    ("qwen3_30b_a3b", "gpus=4 ep=4 optimizer_instances=2", "edp 1 does not divide into 2", "gpus=8 ep=4 optimizer_instances=2"),
    ("llama3_8b", "gpus=8 etp=8 optimizer_instances=2", "edp 1 does not divide into 2", "gpus=8 etp=4 optimizer_instances=2"),
    ("qwen3_30b_a3b", "gpus=8 ep=2 sharding=fsdp2", "needs pp 1 and ep 1", "gpus=8 ep=2 sharding=fsdp"),
    ("qwen3_30b_a3b", "gpus=8 pp=2 sharding=fsdp", "has no stages in it, found pp 2", "gpus=8 sharding=fsdp"),
    ("qwen3_30b_a3b", "gpus=8 sharding=none precision_aware=true", "needs the distributed optimizer", "gpus=8 precision_aware=true"),
    ("qwen3_30b_a3b", "gpus=8 recompute=full,moe", "stands alone", "gpus=8 recompute=full"),
    ("llama3_8b", "gpus=8 recompute=moe_act", "without experts", "gpus=8 recompute=layernorm"),
    ("qwen3_30b_a3b", "gpus=8 recompute=mla_up_proj", "without compressed attention", "gpus=8 recompute=moe_act"),
    ("qwen3_30b_a3b", "gpus=8 recompute=gdn_norm_out", "without linear attention", "gpus=8 recompute=layernorm"),
    ("deepseek_v3", "gpus=8 recompute=shared_experts shared_overlap=true", "excludes overlap of shared", "gpus=8 recompute=shared_experts"),
    ("qwen3_30b_a3b", "gpus=8 recompute=moe_act fp8=delayed", "excludes delayed", "gpus=8 recompute=moe_act fp8=blockwise"),
    ("qwen3_30b_a3b", "gpus=8 recompute=attention_everything", "is not known", "gpus=8 recompute=core_attn"),
    ("qwen3_30b_a3b", "gpus=8 graphs=attn,full_iteration", "stands alone", "gpus=8 graphs=full_iteration"),
    ("qwen3_30b_a3b", "gpus=8 graphs=attn recompute=full", "excludes per-layer CUDA graphs", "gpus=8 graphs=full_iteration recompute=full"),
    ("qwen3_30b_a3b", "gpus=8 graphs=moe", "needs padding to capacity", "gpus=8 graphs=moe capacity=true"),
    ("qwen3_30b_a3b", "gpus=8 graphs=moe,moe_router capacity=true", "already covers", "gpus=8 graphs=attn,moe_router"),
    ("qwen3_30b_a3b", "gpus=8 graphs=moe_preprocess", "needs 'moe_router'", "gpus=8 graphs=moe_preprocess,moe_router"),
    ("qwen3_30b_a3b", "gpus=8 graphs=moe_router recompute=moe", "excludes a graph over its router", "gpus=8 graphs=attn recompute=moe"),
    ("llama3_8b", "gpus=8 graphs=moe_router", "graphs moe_router on a model without experts", "gpus=8 graphs=attn,mlp"),
    ("deepseek_v3", "gpus=8 dispatcher=allgather shared_overlap=true", "alltoall, found allg", "gpus=8 dispatcher=alltoall shared_overlap=true"),
    ("qwen3_30b_a3b", "gpus=8 graphs=mlp", "without dense layers", "gpus=8 graphs=attn"),
    ("qwen3_30b_a3b", "gpus=8 graphs=attn offload=true", "offload of layers excludes graphs", "gpus=8 graphs=full_iteration offload=true"),
    ("qwen3_30b_a3b", "gpus=8 pp=2 offload=true", "needs pp 1", "gpus=8 offload=true"),
    ("qwen3_30b_a3b", "gpus=8 offload=true recompute=full", "excludes recompute", "gpus=8 offload=true"),
    ("qwen3_30b_a3b", "gpus=8 ep=2 delay_wgrad=true", "need overlap", "gpus=8 ep=2 delay_wgrad=true ep_overlap=true"),
    ("qwen3_30b_a3b", "gpus=8 ep_overlap=true", "needs ep > 1", "gpus=8 ep=2 ep_overlap=true"),
    ("qwen3_30b_a3b", "gpus=8 pp=2 ep=2 ep_overlap=true", "needs vpp > 1", "gpus=8 pp=2 vpp=2 ep=2 ep_overlap=true"),
    ("qwen3_30b_a3b", "gpus=8 ep=2 ep_overlap=true dispatcher=allgather", "alltoall or flex", "gpus=8 ep=2 ep_overlap=true dispatcher=flex"),
    ("qwen3_30b_a3b", "gpus=8 ep=2 ep_overlap=true recompute=moe", "excludes recompute moe", "gpus=8 ep=2 ep_overlap=true recompute=moe_act"),
    ("deepseek_v3", "gpus=8 ep=2 ep_overlap=true graphs=mlp", "excludes graphs of moe and mlp", "gpus=8 ep=2 ep_overlap=true graphs=attn"),
    ("deepseek_v3", "gpus=8 ep=2 ep_overlap=true shared_overlap=true", "excludes overlap of shared", "gpus=8 ep=2 ep_overlap=true"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "words", "says", "repaired"), BROKEN, ids=lambda v: str(v)[:40])
def test_each_feature_rule_is_reported_alone_and_its_repair_is_legal(model, words, says, repaired):
    broken = parse(model, words.split()).broken()
    assert len(broken) == 1, broken
    assert says in broken[0]
    assert broken[0].partition("; ")[2], "what to do"
    assert parse(model, repaired.split()).broken() == []


@pytest.mark.parametrize("key", ["gpus", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size"])
def test_a_degree_below_one_is_a_broken_rule_and_no_traceback(key):
    counts = {"heads": 4, "kv_heads": 2, "layers": 4, "experts": 8, "seq_len": 256, "micro_batch_size": 1, "global_batch_size": 8}
    broken = layout.check(**{**counts, "gpus": 8, key: 0})
    assert broken == [f"{key} is 0; set it to 1 or more"]


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("no_such_model", [], "expected one of aya_23_8b"),
        ("qwen3_30b_a3b", ["tp"], "expected key=value"),
        ("qwen3_30b_a3b", ["zp=2"], "is not a setting"),
        ("qwen3_30b_a3b", ["tp=0"], "from 1 to"),
        ("qwen3_30b_a3b", ["tp=-1"], "whole number"),
        ("qwen3_30b_a3b", ["tp=²"], "whole number"),
        ("qwen3_30b_a3b", ["tp=" + "9" * 5000], "whole number"),
        ("qwen3_30b_a3b", ["layers=1001"], "from 1 to 1000"),
        ("qwen3_30b_a3b", ["tp=2", "tp=4"], "given twice"),
        ("qwen3_30b_a3b", ["sp=maybe"], "true or false"),
        ("qwen3_30b_a3b", ["loss=mse"], "te, native"),
        ("qwen3_30b_a3b", ["moment_bytes=3"], "1, 2, 4"),
        ("qwen3_30b_a3b", ["imbalance=nan"], "ratio"),
        ("qwen3_30b_a3b", ["imbalance=1_0"], "ratio"),
        ("qwen3_30b_a3b", ["imbalance=\uff12"], "ratio"),
        ("qwen3_30b_a3b", ["imbalance=."], "ratio"),
        ("qwen3_30b_a3b", ["cp_sizes=2,x"], "whole number"),
    ],
)
def test_words_that_are_no_plan_are_refused(model, words, says):
    with pytest.raises(ConfigError, match=says):
        parse(model, words)


@given(st.lists(st.one_of(st.text(max_size=30), st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=12))), max_size=4))
def test_hostile_words_give_a_plan_or_a_message(words):
    try:
        plan = parse("deepseek_v3", words)
    except ConfigError as e:
        said = [str(e)]
    else:
        said = plan.broken()
    assert sum(map(len, said)) < 5000


some = st.integers(1, 12)


@given(gpus=st.integers(1, 600), tp=some, cp=some, pp=some, ep=some, etp=some, vpp=st.integers(1, 4), gbs=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_nearest_layouts_are_legal_ordered_and_differ_by_what_they_say(gpus, tp, cp, pp, ep, etp, vpp, gbs):
    plan = Plan(MODELS["deepseek_v3"], gpus=gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, gbs=gbs)
    found = nearest(plan)
    assert found
    for near in found:
        assert near.plan.broken() == []
        degrees = {k: v for k, v in near.changes.items() if k != "uneven"}
        options = replace(plan.options, uneven=True if "uneven" in near.changes else None)
        assert replace(plan, **degrees, options=options) == near.plan
        p = near.plan
        assert p.tp * p.cp * p.pp * p.dp == p.etp * p.ep * p.pp * p.edp == p.gpus
    assert [n.distance for n in found] == sorted(n.distance for n in found)
    assert (found[0].changes == {}) is (plan.broken() == [])


def test_options_that_no_degree_repairs_leave_no_offer():
    assert nearest(Plan(MODELS["llama3_8b"], options=Options(recompute=("moe",)))) == []
