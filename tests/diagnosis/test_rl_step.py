"""The step of reinforcement learning: phases from five trainers' logs, the wall, the long tail, what waits, and what an engine stores."""

from __future__ import annotations

from pathlib import Path

import log_excerpts as logs
import pytest
from in_process import document, printed, refused

from playbook.diagnosis import rl_step
from playbook.diagnosis.rl_step import BETWEEN, Step
from playbook.planner.models import MODELS, find
from playbook.planner.parameters import total
from playbook.planner.time.cluster import cluster
from playbook_bench.logs import read, rl_steps

LOGS = {
    "slime": (logs.slime(), "rollout", {"rollout": 0.6, "weight transfer": 0.1, "log-probabilities": 0.1, "update": 0.2}),
    "openrlhf": (logs.openrlhf(), "rollout", {"rollout": 0.4, "log-probabilities": 0.2, "update": 0.3, "weight transfer": 0.1}),
    "nemo-rl": (logs.nemo_rl(), "update", {"rollout": 0.3, "log-probabilities": 0.05, "update": 0.6, "weight transfer": 0.01}),
}


def file(folder: Path, text: str, name: str = "run.log") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("adapter", LOGS)
def test_each_trainers_phases_are_read_and_add_up(adapter: str, tmp_path: Path) -> None:
    text, wall, shares = LOGS[adapter]
    log = read(text)
    seconds = [100 * s if adapter == "nemo-rl" else s for s in logs.SECONDS]
    assert (log.adapter, [s.seconds for s in log.steps]) == (adapter, pytest.approx(seconds))
    found = rl_step.diagnose(rl_step.middle(rl_steps(file(tmp_path, text))))
    assert found["wall"] == wall
    named = {p["phase"]: p["share"] for p in found["phases"] if p["phase"] != BETWEEN}
    assert named == pytest.approx(shares, abs=1e-3)
    assert sum(p["share"] for p in found["phases"]) == pytest.approx(1)


def test_verls_phases_and_the_longest_of_its_turns_are_read(tmp_path: Path) -> None:
    names = {"gen": 541.2, "reward": 0.0, "old_log_prob": 72.4, "ref": 72.0, "update_actor": 472.1, "update_weights": 5.8, "step": 1164.0}
    turns = "timing_s/agent_loop/generate_sequences/max:539.5 - timing_s/agent_loop/generate_sequences/mean:266.6"
    row = " - ".join(f"timing_s/{name}:{s}" for name, s in names.items())
    text = "".join(f"step:{i} - actor/grad_norm:0.5 - {turns} - {row} - perf/total_num_tokens:1856\n" for i in (1, 2))
    step = rl_step.middle(rl_steps(file(tmp_path, text)))
    assert step.phases == pytest.approx(
        {"rollout": 541.2, "reward": 0.0, "log-probabilities": 144.4, "update": 472.1, "weight transfer": 5.8}
    )
    found = rl_step.diagnose(step)
    assert (found["wall"], round(found["long_tail"]["idle_share_of_rollout"], 2)) == ("rollout", 0.51)
    assert "longest" in found["actions"][0]


def test_trl_logs_lengths_and_no_phases_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "diagnose", str(file(tmp_path, logs.trl(), "trainer_state.json")))
    assert "0.5 s a step" in out
    assert "wall       not known" in out
    assert "75% of the rollout" in out


def test_the_command_answers_with_the_wall_and_both_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", str(file(tmp_path, logs.slime())), "--model", "qwen3_30b_a3b", "--gpus", "8", "--gpu", "h200", "--layout", "ep=8"]
    found = document(capsys, *words)
    assert (found["schema"], found["wall"]) == ("rl-step/1", "rollout")
    weights = found["memory"]["engine"]["weights_gib"]
    assert weights == pytest.approx(2 * total(find("qwen3_30b_a3b")) / 2**30, rel=1e-6)
    assert 0 < found["memory"]["trainer_gib"] < 141
    assert "wall       rollout" in printed(capsys, *words)


def test_what_waits_depends_on_the_placement() -> None:
    found = rl_step.diagnose(Step(100.0, {"rollout": 60.0, "reward": 10.0, "update": 20.0}, mean=1000.0, longest=4000.0))
    assert found["idle"] == pytest.approx(
        {"together": 1 - (60 * 0.25 + 20) / 100, "trainers_apart": 0.7, "engines_apart": 0.4, "overlapped": 100 / 60}
    )
    assert rl_step.diagnose(Step(100.0, {"rollout": 10.0, "update": 20.0}))["wall"] == BETWEEN
    assert rl_step.diagnose(Step(None, {}))["wall"] is None


@pytest.mark.parametrize(
    ("model", "kv"),
    [("qwen3_30b_a3b", 2 * 48 * 2 * 4 * 128), ("llama3_70b", 2 * 80 * 2 * 8 * 128), ("deepseek_v3", 2 * 61 * (512 + 64))],
)
def test_keys_and_values_of_a_token(model: str, kv: int) -> None:
    """By the fields of each model's config.json."""
    one = rl_step.engine(MODELS[model], 1)
    assert (one.kv_per_token, one.weights) == (kv, 2 * total(MODELS[model]))
    eight = rl_step.engine(MODELS[model], 8)
    assert eight.kv_per_token == (kv if model == "deepseek_v3" else kv / min(8, MODELS[model].kv_heads))


def test_another_log_is_none_of_reinforcement_learning(tmp_path: Path) -> None:
    for text in (logs.megatron(), logs.json_lines(), logs.torchtitan(), "no log at all\n"):
        assert rl_steps(file(tmp_path, text)) == []


def test_a_planned_step_turns_with_the_lengths_of_its_responses(capsys: pytest.CaptureFixture[str]) -> None:
    """Short responses leave the update as the wall, one very long response the rollout, each of whose steps reads an engine's weights."""
    common = ("plan", "rl", "llama3_8b", "--gpus", "8", "--gpu", "h100", "--mean", "256", "--longest")
    short, long = (document(capsys, *common, longest) for longest in ("256", "65536"))
    assert (short["wall"], long["wall"], short["label"]) == ("update", "rollout", "arithmetic")
    seconds = [{p["phase"]: p["seconds"] for p in step["phases"]} for step in (short, long)]
    assert seconds[0]["update"] == seconds[1]["update"]
    assert seconds[0]["log-probabilities"] == pytest.approx(2 / 3 * seconds[0]["update"])
    weights = 2 * total(find("llama3_8b"))
    steps = (65536 - 256) * weights / cluster("h100").memory_bytes_per_s
    assert seconds[1]["rollout"] - seconds[0]["rollout"] == pytest.approx(steps)
    assert short["memory"]["engine"]["weights_gib"] == pytest.approx(weights / 2**30, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3_70b", "--gpus", "1", "--gpu", "h100"], "no layout of llama3_70b fits 1 h100"),
        (["llama3_8b", "--mean", "4096", "--longest", "64"], "expected at least as many"),
    ],
)
def test_a_step_that_cannot_be_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "plan", "rl", *words)
