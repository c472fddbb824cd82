"""Layouts on either side of each rule's edge: exactly these sentences, and none where a layout can run; and the nearest ones by trying all."""

from __future__ import annotations

from dataclasses import replace
from itertools import product, zip_longest
from math import log2
from typing import Any

import pytest

from playbook.planner import layout
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan, nearest, parse

A, B, V3, QWEN = "qwen3_30b_a3b", "llama3_8b", "deepseek_v3", "qwen3_next_80b_a3b"
ORDER = "rank_order=tp-cp-pp-ep-dp"

# A model, a plan, and what begins each sentence of the rules that it breaks.
EDGES = [
    (B, "gpus=8 tp=4 cp=2 seq_len=1028", ["seq_len 1028 is not a multiple of tp 4 x cp 2 = 8 "]),
    (B, "gpus=8 tp=4 cp=2 seq_len=1032", []),
    (B, "gpus=8 tp=4 cp=2 seq_len=1028 sp=false", []),
    (A, "gpus=8 tp=2 sp=true", []),
    (A, "gpus=8 sp=false", []),
    (A, f"gpus=8 tp=2 {ORDER}", []),
    (A, f"gpus=16 pp=2 tp=2 cp=2 ep=2 etp=2 {ORDER}", []),
    (A, f"gpus=16 pp=2 tp=4 cp=2 ep=2 etp=2 {ORDER}", ["rank order tp-cp-pp-ep-dp with pp 2 needs edp = dp, found edp 2 and dp 1;"]),
    (A, f"gpus=32 pp=2 tp=2 cp=2 ep=8 etp=2 {ORDER}", ["rank order tp-cp-pp-ep-dp with pp 2 needs edp = dp, found edp 1 and dp 4;"]),
    (A, f"gpus=12 pp=2 tp=4 {ORDER}", ["12 ranks do not divide into tp 4 x pp 2 x cp 1 = 8;"]),
    (A, f"gpus=12 pp=2 cp=4 {ORDER}", ["12 ranks do not divide into tp 1 x pp 2 x cp 4 = 8;"]),
    (A, f"gpus=12 pp=2 ep=4 {ORDER}", ["12 ranks do not divide into ep 4 x etp 1 x pp 2 = 8;"]),
    (A, f"gpus=12 pp=2 etp=4 {ORDER}", ["12 ranks do not divide into ep 1 x etp 4 x pp 2 = 8;"]),
    (A, "gpus=8 tp=2 rank_order=cp-tp-ep-dp-pp", []),
    (A, "gpus=8 rank_order=tp-cp-ep-dp-pp-pp", ["rank order tp-cp-ep-dp-pp-pp does not name tp, cp, ep, dp and pp once each;"]),
    (A, "gpus=8 pp=2 overlap_p2p=false", []),
    (A, "gpus=4 pp=4 vpp=2 overlap_p2p=false", []),
    (A, "gpus=2 pp=2 vpp=3 overlap_p2p=false", ["vpp 3 on pp 2 needs overlap of its transfers;"]),
    (A, "gpus=8 ep=2 etp=2 dispatcher=flex", []),
    (A, "gpus=8 etp=2 dispatcher=flex", []),
    (A, "gpus=8 ep=2 dispatcher=alltoall capacity=true", []),
    (A, "gpus=8 dispatcher=alltoall", []),
    (A, "gpus=8 dispatcher=allgather shared_overlap=true", []),
    (V3, "gpus=8 dispatcher=allgather", []),
    (B, "gpus=8 tp=2 cp=4 cp_comm=a2a", []),
    (B, "gpus=16 tp=2 cp=8 cp_comm=a2a", ["the 4 key-value heads of a tp rank do not divide over cp 8 for cp_comm a2a;"]),
    (A, "gpus=16 tp=8 cp=2 cp_comm=a2a", ["the 1 key-value heads of a tp rank do not divide over cp 2 for cp_comm a2a;"]),
    (B, "gpus=64 tp=16 cp=4 cp_comm=a2a", ["32 heads do not divide over tp 16 x cp 4 for cp_comm a2a;"]),
    (A, "gpus=16 tp=8 cp=2 cp_comm=p2p", []),
    (A, "gpus=6 cp=6 seq_len=4092 cp_comm=a2a+p2p cp_sizes=2,3", []),
    (A, "gpus=8 cp=8 cp_sizes=4", ["cp_sizes 4 = 4 is not cp 8;"]),
    (A, "gpus=16 tp=2 pp=2 optimizer_instances=3", ["dp x cp = 4 does not divide into 3 optimizer instances;"]),
    (A, "gpus=16 tp=2 pp=2 optimizer_instances=4", []),
    (A, "gpus=16 ep=2 etp=2 pp=2 optimizer_instances=2", []),
    (A, "gpus=16 ep=2 etp=2 pp=2 optimizer_instances=4", ["edp 2 does not divide into 4 optimizer instances;"]),
    (A, "gpus=12 ep=8 optimizer_instances=4", ["12 ranks do not divide into ep 8 x etp 1 x pp 1 = 8;"]),
    (A, "gpus=8 sharding=fsdp2", []),
    (A, "gpus=8 pp=2 sharding=fsdp2", ["torch FSDP2 in megatron needs pp 1 and ep 1, found pp 2 and ep 1;"]),
    (A, "gpus=8 ep=2 sharding=fsdp2", ["torch FSDP2 in megatron needs pp 1 and ep 1, found pp 1 and ep 2;"]),
    (A, "gpus=8 ep=2 sharding=fsdp precision_aware=true", []),
    (A, "gpus=8 sharding=fsdp2 precision_aware=true", ["the precision-aware optimizer needs the distributed optimizer, found sharding fsdp2;"]),
    (A, "gpus=8 recompute=moe,layernorm", []),
    (V3, "gpus=8 recompute=mla_up_proj", []),
    (QWEN, "gpus=8 recompute=gdn_norm_out", []),
    (B, "gpus=8 recompute=full", []),
    (B, "gpus=8 recompute=moe,shared_experts", ["recompute moe, shared_experts on a model without experts;"]),
    (V3, "gpus=8 shared_overlap=true recompute=moe_act", []),
    (A, "gpus=8 recompute=core_attn fp8=delayed", []),
    (A, "gpus=8 recompute=layernorm fp8=delayed", ["recompute of moe_act or layernorm excludes delayed FP8 scaling;"]),
    (A, "gpus=8 graphs=full_iteration offload=true", []),
    (A, "gpus=8 graphs=attn recompute=moe", []),
    (A, "gpus=8 graphs=moe capacity=true", []),
    (A, "gpus=8 graphs=moe_router capacity=true", []),
    (A, "gpus=8 graphs=moe_router,moe_preprocess", []),
    (B, "gpus=8 graphs=moe capacity=true", ["graphs moe on a model without experts;"]),
    (V3, "gpus=8 graphs=mlp", []),
    (A, "gpus=8 ep=2 ep_overlap=true dispatcher=alltoall recompute=layernorm graphs=attn", []),
    (A, "gpus=8 ep=2 ep_overlap=true recompute=full", ["overlap of expert communication excludes recompute full;"]),
    (A, "gpus=8 ep=2 ep_overlap=true graphs=moe capacity=true", ["overlap of expert communication excludes graphs of moe and mlp;"]),
    (V3, "gpus=8 ep=2 ep_overlap=true", []),
    (A, "gpus=8 offload=true", []),
    (A, "gpus=8 pp=2 recompute=full", []),
    (A, "gpus=8 tp=8", []),  # 4 key-value heads, each on two ranks
    (A, "gpus=50 pp=50 uneven=false", ["48 layers do not divide into pp 50 x vpp 1 = 50 chunks;"]),
    (A, "gpus=50 pp=50 uneven=true", []),
    (A, "gpus=51 pp=51 uneven=true", ["48 layers, embedding and output do not fill pp 51 x vpp 1 = 51 chunks;"]),
    (A, "gpus=1 vpp=2", ["vpp 2 needs pp > 1;"]),
    (A, "gpus=2 pp=2 vpp=2 gbs=4 mbs=2", []),
    (A, "gpus=4 pp=2 mbs=2 gbs=6", ["global batch 6 is not a multiple of micro batch 2 x dp 2 = 4;"]),
    (A, "gpus=2 pp=2 mbs=2 gbs=2", []),
    (A, "gpus=4 pp=2 vpp=2 mbs=2 gbs=12", ["vpp 2 needs micro-batches in a multiple of pp 2, and a step has 3;"]),
    (A, "gpus=3 ep=3", ["128 experts do not divide over ep 3;"]),
    (B, "gpus=2 ep=2", ["ep 2 on a model without experts;"]),
    (B, "gpus=8 etp=2", []),
    (A, "gpus=8 cp=4 seq_len=4100", ["seq_len 4100 is not a multiple of 2 x cp = 8 "]),
    (A, "gpus=8 seq_len=4099", []),
    (QWEN, "gpus=8 tp=2 cp=4", []),
    (QWEN, "gpus=64 tp=4 cp=8", ["16 key and 32 value heads of linear attention do not divide over tp x cp = 32;"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "words", "begins"), EDGES, ids=[f"{m} {w}" for m, w, _ in EDGES])
def test_a_layout_breaks_these_rules_and_no_other(model: str, words: str, begins: list[str]) -> None:
    found = parse(model, words.split()).broken()
    assert [sentence[: len(begin)] for sentence, begin in zip_longest(found, begins, fillvalue="")] == begins, found


def check(options: Options | None, **change: Any) -> list[str]:
    """The rules broken by a layout of eight heads of which nothing else is known."""
    counts = {"heads": 8, "kv_heads": 8, "layers": 8, "experts": 8, "seq_len": 256, "micro_batch_size": 1, "global_batch_size": 64}
    return layout.check(**{"gpus": 8, **counts, **change, "options": options})


@pytest.mark.parametrize(
    ("options", "change", "begins"),
    [
        (Options(recompute=("mla_up_proj", "gdn_norm_out")), {}, []),
        (Options(graphs=("mlp",)), {}, []),
        (Options(ep_overlap=True), {"ep": 2}, []),
        (Options(dispatcher="allgather", shared_overlap=True), {}, ["overlap of shared experts runs beside the dispatcher alltoall,"]),
        (Options(sp=True), {"cp": 2, "seq_len": 255}, ["seq_len 255 is not a multiple of 2 x cp = 4 "]),
        (Options(sp=None), {"tp": 2, "seq_len": 255}, []),
        (Options(uneven=True), {"pp": 8, "vpp": 1}, []),
        (None, {"pp": 4, "layers": 6}, ["6 layers do not divide into pp 4 x vpp 1 = 4 chunks;"]),
        (None, {"vpp": 0, "micro_batch_size": 0}, ["vpp is 0; set it to 1", "micro_batch_size is 0; set it to 1"]),
        (None, {"tp": 2, "heads": 6, "kv_heads": 3}, ["3 key-value heads and tp 2:"]),
        (Options(), {"shape": replace(MODELS[B], ffn=7), "tp": 2}, ["an MLP width of 7 does not divide over tp 2;"]),
        (Options(), {"shape": replace(MODELS[A], ffn=7), "tp": 2}, []),
        (Options(), {"shape": replace(MODELS[A], shared_ffn=7), "tp": 2}, ["a shared-expert width of 7 does not divide over tp 2;"]),
        (
            Options(ep_overlap=True),
            {"shape": replace(MODELS[V3], mtp=2), "ep": 2},
            ["overlap of expert communication takes one MTP depth at most, the model has 2;"],
        ),
        (Options(), {"shape": replace(MODELS[V3], mtp=2), "ep": 2}, []),
    ],
)
def test_what_is_not_known_breaks_no_rule(options: Options | None, change: dict[str, Any], begins: list[str]) -> None:
    found = check(options, **change)
    assert [sentence[: len(begin)] for sentence, begin in zip_longest(found, begins, fillvalue="")] == begins, found


DEGREES = ("tp", "cp", "pp", "ep", "etp", "vpp")
SMALL = replace(MODELS[A], layers=6, heads=4, kv_heads=2, experts=4, expert_ffn=8)


def doublings(a: int, b: int) -> float:
    return abs(log2(a / b))


def every(asked: Plan) -> list[float]:
    """How far each legal layout is whose degrees are powers of two, on the GPUs asked for and on whole copies just below and above."""
    copy = layout.min_gpus(**{k: getattr(asked, k) for k in DEGREES if k != "vpp"})
    found = []
    for gpus in {asked.gpus, asked.gpus // copy * copy, asked.gpus // copy * copy + copy} - {0}:
        for *degrees, vpp in product(*[(1, 2, 4, 8, 16)] * 5, range(1, 7)):
            tp, cp, pp, ep, etp = degrees
            if gpus % (tp * cp * pp) or gpus % (ep * etp * pp) or max(degrees) > asked.gpus:
                continue
            options = Options(uneven=SMALL.layers % (pp * vpp) > 0)
            uneven = options.uneven and (asked.options.uneven is False or (pp, vpp) != (asked.pp, asked.vpp))
            plan = replace(asked, gpus=gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, options=options)
            if not plan.broken():
                moved = sum(doublings(getattr(asked, k), getattr(plan, k)) for k in DEGREES)
                found.append(moved + 0.5 * uneven + (1 + doublings(asked.gpus, gpus) if gpus != asked.gpus else 0))
    return sorted(found)


@pytest.mark.parametrize(
    "words",
    [
        "gpus=8",
        "gpus=8 tp=2 ep=8",
        "gpus=8 tp=8 cp=2",
        "gpus=8 pp=4",
        "gpus=8 pp=4 vpp=4 etp=2",
        "gpus=4 tp=4 cp=2 pp=2",
        "gpus=6 tp=4",
        "gpus=6 ep=4 cp=2",
        "gpus=8 vpp=3",
        "gpus=12 cp=8",
        "gpus=8 etp=8 ep=4",
    ],
)
def test_the_offers_are_the_nearest_of_all_legal_layouts(words: str) -> None:
    asked = replace(parse(A, words.split()), shape=SMALL, seq_len=256)
    assert [n.distance for n in nearest(asked)] == pytest.approx(every(asked)[:3])


@pytest.mark.parametrize(
    ("words", "gbs"),
    [
        ("gpus=8 tp=2 cp=2 pp=2 mbs=3 gbs=7", 6),  # rows of 3
        ("gpus=16 tp=2 cp=2 pp=2 mbs=3 gbs=7", 6),  # of 6
        ("gpus=8 tp=2 pp=2 vpp=2 gbs=3", 4),  # of dp 2 x pp 2, since chunks take micro-batches in groups
        ("gpus=8 tp=2 pp=2 gbs=7", 8),  # of 2
        ("gpus=8 gbs=3", 8),  # at least one row on each
    ],
)
def test_a_batch_that_does_not_divide_is_moved_to_the_nearest_that_does(words: str, gbs: int) -> None:
    asked = parse(A, [*words.split(), "seq_len=256"])
    (found,) = [n for n in nearest(asked, 5) if set(n.changes) == {"gbs"}]
    assert (found.changes, found.distance) == ({"gbs": gbs}, pytest.approx(doublings(asked.gbs, gbs)))
