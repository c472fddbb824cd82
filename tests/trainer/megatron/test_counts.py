"""The dry run's parameters and states are those of real megatron-core models, stage by stage, at world sizes that nobody has here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, SUPPORT, environment

from playbook_trainer.config import recipes
from playbook_trainer.config.tree import load, parse_overrides
from tests.support.targets.apart import answers

pytestmark = pytest.mark.full

pytest.importorskip("megatron.core")

COMMON = ("backend=megatron", "train.dtype=bf16", "data.pack=false", "train.device=cuda")
MLA = ("model=deepseek_v3_tiny", "model.num_layers=13")
JOBS = {
    "dense": ("qwen3_tiny", (), 1),
    "experts": ("qwen3_moe_tiny", (), 1),
    "copies": ("qwen3_moe_tiny", ("parallel.ep=2", "megatron.data_parallel=ddp"), 4),
    "gradients in 16 bits": ("qwen3_moe_tiny", ("parallel.ep=2", "megatron.grad_reduce_dtype=bf16", "moe.dispatcher=hybridep"), 4),
    "images": ("qwen3_vl_moe_tiny", (), 1),
    "images on two tensor ranks": ("qwen3_vl_tiny", ("parallel.tp=2", "parallel.sequence_parallel=true"), 2),
    "latent attention with MTP": ("qwen3_moe_tiny", MLA, 1),
    "folding on 64": ("qwen3_moe_tiny", ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1", "parallel.ep=4"), 64),
    "images in two stages of 64": ("qwen3_vl_moe_tiny", ("parallel.pp=2", "parallel.ep=4"), 64),
    "uneven stages of 256": ("qwen3_moe_tiny", ("parallel.pp=4", "model.num_layers=7", "parallel.pipeline_layout=[1,2,2,2]", "parallel.ep=8"), 256),
    "uneven chunks with MTP on 256": (
        "qwen3_moe_tiny", (*MLA, "parallel.pp=4", "parallel.vpp=2", "parallel.pipeline_layout=[1,2,2,2,2,2,2,0]", "parallel.ep=8"), 256
    ),
}  # fmt: skip


def told(script: str, asked: list[Any]) -> Any:
    """By a script that sees no GPU."""
    return answers(SUPPORT / "megatron" / script, asked, env=environment(CUDA_VISIBLE_DEVICES=""))


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    """Each stage of every job, built."""
    asked, places = [], []
    for name, (file, words, world) in JOBS.items():
        config, own = f"{ROOT}/trainer/configs/{file}.yaml", (*COMMON, f"train.global_batch_size={4 * world}", *words)
        for stage in range(load(Path(config), parse_overrides(own)).parallel.pp):
            asked.append({"config": config, "words": own, "world": world, "stage": stage})
            places.append(name)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
    for name, answer in zip(places, told("megatron_counts.py", asked), strict=True):
        found[name].append(answer)
    return found


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", JOBS)
def test_the_dry_run_says_what_the_real_model_holds(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    for stage in built[name]:
        assert stage["parameters"] == stage["expected_parameters"]
        # Rotary tables and padding of buckets are a few kilobytes more.
        assert 0 <= stage["allocated_bytes"] - stage["expected_bytes"] < 0.005 * stage["expected_bytes"] + 16_384


def test_a_fused_dispatcher_is_built_as_another_and_that_is_said(built: dict[str, list[dict[str, Any]]]) -> None:
    assert "built with alltoall: hybridep" in built["gradients in 16 bits"][0]["notes"][0]
    assert built["experts"][0]["notes"] == []


@pytest.mark.timeout(4000)
def test_recipes_hold_at_full_size_what_the_dry_run_says() -> None:
    files = [r.file for r in recipes.index().recipes if load(recipes.folder() / r.file).backend == "megatron"]
    found = told("megatron_full_size.py", files)
    assert list(found) == files
    for file, stages in found.items():
        for counted, said in stages:
            assert counted == said, file
