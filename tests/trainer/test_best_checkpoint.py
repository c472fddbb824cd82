"""The checkpoint of the lowest evaluation loss stays, and an interrupted run keeps the same one; epochs and an evaluation file in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forking import Forks
from ranks import steps, summary

TEXT = "trainer/configs/qwen3_tiny.yaml"
QUICK = [
    "train.receipt=false",
    "train.warmup_steps=1",
    "data.seq_len=64",
    "model.num_layers=1",
    "eval.batches=1",
    "optimizer.warmup_steps=0",
]
RISES_AGAIN = ["train.steps=6", "optimizer.lr=0.05", "optimizer.schedule=constant", "eval.every=1", "train.deterministic=true"]


def saved(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_*"))


def header(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    return found


@pytest.mark.full
def test_the_best_checkpoint_stays_beside_the_newest(forks: Forks, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "saved"
    keeping = [f"checkpoint.dir={folder}", "checkpoint.keep_best=true", "checkpoint.keep=1", "checkpoint.every=3"]
    words = [TEXT, *QUICK, *RISES_AGAIN, *keeping, f"output={out}"]
    assert forks.run(words) == [0], forks.text(0)
    loss, step = min((r["eval_loss"], r["step"]) for r in steps(out) if "eval_loss" in r)
    assert 1 < step < 6, "the learning rate is so high that the loss rises again"
    assert saved(folder) == [step, 6]
    assert (folder / "best").resolve().name == f"step_{step:08d}"
    assert header(folder / "step_00000006")["best"] == {"step": step, "loss": loss}

    # Interrupted before the last step, the same run keeps the same checkpoint.
    again, other = tmp_path / "again", tmp_path / "other"
    words = [*words[:-5], f"checkpoint.dir={other}", *keeping[1:], f"output={again}"]
    for stop in (4, 6):
        assert forks.run([*words, f"train.steps={stop}"]) == [0], forks.text(0)
    assert [(r["loss"], r.get("eval_loss")) for r in steps(again)] == [(r["loss"], r.get("eval_loss")) for r in steps(out)]
    assert saved(other) == saved(folder)
    assert header(other / "best") | {"tensors": 0, "sha256": 0} == header(folder / "best") | {"tensors": 0, "sha256": 0}

    # And its weights can be had: a folder with it alone has nothing left to train.
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "best").resolve().rename(alone / f"step_{step:08d}")
    exporting = [f"checkpoint.dir={alone}", f"train.steps={step}", f"checkpoint.export={tmp_path / 'export'}", f"output={tmp_path / 'x'}"]
    assert forks.run([TEXT, *QUICK, *exporting]) == [0], forks.text(0)
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.full
def test_a_run_of_epochs_on_a_file_with_another_to_evaluate_on(forks: Forks, tmp_path: Path) -> None:
    for name, count in (("train", 18), ("held", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i} " * 9}) + "\n" for i in range(count)))
    data = [f"data.path={tmp_path}/train.jsonl", f"eval.path={tmp_path}/held.jsonl", "eval.every=2", "data.pack=false", "data.seq_len=128"]
    words = [TEXT, *QUICK, *data, "train.epochs=1", "train.global_batch_size=4", f"checkpoint.dir={tmp_path / 'saved'}"]
    out = tmp_path / "out"
    assert forks.run([*words, f"output={out}"], 2) == [0, 0], forks.text(0)
    assert "train.epochs 1 comes to 5 steps of 4 rows\n" in forks.text(0)
    assert [r["step"] for r in steps(out)] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in summary(out)["eval"]] == [2, 4]
    assert forks.run([*words, f"output={out}"], 2) == [0, 0], forks.text(0)
    assert "finished before" in forks.text(0)
