"""Checkpoints: written under one layout and read under another, killed at any moment, damaged, or hostile."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run, start, steps

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_moe_tiny.yaml"
QUICK = ["train.receipt=false", "train.warmup_steps=1", "train.steps=6", "data.seq_len=64"]

LAYOUTS = {
    "one": (1, []),
    "fsdp2": (2, []),
    "ep2": (2, ["parallel.ep=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "tp2-pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "ep2-dp4": (4, ["parallel.ep=2"]),
}


def trained(folder: Path, config: str, layout: str, *words: str) -> list[dict[str, Any]]:
    ranks, sizes = LAYOUTS[layout]
    results = run([config, *QUICK, *sizes, *words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return steps(folder)


def saving(folder: Path, every: int = 3) -> list[str]:
    return [f"checkpoint.dir={folder}", f"checkpoint.every={every}", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("whole"), TEXT, "one")


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2-pp2", ["one", "ep2"]), ("ep2-dp4", ["tp2", "pp2"]), ("one", ["tp2-pp2"])],
)
def test_resumed_in_another_layout(before: str, after: list[str], whole: list[dict[str, Any]], tmp_path: Path) -> None:
    trained(tmp_path / "first", TEXT, before, *saving(tmp_path / "saved"))
    for layout in after:
        folder = tmp_path / f"from-{layout}"
        folder.mkdir()
        shutil.copytree(tmp_path / "saved" / "step_00000003", folder / "step_00000003")
        rows = trained(tmp_path / layout, TEXT, layout, f"checkpoint.dir={folder}")
        assert [r["step"] for r in rows] == [4, 5, 6]
        for row, expected in zip(rows, whole[3:], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5), (layout, row["step"])
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), (layout, row["step"])
            assert row["useful_tokens"] == expected["useful_tokens"], "the data position is exact"


def test_images_resume_in_another_layout(tmp_path: Path) -> None:
    words = ["train.steps=4", "data.num_workers=1"]
    expected = trained(tmp_path / "whole", VISION, "one", *words)
    trained(tmp_path / "first", VISION, "fsdp2", *words, *saving(tmp_path / "saved", every=2))
    shutil.rmtree(tmp_path / "saved" / "step_00000004")
    rows = trained(tmp_path / "second", VISION, "one", "train.steps=4", "data.num_workers=2", *saving(tmp_path / "saved", every=9))
    assert [(r["step"], r["images"]) for r in rows] == [(r["step"], r["images"]) for r in expected[2:]]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected[2:]], rel=1e-5)


@pytest.mark.timeout(900)
def test_killed_twenty_times_and_resumed(tmp_path: Path) -> None:
    """A random rank dies at a random moment; in the end the losses are those of an uninterrupted run, to the last bit."""
    words = [TEXT, *QUICK, "train.steps=60", "train.deterministic=true", "parallel.ep=2", "model.num_layers=1", "train.global_batch_size=2"]
    whole, parts, saved = tmp_path / "whole", tmp_path / "parts", tmp_path / "saved"
    assert [r[0] for r in run([*words, f"output={whole}"], 2)] == [0, 0]
    chance, kills = random.Random(20), 0
    more = [f"checkpoint.dir={saved}", "checkpoint.every=1", "checkpoint.keep=2", f"output={parts}"]
    while kills < 20:
        ranks = start([*words, *more], 2)
        at = kills * 2 + chance.randint(2, 4)
        wait_for(lambda at=at: len(lines(parts)) >= at, ranks)
        time.sleep(chance.random() * 0.05)
        victim = chance.randrange(2)
        ranks[victim].send_signal(signal.SIGKILL)
        for p in ranks:
            p.kill()
            p.communicate()
        kills += 1
    assert [r[0] for r in run([*words, *more], 2)] == [0, 0]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in steps(parts)] == [(r["step"], r["loss"], r["grad_norm"]) for r in steps(whole)]
    assert sorted(p.name for p in saved.iterdir()) == ["step_00000059", "step_00000060"]


def lines(folder: Path) -> list[bytes]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.is_file() else []


def wait_for(happened: Any, ranks: list[Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        assert all(p.poll() is None for p in ranks), [p.communicate() for p in ranks]
        time.sleep(0.005)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(folder / "out", TEXT, "one", "train.steps=2", *saving(folder / "checkpoints", every=2))
    return folder / "checkpoints"


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def resumed(copy: Path, *words: str) -> tuple[int, str]:
    code, _, err = run([TEXT, *QUICK, f"checkpoint.dir={copy}", f"output={copy / 'out'}", *words])[0]
    assert "Traceback" not in err
    return code, err


def test_a_hostile_checkpoint_runs_no_code(saved: Path, tmp_path: Path) -> None:
    copy, marker = tmp_path / "copy", tmp_path / "executed"
    shutil.copytree(saved, copy)
    bomb = pickle.dumps(Hostile(marker))
    (copy / "step_00000002" / ".metadata").write_bytes(bomb)
    assert resumed(copy)[0] == 0, "the library's own index is never read"
    shutil.rmtree(copy / "out")
    # The stretch of the file that holds a tensor holds a pickle that runs code.
    index = json.loads((copy / "step_00000002" / "checkpoint.json").read_text())
    for tensor in index["tensors"].values():
        for piece in tensor["pieces"]:
            piece |= {"start": 0, "length": len(bomb)}
    (copy / "step_00000002" / "checkpoint.json").write_text(json.dumps(index))
    (copy / "step_00000002" / "__0_0.distcp").write_bytes(bomb)
    code, err = resumed(copy)
    assert (code, "cannot be read" in err) == (2, True), err
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: i["tensors"]["model.norm.weight"]["pieces"].clear(), "has pieces for 0 of its 64 values"),
        (lambda i: i["tensors"]["model.norm.weight"]["pieces"][0].update(file="../../x.distcp"), "file"),
        (lambda i: i["tensors"]["model.norm.weight"]["pieces"][0].update(offsets=[60]), "stick out"),
        (lambda i: i["tensors"]["model.norm.weight"].update(dtype="object"), "dtype"),
        (lambda i: i["tensors"].pop("model.norm.weight"), "lacks 1 tensors"),
        (lambda i: i["model"].update(num_layers=8), "another model: num_layers 8 where this run has 4"),
        (lambda i: i.update(schema="checkpoint/9"), "schema"),
        (lambda i: i["data"].update(row="x"), "row"),
    ],
)
def test_a_damaged_index_is_refused(change: Any, expected: str, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    path = copy / "step_00000002" / "checkpoint.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    code, err = resumed(copy)
    assert code == 2
    assert expected in err


def test_checkpoints_of_another_run_are_not_overwritten(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    code, err = resumed(copy, "checkpoint.resume=false", "checkpoint.every=2")
    assert (code, "checkpoint.resume is false" in err) == (2, True)
    assert [p.name for p in copy.glob("step_*")] == ["step_00000002"]


def test_a_checkpoint_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = run([TEXT, *QUICK, *saving(tmp_path / "file" / "saved"), f"output={tmp_path / 'out'}"])
    assert results[0][0] == 2
    assert "cannot be written" in results[0][2]
    assert "Traceback" not in results[0][2]
