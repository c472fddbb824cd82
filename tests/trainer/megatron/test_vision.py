"""Qwen3-VL on megatron-core equals the torch backend, from the same weights, in every layout that a CPU can train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import Job, difference, train_all
from ranks import ROOT, SUPPORT, environment, summary

from playbook.paths import data_root
from playbook_trainer.config.tree import ModelConfig, load
from playbook_trainer.huggingface import weights

pytestmark = pytest.mark.full

pytest.importorskip("megatron.core")

MOE, DENSE = "qwen3_vl_moe_tiny", "qwen3_vl_tiny"
FULL = ["train.recompute=full"]
JOBS: dict[str, tuple[str, int, list[str]]] = {
    "one": (MOE, 1, []),
    "one-full": (MOE, 1, [*FULL, "megatron.recompute_layers=2"]),
    "pp2": (MOE, 2, ["parallel.pp=2", "train.recompute=selective", "train.recompute_modules=[moe,vision]"]),
    "pp2-full": (MOE, 2, ["parallel.pp=2", *FULL]),
    "ep2": (MOE, 2, ["parallel.ep=2"]),
    "ep2-allgather": (MOE, 2, ["parallel.ep=2", "moe.dispatcher=allgather"]),
    "tp2-sp-ep2-etp1": (MOE, 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2", "parallel.etp=1"]),
    "dense-tp2": (DENSE, 2, ["parallel.tp=2"]),
    "dense-tp2-sp-full": (DENSE, 2, ["parallel.tp=2", "parallel.sequence_parallel=true", *FULL]),
}


def model(name: str) -> ModelConfig:
    return load(data_root("configs") / f"{name}.yaml", {}).model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Losses and gradients of every selected job, by the forks of one process."""
    folder = tmp_path_factory.mktemp("megatron_vl")
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")} | {"tp2-sp-ep2-etp1", "one"}
    jobs = [{"name": n, "model": m, "ranks": r, "words": w, "save": n in SAVED} for n, (m, r, w) in JOBS.items() if n in wanted]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = environment(CUDA_VISIBLE_DEVICES="")
    line = [sys.executable, str(SUPPORT / "megatron" / "megatron_vl_ranks.py"), str(folder / "jobs.json"), str(folder)]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=5000, check=False)
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    return folder


SAVED = ("one", "tp2-sp-ep2-etp1")


def found(folder: Path, name: str) -> dict[str, Any]:
    errors = [p.read_text() for p in sorted(folder.glob(f"{name}.error*"))]
    assert (folder / f"{name}.json").is_file(), "\n".join(errors) or (folder / "said.txt").read_text()[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


def far(folder: Path, name: str) -> dict[str, float]:
    """The relative distance of every gradient from the torch backend's."""
    config = model(JOBS[name][0])
    ours, expected = (weights.load_safetensors(config, folder / n) for n in (name, f"reference-{JOBS[name][0]}"))
    assert all(e.norm() > 0 for e in expected.values())
    return {n: float((ours[n] - e).norm() / e.norm()) for n, e in expected.items()}


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("name", JOBS)
def test_loss_and_gradients_equal_those_of_the_torch_backend(name: str, trained: Path) -> None:
    loss, expected = found(trained, name)["loss"], found(trained, f"reference-{JOBS[name][0]}")["loss"]
    assert loss == pytest.approx(expected, rel=1e-6)
    gradients = far(trained, name)
    worst = max(gradients, key=gradients.__getitem__)
    print(f"{name}: loss {loss / expected - 1:.1e}, gradients {gradients[worst]:.1e} ({worst})")
    assert gradients[worst] < 1e-5, worst


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("saved", SAVED)
def test_weights_come_back_bit_by_bit(saved: str, trained: Path) -> None:
    found(trained, saved)
    config = model(JOBS[saved][0])
    ours, expected = (weights.load_safetensors(config, trained / n) for n in (f"saved-{saved}", f"weights-{JOBS[saved][0]}"))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


STREAM = ("train.steps=4", "train.warmup_steps=1", "train.global_batch_size=4", "train.receipt=false", "data.num_workers=0")
# Of a seed by which no token's choice of experts hangs on a rounding error (see layout_table.py).
SMALL = ("data.seq_len=256", "data.max_image_pixels=16384", "seed=2")
BELOW = ("train.dtype=bf16", "optimizer.lr=3e-5")
"""An update is smaller than the distance of two 16-bit weights: which of them it moves depends on where the float32 ones began."""
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one rank": (MOE, 1, ("train.receipt=true",)),
    "tp 2, pp 2, ep 2": (
        MOE,
        4,
        (
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "parallel.pp=2",
            "parallel.pipeline_layout=[3,1]",
            "parallel.ep=2",
            "parallel.etp=1",
        ),
    ),
    "rows of unequal length": (MOE, 2, ("data.pad=false",)),
    "two rows in a micro-batch": (MOE, 1, ("train.micro_batch_size=2",)),
    "tp 2, ep 2, two rows in a micro-batch": (
        MOE,
        2,
        ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2", "parallel.etp=1", "train.micro_batch_size=2"),
    ),
    "pp 2, two rows in a micro-batch": (MOE, 2, ("parallel.pp=2", "train.micro_batch_size=2")),
    "frozen": (MOE, 2, ("train.freeze=[vision]", "parallel.ep=2")),
    "16 bits, at a rate below their distance": (MOE, 1, BELOW),
    "tower alone": (DENSE, 1, ("train.freeze=[language_model]", "train.recompute=full")),
}


def reference(name: str) -> Job:
    """The torch backend on one rank, on the same rows, with the same parts frozen, in the same precision."""
    config, _, words = RUNS[name]
    alike = tuple(w for w in words if w.startswith(("train.freeze", "train.dtype", "optimizer.", "data.")))
    return Job(" ".join(("torch", config, *alike)), 1, (f"trainer/configs/{config}.yaml", *STREAM, *SMALL, *alike))


@pytest.fixture(scope="module")
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """Runs of the trainer on photographs, and their references."""
    root = tmp_path_factory.mktemp("megatron_vl_runs")
    jobs: dict[str, Job] = {}
    for name in {item.callspec.params.get("run") for item in request.session.items if hasattr(item, "callspec")} & RUNS.keys():
        alone, (_, ranks, words) = reference(name), RUNS[name]
        jobs |= {alone.name: alone, name: Job(name, ranks, (*alone.words, "backend=megatron", *words))}
    return root, train_all(list(jobs.values()), root, timeout=5000, script=ROOT / "tests/support/megatron/megatron_many.py")


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("run", RUNS)
def test_training_on_photographs_equals_the_torch_backend(run: str, streamed: tuple[Path, dict[str, str | None]]) -> None:
    (root, errors), expected = streamed, reference(run).name
    assert errors[run] is None, errors[run]
    assert errors[expected] is None, errors[expected]
    apart = difference(root / run, root / expected)
    print(f"{run}: loss {apart['loss']:.1e}, gradient norm {apart['grad_norm']:.1e}")
    loss, norm = (2e-4, 1e-2) if RUNS[run][2] == BELOW else (2e-5, 2e-4)
    assert apart["loss"] < loss, apart
    assert apart["grad_norm"] < norm, apart
    mine, theirs = (summary(root / n) for n in (run, expected))
    for key in ("num_parameters", "trained_parameters"):
        assert mine[key] == theirs[key], key
    if "train.receipt=true" in RUNS[run][2]:
        ranges, microbatches = mine["receipt"]["ranges"], 4
        assert {name: ranges[name] for name in ("vision", "projector")} == {"vision": microbatches, "projector": microbatches}
        assert ranges["attention"] == ranges["attention.bwd"] == 4 * microbatches
