"""Every layout computes what one rank computes: same data, same seed, FP32, every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from data_sets import samples
from layout_runs import Job, Runs, assert_near, difference, good, note, train_all
from layout_table import LAYOUTS, SMALL, STEPS, every_pair, pairs_of
from ranks import ROOT, steps, summary, trained

TEXT, VISION = "trainer/configs/qwen3_moe_tiny.yaml", "trainer/configs/qwen3_vl_moe_tiny.yaml"
COMMON = ["train.steps=3", "train.warmup_steps=1", "train.receipt=false"]
# Eight ranks on two cores take half of the time of all: four of those layouts are trained here, and every one for the published table (`make parity`).
OF_EIGHT = [layout for layout in LAYOUTS if layout.ranks == 8]
BY_NAME = {x.name: x for x in LAYOUTS if x.ranks < 8 or x in OF_EIGHT[:4] or os.environ.get("PLAYBOOK_PARITY")}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All selected layouts and one rank beside them: the folder of all runs, and by name what went wrong."""
    root = tmp_path_factory.mktemp("layouts")
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    layouts = [layout for layout in LAYOUTS if layout.name in wanted]
    alone = sorted({layout.alone for layout in layouts}, key=str)
    return root, train_all([Job(x.name, x.ranks, (x.config, *x.words())) for x in (*alone, *layouts)], root, timeout=6000)


@pytest.mark.timeout(8000)
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.sample("moe-fsdp-ep2")
def test_layout_equals_one_rank(name: str, runs: Runs) -> None:
    layout = BY_NAME[name]
    far = assert_near(good(runs, name), good(runs, layout.alone.name))
    assert far["steps"] == STEPS
    note([{"layout": name, "ranks": layout.ranks, **far}], "gloo")


@pytest.mark.full
def test_the_table_covers_every_legal_pair_of_choices() -> None:
    legal, covered = every_pair(), set().union(*map(pairs_of, LAYOUTS))
    assert len(legal) > 500
    assert sorted(map(str, legal - covered)) == []
    assert len(LAYOUTS) == len({x.name for x in LAYOUTS}) <= 40


@pytest.mark.full
def test_a_layout_that_breaks_leaves_the_others_alone(tmp_path: Path) -> None:
    words = (TEXT, "train.steps=2", "train.warmup_steps=1", "train.receipt=false", "data.seq_len=64", "model.num_layers=1")
    jobs = [Job("before", 2, words), Job("broken", 2, (*words, "data.path=/nowhere/at/all")), Job("after", 2, words)]
    errors = train_all(jobs, tmp_path, timeout=2500)
    assert errors["before"] is None
    assert "/nowhere/at/all" in str(errors["broken"])
    assert errors["after"] is None
    assert difference(tmp_path / "after", tmp_path / "before") == {"loss": 0, "grad_norm": 0, "steps": 2}


@pytest.mark.full
def test_ranks_without_images_keep_in_step(tmp_path: Path) -> None:
    photographs = ROOT / "trainer" / "assets" / "vqa"
    names = sorted(p.name for p in photographs.glob("*.jpg"))[:3]
    # Rows of one sample each: with two ranks, one of them often has no image where the other has one.
    lines = [{"images": [names[i % 3]] if i % 3 else [], "question": f"What is number {i}?", "answer": str(i)} for i in range(40)]
    folder = samples(tmp_path / "data", lines, {name: (photographs / name).read_bytes() for name in names})
    words = [*SMALL["vision"], f"data.path={folder}", "data.pack=false", "data.num_workers=0"]
    one, two = (trained(tmp_path / str(ranks), ranks, VISION, *COMMON, *words) for ranks in (1, 2))
    assert len({r["images"] for r in steps(one)}) > 1
    assert_near(two, one)


@pytest.mark.full
def test_context_parallel_rows_need_no_padding(tmp_path: Path) -> None:
    words = [TEXT, *COMMON, "data.pad=false", "data.seq_len=252", "data.pack_buffer=1", "parallel.cp_comm=ring"]
    one, two = trained(tmp_path / "one", 1, *words), trained(tmp_path / "two", 2, *words, "parallel.cp=2")
    assert_near(two, one)


@pytest.mark.full
def test_interleaved_stages_evaluate_as_one_rank(tmp_path: Path) -> None:
    words = [TEXT, *COMMON, "train.steps=2", "eval.every=2", "eval.batches=1"]
    one, two = trained(tmp_path / "one", 1, *words), trained(tmp_path / "two", 2, *words, "parallel.pp=2", "parallel.vpp=2")
    assert summary(two)["eval"][-1]["loss"] == pytest.approx(summary(one)["eval"][-1]["loss"], rel=1e-5)
