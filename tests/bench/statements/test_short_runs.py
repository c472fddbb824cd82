"""Invariants that a short run shows: they hold, and they notice when what they speak of is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from playbook_bench.statements import training
from playbook_bench.statements.training import (
    finetune_saves_and_evaluates,
    first_step_from_trained_weights,
    offline_run_gets_configuration,
    tracker_gets_configuration,
)


@pytest.mark.full
def test_an_offline_run_with_another_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    real = training.train

    def changed_since(config: str, out: Path, *words: str) -> str:
        problem = real(config, out, *words)
        (out / "config.yaml").write_text((out / "config.yaml").read_text().replace("seed: 0", "seed: 1"))
        return problem

    monkeypatch.setattr(training, "train", changed_since)
    holds, sentence, figures = offline_run_gets_configuration()
    assert not holds, sentence
    assert len(figures["missing"]) >= 1


def leaves(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], *wanted: str) -> None:
    """Training leaves these files, by their paths from its folder, and is told these words."""

    def planted(config: str, out: Path, *words: str) -> str:
        assert set(wanted) <= set(words)
        for name, text in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
        return ""

    monkeypatch.setattr(training, "train", planted)


HALF = "optimizer:\n  lr: 0.000123\n"


@pytest.mark.parametrize(
    ("told", "said"), [("trainer/configs/qwen3_moe_tiny.yaml", "missing from the tracker's file: optimizer:"), (HALF, "")]
)
@pytest.mark.full
def test_a_tracker_that_gets_only_the_path_or_half_a_configuration_is_noticed(
    monkeypatch: pytest.MonkeyPatch, told: str, said: str
) -> None:
    leaves(monkeypatch, {"tensorboard/events.out": told, "config.yaml": HALF})
    holds, sentence, _ = tracker_gets_configuration()
    assert not holds
    assert said in sentence


def ran(evaluated: list[int], resumed: list[int], written: str | None) -> dict[str, str]:
    """The files of a run that saved at step 4 in this format, evaluated at these steps and went on with those."""
    return {
        "../checkpoints/step_00000004/checkpoint.json": json.dumps({"format": written}),
        "summary.json": json.dumps({"eval": [{"step": s} for s in evaluated]}),
        "metrics.jsonl": "".join(json.dumps({"step": s}) + "\n" for s in resumed),
    }


@pytest.mark.parametrize(("evaluated", "resumed"), [([], [5, 6]), ([2, 4], [1, 2, 3, 4, 5, 6])])
@pytest.mark.full
def test_a_run_that_does_not_evaluate_or_starts_anew_is_noticed(
    monkeypatch: pytest.MonkeyPatch, evaluated: list[int], resumed: list[int]
) -> None:
    leaves(monkeypatch, ran(evaluated, resumed, "torch_dist"))
    assert not finetune_saves_and_evaluates()[0]


@pytest.mark.parametrize(("written", "wanted"), [("fsdp_dtensor", True), ("torch_dist", False), (None, False)])
def test_checkpoints_of_another_format_than_the_named_one_are_noticed(
    monkeypatch: pytest.MonkeyPatch, written: str | None, wanted: bool
) -> None:
    leaves(monkeypatch, ran([2, 4], [5, 6], written), "backend=megatron")
    assert finetune_saves_and_evaluates(["backend=megatron"], "fsdp_dtensor")[0] is wanted


@pytest.mark.full
def test_a_run_that_fails_is_an_answer_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TINY", (*training._TINY, "train.stepz=1"))
    holds, sentence, _ = finetune_saves_and_evaluates()
    assert not holds
    assert "export: the trainer ended with code 2" in sentence


@pytest.mark.parametrize(("norm", "learned", "wanted"), [(400.0, 2.0, True), (399.0, 2.0, False), (400.0, 6.0, False)])
def test_a_first_step_counts_as_unstable_from_the_ratio_on_and_after_learning_alone(
    monkeypatch: pytest.MonkeyPatch, norm: float, learned: float, wanted: bool
) -> None:
    def planted(config: str, out: Path, *words: str) -> str:
        out.mkdir(parents=True)
        trained = any(w.startswith("init.weights=") for w in words)
        row = {"grad_norm": norm if "data.kind=vqa" in words else 4.0, "loss": learned if trained else 5.0}
        (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return ""

    monkeypatch.setattr(training, "train", planted)
    assert first_step_from_trained_weights(10, 1e-3, 100)[0] is wanted
