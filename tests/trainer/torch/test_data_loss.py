"""The loss of packed rows over ranks and micro-batches against each document alone, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import encoded, samples
from PIL import Image
from ranks import ROOT, run, steps, summary, trained

from playbook_trainer import axes as layout
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.data.collate import collate
from playbook_trainer.data.rows import make_rows
from playbook_trainer.exit_codes import REFUSED
from playbook_trainer.torch import build

VISION = ROOT / "trainer" / "configs" / "qwen3_vl_moe_tiny.yaml"
# Small images and short rows: two to four samples a row, whose answers differ in length, so ranks and micro-batches differ in labels.
COMMON = ["data.seq_len=96", "data.max_image_pixels=16384", "train.global_batch_size=4"]
ONE_STEP = ["train.steps=1", "train.warmup_steps=0", "optimizer.warmup_steps=0", "data.seq_len=64"]


@pytest.fixture(scope="module")
def each_alone() -> tuple[float, float, int]:
    """Loss per label and gradient norm of one step, of which every document is a batch of its own, and how many images it has."""
    config = load(VISION, parse_overrides([*COMMON, "data.pad=false"]))
    made = make_rows(config, "train")
    rows = [made.row(k) for k in range(4)]
    assert all(len(row) > 1 for row in rows)
    model = build.build(config, layout.build(1, 0, config.parallel), torch.device("cpu")).double()
    model.activation_dtype = torch.float64
    total, labels = torch.zeros((), dtype=torch.float64), []
    for row in rows:
        batches = [collate([[document]], config.model, config.data) for document in row]
        labels.append(sum(b.num_loss for b in batches))
        for batch in batches:
            loss = model(batch)
            loss.backward()
            total += loss.detach()
    assert len(set(labels)) > 1, "unequal label counts, or the test shows nothing"
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(total) / sum(labels), float(norm) / sum(labels), sum(len(d.images) for row in rows for d in row)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["train.micro_batch_size=4"]),
        (2, ["train.micro_batch_size=1", "data.num_workers=2"]),
        (2, ["train.micro_batch_size=2", "data.pad=false", "data.num_workers=1"]),
    ],
)
@pytest.mark.full
def test_packed_rows_weigh_every_label_the_same_and_keep_documents_apart(
    ranks: int, words: list[str], each_alone: tuple[float, float, int], tmp_path: Path
) -> None:
    loss, norm, images = each_alone
    (first,) = steps(trained(tmp_path, ranks, str(VISION), *ONE_STEP, *COMMON, *words))
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert summary(tmp_path)["data"]["images_decoded"] >= images


@pytest.mark.full
def test_a_bad_image_that_only_another_rank_reads_is_named(tmp_path: Path) -> None:
    noise = (np.random.default_rng(n).integers(0, 256, (40, 48, 3), dtype=np.uint8) for n in range(40))
    images = {f"{n}.jpg": encoded(Image.fromarray(pixels)) for n, pixels in enumerate(noise)}
    folder = samples(tmp_path / "data", [{"images": [name], "question": "q", "answer": "a"} for name in images], images)
    words = [f"data.path={folder}", "data.pack=false", *ONE_STEP]
    bad = make_rows(load(VISION, parse_overrides(words)), "train").row(1)[0].images[0].file  # row 0 is of rank 0
    bad.write_bytes(bad.read_bytes()[:-1000])  # the header is whole
    results = run([str(VISION), *words, f"output={tmp_path / 'out'}"], 2)
    assert results[1][0] == REFUSED
    assert results[1][2].startswith("rank 1: error: ")
    assert str(bad) in results[1][2]


@pytest.mark.full
def test_an_evaluation_of_rows_without_a_label_has_no_loss(tmp_path: Path) -> None:
    """Zero would be the best evaluation of all."""
    samples(tmp_path, [{"images": ["bad.jpg"], "question": "q", "answer": "a"}] * 2, {"bad.jpg": b"no image"})
    words = [f"data.path={tmp_path}", "data.on_bad_image=skip", *ONE_STEP, "eval.every=1", "eval.batches=1"]
    ((code, out, err),) = run([str(VISION), *words, f"output={tmp_path / 'out'}"])
    assert code == 0, err
    assert summary(tmp_path / "out")["eval"] == [{"step": 1, "loss": None}]
    assert "eval loss nan (its rows have no label" in out + err
