"""Launching ranks by forking: the harness's end of `playbook_trainer.fork_server`.

A fork server is a process that has imported what ranks of one backend import, with their environment, so that libraries which read
variables at import read the same ones as in a fresh process; configurations that ask for the same variables share it. It forks a rank for
each line that this module writes to it, so a launch starts as many seconds sooner as the imports take. Everything after the imports is a
rank's own: CUDA, process groups, compiled code. What the two say to each other stands in the fork server's docstring.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from playbook.errors import ConfigError
from playbook.processes import die_with_parent
from playbook.records.evidence import digest
from playbook_bench.launch.local import Launcher, LocalLauncher, Rank, Spec, place
from playbook_trainer.config import environment as trainer_environment

_IMPORT_S = 120.0
"""How long imports may take before ranks are started without them."""
_SIGKILL = -9


@dataclass
class ForkServer:
    """The process that ranks are forked from, and what it has said."""

    process: subprocess.Popen[bytes]
    ready: bool = False
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    _partial_line: bytes = b""

    def fork(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked | None:
        """A rank; None where the server has gone."""
        before = len(self.pids)
        line = json.dumps({"words": list(words), "environment": dict(environment), "log": str(log)}) + "\n"
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError:
            return None
        self.listen(_IMPORT_S, lambda: len(self.pids) > before)
        return Forked(self, self.pids[-1]) if len(self.pids) > before else None

    def listen(self, seconds: float, until: Callable[[], bool]) -> None:
        """Read what it says until that holds, it has gone, or the time is up; 0 seconds read what is there."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while not until() and select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            received = os.read(self.process.stdout.fileno(), 1 << 16)
            if not received:
                # Its ranks die with it, but nobody is left to say how.
                self.codes = {pid: self.codes.get(pid, _SIGKILL) for pid in self.pids}
                return
            *lines, self._partial_line = (self._partial_line + received).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, message: dict[str, int]) -> None:
        if "code" in message:
            self.codes[message["pid"]] = message["code"]
        elif "pid" in message:
            self.pids.append(message["pid"])
        else:
            self.ready = True

    def close(self) -> None:
        """End it, and with it every rank that is left."""
        with contextlib.suppress(OSError), self.process:  # which closes its pipes and waits for it
            self.process.kill()


@dataclass
class Forked:
    """A rank that was forked; what a launcher needs of `subprocess.Popen`."""

    server: ForkServer
    pid: int

    @property
    def returncode(self) -> int | None:
        """Its code, once it is known to have ended."""
        return self.server.codes.get(self.pid)

    def poll(self) -> int | None:
        """Look whether it has ended."""
        self.server.listen(0.0, lambda: self.returncode is not None)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its code, as soon as it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, in so many seconds.
        """
        self.server.listen(timeout, lambda: self.returncode is not None)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return self.returncode


@dataclass(frozen=True)
class ForkLauncher(LocalLauncher):
    """As LocalLauncher, with ranks that are forked where that is possible; where imports fail or touch a GPU, they are started afresh."""

    servers: dict[str, ForkServer | None] = field(default_factory=dict)

    def close(self) -> None:
        """End all servers."""
        for server in self.servers.values():
            if server is not None:
                server.close()
        self.servers.clear()

    def _staying(self) -> Collection[int]:
        return [server.process.pid for server in self.servers.values() if server is not None]

    def _start(self, spec: Spec, config: Path, environment: Mapping[str, str], index: int) -> Rank:
        try:
            key = _imports(spec, environment)
        except ConfigError:
            return super()._start(spec, config, environment, index)  # the rank says what is wrong
        if (previous := self.servers.get(key, None)) is not None and previous.process.poll() is not None:
            previous.close()
            del self.servers[key]  # it was ended from outside: its configurations get another
        if key not in self.servers:
            self.servers[key] = self._start_server(config, environment)
        server = self.servers[key]
        log = spec.folder / f"rank{index}.log"
        forked = server.fork([str(config)], {**environment, **place(index, spec.ranks, shared=spec.shared)}, log) if server else None
        return Rank(index, forked, log, None, forked=True) if forked else super()._start(spec, config, environment, index)

    def _start_server(self, config: Path, environment: Mapping[str, str]) -> ForkServer | None:
        """A server that has imported what the configuration needs; None where it has not done so within `_IMPORT_S`, or says that it must
        not fork.
        """
        server = ForkServer(
            subprocess.Popen(
                [sys.executable, "-m", "playbook_trainer.fork_server", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        )
        server.listen(_IMPORT_S, lambda: server.ready)
        if not server.ready:
            server.close()
            return None
        return server


@contextlib.contextmanager
def closing(launcher: Launcher) -> Iterator[None]:
    """End the servers of a launcher that forks ranks, whatever happens."""
    try:
        yield
    finally:
        if isinstance(launcher, ForkLauncher):
            launcher.close()


def _imports(spec: Spec, inherited: Mapping[str, str]) -> str:
    """What imports depend on: the backend, and the environment with what the configuration adds to it."""
    environment = dict(inherited)
    added = trainer_environment.apply(spec.config, environment)
    return digest([spec.config.backend, added, sorted(spec.environment.items()), environment.get("OMP_NUM_THREADS")], 16)
