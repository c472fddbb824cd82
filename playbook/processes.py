"""Processes: which there are, and making one end with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """What a child does before it starts: ask the kernel to signal it when its parent dies, even by SIGKILL. Only Linux can."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)  # before the fork, after which little may be loaded

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return ask


def listed() -> list[Path]:
    """The folder below /proc of each process of this machine; none where there is no /proc.

    A process may end at any time, and reading its files then fails with an OSError, ESRCH among them, which `Path.glob` does not catch.
    """
    try:
        return [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    except FileNotFoundError:
        return []
