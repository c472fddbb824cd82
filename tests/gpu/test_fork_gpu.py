"""Ranks that are forked use a GPU as fresh ones do: importing either backend leaves CUDA alone."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import LocalLauncher, Spec
from playbook_trainer.config.tree import load, parse_overrides

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "model.num_layers=2",
    "model.num_experts=16",
    "parallel.ep=1",
    "train.steps=5",
    "train.warmup_steps=2",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_forked_ranks_use_the_gpu(backend: str, tmp_path: Path) -> None:
    """Two launches from one process, and a fresh one; loss of the first step alike, and figures of how long each took to start."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    words = [*WORDS, f"backend={backend}", "data.kind=mock", "data.pack=false"]
    config = load(ROOT / "trainer/configs/qwen3_30b_a3b_24l.yaml", parse_overrides(words))
    found = {}
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    with closing(ForkLauncher()) as launcher:
        for name, how in (("first", launcher), ("second", launcher), ("fresh", LocalLauncher())):
            result = how.run(Spec(config, 1, tmp_path / name, gpu, timeout_s=100))
            assert result.outcome == "ok", result.message
            row = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
            found[name] = row["loss"], json.loads((tmp_path / name / "summary.json").read_text())["seconds"], round(result.wall_s, 1)
            print(backend, name, found[name])
        assert all(server is not None for server in launcher.servers.values()), "ranks were started afresh"
    assert found["second"][0] == pytest.approx(found["fresh"][0], rel=1e-4)
    assert found["second"][1]["start_up"] < found["fresh"][1]["start_up"]
