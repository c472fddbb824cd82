"""Where data comes from: text and image-question-answer layouts, generators, and one order for all of them."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import TEXT, TEXTS, VL, config, fingerprint, jpeg, reading, shard, text_source, vqa_source, words_of

from playbook.errors import ConfigError, DataError
from playbook_trainer.config import checks
from playbook_trainer.config.sections import GeneratedConfig
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.images import header_size
from playbook_trainer.data.loader import build_loader, check, data_sha, merge_states
from playbook_trainer.data.rows import LaneRows, make_rows, text_documents
from playbook_trainer.data.sources.generated import GeneratedText, GeneratedVqa, PoolImage
from playbook_trainer.data.sources.streams import Flat


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "huggingface"])
def test_text_layouts_give_each_document_once_and_hold_out_a_tenth(tmp_path: Path, kind: str) -> None:
    cfg = config(TEXT, **text_source(kind, tmp_path), data__pack=False, train__global_batch_size=1)
    check(cfg)
    train, held = words_of(cfg, "train", 54), words_of(cfg, "eval", 6)
    assert train + held == Counter(t.encode() for t in TEXTS)
    assert train + train == words_of(cfg, "train", 108), "the second epoch holds the same"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "huggingface", "webdataset"])
def test_a_subset_of_what_has_none_is_refused_rather_than_left_out(tmp_path: Path, kind: str) -> None:
    source = vqa_source(kind, tmp_path) if kind == "webdataset" else text_source(kind, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.subset test means nothing for .*: leave it out"):
        check(config(VL if kind == "webdataset" else TEXT, **source, data__subset="test"))


@pytest.mark.parametrize(("kind", "held"), [("webdataset", 2), ("parquet", 3), ("vqav2", 3)])
def test_image_layouts_give_each_sample_once_with_its_own_image(tmp_path: Path, kind: str, held: int) -> None:
    cfg = config(VL, **vqa_source(kind, tmp_path), data__pack=False, train__global_batch_size=1)
    check(cfg)
    found: Counter[bytes] = Counter()
    for split, count in (("train", 30 - held), ("eval", held)):
        found += words_of(cfg, split, count)  # type: ignore[arg-type]
    assert found == Counter(f"q{n}a{n}".encode() for n in range(30))
    rows = make_rows(cfg, "train")
    for k in range(30 - held):
        (document,) = rows.row(k)
        (image,) = document.images
        number = int(bytes(t for t in document.tokens.tolist() if t < 256).decode().split("a")[1])
        data = image.file.read_bytes() if isinstance(image.file, Path) else image.file.read()
        assert data == jpeg(number)
        assert (image.height, image.width) == (64, 64)


def batches_of(cfg: TrainerConfig, steps: int, **options: Any) -> tuple[list[list[Any]], dict[str, Any]]:
    with reading(cfg, **options) as loader:
        return list(itertools.islice(loader, steps)), loader.state()


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "vqav2", "generated"])
@pytest.mark.sample("parquet")
def test_resuming_on_other_ranks_and_workers_goes_on_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    common = {
        **vqa_source(kind, tmp_path),
        "train__global_batch_size": 4,
        "data__max_image_pixels": 8192,
        "data__seq_len": 64,
        "data__pack_buffer": 5,
    }
    whole, _ = batches_of(config(VL, **common), 5)
    first = [batches_of(config(VL, **common, data__num_workers=1 + rank), 3, dp_rank=rank, dp_size=2) for rank in range(2)]
    merged = json.loads(json.dumps(merge_states(state for _, state in first)))
    assert set(merged["lanes"]) == set("0123")
    assert all(len(lane) <= 1 + 3 * 6 for lane in merged["lanes"].values()), "a few numbers for each lane"
    ranks = [batches_of(config(VL, **common, data__num_workers=rank % 3), 2, dp_rank=rank, dp_size=4, state=merged)[0] for rank in range(4)]
    for s in range(2):
        found = [fingerprint(batch) for rank in range(4) for batch in ranks[rank][s]]
        assert found == [fingerprint(batch) for batch in whole[3 + s]]
    assert batches_of(config(VL, **common), 1, start_row=12)[0][0][0].tokens_N.equal(whole[3][0].tokens_N), "the row alone does, slower"


def test_a_state_of_another_batch_size_is_refused(tmp_path: Path) -> None:
    _, state = batches_of(config(TEXT, train__global_batch_size=2), 1)
    with pytest.raises(ConfigError, match="2 rows per step"):
        build_loader(config(TEXT, train__global_batch_size=4), dp_rank=0, dp_size=1, state=merge_states([state]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "shards"])
def test_a_state_of_less_data_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "shards":
        shard(tmp_path / "0.tar", range(20))
        cfg = config(VL, data__path=str(tmp_path))
    else:
        cfg = config(TEXT, **text_source(kind, tmp_path))
    _, state = batches_of(cfg, 1)
    merged = json.loads(json.dumps(merge_states([state])))
    build_loader(cfg, dp_rank=0, dp_size=1, state=merged)
    file = next(tmp_path.iterdir())
    (tmp_path / f"later{file.suffix}").write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="would be read twice and others never"):
        build_loader(cfg, dp_rank=0, dp_size=1, state=merged)


def test_a_place_that_the_data_does_not_have_is_refused() -> None:
    lane = [1, 1, 0, 0, 0, 0, 10**6]
    for place in (lane, [*lane[:4], 0, 10**6, 0]):
        loader = build_loader(config(TEXT, train__global_batch_size=1), dp_rank=0, dp_size=1, state={"row": 1, "lanes": {"0": place}})
        with pytest.raises(DataError, match="this run's data has none there; resume with the seed and the data"):
            next(iter(loader))


def test_lanes_of_other_ranks_are_not_planned(tmp_path: Path) -> None:
    read: Counter[str] = Counter()

    class Counted:
        def __len__(self) -> int:
            return 400

        def __getitem__(self, i: int) -> str:
            read[f"{i}"] += 1
            return f"text {i}"

    cfg = config(TEXT, train__global_batch_size=8, data__pack=False)
    rows = LaneRows(Flat(Counted(), "counted"), text_documents(cfg.model, cfg.data), cfg, "train", {})
    for k in range(0, 80, 8):
        rows.row(k)
    assert sum(read.values()) <= 12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_jsonl_is_read_through_once(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{"x" * 90}"}}\n' * 100_000)
    cfg = config(TEXT, data__path=str(tmp_path), eval__every=1)
    before = bytes_read()
    check(cfg)
    for split in ("train", "eval"):
        build_loader(cfg, dp_rank=0, dp_size=1, split=split)
    assert bytes_read() - before < 1.5 * path.stat().st_size
    path.write_text('{"text": "x"}\n' * 20)
    assert len(make_rows(cfg, "train").row(0)) > 0, "what has changed is read anew"


def test_generated_text_has_natural_lengths_and_frequencies() -> None:
    text = GeneratedText(GeneratedConfig(), 256)
    lengths = [len(text[i]) for i in range(2000)]
    assert 0.85 < statistics.mean(lengths) / 427 < 1.15
    assert 0.4 < statistics.median(lengths) / statistics.mean(lengths) < 0.7, "skewed, as a log-normal with sigma 1.1 is"
    counts = Counter(np.concatenate([text[i] for i in range(200)]).tolist())
    assert max(counts) < 256
    assert counts[0] / counts[30] == pytest.approx(33.7 / 3.7, rel=0.25), "Zipf and Mandelbrot"
    assert np.array_equal(text[7], GeneratedText(GeneratedConfig(), 256)[7])
    assert not np.array_equal(text[7][:20], GeneratedText(GeneratedConfig(seed=1), 256)[7][:20])


@pytest.mark.full
def test_generated_samples_are_like_vqa_over_photographs_like_coco(tmp_path: Path) -> None:
    cfg = GeneratedConfig(pool_images=400)
    samples = [GeneratedVqa(cfg, tmp_path)[i] for i in range(1500)]
    assert all(len(s.images) == 1 for s in samples)
    assert statistics.mean(len(s.question.split()) for s in samples) == pytest.approx(6.2, rel=0.05)
    assert sum(len(s.answer.split()) == 1 for s in samples) / 1500 == pytest.approx(0.893, abs=0.03)
    sizes = [PoolImage(tmp_path, 0, n).size() for n in range(400)]
    assert sum(167_500 <= h * w <= 355_840 for h, w in sizes) / 400 == pytest.approx(0.9, abs=0.07)
    assert sum(0.6 <= h / w <= 1.5 for h, w in sizes) / 400 == pytest.approx(0.9, abs=0.07)
    assert not list(tmp_path.iterdir()), "nothing is made before it is read"
    total = sum(len(PoolImage(tmp_path, 0, n).read()) for n in range(12))
    assert 0.7 < total / 12 / 163_000 < 1.3
    for n in range(12):
        image = PoolImage(tmp_path, 0, n)
        assert header_size(image) == header_size(Path(str(image))) == image.size()
    assert len({p.read_bytes() for p in tmp_path.iterdir()}) == 12
    several = GeneratedVqa(GeneratedConfig(images_per_sample=[0.5, 0.3, 0.2]), tmp_path)
    counts = Counter(len(several[i].images) for i in range(1000))
    assert [counts[n] / 1000 for n in (1, 2, 3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.06)


def test_generated_data_is_the_same_everywhere_and_ignores_what_the_pool_holds(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"data__source": "generated", "data__generated": {"pool_images": 2}}
    shas = {data_sha(config(VL, **overrides, data__path=str(tmp_path / name)), steps=2) for name in ("a", "b", "b")}
    assert len(shas) == 1
    assert data_sha(config(TEXT, data__source="generated"), steps=2) == data_sha(config(TEXT, data__source="generated"), steps=2)
    assert data_sha(config(TEXT, data__source="generated", seed=5), steps=2) != data_sha(config(TEXT, data__source="generated"), steps=2)


def test_a_pool_that_cannot_be_made_is_no_bad_image(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/pool"):
        cfg = config(VL, data__path=str(tmp_path / folder), data__source="generated", data__on_bad_image="skip")
        loader = build_loader(cfg, dp_rank=0, dp_size=1)
        with pytest.raises(DataError, match=r"set data\.path to a folder for the generated images"):
            next(iter(loader))


def test_rows_are_padded_to_a_multiple(tmp_path: Path) -> None:
    with reading(config(VL, data__pad=False, data__pad_to_multiple=64, data__pack=False)) as loader:
        lengths = {(len(b.tokens_N), b.num_useful) for step in itertools.islice(loader, 10) for b in step}
    assert all(n % 64 == 0 and 0 <= n - useful < 64 for n, useful in lengths)
    assert len(lengths) > 3
    assert loader.counters()["padding_tokens"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__pad_to_multiple": 64}, "data.pad already fills"),
        ({"data__pad": False, "data__pad_to_multiple": 100}, "no multiple of"),
        ({"data__kind": "mock", "data__source": "generated"}, "mock"),
        ({"data__generated": {"images_per_sample": []}}, "images_per_sample"),
    ],
)
def test_options_that_contradict_each_other_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checks.check(config(VL, **overrides), 1)
