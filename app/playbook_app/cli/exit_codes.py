"""Exit codes of commands. A crash or a mistake of the user never looks like a verdict."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from playbook.errors import ExitCode, FileError, PlaybookError
from playbook_app.cli.output import complain

_INTERRUPTED = 130
READER_LEFT = 141
"""128 + SIGPIPE, the code of a command whose reader has closed the pipe."""


def run(app: Callable[..., Any], argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Errors become one message; a crash ends with 5, since Python's own code for it, 1, means `refuted`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who does not want to hear
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process lives)
    try:
        code = _code(app, argv)
        sys.stdout.flush()
    except PlaybookError as e:
        _tell(str(e) if isinstance(e, FileError) else f"error: {e}")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as e:
        if e.errno == errno.EPIPE:
            return _without_reader()
        _tell(f"error: {e.filename or 'the output'} cannot be read or written: {e.strerror or e}; free some space, or name another place")
        _abandon(sys.stdout)
        return ExitCode.USAGE
    except Exception:
        _tell(f"{traceback.format_exc()}error: this is a fault of playbook, not of what it was given; please report the lines above")
        return ExitCode.FAILED
    return code


def _code(app: Callable[..., Any], argv: Sequence[str]) -> int:
    code: Any
    try:
        code = app(list(argv), prog_name="playbook", standalone_mode=True)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # typer ends with 1 then, which would read as `refuted`
            return _without_reader()
        code = e.code
    if isinstance(code, str):
        _tell(code)
        return ExitCode.FAILED
    return code or 0


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        complain(text)


def _without_reader() -> int:
    """Give up the output after the reader has closed the pipe, as in `playbook cards list | head -1`."""
    for stream in (sys.stdout, sys.stderr):
        _abandon(stream)
    return READER_LEFT


def _abandon(stream: Any) -> None:
    """Redirect the stream to the null device, so that flushing the rest of its buffer at exit cannot fail."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in a test, has nothing to flush to
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
