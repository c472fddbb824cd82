"""Pickles of others: numbers, text, lists and dictionaries alone. A pickle is a program, and nothing of it but these is run."""

from __future__ import annotations

import io
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from playbook.errors import PlaybookError
from playbook_bench.trace.containers import Unpacked

HEAD = b"\x80"
_MAX_BYTES = 512 << 20
_ROOM = 1 << 30
_FACTOR = 24
"""Bytes that an object takes in memory for each byte of its pickle, at most: an empty dictionary is 64 bytes out of two or three."""


class _Plain(pickle.Unpickler):
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


def load(stream: Unpacked) -> Any:
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
            return _Plain(io.BytesIO(data)).load()
    except Exception as e:  # a pickle's opcodes raise whatever their operands do
        raise PlaybookError(
            f"{stream.name}: is no pickle of plain data ({type(e).__name__}: {''.join(c for c in str(e) if c.isprintable())[:100]}); "
            "expected a dump of PyTorch's flight recorder or a memory snapshot, as they were written"
        ) from e


@contextmanager
def _bounded(size: int) -> Iterator[None]:
    """So many bytes more for this process: an opcode of five bytes may ask for a table of 64 GB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + size
    limited = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limited, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
