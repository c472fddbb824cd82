"""A folder that one process at a time may use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

LOCK = ".lock"


def take(folder: Path) -> str:
    """Keep others out of the folder until this process ends, however it does; who keeps us out, or "" where nobody does.

    A file server may go on holding the lock of a node that died. So a job of Slurm that was queued again takes it from itself: one job does not run
    on two hosts that each began it.

    Raises:
        OSError: there can be no file in it.
    """
    # A number, which nothing closes before the end: that would let go of the lock.
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    host, job = socket.gethostname(), os.environ.get("SLURM_JOB_ID")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EAGAIN):
            return ""  # a file system without locks
        who = " ".join(os.read(file, 200).decode("utf-8", "replace").split()) or "another command"
        os.close(file)
        return "" if job and who.endswith(f" of job {job}") and f" on {host} " not in who else who
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {host}{f' of job {job}' if job else ''}\n".encode())
    return ""
