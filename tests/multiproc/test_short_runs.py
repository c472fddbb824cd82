"""Invariants that a short run shows: they hold, and they notice when what they speak of is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from playbook_bench import short_runs


def test_the_whole_configuration_reaches_the_tracker() -> None:
    pytest.importorskip("tensorboard")
    holds, sentence, figures = short_runs.tracker_gets_configuration()
    assert holds, sentence
    assert figures["lines"] > 100


def test_a_tracker_that_gets_only_the_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_path(config: str, out: Path, *words: str) -> str:
        (out / "tensorboard").mkdir(parents=True)
        (out / "tensorboard" / "events.out").write_bytes(b"trainer/configs/qwen3_moe_tiny.yaml")
        (out / "config.yaml").write_text("optimizer:\n  lr: 0.000123\n")
        return ""

    monkeypatch.setattr(short_runs, "_train", only_the_path)
    holds, sentence, _ = short_runs.tracker_gets_configuration()
    assert not holds
    assert "missing: optimizer:" in sentence


def test_a_run_from_saved_weights_evaluates_saves_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    holds, sentence, _ = short_runs.finetune_saves_and_evaluates()
    assert holds, sentence
    real = short_runs._train

    def without_evaluation(config: str, out: Path, *words: str) -> Any:
        return real(config, out, *(w for w in words if not w.startswith("eval.every")))

    monkeypatch.setattr(short_runs, "_train", without_evaluation)
    holds, sentence, figures = short_runs.finetune_saves_and_evaluates()
    assert not holds
    assert figures["evaluated"] == []


def test_a_run_that_fails_is_an_answer_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "_TINY", (*short_runs._TINY, "train.stepz=1"))
    holds, sentence, _ = short_runs.finetune_saves_and_evaluates()
    assert not holds
    assert "export: the trainer ended with code 2" in sentence
