"""Rebuild text/documents.jsonl from two Debian packages; LICENSES.md names them.

Usage: python make_text.py DEVIL.DICT.DZ JANEAUSTENR.RDB
where the files are usr/share/dictd/devil.dict.dz of dict-devil and usr/lib/R/site-library/janeaustenr/data/Rdata.rdb of r-cran-janeaustenr.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import sys
import zlib
from pathlib import Path

ENTRY = re.compile(r"^[A-Z][A-Z' -]*, +(?:n|v|adj|adv|pp|p|x|prep|pro)\b", re.MULTILINE)
CHAPTER = re.compile(r"^Chapter \d+$", re.MULTILINE)
ASCII_STRING = b"\x00\x04\x00\x09"


def dictionary_entries(path: Path) -> list[str]:
    """Each entry of The Devil's Dictionary, short or long, as one document."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8").partition("\n abcdefghijklmnopqrstuvwxyz")[0]  # dictd's own index line
    starts = [m.start() for m in ENTRY.finditer(text)]
    return [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def novel_chapters(path: Path, opening: str) -> list[str]:
    """Each chapter of the novel that begins with the line `opening`, as one document.

    The file is a row of zlib streams, each behind its length in four bytes and holding one R character vector.
    """
    raw = path.read_bytes()
    while raw:
        stream = zlib.decompressobj()
        lines = _strings(stream.decompress(raw[4:]))
        raw = stream.unused_data
        if lines[0] == opening:
            text = "\n".join(lines)
            marks = list(CHAPTER.finditer(text))
            ends = [m.start() for m in marks[1:]] + [len(text)]
            return [text[m.end() : end].strip() for m, end in zip(marks, ends, strict=True)]
    raise SystemExit(f"{path}: no text begins with {opening!r}")


def _strings(data: bytes) -> list[str]:
    out: list[str] = []
    i = data.find(ASCII_STRING)
    while data[i : i + 4] == ASCII_STRING:
        (n,) = struct.unpack(">i", data[i + 4 : i + 8])
        out.append(data[i + 8 : i + 8 + n].decode("ascii"))
        i += 8 + n
    return out


def main(arguments: list[str]) -> None:
    """Write the documents in the order of the books."""
    devil, austen = (Path(a) for a in arguments)
    books = {"The Devil's Dictionary": dictionary_entries(devil), "Persuasion": novel_chapters(austen, "Persuasion")}
    target = Path(__file__).resolve().parent / "text" / "documents.jsonl"
    target.parent.mkdir(exist_ok=True)
    rows = [json.dumps({"text": text, "book": book}, ensure_ascii=False) for book, texts in books.items() for text in texts]
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
