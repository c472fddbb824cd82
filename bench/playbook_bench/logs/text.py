"""A log's text, bounded and free of what terminals add."""

from __future__ import annotations

import re
from pathlib import Path

from playbook import files
from playbook.errors import LogError

MAX_BYTES = 64 * 1024 * 1024
_MAX_LINE = 16 * 1024
"""Characters; no line about a step is longer, and longer ones are passed over."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
_CLOSED = ("}", "|")
"""How the last line of a log may end without a line break, and is whole nevertheless."""

Lines = list[tuple[int, str]]
"""Lines with their numbers from 1 on. Text that a carriage return overwrote on a terminal is a line with the same number."""


def load(path: Path) -> str:
    """The text of a log file.

    Raises:
        LogError: it cannot be read, or is too large.
    """
    try:
        raw = files.read_bytes(path, MAX_BYTES)
    except OSError as e:
        raise LogError(f"{path}: cannot be read ({e.strerror or e}); expected a log of a training run") from e
    if len(raw) > MAX_BYTES:
        raise LogError(
            f"{path}: is larger than {MAX_BYTES >> 20} MiB; expected the log of one run. Let one rank write it, or run fewer steps"
        )
    return raw.decode("utf-8", "replace")


def lines(text: str) -> Lines:
    """The lines of a log, without colours, and without a last one that was cut off: half a number is a number too."""
    whole = _ESCAPES.sub("", text).split("\n")
    if not whole[-1].rstrip().endswith(_CLOSED):
        whole[-1] = ""
    return [(number, part) for number, line in enumerate(whole, start=1) for part in line.split("\r") if part and len(part) <= _MAX_LINE]


def shown(value: object) -> str:
    """A piece of a log for a message: short, and without characters that act on a terminal."""
    return ascii(str(value)[:80])
