"""Ranks of the trainer as forks of one process that has imported torch: a start costs a fraction of a second instead of several.

Reads one JSON object per line from stdin ({"words", "ranks", "port", "plant", "log"}), prints the ranks' process ids, and once all of them have
ended, their return codes. `python forking.py` dies with its stdin, and the ranks die with it.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ranks import ROOT, environment


class Forks:
    """The other end: starts the process, and ranks through it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, words: list[str], ranks: int, port: int, plant: str = "") -> list[int]:
        """`plant` is code that each rank runs first, such as a fault to put in."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"words": words, "ranks": ranks, "port": port, "plant": plant, "log": str(self.log)}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, words: list[str], ranks: int, port: int, plant: str = "") -> list[int]:
        """Exit codes."""
        self.start(words, ranks, port, plant)
        return self.wait()

    def text(self, rank: int) -> str:
        """What a rank has printed, over all its runs."""
        return Path(f"{self.log}.{rank}").read_text()

    def wait(self) -> list[int]:
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def child(spec: dict[str, Any], rank: int) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    log = os.open(f"{spec['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, stream)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": spec["ranks"], "LOCAL_WORLD_SIZE": spec["ranks"]}
    os.environ.update({k: str(v) for k, v in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))
    from playbook_trainer.__main__ import main

    exec(spec["plant"], {})
    return main(spec["words"])


def ends(pids: list[int]) -> dict[int, int]:
    """The ranks' return codes. One that failed leaves the others waiting for it: they get ten seconds to notice."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                deadline = min(deadline, time.monotonic() + 10)
            continue
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def serve() -> None:

    import playbook_trainer.loop  # noqa: F401

    for line in sys.stdin:
        spec, pids = json.loads(line), []
        for rank in range(spec["ranks"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = child(spec, rank)
                finally:
                    with contextlib.suppress(OSError):
                        sys.stdout.flush()
                        sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        codes = ends(pids)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


if __name__ == "__main__":
    serve()
