"""Plans exported to torchtitan: its own parser and checks accept them, and read the same layout back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from playbook.errors import ConfigError
from playbook.paths import repo_root
from playbook.planner import parameters, pipeline
from playbook.planner.plan import Plan, parse
from playbook.planner.runs.check import check
from playbook.planner.time.cluster import cluster
from playbook.planner.time.step import step_time
from playbook_trainer.export.launch import Launchable
from playbook_trainer.export.torchtitan import launchable
from tests.support.targets.apart import answers
from tests.support.targets.plans import planned, searched

WHEELS = repo_root() / ".venv" / "targets" / "torchtitan-0.3.0"
SCRIPT = repo_root() / "tests" / "support" / "targets" / "torchtitan.py"
RECOMPUTE = {(): "NoneType", ("selective",): "SelectiveAC", ("full",): "FullAC"}
BACKENDS = {"": "AllToAll", "alltoall": "AllToAll", "deepep": "DeepEP", "hybridep": "HybridEP"}
PLANS = [
    "llama3_8b gpus=8 tp=2 mbs=2 gbs=32 recompute=full",
    "llama3_8b gpus=8 pp=2 vpp=3 mbs=2 gbs=64",  # 32 layers in six chunks: 5 6 6 6 5 4 and so on
    "llama3_70b gpus=64 pp=8 vpp=2 gbs=128 loss=compiled",
    "llama3_8b gpus=16 sharding=none tp=8 sp=false gbs=32",
    "qwen3_8b gpus=8 cp=2 gbs=32 sharding=optimizer moment_bytes=2",
    "qwen3_0_6b gpus=4 gbs=16 cp_comm=all_gather cp=4",
    "qwen3_30b_a3b gpus=8 ep=4 pp=2 vpp=2 mbs=2 gbs=64 recompute=selective",
    "qwen3_30b_a3b gpus=8 tp=2 etp=2 gbs=64 layers=5",
    "mixtral_8x7b gpus=8 ep=8 gbs=128 dispatcher=deepep",
    "mixtral_8x7b gpus=8 ep=8 gbs=128 imbalance=1.5",
    "deepseek_v3 gpus=64 ep=32 gbs=128 layers=8",
    "deepseek_v2_lite gpus=8 ep=8 gbs=128 dispatcher=hybridep",
    "kimi_k2 gpus=64 ep=32 pp=2 gbs=128",
    "gpt_oss_20b gpus=8 ep=8 gbs=128",
]


def read_back(exports: Sequence[Launchable]) -> list[dict[str, Any]]:
    """What torchtitan makes of each, all in one process."""
    if not WHEELS.is_dir():
        pytest.fail(f"{WHEELS} is missing; run `make targets`")
    return answers(SCRIPT, [{"files": dict(e.files), "command": list(e.command)} for e in exports], str(WHEELS))


def expected(plan: Plan) -> dict[str, Any]:
    """The layout as torchtitan should say it, worked out from the plan alone."""
    o, replicas = plan.options, plan.options.sharding == "none"
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    routed = plan.shape.experts > 0
    return {
        "dp_replicate": plan.dp if replicas else 1, "dp_shard": 1 if replicas else plan.dp, "cp": plan.cp, "tp": plan.tp, "pp": plan.pp, "ep": plan.ep,
        "layers": [sizes[rank :: plan.pp] for rank in range(plan.pp)],
        "schedule": "" if plan.pp == 1 else "1F1B" if plan.vpp == 1 else "Interleaved1F1B", "seq_len": plan.seq_len, "global_batch": plan.global_batch,
        "microbatch": plan.mbs, "microbatches": plan.microbatches, "passes": 1 if plan.pp > 1 else plan.microbatches,
        "recompute": RECOMPUTE[o.recompute], "dispatchers": [f"{BACKENDS[o.dispatcher]}TokenDispatcher"] if routed else [],
        "compiled": ["model", "loss"] if plan.loss == "compiled" else ["model"], "loss": "MTPLoss" if plan.shape.mtp else "CrossEntropyLoss",
        "sp": o.sp is not False, "reshard": "never" if o.sharding == "optimizer" else "default", "forced": routed and plan.even_rows,
        "optimizer": "fused" if plan.moment_bytes == 4 else "fused_opt_states_bf16", "log_freq": 1,
    }  # fmt: skip


def compare(plans: Sequence[Plan], answers: Sequence[dict[str, Any]]) -> None:
    for plan, answer in zip(plans, answers, strict=True):
        assert "refused" not in answer, (plan, answer["refused"])
        count = answer.pop("parameters")
        assert answer == expected(plan), plan
        if count is not None:  # biases of gates and norms apart, it is the same model
            assert count == pytest.approx(parameters.total(plan.shape), rel=2e-4), plan


FAULTY = "llama3_8b gpus=8 pp=2 vpp=2 mbs=2 gbs=64"
FAULTS = {
    "range(0, 8)": "range(0, 7)",  # a layer is lost
    "Interleaved1F1B": "1F1B",  # the split asks for two chunks a rank
    "pipeline_parallel_microbatch_size=2": "pipeline_parallel_microbatch_size=1",
    "data_parallel_shard_degree=4": "data_parallel_shard_degree=3",
    "n_layers=32": "n_layers=31",
}


def faulty() -> Iterator[Launchable]:
    """The export of a plan with each fault in its file."""
    export = launchable(planned(FAULTY), "h100")
    (name, text), *_ = export.files.items()
    for right, wrong in FAULTS.items():
        assert right in text
        yield replace(export, files={name: text.replace(right, wrong)})


@pytest.mark.full
def test_torchtitan_accepts_every_family_and_what_the_search_finds_and_a_fault_does_not_read_back() -> None:
    """All in one process: torchtitan takes seconds to import."""
    fixed = [(), ("pp=2", "vpp=2"), ("pp=4", "vpp=3"), ("recompute=selective",), ("recompute=full",), ("cp=2",), ("tp=2",)]
    drawn = [*islice(searched(42, (1, 2, 8, 16, 64, 128, 512), fixed, launchable), 40)]
    assert len({plan.model for plan in drawn}) > 20
    plans = [*map(planned, PLANS), *drawn]
    found = read_back([*(launchable(plan, "h100") for plan in plans), *faulty()])
    compare(plans, found[: len(plans)])
    assert len(found) == len(plans) + len(FAULTS)
    for answer in found[len(plans) :]:
        assert {k: v for k, v in answer.items() if k != "parameters"} != expected(planned(FAULTY))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qwen3_vl_8b gpus=8", "a vision tower of Qwen3-VL; it has Llama, Qwen3, DeepSeek-V3 and GPT-OSS decoders"),
        ("mpt_7b gpus=8", "MLPs without a gate"),
        ("qwen3_next_80b_a3b gpus=8 ep=8", "gated delta net layers"),
        ("nemotron_3_nano_30b_a3b gpus=8 ep=8", "Mamba layers"),
        ("glm_4_5_air gpus=8 ep=8", "a bias in attention"),
        ("glm_5 gpus=64 ep=64", "sparse attention with an indexer"),
        ("deepseek_v3 gpus=64 ep=32 pp=2", "it has that with pp 1 and cp 1 alone"),
        ("qwen3_30b_a3b gpus=8 tp=2 ep=1", "add --fix etp=2"),
        ("qwen3_30b_a3b gpus=8 tp=8 ep=1 etp=8", "4 heads of keys and values"),
        ("qwen3_0_6b gpus=8 pp=2", "one matrix for embedding and output"),
        ("llama3_8b gpus=8 loss=native", "it has torch and compiled"),
        ("llama3_8b gpus=8 optimizer_offload=50", "optimizer_offload is 50; it has 0"),
        ("llama3_8b gpus=8 fp8=tensorwise", "fp8 is tensorwise; it has none"),
        ("llama3_8b gpus=8 lora=16", "lora is 16; it has 0"),
        ("llama3_8b gpus=8 grad_bytes=2", "grad_bytes is 2; it has 4"),
        ("llama3_8b gpus=8 recompute=mlp", "recompute is mlp; it has none or selective or full"),
    ],
)
def test_what_torchtitan_cannot_express_is_refused_with_what_it_has(text: str, words: str) -> None:
    model, *settings = text.split()
    with pytest.raises(ConfigError, match=r"torchtitan 0\.3\.0 cannot express this plan") as refused:
        launchable(parse(model, ["backend=torch", *settings]), "h100")
    assert words in str(refused.value)


def test_a_plan_for_megatron_is_sent_back_to_the_planner() -> None:
    with pytest.raises(ConfigError, match="plan with --backend torch"):
        launchable(parse("llama3_8b", ["gpus=8"]), "h100")


@pytest.mark.parametrize(
    "text",
    [
        text
        for text in PLANS
        if "layers=" not in text and "imbalance" not in text and "moment" not in text and "cp_comm" not in text and "none" not in text
    ],
)
def test_the_row_of_a_run_predicts_the_plan_itself(text: str, tmp_path: Path) -> None:
    plan = planned(text)
    path = tmp_path / "run.csv"
    path.write_text(launchable(plan, "h100").files["run.csv"], encoding="utf-8")
    (row,) = check(path)
    assert row.interval.value == pytest.approx(step_time(plan, cluster("h100")).tokens_per_s_per_gpu.value, rel=1e-6)
