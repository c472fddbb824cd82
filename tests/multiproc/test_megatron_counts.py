"""The dry run's parameters are those of real megatron-core models, stage by stage, at world sizes that nobody has here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from playbook_trainer.config import load, parse_overrides
from playbook_trainer.dry_run import dry_run

pytest.importorskip("megatron.core")

COMMON = ("backend=megatron", "train.dtype=bf16", "data.pack=false", "train.device=cuda")
MLA = ("model=deepseek_v3_tiny", "model.num_layers=13")
JOBS = {
    "dense": ("qwen3_tiny", (), 1),
    "experts": ("qwen3_moe_tiny", (), 1),
    "images": ("qwen3_vl_moe_tiny", (), 1),
    "latent attention with MTP": ("qwen3_moe_tiny", MLA, 1),
    "folding on 64": ("qwen3_moe_tiny", ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1", "parallel.ep=4"), 64),
    "images in two stages of 64": ("qwen3_vl_moe_tiny", ("parallel.pp=2", "parallel.ep=4"), 64),
    "uneven stages of 256": ("qwen3_moe_tiny", ("parallel.pp=4", "model.num_layers=7", "parallel.pipeline_layout=[1,2,2,2]", "parallel.ep=8"), 256),
    "uneven chunks with MTP on 256": (
        "qwen3_moe_tiny", (*MLA, "parallel.pp=4", "parallel.vpp=2", "parallel.pipeline_layout=[1,2,2,2,2,2,2,0]", "parallel.ep=8"), 256
    ),
}  # fmt: skip


def expected(config: str, words: tuple[str, ...], world: int) -> list[int]:
    """Parameters of each stage by the dry run."""
    return [stage.parameters for stage in dry_run(load(Path(config), parse_overrides(words)), world).stages]


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[list[int], list[int]]]:
    """Parameters of each stage by the dry run and by megatron-core, for every job."""
    asked, places = [], []
    said = {}
    for name, (file, words, world) in JOBS.items():
        config, own = f"{ROOT}/trainer/configs/{file}.yaml", (*COMMON, f"train.global_batch_size={4 * world}", *words)
        said[name] = expected(config, own, world)
        for stage in range(len(said[name])):
            asked.append({"config": config, "words": own, "world": world, "rank": stage * world // len(said[name])})
            places.append(name)
    paths = [str(ROOT / p) for p in (".", "bench", "trainer", "tests/multiproc")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/multiproc/megatron_counts.py")]
    done = subprocess.run(command, input=json.dumps(asked), text=True, capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[int]] = {name: [] for name in JOBS}
    for name, number in zip(places, json.loads(done.stdout.splitlines()[-1]), strict=True):
        found[name].append(number)
    return {name: (said[name], found[name]) for name in JOBS}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_the_dry_run_counts_what_the_real_model_holds(name: str, counted: dict[str, tuple[list[int], list[int]]]) -> None:
    said, found = counted[name]
    assert said == found
