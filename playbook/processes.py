"""Processes: which there are, making one end with the one that started it, and with it whatever it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_KILL_S = 10.0


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


def adopting(stays: Callable[[], Collection[int]] = frozenset) -> Callable[[], None]:
    """From now on this process adopts whatever the processes that it starts leave behind, such as a daemon; the function that comes back
    kills all of them that live, and ends that.

    Only Linux can.

    Args:
        stays: the processes that the caller itself has started meanwhile and goes on with.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc, before, was = ctypes.CDLL(None, use_errno=True), _children(), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def kill() -> None:
        deadline = time.monotonic() + _KILL_S
        while (
            orphans := _children() - before - set(stays())
        ) and time.monotonic() < deadline:  # the children of one that was killed come in the next round
            for pid in orphans:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)

    return kill


def _children() -> set[int]:
    """The processes whose parent this one is, ended ones that nobody has waited for among them."""
    pids = set()
    for process in listed():
        with contextlib.suppress(OSError, IndexError):
            if int((process / "stat").read_bytes().rsplit(b")", 1)[1].split()[1]) == os.getpid():
                pids.add(int(process.name))
    return pids


def listed() -> list[Path]:
    """The folder below /proc of each process of this machine; none where there is no /proc.

    A process may end at any time, and reading its files then fails with an OSError, ESRCH among them, which `Path.glob` does not catch.
    """
    try:
        return [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    except FileNotFoundError:
        return []
