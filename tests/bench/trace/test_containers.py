"""Traces as they are kept: packed, in archives, cut off, larger than memory; and hostile ones."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from test_walls import chrome

from playbook.errors import PlaybookError
from playbook_bench.trace import containers
from playbook_bench.trace.reports import contents, timeline_from_file
from playbook_bench.trace.walls import walls

SEEDS = int(os.environ.get("PLAYBOOK_MUTATIONS", "60"))


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as packed:
        packed.write(data)
    return bytes(out.getvalue())


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstd,
    "zip": lambda data: zipped({"run/t.json": data}),
    "tar": lambda data: tar({"run/t.json": data}, "w"),
    "tar.gz": lambda data: tar({"run/t.json": data}),
    "tar.xz": lambda data: tar({"run/t.json": data}, "w:xz"),
    "tar.zst": lambda data: zstd(tar({"run/t.json": data}, "w")),
    "gz in zip": lambda data: zipped({"run/t.json": gzip.compress(data)}),
    "zst in tar.gz": lambda data: tar({"run/t.json": zstd(data)}),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_trace_reads_as_the_plain_one(kind: str, tmp_path: Path) -> None:
    plain = chrome(tmp_path / "plain.json", steps=40)
    packed = tmp_path / "packed"
    packed.write_bytes(PACKED[kind](plain.read_bytes()))
    assert timeline_from_file(packed) == timeline_from_file(plain)


@pytest.mark.parametrize("kind", ["plain", *PACKED])
def test_of_a_trace_that_is_cut_off_what_is_whole_counts_and_is_said(kind: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    plain = json.loads(chrome(tmp_path / "plain.json", steps=200).read_text())
    for event in plain["traceEvents"]:
        event["args"] = {**event.get("args", {}), "noise": rng.randbytes(150).hex()}
    data = PACKED.get(kind, lambda data: data)(json.dumps(plain).encode())
    packed = tmp_path / "packed"
    packed.write_bytes(data[: len(data) * 3 // 4])
    if kind in ("zip", "gz in zip"):  # their list of contents lies at the end
        with pytest.raises(PlaybookError, match="damaged or encrypted"):
            timeline_from_file(packed)
        return
    timeline = timeline_from_file(packed)
    assert 200 < len(timeline.ops) < 310
    assert any("cut off" in note for note in timeline.notes)
    assert walls(timeline).span_ms == pytest.approx(1)


@pytest.mark.parametrize("end", range(1, 110, 3))
def test_a_document_may_end_anywhere(end: int, tmp_path: Path) -> None:
    whole = '{"a": [1.5, true], "traceEvents": [{"ph": "X", "cat": "kernel", "name": "k\\u00e9", "ts": 12.5, "dur": 2}, {"x": 1}], "b": -1}'
    (tmp_path / "t").write_text(whole[:-end])
    for stream in containers.files(tmp_path / "t"):
        document = containers.Document(stream)
        events = list(document.events())
    assert document.cut
    assert all(event == json.loads(whole)["traceEvents"][i] for i, event in enumerate(events))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_where_a_piece_ends_changes_nothing(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = chrome(tmp_path / "plain.json", steps=4)
    expected = timeline_from_file(plain)
    monkeypatch.setattr(containers, "_CHUNK", size)
    assert timeline_from_file(plain) == expected


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(containers, "MAX_FILES", 3)
    bomb = b'{"traceEvents": [' + b" " * (1 << 22)
    for packed in PACKED.values():
        (tmp_path / "bomb").write_bytes(packed(bomb))
        with pytest.raises(PlaybookError, match="unpacked"):
            timeline_from_file(tmp_path / "bomb")
    many = {f"{i}.json": b"{}" for i in range(5)}
    for pack in (zipped, tar):
        (tmp_path / "many").write_bytes(pack(many))
        with pytest.raises(PlaybookError, match="more than 3 files"):
            list(contents(tmp_path / "many"))


def test_one_value_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_MAX_VALUE", 1 << 20)
    (tmp_path / "t").write_text('{"traceEvents": [{"name": "' + "x" * (5 << 20) + '"}]}')
    with pytest.raises(PlaybookError, match="no value ends within"):
        timeline_from_file(tmp_path / "t")


def test_a_name_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 8 << 20
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(name.tobuf(tarfile.GNU_FORMAT) + bytes(8 << 20) + tar({"t.json": b"{}"}, "w")))
    with pytest.raises(PlaybookError, match="a header is larger than 1 MiB"):
        timeline_from_file(tmp_path / "t.tar.gz")


def test_what_lies_between_traces_is_passed_over(tmp_path: Path) -> None:
    plain = chrome(tmp_path / "plain.json")
    (tmp_path / "t.tar").write_bytes(tar({".large": bytes(3 << 20), "t.json": plain.read_bytes()}, "w"))
    assert timeline_from_file(tmp_path / "t.tar") == timeline_from_file(plain)


def test_archives_may_not_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "t.json").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        archive.add(tmp_path / "t.json", "t.json")
    with pytest.raises(PlaybookError, match="holds no files"):
        timeline_from_file(tmp_path / "t.tar")


@pytest.mark.parametrize("kind", ["plain", "gz", "xz", "zst", "zip", "tar.gz"])
def test_mutated_files_are_refused_or_add_up(kind: str, tmp_path: Path) -> None:
    data = PACKED.get(kind, lambda data: data)(chrome(tmp_path / "plain.json").read_bytes())
    rng = random.Random(5)
    refused = 0
    for _ in range(SEEDS):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 3, 30])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        (tmp_path / "changed").write_bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])])
        try:
            found = walls(timeline_from_file(tmp_path / "changed"))
        except PlaybookError:
            refused += 1
        else:
            assert found.busy + found.idle == pytest.approx(1)
    assert refused


@pytest.mark.full
def test_memory_does_not_grow_with_what_is_passed_over(tmp_path: Path) -> None:
    """Python functions and flows, the most of a large trace, are read and dropped."""
    import tracemalloc

    passed = ",".join(
        json.dumps({"ph": "X", "cat": "python_function", "name": f"f{i}" + 300 * "x", "ts": i, "dur": 1, "tid": 1}) for i in range(25_000)
    )
    text = chrome(tmp_path / "plain.json").read_text()
    (tmp_path / "large.json").write_text(text.replace('"traceEvents": [', f'"traceEvents": [{passed},'))
    tracemalloc.start()
    timeline = timeline_from_file(tmp_path / "large.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(timeline.ops) == 6
    assert peak < 5 << 20 < (tmp_path / "large.json").stat().st_size
