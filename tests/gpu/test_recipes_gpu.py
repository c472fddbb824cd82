"""The small version of each recipe runs on four H200s, and its peak is near the estimate that says that it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from playbook.paths import repo_root, sources
from playbook_trainer.config import recipes
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load

pytestmark = [pytest.mark.multigpu, pytest.mark.slow]
GIB = 1 << 30
SHORT = {"train.steps": 4, "train.warmup_steps": 2, "train.receipt": False, "tracker.tensorboard": False, "eval.every": 0}
GRAPHS = {"train.steps": 7, "train.warmup_steps": 5}
"""Graphs are captured after a few steps."""


@pytest.mark.skipif(torch.cuda.device_count() < recipes.SMALL_GPUS, reason="needs four GPUs")
@pytest.mark.parametrize("recipe", recipes.index().recipes, ids=lambda r: r.file.removesuffix(".yaml"))
def test_the_small_version_trains_and_holds_what_was_estimated(recipe, tmp_path):
    path = recipes.folder() / recipe.file
    if load(path).backend == "megatron":
        pytest.importorskip("megatron.core")
        pytest.importorskip("transformer_engine")
    settings = {**recipe.small, **SHORT, **(GRAPHS if load(path).train.cuda_graphs else {}), "output": str(tmp_path)}
    estimate = dry_run(load(path, settings), recipes.SMALL_GPUS).stages[0].peak / GIB  # of rank 0, whose peak is in the summary
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={recipes.SMALL_GPUS}",
        "-m",
        "playbook_trainer",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources(repo_root())),
        "OMP_NUM_THREADS": "4",
    }
    done = subprocess.run([*command, str(path), *words], env=environment, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    peak = summary["metrics"]["peak_memory_bytes"] / GIB
    print(f"{recipe.file}: peak {peak:.1f} GiB, estimated {estimate:.1f}")
    # The estimate bounds images; Megatron-FSDP and uneven stages may add buffers.
    assert peak < 1.15 * estimate
