"""Files that others read or write too: read up to a limit, written whole or not at all, and a folder that one process at a time may use."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"
_OWN_FOLDER = ".playbook"
_HELD: dict[tuple[int, int, int], FileLock] = {}  # by process, device and inode; a lock is let go of when its object is
_OF_JOB = re.compile(r" on (\S+) of job (\S+?)(?:, restart (\d+))?\Z")
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
"""What flock(2) says on file systems without locks."""
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What link(2) says on FAT, and on file systems in user space such as those before object stores."""


def read_bytes(path: Path, limit: int) -> bytes:
    """The file's bytes, one more than `limit` at most: a device or a file that never ends is too large, and not the end of the machine.

    Raises:
        OSError: it cannot be read; a named pipe, in which nobody may ever write, is not waited for.
    """
    if path.is_fifo():
        raise OSError(errno.EINVAL, "a named pipe; expected a file")
    with path.open("rb") as f:
        return f.read(limit + 1)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that lack. A `.playbook` that is first made here is kept out of git: what lies in it belongs to
    one machine.

    Raises:
        OSError: it cannot be made.
    """
    playbook_folder = next((f for f in (path, *path.parents) if f.name == _OWN_FOLDER), None)
    first = playbook_folder is not None and not playbook_folder.exists()
    path.mkdir(parents=True, exist_ok=True)
    if playbook_folder is not None and first:
        (playbook_folder / ".gitignore").write_text("*\n", encoding="utf-8")


def replace(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file that may take the place of an older one: readers see the old one or all of the new one.

    `durable` waits until the content is on the disk, so that a machine that loses power keeps one of the two.

    Raises:
        OSError: it cannot be written; the older one stays as it was.
    """
    temporary = _written(path, content, durable)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def create(path: Path, content: str) -> None:
    """Make a file that did not exist: readers see all of it or nothing, and no other file is ever replaced.

    Raises:
        FileExistsError: there is such a file.
        OSError: it cannot be written.
    """
    temporary = _written(path, content, durable=True)
    try:
        os.link(temporary, path)
    except OSError as e:
        if e.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError(path) from e
        temporary.rename(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _written(path: Path, content: str | bytes, durable: bool) -> Path:
    """The content under a name beside the path's that no other process has."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as f:
            f.write(content.encode("utf-8") if isinstance(content, str) else content)
            f.flush()
            if durable:
                os.fsync(f.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return temporary


def take(folder: Path) -> str:
    """Keep others out of the folder until this process ends, however it does; who keeps us out, or "" where nobody does.

    A file server may go on holding the lock of a node that died. So a job of Slurm that was queued again, which Slurm counts, takes it
    from its own start before, if that was on another host. Two steps of one start are two commands.

    Raises:
        OSError: there can be no file in it.
    """
    lock = folder / LOCK
    who = _lock(lock)
    if not _of_an_earlier_start(who):
        return who
    # Whoever holds this one alone may put a new file in the place of the old one, whose lock nobody lets go of.
    fresh = folder / f"{LOCK}-{os.environ['SLURM_JOB_ID']}"
    try:
        ours = not _lock(fresh)
    except FileNotFoundError:
        ours = False  # it took the old one's place between our two looks at it
    if not ours:
        return _words(lock, lambda words: not _of_an_earlier_start(words))
    if not _of_an_earlier_start(who := _words(lock)):
        fresh.unlink(missing_ok=True)  # another step of this start has just done so
        return who
    fresh.replace(lock)
    return ""


def _lock(path: Path) -> str:
    """Lock a file and write into it whose it is; whose it is, where that is another one's. What this process holds, it may take again."""
    from filelock import FileLock, Timeout  # most commands read alone, and need not wait for it

    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return "" if _key(path) in _HELD else _words(path)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        return ""
    _HELD[_key(path)] = lock
    job, start = os.environ.get("SLURM_JOB_ID"), _start()
    whose = f" of job {job}{f', restart {start}' if start else ''}" if job else ""
    with contextlib.suppress(OSError):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}{whose}\n", encoding="utf-8")
    return ""


def _key(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return os.getpid(), about.st_dev, about.st_ino


def _words(path: Path, expected: Callable[[str], bool] = bool) -> str:
    """Whose a lock is, as its file says; who has just locked it gets a second to write what is expected."""
    words = ""
    for _ in range(20):
        words = " ".join(read_bytes(path, 200).decode("utf-8", "replace").split())
        if words and expected(words):
            break
        time.sleep(0.05)
    return words or "another command"


def _of_an_earlier_start(who: str) -> bool:
    """Whether these words name this job as it was before it was queued again, on another host."""
    match = _OF_JOB.search(who)
    if match is None or match[2] != os.environ.get("SLURM_JOB_ID") or match[1] == socket.gethostname():
        return False
    return int(match[3] or 0) < _start()


def _start() -> int:
    """How often Slurm has started this job anew."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(restarts) if restarts.isascii() and restarts.isdigit() and len(restarts) < 10 else 0
