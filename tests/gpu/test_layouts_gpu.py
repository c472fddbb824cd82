"""Layouts on NCCL: in FP32 they equal one GPU, in BF16 they agree with it within its rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_runs import Job, assert_near, note, train_all
from nodes import four_or_two
from ranks import steps, trained

MODELS = {
    "moe": ["trainer/configs/qwen3_moe_tiny.yaml"],
    "dense": ["trainer/configs/qwen3_tiny.yaml"],
    "vl": ["trainer/configs/qwen3_vl_moe_tiny.yaml", "train.global_batch_size=4", "data.num_workers=0"],
}
COMMON = ["train.steps=10", "train.warmup_steps=1", "train.receipt=false"]
BF16 = ["train.dtype=bf16", "moe.experts=grouped"]
WIDE = ["model.head_dim=64", "model.hidden_size=128"]
SEQUENCE = ["parallel.tp=2", "parallel.sequence_parallel=true"]
# On {n} GPUs, of which {half} is a half.
LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "fsdp": ("moe", []),
    "hsdp": ("moe", ["parallel.dp_replicate=2"]),
    "copies": ("moe", ["parallel.fsdp=false"]),
    "ep-alltoall": ("moe", ["parallel.ep={n}"]),
    "ep-allgather": ("moe", ["parallel.ep={n}", "moe.dispatcher=allgather"]),
    "ep-dedup": ("moe", ["parallel.ep={n}", "moe.dispatcher=dedup"]),
    "cp-allgather": ("moe", ["parallel.cp={n}"]),
    "cp-ring": ("moe", ["parallel.cp={n}", "parallel.cp_comm=ring"]),
    "cp-ulysses": ("moe", ["parallel.cp={n}", "parallel.cp_comm=ulysses"]),
    "tp2-sp-pp": ("moe", [*SEQUENCE, "parallel.pp={half}"]),
    "tp2-ep-etp1": ("moe", ["parallel.tp=2", "parallel.ep={n}", "parallel.etp=1"]),
    "tp2-sp-ep-etp1-dedup": ("moe", [*SEQUENCE, "parallel.ep={n}", "parallel.etp=1", "moe.dispatcher=dedup"]),
    "etp": ("moe", ["parallel.etp={n}"]),
    "pp2-vpp2": ("moe", ["parallel.pp=2", "parallel.vpp=2"]),
    "tied-tp-pp2": ("dense", ["parallel.tp={half}", "parallel.pp=2"]),
    "vl-pp2-dp": ("vl", ["parallel.pp=2"]),
    "vl-cp2": ("vl", ["parallel.cp=2"]),
    "vl-pp-cp2-ring": ("vl", ["parallel.pp={half}", "parallel.cp=2", "parallel.cp_comm=ring"]),
    "vl-ep2": ("vl", ["parallel.ep=2"]),
    "vl-tp2-sp-ep-etp1": ("vl", [*SEQUENCE, "parallel.ep={n}", "parallel.etp=1"]),
}
IN_BF16 = (
    "hsdp",
    "ep-alltoall",
    "ep-allgather",
    "ep-dedup",
    "cp-ring",
    "cp-ulysses",
    "tp2-sp-ep-etp1-dedup",
    "pp2-vpp2",
    "vl-pp-cp2-ring",
    "vl-ep2",
)


@pytest.mark.gpu
def test_one_gpu_learns(tmp_path: Path) -> None:
    trained(tmp_path, 1, *MODELS["moe"], *COMMON, *BF16, *WIDE)
    rows = steps(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """All selected layouts and one GPU beside them, trained by the same processes: the folder of all runs, and by name what went wrong."""
    root = tmp_path_factory.mktemp("layouts")
    n = four_or_two()
    jobs = {}
    tests = [item for item in request.session.items if item.module is request.module and "layouts" in item.fixturenames]
    for dtype, name in [tuple(item.callspec.params.values()) for item in tests]:
        model, words = LAYOUTS[name]
        line = [*MODELS[model], *COMMON, *(BF16 if dtype == "bf16" else []), *(WIDE if (dtype, model) == ("bf16", "moe") else [])]
        jobs[f"{dtype}-{model}-one"] = Job(f"{dtype}-{model}-one", 1, tuple(line))
        jobs[f"{dtype}-{name}"] = Job(f"{dtype}-{name}", n, (*line, *(w.format(n=n, half=n // 2) for w in words)))
    return root, train_all(list(jobs.values()), root, timeout=560, stall=60)


@pytest.mark.multigpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "name"), [*(("fp32", name) for name in LAYOUTS), *(("bf16", name) for name in IN_BF16)])
def test_layout_agrees_with_one_gpu(dtype: str, name: str, layouts: tuple[Path, dict[str, str | None]]) -> None:
    root, errors = layouts
    run, alone = f"{dtype}-{name}", f"{dtype}-{LAYOUTS[name][0]}-one"
    assert (errors[run], errors[alone]) == (None, None)
    far = assert_near(root / run, root / alone, *((1e-5, 1e-4) if dtype == "fp32" else (5e-3, 5e-2)))
    if dtype == "fp32":
        note([{"layout": name, "ranks": four_or_two(), **far}], "nccl")


@pytest.mark.multigpu
def test_checkpoint_of_several_gpus_resumes_on_one(tmp_path: Path) -> None:
    n = four_or_two()
    words = [*MODELS["moe"], *COMMON, *BF16, *WIDE, "optimizer.schedule=constant"]
    trained(tmp_path / "whole", 1, *words)
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=3"]
    trained(tmp_path / "first", n, *words, f"parallel.ep={n}", "train.steps=3", *saving)
    trained(tmp_path / "second", 1, *words, *saving)
    resumed, whole = steps(tmp_path / "second"), steps(tmp_path / "whole")[3:]
    print([(a["loss"], b["loss"]) for a, b in zip(resumed, whole, strict=True)])
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole], rel=2e-2)
