"""Text documents from files: found, indexed, and read one at a time."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from playbook.errors import DataError
from playbook_trainer.data.sources.streams import Items, Joined, Mapped

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
    lots: list[Items[str]] = []
    for file in _files(path):
        lots.append(read_documents(file) if file.suffix == ".txt" else Mapped(lambda record: _text(record, key), JsonLines(file)))
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


def text_of(place: str, value: object, key: str) -> str:
    """A document's text, or DataError with its place."""
    if not is_text(value) or not value:
        raise DataError(f"{place}: expected a non-empty string of valid Unicode under '{key}'; data.text_key names the key")
    return value


def _text(record: Record, key: str) -> str:
    return text_of(record[0], record[1].get(key), key)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return files_in(path, (".txt", ".jsonl"))
    if not path.is_file():
        raise DataError(f"data.path: no file or folder {path}; expected a .txt or .jsonl file, or a folder of them")
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(f"data.path: {path} ends in '{path.suffix}'; expected .txt, or .jsonl with a key 'text' on each line")
    return [path]
