"""Qwen3-VL trained on megatron-core equals the torch backend in every layout that a CPU can train; gradients of each parameter are in test_models.py."""

from __future__ import annotations

import pytest
from layout_runs import Job, Runs, assert_near, good, train_all
from ranks import ROOT, summary

pytestmark = pytest.mark.full

pytest.importorskip("megatron.core")

MOE, DENSE = "qwen3_vl_moe_tiny", "qwen3_vl_tiny"
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
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the trainer on photographs, and their references."""
    root = tmp_path_factory.mktemp("megatron_vl_runs")
    jobs: dict[str, Job] = {}
    for name in {item.callspec.params.get("run") for item in request.session.items if hasattr(item, "callspec")} & RUNS.keys():
        alone, (_, ranks, words) = reference(name), RUNS[name]
        jobs |= {alone.name: alone, name: Job(name, ranks, (*alone.words, "backend=megatron", *words))}
    return root, train_all(list(jobs.values()), root, timeout=5000, script=ROOT / "tests/support/megatron/megatron_many.py")


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("run", RUNS)
def test_training_on_photographs_equals_the_torch_backend(run: str, streamed: Runs) -> None:
    folders = [good(streamed, name) for name in (run, reference(run).name)]
    assert_near(*folders, *((2e-4, 1e-2) if RUNS[run][2] == BELOW else (2e-5, 2e-4)))
    mine, theirs = map(summary, folders)
    for key in ("num_parameters", "trained_parameters"):
        assert mine[key] == theirs[key], key
    if "train.receipt=true" in RUNS[run][2]:
        ranges, microbatches = mine["receipt"]["ranges"], 4
        assert {name: ranges[name] for name in ("vision", "projector")} == {"vision": microbatches, "projector": microbatches}
        assert ranges["attention"] == ranges["attention.bwd"] == 4 * microbatches
