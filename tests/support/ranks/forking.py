"""Ranks of the trainer as forks of one process that has imported torch: a start costs a fraction of a second instead of several.

Reads one JSON object per line from stdin ({"words", "environments", "plant", "logs", "script"}), prints the ranks' process ids, and once all of them have
ended, their return codes. `python forking.py` dies with its stdin, and the ranks die with it.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import ROOT, environment, environments

from playbook_trainer.__main__ import main
from playbook_trainer.fork_server import fork


class Server:
    """The other end, one for all tests of a process; one that a test did not wait for is replaced."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.busy = False

    def start(
        self, words: list[str], environments: list[dict[str, str]], logs: list[tuple[str, str]], plant: str = "", script: Path | None = None
    ) -> list[int]:
        """Process ids of the ranks of the trainer or of a script, each of which has an environment and files for stdout and stderr."""
        if self.busy:
            self.close()
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            self.process = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment(), **pipes)
        assert self.process.stdin is not None
        spec = {"words": words, "environments": environments, "logs": logs, "plant": plant, "script": script and str(script)}
        self.process.stdin.write(json.dumps(spec).encode() + b"\n")
        self.busy = True
        return self._read()

    def wait(self, timeout: float | None = None) -> list[int]:
        """Return codes."""
        assert self.process is not None
        if timeout is not None and not select.select([self.process.stdout], [], [], timeout)[0]:
            self.close()
            raise TimeoutError(f"ranks that go on for more than {timeout:.0f} s")
        codes = self._read()
        self.busy = False
        return codes

    def _read(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it, and with it its ranks."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process, self.busy = None, False


SERVER = Server()
atexit.register(SERVER.close)


def run(words: list[str], ranks: int, timeout: float, script: Path | None) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [(f"{folder}/{rank}.out", f"{folder}/{rank}.err") for rank in range(ranks)]
        SERVER.start(words, environments(ranks), logs, script=script)
        codes = SERVER.wait(timeout)
        return [(code, Path(out).read_text(), Path(err).read_text()) for code, (out, err) in zip(codes, logs, strict=True)]


class Forks:
    """Ranks whose output is kept in one file for each rank, over all runs."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def start(self, words: list[str], ranks: int, plant: str = "", port: int | None = None) -> list[int]:
        """`plant` is code that each rank runs first, such as a fault to put in."""
        return SERVER.start(words, environments(ranks, port), [(f"{self.log}.{rank}",) * 2 for rank in range(ranks)], plant)

    def run(self, words: list[str], ranks: int = 1, plant: str = "", port: int | None = None) -> list[int]:
        """Exit codes."""
        self.start(words, ranks, plant, port)
        return self.wait()

    def text(self, rank: int) -> str:
        """What a rank has printed, over all its runs; nothing where it has not begun."""
        log = Path(f"{self.log}.{rank}")
        return log.read_text() if log.exists() else ""

    def told(self, ranks: int = 1) -> str:
        """The end of what each rank has printed, for the message of a test that fails."""
        return "\n".join(f"rank {rank}: {self.text(rank)[-3000:]}" for rank in range(ranks))

    def wait(self) -> list[int]:
        return SERVER.wait()


def child(spec: dict[str, Any], rank: int) -> Callable[[list[str]], int]:
    """What a rank does; its stdout is in place."""

    def run(words: list[str]) -> int:
        os.dup2(os.open(spec["logs"][rank][1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        try:
            if spec["script"]:
                sys.argv = [spec["script"], *words]
                runpy.run_path(spec["script"], run_name="__main__")
                return 0
            exec(spec["plant"], {})
            return main(words)
        except SystemExit as e:
            return e.code if isinstance(e.code, int) else int(e.code is not None)

    return run


def ends(pids: list[int]) -> dict[int, int]:
    """The ranks' return codes. One that failed leaves the others waiting for it: they get half a minute to notice."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                deadline = min(deadline, time.monotonic() + 30)
            continue
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def serve() -> None:
    import playbook_trainer.loop  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        spec = json.loads(line)
        pids = [
            fork(spec["words"], environment, Path(spec["logs"][rank][0]), run=child(spec, rank))
            for rank, environment in enumerate(spec["environments"])
        ]
        print(json.dumps(pids), flush=True)
        codes = ends(pids)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


if __name__ == "__main__":
    serve()
