"""Several ranks on one GPU: where each goes, what such a run may judge, and what its record says."""

from __future__ import annotations

import json
import math

import pytest

from playbook.errors import ConfigError
from playbook.records.case import Case, load_case
from playbook_bench.launch.local import Spec, place
from playbook_bench.launch.slurm import Allocation, SrunLauncher
from playbook_bench.machine import detect
from playbook_bench.metrics import METRICS
from playbook_bench.run import confirm
from playbook_bench.run.options import Options
from playbook_bench.variants.resolve import resolve_all

SMALL = {
    "train.device": "cpu",
    "model.num_kv_heads": 1,
    "data.seq_len": 64,
    "train.steps": 2,
    "train.warmup_steps": 1,
    "train.global_batch_size": 2,
}
ON_ONE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def shared(case: str, **fields: object) -> Case:
    return load_case(case).model_copy(update={"profiles": {"h200x1": {"ranks": 2, **SMALL}}, **fields})


def test_ranks_that_share_a_gpu_are_nodes_of_one_gpu_to_nccl():
    found = [place(rank, 4, shared=True) for rank in range(4)]
    assert [each["RANK"] for each in found] == ["0", "1", "2", "3"]
    assert {(each["LOCAL_RANK"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in found} == {("0", "4", "1")}
    assert len({each["NCCL_HOSTID"] for each in found}) == 4
    assert {(each["NCCL_NET"], each["NCCL_SOCKET_IFNAME"], each["NCCL_IB_DISABLE"]) for each in found} == {("Socket", "lo", "1")}


@pytest.mark.parametrize(("ranks", "how"), [(4, {}), (1, {"shared": True})])
def test_a_rank_with_a_gpu_of_its_own_uses_whatever_links_there_are(ranks, how):
    found = place(ranks - 1, ranks, **how)
    assert found.keys() == ON_ONE
    assert found["LOCAL_RANK"] == found["RANK"] == str(ranks - 1)
    assert place(1, 2, 4)["LOCAL_RANK"] == "5"


def test_more_ranks_than_one_share_the_gpu_of_a_profile_of_one():
    case = load_case("megatron-fsdp-vl")
    assert [run.shared for run in resolve_all(case, "h200x1").values()] == [True, True]
    assert [run.shared for run in resolve_all(case, "h200x4").values()] == [False, False]


@pytest.mark.parametrize("fields", [{"metric": "step_seconds"}, {"also": ["mfu"]}])
def test_time_is_not_judged_where_ranks_take_turns(fields):
    case = shared("cp-saved-activations", **fields)
    (name,) = [case.metric, *case.also][-1:]
    with pytest.raises(
        ConfigError, match=rf"2 ranks take turns on one GPU, where time says nothing, and {name} rests on it; .* as many GPUs as ranks"
    ):
        resolve_all(case, "h200x1")
    alone = case.model_copy(update={"profiles": {"h200x2": case.profiles["h200x1"]}})
    assert len(resolve_all(alone, "h200x2")) == 2


def test_a_metric_is_either_counted_or_made_with_a_clock():
    timed = {name for name, row in METRICS.items() if not row.is_counted}
    assert timed == {
        *("useful_tokens_per_s_per_gpu", "raw_tokens_per_s_per_gpu", "step_seconds", "step_time_variation", "data_time_share"),
        *("images_per_s", "compile_time_share", "mfu", "hfu", "checkpoint_seconds", "wall_step_seconds"),
    }


def test_slurm_gives_a_gpu_to_one_rank(tmp_path):
    run = next(iter(resolve_all(shared("cp-saved-activations"), "h200x1").values()))
    with pytest.raises(ConfigError, match="leave --launcher out"):
        SrunLauncher(Allocation("1", ("a",), "a")).run(Spec(run.config, 2, tmp_path / "run", shared=True))


@pytest.mark.full
def test_shared_ranks_launch_count_and_are_told_of(tmp_path, monkeypatch):
    """On a CPU, whose ranks share it anyhow: all but the GPU's own part of the path."""
    machine = detect.machine_of([("NVIDIA H200", "143771", "1")], "", "a CPU", 2)
    monkeypatch.setattr(detect, "detect", lambda: machine)
    placed: list[dict[str, str]] = []
    monkeypatch.setattr("playbook_bench.launch.local.place", lambda *at, **how: placed.append(place(*at, **how)) or placed[-1])
    (found,) = confirm.bench_run(shared("cp-saved-activations"), Options("h200x1", tmp_path, pairs=2))
    assert {each["NCCL_HOSTID"] for each in placed} == {"node-0", "node-1"}
    assert (found.evidence.measured.sharing, found.evidence.measured.facts["gpus"], found.evidence.measured.facts["ranks"]) == (2, 1, 2)
    verdict = found.evidence.derived.verdict
    assert verdict.reason in ("no_claim", "exact"), verdict.sentence
    assert verdict.sentence.endswith("; 2 ranks took turns on one GPU")
    comparison = found.evidence.derived.comparison
    assert comparison is not None
    assert math.isclose(comparison.candidate / comparison.baseline, 0.5, rel_tol=0.3), "CP 2 saves about half"
    assert json.loads(found.path.read_text())["measured"]["runs"][0]["ranks"] == 2


@pytest.mark.full
def test_peak_memory_on_a_gpu_takes_one_launch_of_each_variant(tmp_path, monkeypatch):
    """On a CPU that says it is a GPU; what is resident there stands for what is allocated."""
    monkeypatch.setattr(detect, "detect", lambda: detect.machine_of([("NVIDIA H200", "143771", "1")], "", "a CPU", 2))
    (found,) = confirm.bench_run(shared("cp-saved-activations", metric="peak_memory_bytes", also=[]), Options("h200x1", tmp_path))
    measured, derived = found.evidence.measured, found.evidence.derived
    assert [r.role for r in measured.runs] == ["measure", "measure"]
    assert measured.aa is None
    assert (derived.verdict.reason, derived.comparison and derived.comparison.design) == ("no_claim", "deterministic")
