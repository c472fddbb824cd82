"""Every layout computes what one rank computes: same data, same seed, FP32, ten steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from ranks import ROOT, run, steps, summary

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_moe_tiny.yaml"
DENSE = "trainer/configs/qwen3_tiny.yaml"  # with tied embeddings
DENSE_VISION = "trainer/configs/qwen3_vl_tiny.yaml"
COMMON = ["train.steps=10", "train.warmup_steps=1"]

LAYOUTS = {
    "fsdp2": (TEXT, 2, []),
    "fsdp4": (TEXT, 4, []),
    "ep2-alltoall": (TEXT, 2, ["parallel.ep=2", "moe.dispatcher=alltoall"]),
    "ep2-allgather": (TEXT, 2, ["parallel.ep=2", "moe.dispatcher=allgather"]),
    "ep2-of-4": (TEXT, 4, ["parallel.ep=2", "moe.dispatcher=alltoall"]),
    "ep4-allgather": (TEXT, 4, ["parallel.ep=4", "moe.dispatcher=allgather"]),
    "cp2": (TEXT, 2, ["parallel.cp=2"]),
    "cp4-ring": (TEXT, 4, ["parallel.cp=4", "parallel.cp_comm=ring"]),
    "cp2-ring-tp2": (TEXT, 4, ["parallel.cp=2", "parallel.tp=2", "parallel.cp_comm=ring"]),
    "cp2-ulysses": (TEXT, 2, ["parallel.cp=2", "parallel.cp_comm=ulysses"]),
    "cp4-ulysses": (TEXT, 4, ["parallel.cp=4", "parallel.cp_comm=ulysses"]),
    "cp2-ep4": (TEXT, 4, ["parallel.cp=2", "parallel.ep=4"]),
    "tp2": (TEXT, 2, ["parallel.tp=2"]),
    "pp2": (TEXT, 2, ["parallel.pp=2"]),
    "pp2-vpp2": (TEXT, 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "pp2-vpp2-dp2": (TEXT, 4, ["parallel.pp=2", "parallel.vpp=2"]),
    "tp2-pp2": (TEXT, 4, ["parallel.tp=2", "parallel.pp=2"]),
    "tp2-dp2": (TEXT, 4, ["parallel.tp=2"]),
    "pp2-dp2": (TEXT, 4, ["parallel.pp=2"]),
    "pp2-cp2": (TEXT, 4, ["parallel.pp=2", "parallel.cp=2"]),
    "recompute": (TEXT, 2, ["train.recompute=full", "parallel.ep=2"]),
    "vision-fsdp2": (VISION, 2, ["data.num_workers=1"]),
    "tied-fsdp2": (DENSE, 2, []),
    "tied-tp2-pp2": (DENSE, 4, ["parallel.tp=2", "parallel.pp=2"]),
    "tied-pp2-dp2": (DENSE, 4, ["parallel.pp=2"]),
    "tied-pp2-vpp2": (DENSE, 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "tied-vision-fsdp2": (DENSE_VISION, 2, ["data.num_workers=1"]),
    "vision-pp2-dp2": (VISION, 4, ["parallel.pp=2", "data.num_workers=0"]),
    "vision-cp2": (VISION, 2, ["parallel.cp=2", "data.num_workers=0"]),
    "vision-pp2-cp2-ring": (VISION, 4, ["parallel.pp=2", "parallel.cp=2", "parallel.cp_comm=ring", "data.num_workers=0"]),
    "vision-cp2-ulysses": (VISION, 2, ["parallel.cp=2", "parallel.cp_comm=ulysses", "data.num_workers=0"]),
}


def curve(folder: Path, config: str, ranks: int, words: list[str]) -> list[dict[str, float]]:
    results = run([config, *COMMON, *words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return steps(folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    root = tmp_path_factory.mktemp("one")

    @cache
    def reference(config: str) -> list[dict[str, float]]:
        return curve(root / Path(config).stem, config, 1, [])

    return reference


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(name: str, one_rank: Callable[[str], list[dict[str, float]]], tmp_path: Path) -> None:
    config, ranks, words = LAYOUTS[name]
    rows = curve(tmp_path, config, ranks, words)
    reference = one_rank(config)
    assert len(rows) == len(reference) == 10
    for a, b in zip(rows, reference, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), f"loss at step {a['step']}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), f"gradient norm at step {a['step']}"
        assert (a["useful_tokens"], a["raw_tokens"], a["images"]) == (b["useful_tokens"], b["raw_tokens"], b["images"])
    assert summary(tmp_path)["outcome"] == "ok"


def test_ranks_without_images_keep_in_step(tmp_path: Path) -> None:
    photographs = ROOT / "trainer" / "assets" / "vqa"
    folder = tmp_path / "data"
    folder.mkdir()
    names = sorted(p.name for p in photographs.glob("*.jpg"))[:3]
    for name in names:
        shutil.copy(photographs / name, folder)
    # Rows of one sample each: with two ranks, one of them often has no image where the other has one.
    samples = [{"images": [names[i % 3]] if i % 3 else [], "question": f"What is number {i}?", "answer": str(i)} for i in range(40)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    words = [f"data.path={folder}", "data.pack=false", "data.num_workers=0"]
    one = curve(tmp_path / "one", VISION, 1, words)
    two = curve(tmp_path / "two", VISION, 2, words)
    assert len({r["images"] for r in one}) > 1
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_context_parallel_rows_need_no_padding(tmp_path: Path) -> None:
    words = ["data.pad=false", "data.seq_len=252", "data.pack_buffer=1", "parallel.cp_comm=ring"]
    one, two = curve(tmp_path / "one", TEXT, 1, words), curve(tmp_path / "two", TEXT, 2, [*words, "parallel.cp=2"])
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["raw_tokens"] == b["raw_tokens"]


def test_interleaved_stages_evaluate_as_one_rank(tmp_path: Path) -> None:
    words = ["train.steps=2", "eval.every=2", "eval.batches=1", "train.receipt=false"]
    losses = []
    for name, ranks, layout in (("one", 1, []), ("two", 2, ["parallel.pp=2", "parallel.vpp=2"])):
        results = run([TEXT, *COMMON, *words, *layout, f"output={tmp_path / name}"], ranks)
        assert [r[0] for r in results] == [0] * ranks, results[-1][2]
        losses.append(summary(tmp_path / name)["eval"][-1]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
