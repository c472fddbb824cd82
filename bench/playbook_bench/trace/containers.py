"""Files of traces as streams of bytes: plain, packed, or several in an archive; the events of a Chrome trace, one in memory at a time;
and the data in a pickle, without running it.

A file comes from elsewhere: what it unpacks to is read in pieces up to a limit, and nothing of it is written to disk by its own name.
The events of a trace are the list `traceEvents` of a document, or the whole document. Each is decoded by json's own scanner out of a piece
of text that grows where an event goes on behind it.
A pickle is a program: of it numbers, text, lists and dictionaries are read, and nothing is run.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import pickle
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from playbook.errors import PlaybookError, tables_wanted

MAX_BYTES = 4 << 30
"""Of a file or a whole archive, unpacked."""
MAX_FILES = 1024
_MAX_DICTIONARY = 256 << 20
"""Memory that unpacking .xz may take: its dictionary is of any size that the file names."""
_CHUNK = 1 << 20
_PIECE = 1 << 14
_HEADS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ZIP = b"PK\x03\x04"
_TAR_AT = 257
_BROKEN = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError, RuntimeError, MemoryError, OSError)


_DAMAGED = (EOFError, ValueError, struct.error, KeyError)
"""What the modules of archives raise as well, where a header is damaged."""
_MAX_HEADERS = 1 << 20
"""Bytes between the members of a .tar, which are read whole: a header may name gigabytes for a file's name."""


class Unpacked(io.RawIOBase):
    """The bytes of one file, unpacked, up to what is left of a limit. `cut`: the packed data ended before its end."""

    def __init__(self, name: str, read: Callable[[int], bytes], budget: list[int], head: bytes = b"") -> None:
        self.name, self.cut = name, False
        self.quota: int | None = None
        """What may be read on, where less than the limit."""
        self._read, self._budget, self._head = read, budget, head

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay to be read."""
        while len(self._head) < size and (more := self._filled(size)):
            self._head += more
        return self._head[:size]

    def readable(self) -> bool:
        """It is, which pyarrow asks."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; none at the end, be it the file's or where its packed data was cut.

        Raises:
            PlaybookError: damaged, or larger than the limit.
        """
        size = _CHUNK if size is None or size < 0 else size
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._filled(size)

    def _filled(self, size: int) -> bytes:
        """Up to `size` bytes more, counted against the quota and the limit of the archive; none at the end, or where the file is cut.

        Raises:
            PlaybookError: the file is damaged, or larger than the limit.
        """
        if self.cut:
            return b""
        try:
            data = self._read(size)
        except (EOFError, *_BROKEN) as e:
            if not isinstance(e, EOFError) and "unexpected end of data" not in str(e) and "Truncated" not in str(e):
                raise PlaybookError(f"{self.name}: is a damaged file ({_shown(str(e)) or type(e).__name__}); copy it anew") from e
            self.cut = True
            return b""
        if self.quota is not None:
            self.quota -= len(data)
            if self.quota < 0:
                raise PlaybookError(f"{self.name}: a header is larger than {_MAX_HEADERS >> 20} MiB; the archive is damaged")
        self._budget[0] -= len(data)
        if self._budget[0] < 0:
            raise PlaybookError(f"{self.name}: is larger than {MAX_BYTES >> 30} GiB unpacked; trace fewer steps (profile.steps)")
        return data


def files(path: Path) -> Iterator[Unpacked]:
    """The file at a path, or each that lies in its archive: by their names, of a .tar as they lie in it.

    Raises:
        PlaybookError: there is none, it cannot be read, or it holds too many.
    """
    try:
        with path.open("rb") as f:
            yield from _inside(str(path), f, [MAX_BYTES])
    except OSError as e:
        raise PlaybookError(f"{path}: cannot be read ({e.strerror or e}); expected a SQLite export of nsys or a Chrome trace") from e


def _inside(name: str, stream: IO[bytes], budget: list[int]) -> Iterator[Unpacked]:
    head = stream.read(len(_ZIP))
    stream.seek(0)
    if head == _ZIP:
        yield from _of_zip(name, stream, budget)
        return
    plain = _unpacked(name, stream.read, budget)
    if plain.peek(tarfile.BLOCKSIZE)[_TAR_AT:].startswith(b"ustar"):
        yield from _of_tar(name, plain, budget)
    else:
        yield plain


def _of_zip(name: str, stream: IO[bytes], budget: list[int]) -> Iterator[Unpacked]:
    try:
        archive = zipfile.ZipFile(stream)
        members = sorted((m for m in archive.infolist() if _wanted(m.filename) and not m.is_dir()), key=lambda m: m.filename)
        _check(name, len(members))
        for member in members:
            with archive.open(member) as f:
                yield _unpacked(f"{name}: {_shown(member.filename)}", f.read, budget)
    except (*_BROKEN, *_DAMAGED) as e:
        raise PlaybookError(f"{name}: is a damaged or encrypted .zip ({_shown(str(e))}); pack it anew") from e


def _of_tar(name: str, stream: Unpacked, budget: list[int]) -> Iterator[Unpacked]:
    """Members of a .tar, read as a stream: a header may name any size, so that what lies between members is limited to `_MAX_HEADERS`
    bytes.
    """
    count = 0
    try:
        stream.quota = _MAX_HEADERS
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            while (member := archive.next()) is not None:
                f = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if f is None:
                    continue
                stream.quota = None
                if _wanted(member.name):
                    count += 1
                    _check(name, count)
                    yield _unpacked(f"{name}: {_shown(member.name)}", partial(_little, f), budget)
                while f.read(_CHUNK):  # so that what is read before the next member is its header
                    pass
                stream.quota = _MAX_HEADERS
    except (tarfile.TarError, *_DAMAGED) as e:
        if not count:
            raise PlaybookError(f"{name}: is a damaged .tar ({_shown(str(e))}); pack it anew") from e
    _check(name, count)


def _little(f: Any, size: int) -> bytes:
    """Where the file below is cut, the last piece is lost: pieces are small."""
    data: bytes = f.read(min(size, _PIECE))
    return data


def _check(name: str, count: int) -> None:
    if not 0 < count <= MAX_FILES:
        raise PlaybookError(
            f"{name}: holds {f'more than {MAX_FILES}' if count else 'no'} files; expected the traces of 1 to {MAX_FILES} ranks"
        )


def _wanted(name: str) -> bool:
    """Not what a Mac adds to an archive."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not parts[-1].startswith(".") and "__MACOSX" not in parts


def _shown(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[-120:]


def _unpacked(name: str, read: Callable[[int], bytes], budget: list[int]) -> Unpacked:
    """The bytes behind what the head says they are packed with."""
    packed = Unpacked(name, read, budget)
    head = packed.peek(max(map(len, _HEADS)))
    match next((kind for magic, kind in _HEADS.items() if head.startswith(magic)), None):
        case "gzip":
            return Unpacked(name, gzip.GzipFile(fileobj=packed).read1, budget)
        case "xz":
            return Unpacked(name, _Xz(packed).read, budget)
        case "zstd":
            with tables_wanted():
                import pyarrow as pa

            return Unpacked(name, partial(_little, pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")), budget)
        case _:
            return packed


class _Xz:
    """An .xz file with a limit on the memory that unpacking takes, which `lzma.LZMAFile` has not."""

    def __init__(self, source: Unpacked) -> None:
        self._source = source
        self._decoder = lzma.LZMADecompressor(memlimit=_MAX_DICTIONARY)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; `EOFError` where the file ends before its data does."""
        while not self._decoder.eof:
            more = self._source.read(_CHUNK) if self._decoder.needs_input else b""
            if not more and self._decoder.needs_input:
                raise EOFError
            data = self._decoder.decompress(more, size)
            if data:
                return data
        return b""


HEAD = b"\x80"
_MAX_BYTES = 512 << 20
_ROOM = 1 << 30
_FACTOR = 24
"""Bytes that an object takes in memory for each byte of its pickle, at most: an empty dictionary is 64 bytes out of two or three."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows no class and no function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it asks for {module[:60]}.{name[:60]}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError("it asks for an object outside itself")


def load_pickle(stream: Unpacked) -> Any:
    """The plain data in a pickle.

    Raises:
        PlaybookError: it is damaged, too large, or holds anything but plain data.
    """
    pieces, size = [], 0
    while piece := stream.read():
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_BYTES:
            raise PlaybookError(f"{stream.name}: is a pickle of more than {_MAX_BYTES >> 20} MiB; record fewer events")
    data = b"".join(pieces)
    try:
        with _bounded(_ROOM + _FACTOR * len(data)):
            return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as e:  # a pickle's opcodes raise whatever their operands do
        raise PlaybookError(
            f"{stream.name}: is no pickle of plain data ({type(e).__name__}: {''.join(c for c in str(e) if c.isprintable())[:100]}); "
            "expected a dump of PyTorch's flight recorder or a memory snapshot, as they were written"
        ) from e


@contextmanager
def _bounded(size: int) -> Iterator[None]:
    """So many bytes more for this process: an opcode of five bytes may ask for a table of 64 GB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
    limited = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limited, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_MAX_VALUE = 64 << 20
"""Characters of one event, or of one value beside the events."""
_SPACE = re.compile(r"[ \t\n\r\ufeff]*")
_BETWEEN = re.compile(r"[ \t\n\r,]*")
_DECODE = json.JSONDecoder(strict=False).raw_decode
_NEAR = 8
"""Characters before the end of a text within which a value that the end cuts is found to be wrong: `\\u12`, `fals`."""


class _CutError(Exception):
    """The text ended inside the document."""


class Document:
    """A Chrome trace that is being read. `cut`: its end is missing; `head`: its values beside the events, once they have been passed."""

    def __init__(self, stream: Unpacked) -> None:
        self.cut, self.head = False, dict[str, Any]()
        self._stream, self._name = stream, stream.name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._at, self._over = "", 0, False

    def events(self) -> Iterator[Any]:
        """The events, in order.

        Raises:
            PlaybookError: it is no Chrome trace, or damaged before its end.
        """
        try:
            yield from self._whole()
        except _CutError:
            self.cut = True
        except RecursionError as e:
            raise PlaybookError(f"{self._name}: is nested too deeply to be a Chrome trace") from e

    def _whole(self) -> Iterator[Any]:
        first = self._next()
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._members()
        else:
            what = "is empty, and so" if not first else "is"
            raise PlaybookError(f"{self._name}: {what} not valid JSON; expected the Chrome trace that torch.profiler writes")
        if self._next():
            raise PlaybookError(
                f"{self._name}: goes on behind its end, as where several processes wrote into one file; trace anew, each rank into its own"
            )

    def _members(self) -> Iterator[Any]:
        """The events of a document that is an object; its other values go into `head`.

        Raises:
            PlaybookError: it is no Chrome trace.
        """
        self._at += 1
        listed = False
        while (c := self._need()) != "}":
            if c == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._need() != ":":
                self._refuse("expected a name and a colon")
            self._at += 1
            if self._need() == "[" and key == "traceEvents":
                listed = True
                yield from self._list()
            else:
                value = self._value()
                if len(self.head) < _CHUNK:
                    self.head[key] = value
        self._at += 1
        if not listed and "entries" not in self.head:  # a dump of the flight recorder has these
            raise PlaybookError(f"{self._name}: has no list 'traceEvents'; expected the Chrome trace that torch.profiler writes")

    def _list(self) -> Iterator[Any]:
        self._at += 1
        while True:
            match = _BETWEEN.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at == len(self._text):
                if not self._more():
                    raise _CutError
            elif self._text[self._at] == "]":
                self._at += 1
                return
            else:
                yield self._value()

    def _need(self) -> str:
        """The next character, which must be there."""
        c = self._next()
        if not c:
            raise _CutError
        return c

    def _next(self) -> str:
        """The next character that is no space; none at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        """The next value of the document, read on until it is whole."""
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as e:
                if not self._more():
                    if e.pos >= len(self._text) - _NEAR or e.msg.startswith("Unterminated"):
                        raise _CutError from e
                    self._refuse(e.msg)
            except ValueError as e:
                self._refuse(str(e)[:80])
            else:
                # A number that touches the end may go on behind it.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on; False at the end. A value that does not fit doubles the piece, so that it is not scanned again and again."""
        self._text = self._text[self._at :]
        self._at = 0
        if self._over:
            return False
        if len(self._text) > _MAX_VALUE:
            self._refuse(f"no value ends within {_MAX_VALUE >> 20} million characters")
        target, pieces, size = max(_CHUNK, len(self._text)), [self._text], 0
        while size < target:
            data = self._stream.read(_CHUNK)
            if not data:
                self._over = True
                pieces.append(self._decoder.decode(b"", final=True))
                break
            size += len(data)
            pieces.append(self._decoder.decode(data))
        self._text = "".join(pieces)
        return True

    def _refuse(self, what: str) -> None:
        near = self._text[self._at : self._at + 40]
        raise PlaybookError(f"{self._name}: is not valid JSON ({what} near {near!r}); the file is damaged: copy it, or trace, anew")
