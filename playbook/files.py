"""A folder that one process at a time may use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path

LOCK = ".lock"
_OF_JOB = re.compile(r" on (\S+) of job (\S+?)(?:, restart (\d+))?\Z")


def take(folder: Path) -> str:
    """Keep others out of the folder until this process ends, however it does; who keeps us out, or "" where nobody does.

    A file server may go on holding the lock of a node that died. So a job of Slurm that was queued again, which Slurm counts, takes it from its own
    start before, if that was on another host. Two steps of one start are two commands.

    Raises:
        OSError: there can be no file in it.
    """
    lock = folder / LOCK
    who = _lock(lock)
    if not _of_an_earlier_start(who):
        return who
    # Whoever holds this one alone may put a new file in the place of the old one, whose lock nobody lets go of.
    fresh = folder / f"{LOCK}-{os.environ['SLURM_JOB_ID']}"
    if second := _lock(fresh):
        return second
    if not _of_an_earlier_start(who := _words(lock.read_bytes())):
        fresh.unlink(missing_ok=True)  # another step of this start has just done so
        return who
    fresh.replace(lock)
    return ""


def _lock(path: Path) -> str:
    """Lock a file and write into it whose it is; whose it is, where that is another one's."""
    # A number, which nothing closes before the end: that would let go of the lock.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        who = _words(os.pread(file, 200, 0))
        os.close(file)
        # Other errors are those of a file system without locks.
        return who if e.errno in (errno.EACCES, errno.EAGAIN) else ""
    job, start = os.environ.get("SLURM_JOB_ID"), _start()
    whose = f" of job {job}{f', restart {start}' if start else ''}" if job else ""
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}{whose}\n".encode())
    return ""


def _words(content: bytes) -> str:
    """Whose a lock is, as its file says."""
    return " ".join(content[:200].decode("utf-8", "replace").split()) or "another command"


def _of_an_earlier_start(who: str) -> bool:
    """Whether these words name this job as it was before it was queued again, on another host."""
    found = _OF_JOB.search(who)
    if found is None or found[2] != os.environ.get("SLURM_JOB_ID") or found[1] == socket.gethostname():
        return False
    return int(found[3] or 0) < _start()


def _start() -> int:
    """How often Slurm has started this job anew."""
    said = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0
