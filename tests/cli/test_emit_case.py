"""`playbook plan --emit-case`: a case that the harness accepts, with the speeds that the planner predicts for what it runs."""

from __future__ import annotations

import pytest
import yaml
from in_process import document, refused
from planted_case import bench

from playbook.paths import repo_root
from playbook.planner.memory import GIB, stages
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.time.cluster import cluster
from playbook.records.case import load_case
from playbook_app.cli.app import app, run_command
from playbook_app.services.predicted_case import scaled
from playbook_bench.run import aa, replay
from playbook_bench.variants.resolve import configurations
from playbook_trainer.config.dry_run import dry_run, predicted

TINY = ("qwen3_moe_tiny", "--gpus", "2", "--seq", "256", "--gbs", "8", "--backend", "torch", "--fix", "recompute=,ep=1,tp=1,cp=1,pp=1")
ON_GPUS = ("fused", "compile", "apply_probs_on")


def emitted(tmp_path, *words, code=0):
    """The case that the command writes."""
    path = tmp_path / "mine.yaml"
    assert run_command(app, ["plan", "--emit-case", str(path), "--hardware", "h200", *words]) == code
    return load_case(path) if code == 0 else None


def on_cpu(tmp_path, **changes):
    """The case of a tiny model with a profile for the CPU, where the kernels of a GPU are not."""
    emitted(tmp_path, *TINY, "--against", "recompute=full,mbs=2")
    path = tmp_path / "mine.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = content["profiles"].pop("h200x1")
    steps = {"train.steps": 8, "train.warmup_steps": 2, "train.dtype": "fp32", "data.seq_len": 32}
    content["profiles"]["cpu"] = {k: v for k, v in own.items() if not any(word in k for word in ON_GPUS)} | steps
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (("qwen3_8b", "--gpus", "8", "--gbs", "64"), 1),
        (("qwen3_30b_a3b", "--gpus", "8", "--gbs", "64", "--backend", "torch", "--fix", "recompute="), 1),
        pytest.param(("qwen3_30b_a3b", "--gpus", "32", "--gbs", "256", "--case-gpus", "2"), 2, marks=pytest.mark.full),
    ],
)
def test_every_run_of_the_case_fits_and_is_predicted_as_the_planner_times_it(tmp_path, words, gpus):
    case = emitted(tmp_path, *words)
    (profile,) = case.profiles
    assert (case.kind, profile) == ("prediction", f"h200x{gpus}")
    for value, (name, resolved) in zip(case.values, configurations(case, profile).items(), strict=True):
        assert value.name == name
        assert max(s.peak for s in dry_run(resolved.config, gpus).stages) <= 0.92 * cluster("h200").memory_gib * GIB
        speed = predicted(resolved.config, gpus, cluster("h200")).tokens_per_s_per_gpu
        for told, expected in ((value.predicted.value, speed.value), (value.predicted.low, speed.low), (value.predicted.high, speed.high)):
            assert told == pytest.approx(expected, rel=1e-3)


def test_the_kernel_of_attention_is_the_one_that_the_dry_run_works_out(tmp_path, monkeypatch):
    monkeypatch.setattr("playbook_trainer.config.dry_run.attention", lambda config, hardware: "unfused")
    case = emitted(tmp_path, "qwen3_8b", "--gpus", "8", "--gbs", "64", "--backend", "torch", "--fix", "recompute=")
    for value, resolved in zip(case.values, configurations(case, "h200x1").values(), strict=True):
        assert value.predicted.value == pytest.approx(predicted(resolved.config, 1, cluster("h200")).tokens_per_s_per_gpu.value, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "verdict", "predicted_at_all"),
    [
        (["train.dtype=bf16", "model=qwen3_8b", "model.num_layers=20"], "fits", True),
        (["train.dtype=bf16", "model=qwen3_30b_a3b"], "does not fit", True),
        ([], "fits", False),
    ],
)
def test_a_dry_run_says_what_hardware_makes_of_it(capsys, words, verdict, predicted_at_all):
    config = str(repo_root() / "trainer/configs/qwen3_tiny.yaml")
    command = ["train", "--dry-run", "--gpus", "1", "--hardware", "h200", config, *words]
    told = document(capsys, *command)
    assert told["verdict"] == verdict
    speed = told["tokens_per_s_per_gpu"]
    assert (speed is not None) == predicted_at_all
    assert speed is None or speed["low"] < speed["value"] < speed["high"]
    assert run_command(app, command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(verdict) for line in lines)
    speeds = [line for line in lines if line.startswith("predicted: ")]
    assert ["not scaled to published runs" in line for line in speeds] == [True] * predicted_at_all
    assert run_command(app, ["train", "--hardware", "h200", config]) == 2


def test_a_layout_of_ones_own_is_set_against_the_best(tmp_path):
    case = emitted(tmp_path, "qwen3_8b", "--gpus", "8", "--gbs", "64", "--against", "tp=2,mbs=1")
    first, second = case.values
    assert second.name == "second-tp2-mbs1"
    assert second.set["model.num_heads"] == MODELS["qwen3_8b"].heads // 2
    assert "num_heads" in case.delta.reason
    assert first.name.startswith("first-tp1")


@pytest.mark.parametrize(
    "words",
    [
        ("llama3_8b", "--gpus", "8", "--gbs", "64"),
        ("qwen3_vl_30b_a3b", "--gpus", "8", "--gbs", "256"),
        ("qwen3_30b_a3b", "--gpus", "8", "--gbs", "64", "--backend", "torch"),
        ("qwen3_8b", "--gpus", "8", "--gbs", "64", "--against", "tp=3"),
        ("qwen3_8b", "--gpus", "8", "--gbs", "64", "--top", "1"),
        ("qwen3_8b", "--gpus", "8", "--gbs", "64", "--emit-case", "No_Name.yaml"),
        ("qwen3_8b", "--gpus", "8", "--gbs", "64", "--emit-case", "no/such/folder/mine.yaml"),
    ],
)
def test_what_cannot_be_run_here_is_refused(tmp_path, capsys, words):
    emitted(tmp_path, *words, code=2)
    assert capsys.readouterr().err.strip()
    assert not (tmp_path / "mine.yaml").exists()


def test_what_speaks_of_a_case_needs_one(capsys):
    assert "--emit-case" in refused(capsys, "plan", "qwen3_8b", "--gpus", "8", "--gbs", "64", "--case-gpus", "2")


def test_a_rank_keeps_what_it_holds_of_a_layer():
    plan = parse("qwen3_30b_a3b", ["gpus=32", "tp=2", "pp=2", "ep=8", "mbs=2", "gbs=64", "dispatcher=alltoall"])
    for gpus, tp, ep in ((1, 1, 1), (4, 2, 4), (16, 2, 8)):
        cut = scaled(plan, gpus, 6)
        assert (cut.tp, cut.ep, cut.pp, cut.shape.layers) == (tp, ep, 1, 6)
        assert cut.shape.heads // cut.tp == plan.shape.heads // plan.tp
        assert cut.shape.experts // cut.ep == plan.shape.experts // plan.ep
        assert cut.shape.vocab // cut.tp == plan.shape.vocab // plan.tp
        assert cut.broken() == []
        assert len(stages(cut)) == 1


@pytest.mark.full
def test_an_emitted_case_trains_as_its_proofs_say(tmp_path):
    proofs = aa.prove([str(on_cpu(tmp_path))], profile="cpu")
    assert [p.variant for p in proofs] == ["first-mbs4-recompute-none", "second-mbs2-recompute-full"]
    assert all(p.ok and p.checks for p in proofs)


@pytest.mark.full
def test_an_emitted_case_has_its_verdict_from_the_harness(tmp_path):
    """Planted ranks reach a million tokens per second; what was predicted for an H200 is not that."""
    seen = {"every": {"require": [{"collective": "all_to_all", "inside": "dispatch"}]}}
    path = on_cpu(tmp_path, activation=seen, budget={"pairs": [4]})
    found = bench(str(path), tmp_path)
    assert found.status == "refuted"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for value in content["values"]:
        value["predicted"] = {"value": 1_000_000, "low": 850_000, "high": 1_150_000}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = bench(str(path), tmp_path)
    assert found.status == "confirmed"
    assert replay.derive(found.evidence.measured) == found.evidence.derived
