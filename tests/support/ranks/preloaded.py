"""Scripts and modules in forks of a process that has imported what they import: `python preloaded.py SOCKET SCRIPT ...` asks the process that `serving` starts.

Importing a trainer takes five to ten seconds, and a series launches it fourteen times. The clock of a script is `Spent`; what it tells of the
launch goes into the `planned.json` that `planned_clock.py` reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(script: Path) -> Iterator[str]:
    """The path of a socket at which forks of the script are to be had."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/socket"
        with subprocess.Popen([sys.executable, __file__, "--serve", place, str(script)], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield place
            finally:
                process.kill()


def python(folder: Path, place: str) -> Path:
    """An executable in the folder that is this Python, but for modules, which run as forks."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n[ "$1" = -m ] && shift && exec {sys.executable} {__file__} {place} "$@"\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def serve(place: str, script: str) -> None:
    """Answer until killed."""
    runpy.run_path(script, run_name="imported")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            told, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
            pid = os.fork()
            if pid == 0:
                listening.close()
                run(json.loads(told), streams)
            for stream in streams:
                os.close(stream)
            _, status = os.waitpid(pid, 0)
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


class Spent:
    """A clock that counts what this process computes and how long it sleeps, without sleeping: other work on the machine is no part of it."""

    def __init__(self) -> None:
        self.began, self.slept, self.arrivals = time.process_time(), 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def now(self) -> float:
        return time.process_time() - self.began + self.slept

    def install(self) -> None:
        """In place of the machine's, for this script and what it imports."""
        epoch = time.time()
        time.sleep, time.monotonic, time.perf_counter = self.sleep, self.now, self.now
        time.time = lambda: epoch + self.now()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            stream.write = self._noting(stream.write)  # type: ignore[method-assign]

    def _noting(self, write: Any) -> Any:
        def noted(text: str) -> int:
            self.arrivals += [self.now()] * text.count("\n")
            return int(write(text))

        return noted


def run(told: dict[str, Any], streams: list[int]) -> None:
    """The script or module in this process, to its end."""
    spent = Spent()
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        sys.argv = told["words"]
        if sys.argv[0].endswith(".py"):
            spent.install()
            runpy.run_path(sys.argv[0], run_name="__main__")
            plan = Path(sys.argv[sys.argv.index("--output") + 1]).with_name("planned.json")
            plan.write_text(json.dumps({"arrivals": spent.arrivals, "whole": spent.now()}))
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ask(place: str, words: list[str]) -> int:
    """The exit code of the script or module with these words, with this process's streams, folder and environment."""
    told = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [json.dumps(told).encode()], [0, 1, 2])
        return int(connection.recv(16))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
