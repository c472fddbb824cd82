"""Text documents: from files to pieces of at most seq_len tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from playbook.errors import DataError
from playbook_trainer.data.tokenizer import Tokenizer

# In a plain file, documents are set apart as books set apart chapters: by two or more blank lines.
_BORDER = re.compile(r"\n[ \t\r]*\n(?:[ \t\r]*\n)+")


@dataclass(frozen=True)
class Piece:
    """A document, or the part of a long one that fits into a row."""

    start: int
    length: int


@dataclass(frozen=True)
class Corpus:
    """All documents of a split, end to end, each ended by eos, and the pieces into which they are cut."""

    tokens: NDArray[np.int32]
    pieces: list[Piece]


def read_documents(path: Path) -> list[str]:
    """The documents of a `.txt` or `.jsonl` (key `text`) file, or of all such files in a folder, by name.

    Raises:
        DataError: nothing there, a file that is not text, or a line that is no document.
    """
    return [text for file in _files(path) for text in _documents(file)]


def cut(documents: list[str], tokenizer: Tokenizer, eos: int, seq_len: int) -> Corpus:
    """Tokenize, end each document with eos and cut it into pieces of `seq_len`; the last piece of a document is shorter."""
    encoded = [np.asarray([*tokenizer.encode(text), eos], dtype=np.int32) for text in documents]
    pieces: list[Piece] = []
    offset = 0
    for tokens in encoded:
        n = len(tokens)
        pieces += [Piece(offset + at, min(seq_len, n - at)) for at in range(0, n, seq_len)]
        offset += n
    return Corpus(np.concatenate([np.empty(0, np.int32), *encoded]), pieces)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        root = path.resolve()
        files = sorted(p for p in root.iterdir() if p.suffix in (".txt", ".jsonl"))
        if not files:
            raise DataError(f"data.path: folder {path} holds no .txt or .jsonl file")
        for file in files:
            if not file.resolve().is_relative_to(root) or not file.is_file():
                raise DataError(f"{file} is a link out of {path}, or no regular file; copy the text into the folder")
        return files
    if not path.is_file():
        raise DataError(f"data.path: no file or folder {path}; expected a .txt or .jsonl file, or a folder of them")
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(f"data.path: {path} ends in '{path.suffix}'; expected .txt, or .jsonl with a key 'text' on each line")
    return [path]


def _documents(file: Path) -> Iterator[str]:
    text = read_utf8(file)
    if file.suffix == ".txt":
        found = [part.strip("\r\n") for part in _BORDER.split(text)]
        yield from (part for part in found if part.strip())
        return
    for number, record in json_lines(file, text):
        value = record.get("text")
        if not is_text(value) or not value:
            raise DataError(f"{file}:{number}: expected a non-empty string of valid Unicode under 'text'")
        yield value


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


def json_lines(file: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Line number and object of each line that is not blank, or DataError with the place."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{file}:{number}: not JSON ({e}); expected one object per line") from e
        if not isinstance(record, dict):
            raise DataError(f"{file}:{number}: expected a JSON object, found {type(record).__name__}")
        yield number, record
