"""Layouts that cannot run say which rule they break and what to change, before any process starts."""

from __future__ import annotations

import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.config import checks
from playbook_trainer.config.tree import load, parse_overrides

MOE, DENSE, VISION = "qwen3_moe_tiny", "qwen3_tiny", "qwen3_vl_moe_tiny"
ILLEGAL = {
    "ranks": (MOE, 3, "parallel.tp=2", r"3 ranks do not divide into tp 2"),
    "expert-grid": (MOE, 2, "parallel.ep=2 parallel.etp=2", r"2 ranks do not divide into ep 2 x etp 2"),
    "experts": (MOE, 3, "parallel.ep=3 train.global_batch_size=3", r"8 experts do not divide over ep 3"),
    "no-experts": (DENSE, 2, "parallel.ep=2", r"ep 2 on a model without experts"),
    "heads": (MOE, 3, "parallel.tp=3", r"4 attention heads do not divide over tp 3"),
    "kv-heads": (MOE, 4, "parallel.tp=4", r"2 key-value heads do not divide over tp 4"),
    "vocabulary": (MOE, 2, "parallel.tp=2 model.vocab_size=321", r"a vocabulary of 321 does not divide over tp 2; pad model.vocab_size"),
    "mlp-width": (DENSE, 2, "parallel.tp=2 model.ffn_size=97", r"an MLP width of 97 does not divide over tp 2"),
    "expert-width": (
        MOE,
        2,
        "parallel.tp=2 model.expert_ffn_size=65",
        r"an expert width of 65 does not divide over etp 2; set parallel.etp",
    ),
    "layers": (MOE, 3, "parallel.pp=3", r"4 layers do not divide"),
    "chunks": (MOE, 2, "parallel.pp=2 parallel.vpp=3", r"4 layers do not divide"),
    "vpp-without-pp": (MOE, 1, "parallel.vpp=2", r"vpp 2"),
    "interleaving": (
        MOE,
        4,
        "parallel.pp=2 parallel.vpp=2 train.micro_batch_size=2",
        r"micro-batches in a multiple of pp 2, and a step has 1",
    ),
    "pipeline-rows": (MOE, 2, "parallel.pp=2 data.pad=false", r"pp needs rows of one length: set data.pad: true"),
    "deepstack": (
        VISION,
        4,
        "parallel.pp=2 parallel.vpp=2 train.global_batch_size=4",
        r"DeepStack.*pp 2 x vpp 2 leaves 1 layers in a chunk",
    ),
    "deepstack-stages": (VISION, 4, "parallel.pp=4", r"first 2 decoder layers.*pp 4 x vpp 1 leaves 1 layers"),
    "batch": (MOE, 3, "", r"global batch 4 is not a multiple"),
    "ulysses-heads": (MOE, 8, "parallel.cp=8 parallel.cp_comm=ulysses", r"4 attention heads, which do not divide over cp 8; .*ring"),
    "ulysses-kv-heads": (MOE, 3, "parallel.cp=3 parallel.cp_comm=ulysses model.num_heads=6", r"2 key-value heads and cp 3"),
    "cp-rows": (MOE, 2, "parallel.cp=2 data.seq_len=254", r"254"),
    "sequence-rows": (
        MOE,
        2,
        "parallel.tp=2 parallel.sequence_parallel=true data.pad=false",
        r"sequence parallelism needs rows of one length",
    ),
    "sequence-cut": (MOE, 2, "parallel.tp=2 parallel.sequence_parallel=true data.seq_len=255", r"cuts the 255 tokens of a rank over tp 2"),
    "folded-cut": (MOE, 2, "parallel.tp=2 parallel.etp=1 data.seq_len=255", r"etp 1 beside tp 2 cuts the 255 tokens"),
    "folded-rows": (MOE, 2, "parallel.etp=2 data.pad=false", r"etp 2 beside tp 1 needs rows of one length"),
    "allgather-rows": (
        MOE,
        2,
        "parallel.ep=2 moe.dispatcher=allgather data.pad=false",
        r"moe.dispatcher allgather needs rows of one length",
    ),
    "copies": (MOE, 2, "parallel.dp_replicate=3", r"dp 2 does not divide into 3 copies"),
    "copies-of-copies": (MOE, 2, "parallel.dp_replicate=2 parallel.fsdp=false", r"fsdp: false, which makes every rank a copy"),
    "shared-width": (MOE, 3, "model=deepseek_v3_tiny parallel.tp=3", r"a shared-expert width of 32 does not divide over tp 3"),
    "dense-layers-width": (
        MOE,
        2,
        "model=deepseek_v3_tiny parallel.tp=2 model.ffn_size=97",
        r"an MLP width of 97 does not divide over tp 2",
    ),
    "megatrons-mla": (MOE, 1, "model=deepseek_v3_tiny", r"model.attention: mla belongs to the megatron backend"),
    "megatrons-dense-layers": (MOE, 1, "model.first_dense_layers=1 model.ffn_size=96", r"model.first_dense_layers: 1 belongs to"),
    "megatrons-shared-expert": (MOE, 1, "model.shared_expert_ffn_size=32", r"model.shared_expert_ffn_size: 32 belongs to"),
    "megatrons-sigmoid": (MOE, 1, "model.router_score=sigmoid", r"model.router_score: sigmoid belongs to"),
    "megatrons-groups": (MOE, 1, "model.router_groups=4 model.router_group_top_k=2", r"model.router_groups: 4 belongs to"),
    "megatrons-router-scale": (MOE, 1, "model.router_scale=2.5", r"model.router_scale: 2.5 belongs to"),
    "megatrons-router-bias": (MOE, 1, "model.router_score=sigmoid model.router_bias=true", r"model.router_bias: true belongs to"),
    "megatrons-mtp": (DENSE, 1, "model.mtp_layers=1", r"model.mtp_layers: 1 belongs to"),
    "megatrons-norms": (DENSE, 1, "model.qk_norm=false", r"model.qk_norm: false belongs to"),
    "megatrons-yarn": (MOE, 1, "model=deepseek_v3_tiny model.yarn.factor=4 model.yarn.original_seq_len=64", r"model.yarn belongs to"),
    "megatrons-dispatcher": (MOE, 2, "parallel.ep=2 moe.dispatcher=deepep", r"'deepep' belongs to the megatron backend"),
    "fused-dedup": (
        MOE,
        2,
        "parallel.ep=2 moe.dispatcher=dedup moe.fused_permutation=true",
        r"fused_permutation serves the dispatcher alltoall",
    ),
}


@pytest.mark.parametrize("rule", ILLEGAL)
def test_the_broken_rule_is_named(rule: str) -> None:
    name, world, words, says = ILLEGAL[rule]
    with pytest.raises(ConfigError, match=f"(?s)cannot run on {world} rank.*{says}"):
        checks.check(load(data_root("configs") / f"{name}.yaml", parse_overrides(words.split())), world)


@pytest.mark.parametrize(("pp", "deepstack"), [(2, [1, 2]), (4, [1])])
def test_stages_may_cut_behind_the_layers_that_deepstack_enters(pp: int, deepstack: list[int]) -> None:
    words = {"parallel.pp": pp, "model.vision.deepstack_layers": deepstack}
    checks.check(load(data_root("configs") / f"{VISION}.yaml", words), pp)
