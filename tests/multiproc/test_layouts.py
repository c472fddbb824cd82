"""Every layout computes what one rank computes: same data, same seed, FP32, ten steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from layout_table import COMMON, LAYOUTS, MODELS, Layout, every_legal, pairs_of
from ranks import ROOT, run, steps, summary

TEXT, VISION = MODELS["text"], MODELS["vision"]
MANY = Path(__file__).with_name("many.py")
TOGETHER = 6
"""Layouts that share their processes: enough to save most of the time that starting takes, few enough to lose little when one breaks."""
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def curve(folder: Path, config: str, ranks: int, words: list[str]) -> list[dict[str, float]]:
    results = run([config, *COMMON, *words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return steps(folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    root = tmp_path_factory.mktemp("one")

    @cache
    def reference(config: str) -> list[dict[str, float]]:
        return curve(root / Path(config).stem, config, 1, ["data.num_workers=0"])

    return reference


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """The output of a layout; selected layouts of one number of ranks share their processes."""
    root = tmp_path_factory.mktemp("layouts")
    selected = {
        item.callspec.params["name"] for item in request.session.items if "name" in getattr(getattr(item, "callspec", None), "params", {})
    }

    @cache
    def together(layouts: tuple[Layout, ...]) -> str:
        jobs = [[layout.config, *layout.words(), f"output={root / layout.name}"] for layout in layouts]
        listed = root / f"{layouts[0].name}.json"
        listed.write_text(json.dumps(jobs))
        try:
            results = run([str(listed)], layouts[0].ranks, timeout=400, command=[sys.executable, str(MANY)])
        except subprocess.TimeoutExpired as e:
            return str(e)
        return "\n".join(err for code, _, err in results if code)

    def output(layout: Layout) -> Path:
        like = [x for x in LAYOUTS if x.ranks == layout.ranks and x.name in selected]
        first = like.index(layout) // TOGETHER * TOGETHER
        errors = together(tuple(like[first : first + TOGETHER]))
        folder = root / layout.name
        assert (folder / "summary.json").is_file(), f"{layout.name}, or a layout before it in the same processes, broke:\n{errors[-6000:]}"
        return folder

    return output


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", BY_NAME)
def test_layout_equals_one_rank(name: str, one_rank: Callable[[str], list[dict[str, float]]], trained: Callable[[Layout], Path]) -> None:
    layout = BY_NAME[name]
    folder, reference = trained(layout), one_rank(layout.config)
    rows = steps(folder)
    assert len(rows) == len(reference) == 10
    for a, b in zip(rows, reference, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), f"loss at step {a['step']}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), f"gradient norm at step {a['step']}"
        assert (a["useful_tokens"], a["raw_tokens"], a["images"]) == (b["useful_tokens"], b["raw_tokens"], b["images"])
    assert summary(folder)["outcome"] == "ok"


def test_the_table_covers_every_legal_pair_of_choices() -> None:
    legal = set().union(*(pairs_of(layout) for layout in every_legal()))
    covered = set().union(*(pairs_of(layout) for layout in LAYOUTS))
    assert len(legal) > 200
    assert sorted(map(str, legal - covered)) == []
    assert len(LAYOUTS) == len(BY_NAME) <= 40


def test_decode_workers_change_nothing(one_rank: Callable[[str], list[dict[str, float]]], tmp_path: Path) -> None:
    rows = curve(tmp_path, VISION, 2, ["data.num_workers=1"])
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in one_rank(VISION)], rel=1e-5)


def test_ranks_without_images_keep_in_step(tmp_path: Path) -> None:
    photographs = ROOT / "trainer" / "assets" / "vqa"
    folder = tmp_path / "data"
    folder.mkdir()
    names = sorted(p.name for p in photographs.glob("*.jpg"))[:3]
    for name in names:
        shutil.copy(photographs / name, folder)
    # Rows of one sample each: with two ranks, one of them often has no image where the other has one.
    samples = [{"images": [names[i % 3]] if i % 3 else [], "question": f"What is number {i}?", "answer": str(i)} for i in range(40)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    words = [f"data.path={folder}", "data.pack=false", "data.num_workers=0"]
    one = curve(tmp_path / "one", VISION, 1, words)
    two = curve(tmp_path / "two", VISION, 2, words)
    assert len({r["images"] for r in one}) > 1
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_context_parallel_rows_need_no_padding(tmp_path: Path) -> None:
    words = ["data.pad=false", "data.seq_len=252", "data.pack_buffer=1", "parallel.cp_comm=ring"]
    one, two = curve(tmp_path / "one", TEXT, 1, words), curve(tmp_path / "two", TEXT, 2, [*words, "parallel.cp=2"])
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["raw_tokens"] == b["raw_tokens"]


def test_interleaved_stages_evaluate_as_one_rank(tmp_path: Path) -> None:
    words = ["train.steps=2", "eval.every=2", "eval.batches=1", "train.receipt=false"]
    losses = []
    for name, ranks, layout in (("one", 1, []), ("two", 2, ["parallel.pp=2", "parallel.vpp=2"])):
        results = run([TEXT, *COMMON, *words, *layout, f"output={tmp_path / name}"], ranks)
        assert [r[0] for r in results] == [0] * ranks, results[-1][2]
        losses.append(summary(tmp_path / name)["eval"][-1]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
