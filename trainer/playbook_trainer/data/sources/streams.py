"""Where samples come from: chunks that are read whole, each by one lane, without reading the data set up front; and text documents from
files: found, indexed, and read one at a time.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeGuard, TypeVar

from playbook.errors import DataError

S = TypeVar("S")
T = TypeVar("T")
_T_co = TypeVar("_T_co", covariant=True)
Split = Literal["train", "eval"]
Part = Literal["train", "eval", "all"]
"""The samples of a split, or all of them, where another file holds the other split."""
HOLD_OUT = 10
"""Every tenth sample or document is held out for evaluation, whether or not the run evaluates."""
_PARTS_PER_LANE = 8
"""Shards are cut into at least this many chunks for each lane, so that a few large files still feed many lanes."""


class Items(Protocol[_T_co]):
    """Samples by number, each read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> _T_co: ...


class Stream(Protocol[_T_co]):
    """One split of a data set as numbered chunks; a chunk is opened only by the lane that draws it."""

    num_chunks: int
    shards: int
    """Chunks n and n + shards are parts of one shard."""
    extent: int
    """Samples, or shards where they come in shards: with another number of them, places in the stream mean others."""

    def chunk(self, number: int) -> Items[_T_co]:
        """The samples of a chunk, read when they are indexed; may be empty."""
        ...


class FlatStream(Generic[T]):
    """Samples that can be read one by one in any order: each is a chunk of its own, so the shuffle is over all.

    Raises:
        DataError: no sample is left for the split.
    """

    def __init__(self, items: Items[T], part: Part, name: str) -> None:
        self._items, self._part, self._total = items, part, len(items)
        self.extent = self._total
        held_out = len(items) // HOLD_OUT or int(len(items) > 1)  # of fewer than ten, the last
        self.num_chunks = {"train": len(items) - held_out, "eval": held_out, "all": len(items)}[part]
        self.shards = self.num_chunks
        if not self.num_chunks:
            raise DataError(
                f"{name}: {len(items)} samples or documents leave none for '{part}'; expected at least 2, so that one can be held out"
            )

    def chunk(self, number: int) -> Items[T]:
        """The one sample."""
        return Mapped(self._items.__getitem__, [self._position(number)])

    def _position(self, number: int) -> int:
        if self._part == "all":
            return number
        if self._total < HOLD_OUT:
            return number if self._part == "train" else self._total - 1
        return number + number // (HOLD_OUT - 1) if self._part == "train" else number * HOLD_OUT + HOLD_OUT - 1


class ShardStream(Generic[T]):
    """Samples in shards (files, row groups) that cost something to open: a lane reads a part of a shard, shuffled, then draws another.

    Raises:
        DataError: no sample is left for the split.
    """

    def __init__(self, data: Sharded[T], part: Part, lanes: int) -> None:
        self._open, self._part, self.shards = data.open, part, data.num_shards
        self._parts = -(-_PARTS_PER_LANE * lanes // max(1, self.shards))
        self.num_chunks, self.extent = self.shards * self._parts, self.shards
        if not any(len(self.chunk(number * self.shards + shard)) for shard in range(self.shards) for number in range(self._parts)):
            raise DataError(f"{data.name} leaves no sample for '{part}'; expected at least {HOLD_OUT}, so that one can be held out")

    def chunk(self, number: int) -> Items[T]:
        """The chunk's samples of this split, from its shard."""
        part, shard = divmod(number, self.shards)
        items = self._open(shard)
        # The tenth place turns with the shard, so that many small shards hold out a tenth too.
        held_out = {i for i in range(len(items)) if (i + shard) % HOLD_OUT == HOLD_OUT - 1}
        chosen = [i for i in range(len(items)) if self._part == "all" or (i in held_out) == (self._part == "eval")]
        return Mapped(items.__getitem__, chosen[part :: self._parts])


@dataclass(frozen=True)
class Flat(Generic[_T_co]):
    """A data set whose samples can be read one by one in any order."""

    items: Items[_T_co]
    name: str

    def stream(self, part: Part, lanes: int) -> Stream[_T_co]:
        """One part of it."""
        return FlatStream(self.items, part, self.name)

    def fewer_than(self, limit: int) -> Flat[_T_co] | None:
        """Itself, where it has fewer samples than that."""
        return self if len(self.items) < limit else None

    def head(self) -> Items[_T_co]:
        """All samples, in their own order, whatever split they belong to."""
        return self.items


@dataclass(frozen=True)
class Sharded(Generic[_T_co]):
    """A data set in shards that cost something to open."""

    num_shards: int
    open: Callable[[int], Items[_T_co]]
    name: str

    def stream(self, part: Part, lanes: int) -> Stream[_T_co]:
        """One part of it."""
        return ShardStream(self, part, lanes)

    def fewer_than(self, limit: int) -> Flat[_T_co] | None:
        """Its samples as they lie in all shards, where they are fewer than that; shards are opened until they are not."""
        if self.num_shards >= limit:
            return None
        shards: list[Items[_T_co]] = []
        for number in range(self.num_shards):
            shards.append(self.open(number))
            if sum(map(len, shards)) >= limit:
                return None
        return Flat(Joined(shards), self.name)

    def head(self) -> Items[_T_co]:
        """The samples of the first shard, in their own order, whatever split they belong to."""
        return self.open(0)


class Joined(Generic[T]):
    """Several lists of items as one, in order."""

    def __init__(self, lots: Sequence[Items[T]]) -> None:
        self._lots = lots
        self._ends = list(accumulate(len(lot) for lot in lots))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> T:
        lot = bisect_right(self._ends, i)
        return self._lots[lot][i - self._ends[lot] + len(self._lots[lot])]


class Mapped(Generic[S, T]):
    """The results of a function over items, computed on access."""

    def __init__(self, function: Callable[[S], T], items: Items[S]) -> None:
        self._function, self._items = function, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> T:
        return self._function(self._items[i])


class Recent(Generic[T]):
    """The latest results of a function, up to a total size."""

    def __init__(self, make: Callable[[int], T], size: Callable[[T], int], limit: int) -> None:
        self._make, self._size, self._limit = make, size, limit
        self._held: OrderedDict[int, T] = OrderedDict()
        self._total = 0

    def get(self, key: int) -> T:
        """The result for `key`, made if it is not at hand."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = self._held[key] = self._make(key)
        self._total += self._size(value)
        while self._total > self._limit and len(self._held) > 1:
            self._total -= self._size(self._held.popitem(last=False)[1])
        return value


# In a plain file, documents are set apart as books set apart chapters: by two or more blank lines.
_BORDER = re.compile(r"\n[ \t\r]*\n(?:[ \t\r]*\n)+")

_PACKED = (".gz", ".bz2", ".xz", ".zst")

Record = tuple[str, dict[str, Any]]
"""Where an object stands (file:line), and the object."""


class JsonLines:
    """The objects of a .jsonl file, by number; only the places of its lines are held.

    Raises:
        DataError: the file cannot be read; on access, a line that is no object.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            stat = file.stat()
            self._starts, self._numbers = _lines(file, stat.st_mtime_ns, stat.st_size)
        except OSError as e:
            raise DataError(f"{file} cannot be read: {e.strerror or e}") from e

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> Record:
        """The place (file and line) and the object of record `i`."""
        # Opened anew each time: workers are forks, and a shared file would have one position for all of them.
        with self._file.open("rb") as file:
            file.seek(self._starts[i])
            line = file.readline()
        place = f"{self._file}:{self._numbers[i]}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as e:
            raise DataError(f"{place}: not UTF-8 text (byte {e.start} of the line); convert it to UTF-8") from e
        except (ValueError, RecursionError) as e:
            raise DataError(f"{place}: not JSON ({e}); expected one object per line") from e
        if not isinstance(record, dict):
            raise DataError(f"{place}: expected a JSON object, found {type(record).__name__}")
        return place, record


@lru_cache(maxsize=4096)
def _lines(file: Path, _changed: int, _size: int) -> tuple[array[int], array[int]]:
    """Where each line that is not blank starts, and its number; found once, for checking, training, evaluation and the data's hash."""
    starts, numbers, start = array("q"), array("q"), 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                starts.append(start)
                numbers.append(number)
            start += len(line)
    return starts, numbers


def text_items(path: Path, key: str) -> Items[str]:
    """The documents of a `.txt` or `.jsonl` file, or of all such files in a folder, by name.

    Raises:
        DataError: nothing there, or a file that is not text; on access, a line that is no document.
    """
    lots: list[Items[str]] = [
        read_documents(file) if file.suffix == ".txt" else Mapped(lambda record: text_of(record, key), JsonLines(file))
        for file in _files(path)
    ]
    return Joined(lots)


def read_documents(file: Path) -> list[str]:
    """The documents of a plain text file.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    parts = [part.strip("\r\n") for part in _BORDER.split(read_utf8(file))]
    return [part for part in parts if part.strip()]


def files_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of a folder with one of the suffixes, by name; none may be a link out of the folder.

    Raises:
        DataError: none there, one that is no regular file of the folder, or one that is packed or named in capitals and would be passed
            over.
    """
    root = folder.resolve()
    entries = sorted(root.iterdir())
    files = [p for p in entries if p.suffix in suffixes]
    for path in (p for p in entries if p.is_dir() and not p.is_symlink()):
        if inner := next((p for p in sorted(path.rglob("*")) if p.suffix in suffixes), None):
            raise DataError(
                f"data.path: {inner} would not be read, since it lies in a sub-folder: move it up, or let data.path name its folder"
            )
    for path in entries:
        plain = path.with_suffix("") if path.suffix in _PACKED else path.with_suffix(path.suffix.lower())
        if path.suffix not in suffixes and plain.suffix in suffixes and plain not in files:
            raise DataError(
                f"data.path: {path} would not be read: unpack it, and let its name end in {plain.suffix}, or take it out of the folder"
            )
    if not files:
        raise DataError(f"data.path: folder {folder} holds no {' or '.join(suffixes)} file")
    for file in files:
        if not file.resolve().is_relative_to(root) or not file.is_file():
            raise DataError(f"{file} is a link out of {folder}, or no regular file; copy it into the folder")
    return files


def read_utf8(file: Path) -> str:
    """The file's text, or DataError."""
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{file} is not UTF-8 text (byte {e.start}); convert it to UTF-8") from e


def is_text(value: object) -> TypeGuard[str]:
    """Whether `value` is a string that UTF-8 can carry; JSON can spell half a surrogate pair, which it cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def text_of(record: Record, key: str) -> str:
    """A document's text, or DataError with its place."""
    place, value = record[0], record[1].get(key)
    if not is_text(value) or not value:
        raise DataError(f"{place}: expected a non-empty string of valid Unicode under '{key}'; data.text_key names the key")
    return value


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return files_in(path, (".txt", ".jsonl"))
    if not path.is_file():
        raise DataError(f"data.path: no file or folder {path}; expected a .txt or .jsonl file, or a folder of them")
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(f"data.path: {path} ends in '{path.suffix}'; expected .txt, or .jsonl with a key 'text' on each line")
    return [path]
