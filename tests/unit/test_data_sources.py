"""Where data comes from: text and image-question-answer layouts, generators, hostile files, and one order for all of them."""

from __future__ import annotations

import io
import itertools
import json
import statistics
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from playbook.errors import ConfigError, DataError
from playbook.paths import data_root
from playbook_trainer import checks
from playbook_trainer.config import GeneratedConfig, TrainerConfig, load
from playbook_trainer.data.generated import GeneratedText, GeneratedVqa, PoolImage
from playbook_trainer.data.images import BadImage, header_size
from playbook_trainer.data.loader import build_loader, check, data_sha, merge_states
from playbook_trainer.data.rows import make_rows
from playbook_trainer.data.streams import Flat, Sharded
from playbook_trainer.data.webdataset import tar_samples

TEXT, VL = "qwen3_moe_tiny", "qwen3_vl_moe_tiny"
TEXTS = [f"document {i} " * (1 + i % 5) for i in range(60)]


def config(name: str, **overrides: Any) -> TrainerConfig:
    keys = {"data.num_workers": 0} | {key.replace("__", "."): value for key, value in overrides.items()}
    return load(data_root("configs") / f"{name}.yaml", keys)


def jpeg(number: int, size: tuple[int, int] = (64, 48)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (number % 256, 20, 30)).save(out, format="JPEG")
    return out.getvalue()


def tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def shard(path: Path, numbers: range) -> Path:
    members = []
    for n in numbers:
        members += [(f"{n:04d}.jpg", jpeg(n)), (f"{n:04d}.json", json.dumps({"question": f"q{n}", "answer": f"a{n}"}).encode())]
    return tar(path, members)


def vqa_table(numbers: range, *, struct: bool = False) -> Any:
    import pyarrow as pa

    images = [{"bytes": jpeg(n), "path": None} if struct else jpeg(n) for n in numbers]
    return pa.table({"image": images, "question": [f"q{n}" for n in numbers], "answer": [f"a{n}" for n in numbers], "extra": list(numbers)})


def write_parquet(path: Path, table: Any, rows: int) -> Path:
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_vqav2(folder: Path, subset: str = "train2014", count: int = 12) -> Path:
    (folder / subset).mkdir(parents=True)
    for n in range(count):
        (folder / subset / f"COCO_{subset}_{n:012d}.jpg").write_bytes(jpeg(n))
    questions = [{"image_id": n, "question_id": 10 * n, "question": f"q{n}"} for n in range(count)]
    annotations = [{"question_id": 10 * n, "image_id": n, "multiple_choice_answer": f"a{n}"} for n in reversed(range(count))]
    (folder / f"v2_OpenEnded_mscoco_{subset}_questions.json").write_text(json.dumps({"questions": questions}))
    (folder / f"v2_mscoco_{subset}_annotations.json").write_text(json.dumps({"annotations": annotations}))
    return folder


def text_source(kind: str, folder: Path) -> dict[str, Any]:
    """A configuration whose 60 documents are TEXTS."""
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n\n" for t in TEXTS[:30]))
        (folder / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[30:]))
    elif kind == "parquet":
        import pyarrow as pa

        write_parquet(folder / "a.parquet", pa.table({"text": TEXTS[:25], "other": list(range(25))}), 10)
        write_parquet(folder / "b.parquet", pa.table({"text": TEXTS[25:]}), 10)
    elif kind == "huggingface":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
        return {"data__path": str(folder / "saved")}
    return {"data__path": str(folder)}


def vqa_source(kind: str, folder: Path) -> dict[str, Any]:
    """A configuration whose samples are q0 a0 to q29 a29 (others, where generated), one image each."""
    if kind == "webdataset":
        shard(folder / "0.tar", range(14))
        shard(folder / "1.tar", range(14, 30))
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", vqa_table(range(14)), 3)
        write_parquet(folder / "b.parquet", vqa_table(range(14, 30), struct=True), 3)
    elif kind == "vqav2":
        write_vqav2(folder / "set", count=30)
        return {"data__path": str(folder / "set")}
    elif kind == "generated":
        return {"data__path": str(folder), "data__source": "generated", "data__generated": {"pool_images": 3, "num_samples": 50}}
    return {"data__path": str(folder)}


def words_of(cfg: TrainerConfig, split: Any, rows: int) -> Counter[bytes]:
    """The text of every document of the first rows."""
    made = make_rows(cfg, split)
    return Counter(bytes(t for t in d.tokens.tolist() if t < 256) for k in range(rows) for d in made.row(k))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "huggingface"])
def test_text_layouts_give_each_document_once_and_hold_out_a_tenth(tmp_path: Path, kind: str) -> None:
    cfg = config(TEXT, **text_source(kind, tmp_path), data__pack=False, train__global_batch_size=1)
    check(cfg)
    train, held = words_of(cfg, "train", 54), words_of(cfg, "eval", 6)
    assert train + held == Counter(t.encode() for t in TEXTS)
    assert train + train == words_of(cfg, "train", 108), "the second epoch holds the same"


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


def fingerprint(batches: list[Any]) -> list[tuple[bytes, ...]]:
    parts = [(b.tokens_N, b.labels_N, b.cu_seqlens, *([b.vision.pixels_PC] if b.vision else [])) for b in batches]
    return [tuple(t.numpy().tobytes() for t in tensors) for tensors in parts]


def batches_of(cfg: TrainerConfig, steps: int, **options: Any) -> tuple[list[list[Any]], dict[str, Any]]:
    loader = build_loader(cfg, **{"dp_rank": 0, "dp_size": 1, **options})
    try:
        return list(itertools.islice(loader, steps)), loader.state()
    finally:
        loader.close()


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "vqav2", "generated"])
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
        found = [batch for rank in range(4) for batch in ranks[rank][s]]
        assert fingerprint(found) == fingerprint(whole[3 + s])
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


def test_a_resumed_lane_reads_nothing_of_what_came_before(tmp_path: Path) -> None:
    opened: list[int] = []

    def open_shard(number: int) -> list[str]:
        opened.append(number)
        return [f"text {number} {i}" for i in range(40)]

    from playbook_trainer.data.rows import LaneRows, text_documents

    cfg = config(TEXT, data__seq_len=64, data__pack_buffer=4, train__global_batch_size=2)
    source = Sharded(50, open_shard, "planted")
    first = LaneRows(source, text_documents(cfg.model, cfg.data), cfg, "train", {})
    rows = [first.row(k) for k in range(0, 240, 2)]
    state = first.state(238)
    drawn = len(set(opened))
    opened.clear()
    second = LaneRows(source, text_documents(cfg.model, cfg.data), cfg, "train", {0: state})
    following = second.row(240)
    assert [d.tokens.tolist() for d in following] == [d.tokens.tolist() for d in first.row(240)]
    assert drawn > 10
    assert len(set(opened)) <= 5, "the shards of the documents that wait, and the first, to see that there is a sample"
    assert len(rows) == 120


def test_lanes_of_other_ranks_are_not_planned(tmp_path: Path) -> None:
    read: Counter[str] = Counter()

    class Counted:
        def __len__(self) -> int:
            return 400

        def __getitem__(self, i: int) -> str:
            read[f"{i}"] += 1
            return f"text {i}"

    from playbook_trainer.data.rows import LaneRows, text_documents

    cfg = config(TEXT, train__global_batch_size=8, data__pack=False)
    rows = LaneRows(Flat(Counted(), "counted"), text_documents(cfg.model, cfg.data), cfg, "train", {})
    for k in range(0, 80, 8):
        rows.row(k)
    assert sum(read.values()) <= 12


def test_a_large_jsonl_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(300)) + "not json\n")
    cfg = config(TEXT, data__path=str(tmp_path), data__pack=False)
    check(cfg)
    rows = make_rows(cfg, "train")
    with pytest.raises(DataError, match=r"a\.jsonl:301"):
        [rows.row(k) for k in range(272)]


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


def hostile(kind: str, folder: Path) -> None:
    good = [("0.jpg", jpeg(0)), ("0.json", b'{"question": "q", "answer": "a"}')]
    if kind == "link":
        with tarfile.open(folder / "x.tar", "w") as archive:
            info = tarfile.TarInfo("0.jpg")
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    elif kind == "truncated":
        path = tar(folder / "x.tar", good)
        path.write_bytes(path.read_bytes()[:700])
    elif kind == "lying size":
        info = tarfile.TarInfo("0.jpg")
        info.size = 2**40
        (folder / "x.tar").write_bytes(info.tobuf() + b"\0" * 2048)
    elif kind == "gzip":
        with tarfile.open(folder / "x.tar", "w:gz") as archive:
            archive.add(__file__, "a.txt")
    elif kind == "noise":
        (folder / "x.tar").write_bytes(np.random.default_rng(0).bytes(4096))
    elif kind == "video":
        tar(folder / "x.tar", [("0.mp4", b"x"), ("0.json", b'{"question": "q", "answer": "a"}')] + good * 10)
    elif kind == "no text":
        tar(folder / "x.tar", [("0.jpg", jpeg(0))] * 20)
    elif kind == "deep json":
        tar(folder / "x.tar", [("0.jpg", jpeg(0)), ("0.json", b"[" * 200_000)])
    elif kind == "outside":
        (folder / "x.tar").symlink_to("/etc/hostname")
    elif kind == "one kind twice":
        tar(folder / "x.tar", good * 20)
    elif kind == "negative size":
        header = bytearray(tarfile.TarInfo("1.jpg").tobuf())
        header[124:136] = (2**96 - tarfile.BLOCKSIZE).to_bytes(12, "big")  # the next header would be this one again
        header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:])
        before = tarfile.TarInfo("0.jpg").tobuf()
        (folder / "x.tar").write_bytes(before + bytes(header) + b"\0" * 2048)


HOSTILE = [
    "link", "truncated", "lying size", "gzip", "noise", "video", "no text", "deep json", "outside", "one kind twice", "negative size",
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_shards_are_one_clear_error(tmp_path: Path, kind: str) -> None:
    hostile(kind, tmp_path)
    with pytest.raises(DataError, match=r"x\.tar"):
        check(config(VL, data__path=str(tmp_path), data__source="webdataset"))


@pytest.mark.parametrize("fault", ["cut at a member", "cut in a header", "broken header", "joined"])
def test_a_shard_that_ends_early_loses_nothing_in_silence(tmp_path: Path, fault: str) -> None:
    path = shard(tmp_path / "x.tar", range(20))
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        at = archive.getmembers()[20].offset
    path.write_bytes(
        {
            "cut at a member": data[:at],
            "cut in a header": data[: at + 100],
            "broken header": data[:at] + b"?" + data[at + 1 :],
            "joined": data + data,
        }[fault]
    )
    with pytest.raises(DataError, match=r"x\.tar has no end mark at byte \d+, or more behind it"):
        check(config(VL, data__path=str(tmp_path)))


def test_images_of_a_sample_come_by_number_and_none_is_left_out(tmp_path: Path) -> None:
    members = [(f"s.{n}.jpg", jpeg(n, (32 + n, 32))) for n in range(12)] + [("s.txt", b"caption")]
    path = tar(tmp_path / "x.tar", [*members, ("t.gif", b"GIF89a"), ("t.txt", b"another")])
    samples = tar_samples([path], "x").open(0)
    assert [header_size(image)[1] for image in samples[0].images] == [32 + n for n in range(12)]
    with pytest.raises(BadImage, match=r"t\.gif.*not_an_image"):
        header_size(samples[1].images[0])


def test_a_member_named_upwards_leads_nowhere(tmp_path: Path) -> None:
    members = []
    for n in range(10):
        members += [(f"../../{n}.jpg", jpeg(n)), (f"../../{n}.txt", f"caption {n}".encode())]
    tar(tmp_path / "x.tar", members)
    cfg = config(VL, data__path=str(tmp_path), data__pack=False, train__global_batch_size=1)
    assert words_of(cfg, "train", 9) + words_of(cfg, "eval", 1) == Counter(f"caption {n}".encode() for n in range(10))


def test_webdataset_itself_writes_what_we_read(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        for n in range(20):
            sink.write({"__key__": f"s{n:03d}", "jpg": jpeg(n), "json": {"question": f"q{n}", "answer": f"a{n}"}})
    cfg = config(VL, data__path=str(tmp_path), data__pack=False, train__global_batch_size=1)
    assert words_of(cfg, "train", 18) + words_of(cfg, "eval", 2) == Counter(f"q{n}a{n}".encode() for n in range(20))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (TEXT, {"data__source": "vqav2"}, "holds images"),
        (VL, {"data__source": "huggingface"}, "holds text"),
        (TEXT, {"data__source": "huggingface"}, "set data.path"),
        (VL, {"data__source": "vqav2", "data__path": "{folder}"}, "no subset"),
        (VL, {"data__source": "vqav2", "data__path": "{folder}/nowhere"}, "no folder"),
        (TEXT, {"data__source": "parquet", "data__path": "{folder}"}, "no .parquet file"),
    ],
)
def test_a_layout_that_is_not_there_is_named(tmp_path: Path, name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        check(config(name, **{k: str(v).format(folder=tmp_path) for k, v in overrides.items()}))


def test_broken_parquet_and_wrong_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        check(config(TEXT, data__path=str(tmp_path)))
    write_parquet(tmp_path / "a.parquet", vqa_table(range(12)), 5)
    with pytest.raises(DataError, match="under 'text'"):
        check(config(TEXT, data__path=str(tmp_path)))
    write_parquet(tmp_path / "a.parquet", vqa_table(range(12)).rename_columns(["photo", "question", "answer", "extra"]), 5)
    with pytest.raises(DataError, match="neither a column image nor images"):
        check(config(VL, data__path=str(tmp_path)))


@pytest.mark.parametrize("fault", ["not UTF-8", "not a date", "two columns"])
def test_values_that_parquet_holds_and_python_cannot_are_named(tmp_path: Path, fault: str) -> None:
    import pyarrow as pa

    texts = pa.array(TEXTS)
    columns = {
        "not UTF-8": [pa.Array.from_buffers(pa.string(), 12, pa.array([b"\xff"] * 12, pa.binary()).buffers())],
        "not a date": [pa.array([2**62] * 12, pa.timestamp("us"))],
        "two columns": [texts, texts],
    }[fault]
    write_parquet(tmp_path / "a.parquet", pa.Table.from_arrays(columns, names=["text"] * len(columns)), 5)
    with pytest.raises(DataError, match=r"a\.parquet.*(row 0: a value of text cannot be read|several columns named 'text')"):
        check(config(TEXT, data__path=str(tmp_path)))


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.JSONL", "b.txt.zst"])
def test_a_file_that_would_be_passed_over_is_named(tmp_path: Path, name: str) -> None:
    cfg = config(TEXT, **text_source("jsonl", tmp_path))
    (tmp_path / "a.jsonl.gz").touch()  # what was unpacked may stay
    check(cfg)
    (tmp_path / "b.jsonl").rename(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} would not be read: unpack it"):
        check(cfg)


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    for name in (TEXT, VL):
        with pytest.raises(DataError, match=r"data\.path: a+ cannot be read"):
            check(config(name, data__path="a" * 5000))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_goes_away_during_a_run_is_one_message(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    loader = build_loader(config(TEXT, data__path=str(tmp_path), data__num_workers=workers), dp_rank=0, dp_size=1)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot be read: .*a\.jsonl"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("fault", ["annotation", "image", "outside", "negative"])
def test_a_vqav2_folder_that_does_not_fit_together_is_named(tmp_path: Path, fault: str) -> None:
    folder = write_vqav2(tmp_path / "set")
    questions, annotations = (next(folder.glob(f"*{kind}.json")) for kind in ("questions", "annotations"))
    if fault == "annotation":
        annotations.write_text(json.dumps({"annotations": json.loads(annotations.read_text())["annotations"][1:]}))
    elif fault == "image":
        next((folder / "train2014").glob("*0000.jpg")).unlink()
    elif fault == "outside":
        image = next((folder / "train2014").glob("*0000.jpg"))
        image.unlink()
        image.symlink_to("/etc/hostname")
    else:
        questions.write_text(json.dumps({"questions": [{"image_id": -1, "question_id": 0, "question": "q"}]}))
    with pytest.raises(DataError, match=r"question 110|does not exist|lies outside|non-negative"):
        check(config(VL, data__path=str(folder)))


def test_a_video_in_samples_jsonl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"video": "a.mp4", "images": [], "question": "q", "answer": "a"}\n' * 2)
    with pytest.raises(DataError, match="only images are supported"):
        check(config(VL, data__path=str(tmp_path)))


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
    loader = build_loader(config(VL, data__pad=False, data__pad_to_multiple=64, data__pack=False), dp_rank=0, dp_size=1)
    lengths = {(len(b.tokens_N), b.num_useful) for step in itertools.islice(loader, 10) for b in step}
    assert all(n % 64 == 0 and 0 <= n - useful < 64 for n, useful in lengths)
    assert len(lengths) > 3
    assert loader.counters()["padding_tokens"] > 0
    loader.close()


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
