"""A script in a fork of a process that has imported what it imports: `python preloaded.py SOCKET SCRIPT ...` asks the process that `serving` starts.

Importing a trainer takes five seconds, and a series launches it fourteen times.
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


def run(told: dict[str, Any], streams: list[int]) -> None:
    """The script in this process, to its end."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        sys.argv = told["words"]
        runpy.run_path(told["words"][0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ask(place: str, words: list[str]) -> int:
    """The exit code of the script with these words, with this process's streams, folder and environment."""
    told = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [json.dumps(told).encode()], [0, 1, 2])
        return int(connection.recv(16))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
