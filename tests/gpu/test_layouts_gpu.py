"""Layouts on NCCL agree with one GPU, in BF16 within its rounding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiproc"))
from ranks import run, steps

MANY = Path(__file__).resolve().parents[1] / "multiproc" / "many.py"
TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
WORDS = ["train.steps=6", "train.warmup_steps=1", "train.dtype=bf16", "model.head_dim=64", "model.hidden_size=128", "moe.experts=grouped"]
LAYOUTS = {
    "fsdp": [],
    "ep-alltoall": ["parallel.ep={n}", "moe.dispatcher=alltoall"],
    "ep-allgather": ["parallel.ep={n}", "moe.dispatcher=allgather"],
    "cp": ["parallel.cp={n}"],
    "cp-ring": ["parallel.cp={n}", "parallel.cp_comm=ring"],
    "cp-ulysses": ["parallel.cp={n}", "parallel.cp_comm=ulysses"],
    "tp2-pp": ["parallel.tp=2", "parallel.pp={half}"],
    "ep-dedup": ["parallel.ep={n}", "moe.dispatcher=dedup"],
    "hsdp": ["parallel.dp_replicate=2"],
    "copies": ["parallel.fsdp=false"],
    "tp2-sp": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "tp2-sp-ep-etp1-dedup": [
        "parallel.tp=2",
        "parallel.sequence_parallel=true",
        "parallel.ep={n}",
        "parallel.etp=1",
        "moe.dispatcher=dedup",
    ],
    "tp2-ep-etp1": ["parallel.tp=2", "parallel.ep={n}", "parallel.etp=1"],
    "etp": ["parallel.etp={n}"],
}


@pytest.mark.gpu
def test_one_gpu_learns(tmp_path: Path) -> None:
    assert run([TEXT, *WORDS, f"output={tmp_path}"])[0][0] == 0
    rows = steps(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all outputs: every layout in turn, by the same processes."""
    root = tmp_path_factory.mktemp("layouts")
    n = 4 if torch.cuda.device_count() >= 4 else 2
    for ranks, layouts in ((1, {"one": []}), (n, LAYOUTS)):
        jobs = [[TEXT, *WORDS, *(w.format(n=n, half=n // 2) for w in words), f"output={root / name}"] for name, words in layouts.items()]
        (root / f"{ranks}.json").write_text(json.dumps(jobs))
        results = run([str(root / f"{ranks}.json")], ranks, timeout=280, command=[sys.executable, str(MANY)])
        print(results[0][1], *(err[-3000:] for code, _, err in results if code), sep="\n")
    return root


@pytest.mark.multigpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_gpu(name: str, trained: Path) -> None:
    assert (trained / name / "summary.json").is_file(), f"{name}, or a layout before it in the same processes, broke"
    for a, b in zip(steps(trained / name), steps(trained / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-2)
