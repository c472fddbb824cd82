"""Weights of models that both kinds of FSDP share out among GPUs come back bit by bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nodes
import pytest
import torch
from ranks import ROOT, SUPPORT, run

from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.huggingface import weights

LAYOUTS = {
    "dp2-fsdp2": (2, ["megatron.data_parallel=fsdp2"]),
    "dp2": (2, ["megatron.data_parallel=megatron_fsdp"]),
    "ep2": (2, ["megatron.data_parallel=megatron_fsdp", "parallel.ep=2"]),
    "tp2": (2, ["megatron.data_parallel=megatron_fsdp", "parallel.tp=2", "parallel.etp=1", "parallel.sequence_parallel=true"]),
    "tp2-dp2-ep2": (
        4,
        ["megatron.data_parallel=megatron_fsdp", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2", "parallel.sequence_parallel=true"],
    ),
}
MODEL = ["model.head_dim=64", "model.hidden_size=128"]


@pytest.mark.multigpu
@pytest.mark.parametrize("gpus", [2, 4])
def test_parameters_that_are_shared_out_among_gpus_are_saved_whole(gpus: int, tmp_path: Path) -> None:
    for package in ("megatron.core", "transformer_engine", "einops", "transformers"):
        pytest.importorskip(package)
    import parity

    if nodes.gpus() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    config = load(ROOT / "trainer/configs/qwen3_moe_tiny.yaml", parse_overrides(MODEL)).model
    given = {name: t.bfloat16().float() for name, t in parity.random_state(config).items()}
    weights.save_safetensors(config, given, tmp_path / "given")
    chosen = {name: words for name, (ranks, words) in LAYOUTS.items() if ranks == gpus}
    jobs = [{"name": name, "words": [*MODEL, *words], "weights": str(tmp_path / "given")} for name, words in chosen.items()]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = [sys.executable, str(SUPPORT / "megatron" / "megatron_weights_ranks.py")]
    results = run([str(tmp_path / "jobs.json")], gpus, timeout=240, command=script)
    assert [r[0] for r in results] == [0] * gpus, results[0][1] + results[0][2][-4000:]
    for name in chosen:
        found = weights.load_safetensors(config, tmp_path / name)
        assert all(torch.equal(found[key].float(), given[key]) for key in given), name
