"""Hostile and broken sources: each is one clear message, and nothing is left out in silence."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from data_sets import TEXT, TEXTS, VL, config, jpeg, reading, shard, tar, text_source, vqa_table, words_of, write_parquet, write_vqav2

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.images import BadImage, header_size
from playbook_trainer.data.loader import check
from playbook_trainer.data.sources import shards
from playbook_trainer.data.sources.shards import Member, tar_samples, text_groups


def header(name: str, **fields: Any) -> bytes:
    """Of a member of a shard."""
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf()


def negative_size() -> bytes:
    """So that the next header would be this one again."""
    made = bytearray(header("1.jpg"))
    made[124:136] = (2**96 - tarfile.BLOCKSIZE).to_bytes(12, "big")
    made[148:156] = b"%06o\0 " % sum(made[:148] + b" " * 8 + made[156:])
    return bytes(made)


GOOD = [("0.jpg", jpeg(0)), ("0.json", b'{"question": "q", "answer": "a"}')]
END = b"\0" * 2048
MEMBERS = {
    "video": [("0.mp4", b"x"), GOOD[1], *GOOD * 10],
    "no text": [GOOD[0]] * 20,
    "deep json": [GOOD[0], ("0.json", b"[" * 200_000)],
    "one kind twice": GOOD * 20,
}
HOSTILE = {
    "link": header("0.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd") + END,
    "truncated": (header("0.jpg", size=len(jpeg(0))) + jpeg(0))[:700],
    "lying size": header("0.jpg", size=2**40) + END,
    "gzip": gzip.compress(header("a.txt") + END),
    "noise": np.random.default_rng(0).bytes(4096),
    "negative size": header("0.jpg") + negative_size() + END,
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [*MEMBERS, *HOSTILE, "outside"])
def test_hostile_shards_are_one_clear_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tar"
    if kind in MEMBERS:
        tar(path, MEMBERS[kind])
    elif kind in HOSTILE:
        path.write_bytes(HOSTILE[kind])
    else:
        path.symlink_to("/etc/hostname")
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
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
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
    texts = pa.array(TEXTS)
    columns = {
        "not UTF-8": [pa.Array.from_buffers(pa.string(), 12, pa.array([b"\xff"] * 12, pa.binary()).buffers())],
        "not a date": [pa.array([2**62] * 12, pa.timestamp("us"))],
        "two columns": [texts, texts],
    }[fault]
    write_parquet(tmp_path / "a.parquet", pa.Table.from_arrays(columns, names=["text"] * len(columns)), 5)
    with pytest.raises(DataError, match=r"a\.parquet.*(row 0: a value of text cannot be read|several columns named 'text')"):
        check(config(TEXT, data__path=str(tmp_path)))


def test_a_row_group_that_would_fill_the_memory_of_a_worker_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its footer, and by the columns that are read alone."""
    table = pa.table({"text": TEXTS, "image": [b"x" * 100_000] * len(TEXTS)})
    write_parquet(tmp_path / "a.parquet", table.slice(0, 2), 5)
    write_parquet(tmp_path / "b.parquet", table, 5)
    assert text_groups([tmp_path / "b.parquet"], "text", "t").num_shards > 1
    monkeypatch.setattr(shards, "MAX_GROUP_BYTES", 200)
    message = r"b\.parquet: row group 0 holds 0\.\d MiB in text, and a worker holds one whole; expected at most .*with smaller row groups"
    with pytest.raises(DataError, match=message):
        text_groups([tmp_path / "a.parquet", tmp_path / "b.parquet"], "text", "t")


def big_member(path: Path, name: str, size: int, kind: bytes = tarfile.REGTYPE) -> None:
    """A shard with one member that takes no room on the disk, behind a sample."""
    sample = [
        header(given, size=len(data)) + data + b"\0" * (-len(data) % tarfile.BLOCKSIZE)
        for given, data in (("a.jpg", jpeg(0)), ("a.txt", b"a"))
    ]
    path.write_bytes(b"".join([*sample, header(name, size=size, type=kind)]))
    os.truncate(path, path.stat().st_size + size + 2 * tarfile.BLOCKSIZE)


@contextmanager
def in_little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("b.txt", tarfile.REGTYPE, r"x\.tar:b\.txt holds 64 MiB; expected a text of at most 16 MiB"),
        ("b.json", tarfile.REGTYPE, r"x\.tar:b\.json holds 64 MiB; expected a text of at most 16 MiB"),
        ("b", tarfile.XHDTYPE, r"x\.tar: a header before member 3 holds 64 MiB; expected at most 1 MiB"),
        ("b", tarfile.XGLTYPE, r"x\.tar: a header before member 3 holds 64 MiB; expected at most 1 MiB"),
        ("b", tarfile.GNUTYPE_LONGNAME, r"x\.tar: a header before member 3 holds 64 MiB; expected at most 1 MiB"),
    ],
)
def test_members_that_would_fill_the_memory_of_a_worker_are_refused_unread(name: str, kind: bytes, message: str, tmp_path: Path) -> None:
    big_member(tmp_path / "x.tar", name, 64 * 2**20, kind)
    with in_little_memory(), pytest.raises(DataError, match=message):
        list(tar_samples([tmp_path / "x.tar"], "x").head())


def test_an_image_in_a_shard_that_is_too_large_is_a_bad_one_of_that_kind(tmp_path: Path) -> None:
    big_member(tmp_path / "x.tar", "b.jpg", 300 * 2**20)
    image = Member(tmp_path / "x.tar", "b.jpg", 4096, 300 * 2**20)
    with in_little_memory(), pytest.raises(BadImage, match="more than 256 MiB") as found:
        header_size(image)
    assert found.value.kind == "too_large"


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
    with reading(config(TEXT, data__path=str(tmp_path), data__num_workers=workers)) as loader:
        path.unlink()
        with pytest.raises(DataError, match=r"cannot be read: .*a\.jsonl"):
            next(iter(loader))


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
