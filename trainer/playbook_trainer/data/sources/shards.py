"""Samples in shards that are read in place: row groups of Parquet files (text, or images with questions and answers), and tar files as the
webdataset library writes them (images with questions and answers).

In a tar file, files with the same name up to the first dot of the base name are one sample: images (jpg, jpeg, png, webp; also 0.jpg,
1.jpg, ...), and either json with question and answer, or txt, which is taken as the answer (a caption).
Kinds of images that are not read (gif, bmp, tiff, ...) count as bad images, and not as none.

Nothing is unpacked, so a member's name leads nowhere; links, devices and sparse files are refused.

Source: https://github.com/webdataset/webdataset, "The WebDataset Format".
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.images import MAX_FILE_BYTES, BadImage
from playbook_trainer.data.sources.streams import Mapped, Recent, Record, Sharded, text_of
from playbook_trainer.data.sources.vqa import Sample, question_answer, refuse_video

_OPEN_BYTES = 256 * 2**20
"""Row groups that one worker keeps at hand; at least one, however large."""

MAX_GROUP_BYTES = 4 * 2**30
"""A larger row group is refused: a worker would hold it whole, and one more for each further lane."""


@dataclass(frozen=True)
class Encoded:
    """An image inside a table; its name is its identity."""

    name: str
    data: bytes = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name

    def read(self) -> bytes:
        """The encoded image."""
        return self.data


def text_groups(files: Sequence[Path], key: str, name: str) -> Sharded[str]:
    """The documents in column `key`."""
    return _groups(files, [key], name, lambda record: text_of(record, key))


def vqa_groups(files: Sequence[Path], name: str) -> Sharded[Sample]:
    """Samples with the columns image (or images), question and answer; an image is bytes, or a struct with bytes,
    as Hugging Face writes it.
    """
    return _groups(files, ["image", "images", "video", "videos", "question", "answer"], name, _of_record)


def _groups(files: Sequence[Path], columns: list[str], name: str, make: Any) -> Sharded[Any]:
    """The row groups of Parquet files as chunks, of which only `columns` are read; `make` turns a record into a sample."""
    parquet = _parquet()
    metadata = [_metadata(parquet, file) for file in files]
    for file, m in zip(files, metadata, strict=True):
        _check_size(file, m, columns)
    groups = [(f, g) for f, m in enumerate(metadata) for g in range(m.num_row_groups)]
    if not groups:
        raise DataError(f"{name} holds no row")

    def read(i: int) -> _Group:
        f, g = groups[i]
        try:
            with parquet.ParquetFile(files[f], metadata=metadata[f]) as file:
                present = [c for c in columns if c in file.schema_arrow.names]
                if twice := [c for c in present if file.schema_arrow.names.count(c) > 1]:
                    raise DataError(f"{files[f]} has several columns named '{twice[0]}'; keep one")
                # Several workers read at once; a pool of threads in each would fight over the cores.
                return _Group(f"{files[f]}: row group {g}", file.read_row_group(g, columns=present, use_threads=False))
        except (OSError, ValueError, NotImplementedError) as e:
            raise DataError(f"{files[f]}: row group {g} cannot be read: {e}") from e

    recent: Recent[_Group] = Recent(read, lambda group: group.table.nbytes, _OPEN_BYTES)
    return Sharded(len(groups), lambda i: Mapped(make, recent.get(i)), name)


@dataclass(frozen=True)
class _Group:
    name: str
    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, i: int) -> Record:
        place = f"{self.name}, row {i}"
        try:
            return place, {c: self.table.column(c)[i].as_py() for c in self.table.column_names}
        except (ValueError, OverflowError) as e:  # strings are not checked when they are written, and not every date is one of Python's
            raise DataError(f"{place}: a value of {', '.join(self.table.column_names)} cannot be read: {e}") from e


def _of_record(record: Record) -> Sample:
    place, fields = record
    refuse_video(place, [key for key in ("video", "videos") if fields.pop(key, None)])
    question, answer = question_answer(place, fields)
    if "image" not in fields and "images" not in fields:
        raise DataError(f"{place}: has neither a column image nor images; rename the one that holds the images")
    images = fields.get("images") if fields.get("images") is not None else fields.get("image")
    images = images if isinstance(images, list) else [] if images is None else [images]
    return Sample(place, [Encoded(f"{place}, image {n}", _bytes(place, image)) for n, image in enumerate(images)], question, answer)


def _bytes(place: str, image: Any) -> bytes:
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise DataError(f"{place}: an image is {type(data).__name__}; expected bytes, or a struct with bytes. Paths are not followed")
    return data


def _metadata(parquet: Any, file: Path) -> Any:
    try:
        return parquet.read_metadata(file)
    except (OSError, ValueError) as e:  # pyarrow's own errors are of these kinds
        raise DataError(f"{file} cannot be read as parquet: {e}") from e


def _check_size(file: Path, metadata: Any, columns: list[str]) -> None:
    """Refuse a row group, by the sizes in the file's footer, that would fill the memory of a worker."""
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        parts = (group.column(i) for i in range(group.num_columns))
        sizes = [(c, p.total_uncompressed_size) for p in parts if (c := p.path_in_schema.partition(".")[0]) in columns]
        total = sum(size for _, size in sizes)
        if total > MAX_GROUP_BYTES:
            raise DataError(
                f"{file}: row group {g} holds {total / 2**20:.1f} MiB in {', '.join(dict.fromkeys(c for c, _ in sizes))}, and a worker "
                f"holds one whole; expected at most {MAX_GROUP_BYTES / 2**20:g} MiB: write the file anew with smaller row groups, of some "
                "hundred rows"
            )


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ConfigError("parquet data needs the package 'pyarrow': pip install pyarrow") from e
    return pyarrow.parquet


IMAGES = ("jpg", "jpeg", "png", "webp")
_UNREAD = ("avif", "bmp", "gif", "heic", "heif", "jp2", "jxl", "tif", "tiff")
"""Images too, which decoding refuses under the policy for bad ones; left out, their samples would pass for text."""
_VIDEOS = ("mp4", "avi", "mov", "mkv", "webm")
_OPEN_MEMBERS = 200_000
"""Members of the shards whose indices one worker keeps at hand."""
_MAX_TEXT_BYTES = 16 * 2**20
"""No question, answer or caption is longer; reading what is would fill the memory of a worker."""
_MAX_HEADER_BYTES = 2**20
"""A long name, or what else a header adds to a member, which tarfile reads whole."""
_ADDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass(frozen=True)
class Member:
    """A file inside a tar file."""

    tar: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.tar}:{self.name}"

    def read(self) -> bytes:
        """The member's bytes.

        Raises:
            BadImage: there are more than of any image.
        """
        if self.size > MAX_FILE_BYTES:
            why = f"too_large: more than {MAX_FILE_BYTES >> 20} MiB"
            raise BadImage(
                "too_large", f"{self} cannot be used as an image ({why}); replace it, take its sample out, or set data.on_bad_image=skip"
            )
        with self.tar.open("rb") as file:
            return os.pread(file.fileno(), self.size, self.offset)


class _Bounded(tarfile.TarInfo):
    """A member whose additional headers are of the size that headers have."""

    def _proc_member(self, archive: Any) -> Any:
        if self.type in _ADDED and self.size > _MAX_HEADER_BYTES:
            raise DataError(
                f"{archive.name}: a header before member {len(archive.members) + 1} holds {self.size >> 20} MiB; expected at most "
                f"{_MAX_HEADER_BYTES >> 20} MiB: the shard is broken, write it anew"
            )
        return super()._proc_member(archive)  # type: ignore[misc]


def tar_samples(files: Sequence[Path], name: str) -> Sharded[Sample]:
    """The samples of the shards; a shard is indexed when a lane first draws it."""
    indices = Recent(lambda i: index(files[i]), lambda groups: sum(len(g) for g in groups) + 1, _OPEN_MEMBERS)
    return Sharded(len(files), lambda i: Mapped(_of_members, indices.get(i)), name)


def index(tar: Path) -> list[list[Member]]:
    """The members of each sample, in the order of the file; only headers are read.

    Raises:
        DataError: no plain tar file, a member that is no regular file, or one that reaches beyond the end.
    """
    members, end = [], tar.stat().st_size
    try:
        with tarfile.open(tar, "r:", tarinfo=_Bounded) as archive:
            for info in archive:
                if info.isdir():
                    continue
                if not info.isreg() or info.issparse():
                    raise DataError(f"{tar}: member {info.name[:80]!r} is a link, device or sparse file; expected regular files only")
                if info.size < 0:  # the next header would lie before this one, for ever
                    raise DataError(f"{tar}: member {info.name[:80]!r} has {info.size} bytes; the shard is broken")
                if info.offset_data + info.size > end:
                    raise DataError(f"{tar}: member {info.name[:80]!r} reaches beyond the end of the file; the shard is truncated")
                members.append(Member(tar, info.name, info.offset_data, info.size))
            _check_end(tar, archive.offset)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as e:
        raise DataError(f"{tar} cannot be read as an uncompressed tar file ({e}); unpack .gz first, and check the file") from e
    groups = [list(group) for _, group in groupby(members, key=lambda m: _split(m.name)[0])]
    return [group for group in groups if any(_split(m.name)[1] for m in group)]


def _check_end(tar: Path, offset: int) -> None:
    """Refuse a file in which more follows, or nothing at all: at a header that is broken or cut, tarfile stops as it does at the end."""
    with tar.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
        whole = len(block) == tarfile.BLOCKSIZE
        while block and not any(block):
            block = file.read(2**20)
    if block or not whole:
        raise DataError(
            f"{tar} has no end mark at byte {offset}, or more behind it: the shard is truncated, broken or several joined; write it anew"
        )


def _of_members(members: list[Member]) -> Sample:
    """The sample of the members that share a name up to the first dot."""
    place = f"{members[0].tar}:{_split(members[0].name)[0]}"
    by_kind = {_split(m.name)[1].lower(): m for m in members}
    if any(kind.rsplit(".")[-1] in _VIDEOS for kind in by_kind):
        raise DataError(f"{place}: holds a video; only images are supported. Take the sample out, or turn frames into images")
    if len(by_kind) < len(members):
        raise DataError(f"{place}: has several members of one kind; expected each once: give each sample a name of its own")
    images = [by_kind[kind] for kind in sorted(by_kind, key=_order) if kind.rsplit(".")[-1] in IMAGES + _UNREAD]
    if "json" in by_kind:
        question, answer = question_answer(place, _json(by_kind["json"]))
    elif "txt" in by_kind:
        question, answer = "", _utf8(by_kind["txt"])
    else:
        raise DataError(f"{place}: has neither .json (question, answer) nor .txt (caption); found {', '.join(sorted(by_kind))}")
    return Sample(place, images, question, answer)


def _json(member: Member) -> dict[str, object]:
    try:
        record = json.loads(_utf8(member))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{member}: not JSON ({e})") from e
    if not isinstance(record, dict):
        raise DataError(f"{member}: expected a JSON object, found {type(record).__name__}")
    return record


def _utf8(member: Member) -> str:
    if member.size > _MAX_TEXT_BYTES:
        raise DataError(
            f"{member} holds {member.size >> 20} MiB; expected a text of at most {_MAX_TEXT_BYTES >> 20} MiB: cut it, or leave the sample "
            "out"
        )
    try:
        return member.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{member} is not UTF-8 text (byte {e.start})") from e


def _order(kind: str) -> tuple[str, str]:
    """By number where there is one: 2.jpg before 10.jpg."""
    return kind.partition(".")[0].zfill(20), kind


def _split(name: str) -> tuple[str, str]:
    """The sample's key and the kind of the member."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return str(path.parent / stem), kind
