"""Models on megatron-core, by the backend's engine, against transformers and the torch backend, and in every layout against one rank; on a CPU, with the shim."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from ranks import ROOT, SUPPORT, environment
from safetensors.torch import load_file

from playbook_trainer.config.tree import ModelConfig, load, parse_overrides
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.torch.parallel.sharding import initial_value

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed")

TOLERANCE = 1e-5
"""Largest relative difference of logits, loss and each parameter's gradient, in FP32."""

EXPERTS = [
    "num_experts",
    "top_k",
    "expert_ffn_size",
    "first_dense_layers",
    "shared_expert_ffn_size",
    "router_groups",
    "router_group_top_k",
    "mtp_layers",
]

MODELS = {
    "dense": ["model.num_experts=0", "model.top_k=0", "model.expert_ffn_size=0", "model.ffn_size=96"],
    "tied": ["model=qwen3_tiny"],
    "moe": [],
    "deepseek": ["model=deepseek_v3_tiny", "model.mtp_layers=0"],
    "yarn": ["model=deepseek_v3_tiny", "model.mtp_layers=0", "model.yarn.factor=4", "model.yarn.original_seq_len=16"],
    "prediction": ["model=deepseek_v3_tiny"],
    "mla-dense": ["model=deepseek_v3_tiny", *(f"model.{key}=0" for key in EXPERTS), "model.router_bias=false"],
    "vl-moe": ["model=qwen3_vl_moe_tiny", "data.seq_len=192", "train.global_batch_size=4"],
    "vl-dense": ["model=qwen3_vl_tiny", "data.seq_len=192", "train.global_batch_size=4"],
}

DRAWN = ("mla-dense",)
"""What transformers lacks has no folder: its weights are drawn."""

LAYOUTS = {
    "dp2": ("moe", 2, []),
    "tp2-mla": ("mla-dense", 2, ["parallel.tp=2"]),
    "tp2-mla-sp": ("mla-dense", 2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "tp2-sp": ("moe", 2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "ep2": ("moe", 2, ["parallel.ep=2"]),
    "ep2-allgather": ("moe", 2, ["parallel.ep=2", "moe.dispatcher=allgather"]),
    "pp2-tied": ("tied", 2, ["parallel.pp=2"]),
    "pp2-vpp2": ("moe", 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "tp2": ("dense", 2, ["parallel.tp=2"]),
    "pp2-prediction": ("prediction", 2, ["parallel.pp=2"]),
    "tp2-ep2-etp1": ("moe", 4, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=1", "parallel.sequence_parallel=true"]),
    "pp2-uneven": ("deepseek", 2, ["parallel.pp=2", "parallel.pipeline_layout=[1,3]"]),
    "tp2-ep2-etp2": ("moe", 4, ["parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"]),
    "tp2-pp2-mla-sp": ("deepseek", 4, ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]),
    "vl-full": ("vl-moe", 1, ["train.recompute=full", "megatron.recompute_layers=2"]),
    "vl-pp2": ("vl-moe", 2, ["parallel.pp=2", "train.recompute=selective", "train.recompute_modules=[moe,vision]"]),
    "vl-pp2-full": ("vl-moe", 2, ["parallel.pp=2", "train.recompute=full"]),
    "vl-ep2": ("vl-moe", 2, ["parallel.ep=2"]),
    "vl-ep2-allgather": ("vl-moe", 2, ["parallel.ep=2", "moe.dispatcher=allgather"]),
    "vl-tp2-sp-ep2-etp1": ("vl-moe", 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2", "parallel.etp=1"]),
    "vl-dense-tp2": ("vl-dense", 2, ["parallel.tp=2"]),
    "vl-dense-tp2-sp-full": ("vl-dense", 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "train.recompute=full"]),
}


WEIGHTS_ALONE = ("tp2-ep2-etp2",)
"""gloo gathers no uneven numbers of rows, which etp 2 asks of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs, run."""
    path = tmp_path_factory.mktemp("megatron")
    jobs = []
    for base in MODELS:
        if base not in DRAWN:
            parity.written(model(base), path / "weights" / base)
    for name, (base, ranks, words) in {**{name: (name, 1, []) for name in MODELS}, **LAYOUTS}.items():
        weights = None if base in DRAWN else str(path / "weights" / base)
        job = {"name": name, "ranks": ranks, "words": [*MODELS[base], *words], "weights": weights}
        jobs.append({**job, "shared_out": name == "dp2", "trains": name not in WEIGHTS_ALONE})
    (path / "jobs.json").write_text(json.dumps(jobs))
    env = environment()
    script = [sys.executable, str(SUPPORT / "megatron" / "megatron_ranks.py"), str(path / "jobs.json")]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2800)
    (path / "said").write_text(done.stderr)
    return path


def model(name: str) -> ModelConfig:
    return load(ROOT / "trainer/configs/qwen3_moe_tiny.yaml", parse_overrides(MODELS[name])).model


def result(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Loss and counts, and the gradients."""
    found = folder / name / "result.json"
    assert found.is_file(), (folder / "said").read_text()[-4000:]
    gradients = folder / name / "gradients.safetensors"
    return json.loads(found.read_text()), load_file(gradients) if name not in WEIGHTS_ALONE else {}


def note(model: str, against: str, ranks: int, far: dict[str, Any]) -> None:
    """A row of the parity page."""
    how = {"kernels": "local", "device": "CPU", "dtype": "fp32", "tolerance": TOLERANCE, "megatron_core": version("megatron-core")}
    parity.record("megatron.jsonl", {"model": model, "against": against, "ranks": ranks, **far, **how})


@pytest.mark.parametrize("name", ["dense", "tied", "moe", "deepseek", "yarn"])
@pytest.mark.full
def test_transformers_computes_the_same(name: str, folder: Path) -> None:
    config = model(name)
    theirs = parity.theirs(folder / "weights" / name)
    logits, loss = parity.run_theirs(theirs, [document for row in parity.rows(config) for document in row])
    found, gradients = result(folder, name)
    ours = load_file(folder / name / "logits.safetensors")["logits"]
    far = {
        "logits": float((ours - logits).norm() / logits.norm()),
        "loss": abs(found["loss"] / float(loss) - 1),
        "gradients": parity.worst_gradient(gradients, parity.their_gradients(config, theirs))[0],
    }
    note(name, "transformers", 1, far)
    assert max(far.values()) < TOLERANCE, far


@pytest.mark.parametrize("name", ["dense", "moe", "vl-moe", "vl-dense"])
@pytest.mark.full
def test_the_torch_backend_computes_the_same(name: str, folder: Path) -> None:
    config = model(name)
    ours = parity.ours(config, parity.random_state(config))
    loss = torch.stack([ours(parity.pack(row)) for row in parity.rows(config)]).sum()
    loss.backward()
    found, gradients = result(folder, name)
    assert abs(found["loss"] / float(loss.detach()) - 1) < TOLERANCE
    assert parity.worst_gradient(gradients, {n: p.grad for n, p in ours.named_parameters()})[0] < TOLERANCE


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in WEIGHTS_ALONE])
@pytest.mark.full
def test_a_layout_computes_what_one_rank_does(name: str, folder: Path) -> None:
    base = LAYOUTS[name][0]
    (one, expected), (found, gradients) = result(folder, base), result(folder, name)
    far = {"logits": None, "loss": abs(found["loss"] / one["loss"] - 1), "gradients": parity.worst_gradient(gradients, expected)[0]}
    note(f"{base} {name}", "one rank", LAYOUTS[name][1], far)
    assert max(far["loss"], far["gradients"]) < TOLERANCE, far


WITH_FOLDER = [name for name in (*MODELS, *LAYOUTS) if LAYOUTS.get(name, (name,))[0] not in DRAWN]


@pytest.mark.parametrize("name", WITH_FOLDER)
@pytest.mark.full
def test_weights_go_in_and_out_bit_by_bit(name: str, folder: Path) -> None:
    base = LAYOUTS[name][0] if name in LAYOUTS else name
    counts = result(folder, name)[0]["counts"]
    given = load_file(folder / "weights" / base / hf.SINGLE)
    whole = {k: v for file in (folder / name / "saved").glob("*.safetensors") for k, v in load_file(file).items()}
    torch.testing.assert_close(whole, given, rtol=0, atol=0)
    if name in LAYOUTS and base != "prediction":  # which reads every copy of embedding and head
        slack = sum(t.nbytes for k, t in given.items() if k.endswith("correction_bias"))
        assert all(read <= held + slack for read, held in counts), "a rank read more than it holds"


@pytest.mark.full
def test_parameters_that_fsdp2_shares_out_are_saved_whole(folder: Path) -> None:
    result(folder, "dp2")
    found, given = load_file(folder / "dp2" / "shared_out" / hf.SINGLE), load_file(folder / "weights" / "moe" / hf.SINGLE)
    torch.testing.assert_close(found, given, rtol=0, atol=0)


@pytest.mark.parametrize("name", WITH_FOLDER)
@pytest.mark.full
def test_first_weights_follow_from_the_seed_alone(name: str, folder: Path) -> None:
    result(folder, name)
    config = model(LAYOUTS[name][0] if name in LAYOUTS else name)
    value = initial_value(config, 1234)
    expected = {rule.ours: value(rule.ours, list(rule.shape), torch.device("cpu")) for rule in hf.rules(config)}
    found = hf.load_safetensors(config, folder / name / "drawn")
    assert all(torch.equal(found[k], expected[k]) for k in expected)
