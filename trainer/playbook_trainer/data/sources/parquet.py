"""Parquet files, read by row group: text, or images with questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.sources.streams import Items, Mapped, Recent, Sharded
from playbook_trainer.data.sources.text import Record, text_of
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
    return _groups(files, [key], name, lambda record: text_of(record[0], record[1].get(key), key))


def vqa_groups(files: Sequence[Path], name: str) -> Sharded[Sample]:
    """Samples with the columns image (or images), question and answer; an image is bytes, or a struct with bytes, as Hugging Face writes it."""
    return _groups(files, ["image", "images", "video", "videos", "question", "answer"], name, _sample)


def _groups(files: Sequence[Path], columns: list[str], name: str, make: Any) -> Sharded[Any]:
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

    def opened(i: int) -> Items[Any]:
        return Mapped(make, recent.get(i))

    return Sharded(len(groups), opened, name)


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


def _sample(record: Record) -> Sample:
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
                f"{file}: row group {g} holds {total / 2**20:.1f} MiB in {', '.join(dict.fromkeys(c for c, _ in sizes))}, and a worker holds one "
                f"whole; expected at most {MAX_GROUP_BYTES / 2**20:g} MiB: write the file anew with smaller row groups, of some hundred rows"
            )


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ConfigError("parquet data needs the package 'pyarrow': pip install pyarrow") from e
    return pyarrow.parquet
