"""Starting one run on this machine and coming back with an outcome, whatever happens.

Each rank is started directly, with the variables that torchrun would set: torchrun itself would import torch once more. Every rank
leads a session of its own, so that killing its group takes its loader workers along and a terminal's Ctrl-C reaches the harness
alone, which then ends the ranks in order.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from playbook import files
from playbook.errors import LaunchError
from playbook.paths import repo_root
from playbook.processes import adopting, die_with_parent, listed
from playbook_bench.launch.outcome import Ended, Result, judge, tail
from playbook_trainer import exit_codes
from playbook_trainer.config import tree as trainer_config
from playbook_trainer.config.tree import TrainerConfig

TRAINER: tuple[str, ...] = (sys.executable, "-m", "playbook_trainer")
GRACE_S = 3.0
DRAIN_S = 20.0
"""How long the other ranks may take to end after the first has finished well."""
_POLL_S = 0.25
_REFUSAL_S = 5.0
_PORT_TAKEN = ("EADDRINUSE", "address already in use", "Address already in use")
_IN_ORDER = (exit_codes.OK, exit_codes.STOPPED)
"""Codes with which ranks end together: the others are given time to do so."""


class Interrupted(SystemExit):
    """Ctrl-C or SIGTERM; every run has been ended. Its code is the exit code of the command (130 or 143)."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


@dataclass(frozen=True)
class Spec:
    """What to launch. `folder` is new and belongs to this run alone."""

    config: TrainerConfig
    ranks: int
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    stall_s: float | None = None
    """Seconds without a new step after which a run hangs; None takes six tenths of the timeout."""
    threads: int = 1
    output: Path | None = None
    """Where the trainer writes, if not into `folder`."""
    resolved: Mapping[str, Any] | None = None
    """The configuration as another commit's code resolved it, which is written in place of `config`."""
    shared: bool = False
    """Whether all ranks take turns on one GPU."""

    @property
    def written(self) -> Path:
        """The folder of what the trainer writes."""
        return self.output or self.folder


class Launcher(Protocol):
    """Runs one configuration to its end. Another trainer, or a cluster's queue, is one more of these."""

    def run(self, spec: Spec, on_step: Callable[[int], None] | None = None) -> Result:
        """Run it; problems of the run are outcomes, and only what prevents a start is an error."""
        ...


class Process(Protocol):
    """What is needed of a rank's process."""

    pid: int

    @property
    def returncode(self) -> int | Any:
        """The code with which it ended, once `poll` has seen that."""
        ...

    def poll(self) -> int | None:
        """Look whether it has ended."""
        ...

    def wait(self, timeout: float) -> int:
        """Wait until it has."""
        ...


@dataclass
class Rank:
    """A rank that was started."""

    index: int
    process: Process
    log: Path
    pidfd: int | None
    forked: bool = False
    exit_code: int | None = None
    """The code with which it ended by itself, before the launcher ended the rest."""


@dataclass(frozen=True)
class LocalLauncher:
    """Ranks as processes of this machine. `command` is what a rank runs; the configuration's path follows it."""

    command: Sequence[str] = TRAINER
    grace_s: float = GRACE_S
    drain_s: float = DRAIN_S
    wrap: Callable[[int, list[str]], list[str]] | None = None
    """Changes the command of a rank, such as putting a profiler in front of rank 0's."""

    def run(self, spec: Spec, on_step: Callable[[int], None] | None = None) -> Result:
        """Start the ranks, wait for them, and leave no process behind.

        Raises:
            LaunchError: the command does not exist, or the run's folder cannot be written.
        """
        return retry_if_port_taken(lambda: self._once(spec, on_step), spec.folder)

    def _once(self, spec: Spec, on_step: Callable[[int], None] | None) -> Result:
        """Launch once: start the ranks, wait, end what is left, and judge how they ended."""
        config = write_config(spec)
        environment = rank_environment(spec)
        started, clock = time.time(), time.monotonic()
        ranks: list[Rank] = []
        kill_orphans = adopting(self._staying)
        try:
            for index in range(spec.ranks):
                ranks.append(self._start(spec, config, environment, index))
            hung = _wait(ranks, Watch(spec, on_step), clock, self.drain_s)
        finally:
            with deferred_signals() as arrived_signals:
                terminate_ranks(ranks, self.grace_s, arrived_signals)
                kill_orphans()
        wall = time.monotonic() - clock
        if hung:
            result = Result("hang", None, f"{hung}\n{tail(ranks[0].log)}", started, wall)
        else:
            result = judge([Ended(r.index, r.exit_code, r.log) for r in ranks], spec.written, started, wall)
        forked = {r.forked for r in ranks}
        return replace(result, launched="mixed" if len(forked) > 1 else "fork" if True in forked else "")

    def _staying(self) -> Collection[int]:
        """Processes that outlive a launch."""
        return ()

    def _start(self, spec: Spec, config: Path, environment: Mapping[str, str], index: int) -> Rank:
        log = spec.folder / f"rank{index}.log"
        env = {**environment, **place(index, spec.ranks, shared=spec.shared)}
        command = [*self.command, str(config)]
        with log.open("wb") as out:
            return started(index, self.wrap(index, command) if self.wrap else command, log, out, env)


def started(
    index: int,
    words: Sequence[str],
    log: Path,
    out: IO[bytes] | int,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    signum: int = signal.SIGKILL,
) -> Rank:
    """A process that leads a session of its own, prints to `out`, and gets `signum` when this process ends.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid(), signum),
        )
    except OSError as e:
        raise LaunchError(f"{' '.join(words)[:300]} could not be started: {e.strerror or e}") from e
    try:
        pidfd: int | None = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        pidfd = None
    return Rank(index, process, log, pidfd)


def rank_environment(spec: Spec) -> dict[str, str]:
    """The variables that every rank of a run gets, on top of this process's own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(import_paths()),
        # `python -m` would otherwise put the working folder first, where any file may shadow a module.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **spec.environment,
    }


def place(rank: int, ranks: int, first: int = 0, *, shared: bool = False) -> dict[str, str]:
    """The variables that say where a rank of several runs: on a GPU of its own, from `first` on, or all in turns on the first.

    NCCL refuses two ranks on one GPU of one host. Ranks that call themselves hosts of their own it connects by sockets, which makes of one
    machine as many nodes of one GPU. What they compute, exchange and hold is what nodes would, and how long they take says nothing.
    """
    alone = shared and ranks > 1
    local, of = (0, 1) if alone else (first + rank, ranks)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(of)}
    apart = {"NCCL_HOSTID": f"node-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    return {**variables, **(apart if alone else {})}


def import_paths() -> list[str]:
    """Where ranks import from: this process's own packages first, so that both run the same code from any folder."""
    paths = [str(repo_root())]
    spec = importlib.util.find_spec("playbook_trainer")
    if spec is not None and spec.submodule_search_locations:
        paths.append(str(Path(next(iter(spec.submodule_search_locations))).parent))
    inherited = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return list(dict.fromkeys([*paths, *inherited]))


def free_port() -> int:
    """A TCP port that nobody listens on now, below those that the system hands out by itself.

    One of the latter may go to any connection before rank 0 listens; the other ranks would then wait at a stranger's door.
    """
    for _ in range(1000):
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise LaunchError("no free TCP port between 15000 and 32000; end what holds them")


@contextlib.contextmanager
def interruptible(*, resumes: bool = False) -> Iterator[None]:
    """A context in which the first Ctrl-C or SIGTERM raises Interrupted, so that running launches are ended in order; later ones are
    ignored.

    `resumes` says that the command keeps a journal, which the user is then told.
    """
    advice = "; the same command goes on from the launches that had ended" if resumes else ""

    def stop(signum: int, frame: FrameType | None) -> None:
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            # Not by sys.stderr, in the middle of whose own writing the signal may have come.
            os.write(2, f"{signal.Signals(signum).name}: ending what runs{advice}\n".encode())
        raise Interrupted(signum)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its own are in force
        return
    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """A context in which Ctrl-C and SIGTERM are only collected, in the list that it yields, and take effect after it: code that ends
    processes is not cut off half-way.

    Masking them would not do: another thread of this process may receive them, and the handler runs in the main one all the same.
    """
    arrived_signals: list[int] = []
    before = (
        {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if threading.current_thread() is threading.main_thread() else {}
    )
    before = {s: handler for s, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for s in before:
        signal.signal(s, lambda signum, frame: arrived_signals.append(signum))
    try:
        yield arrived_signals
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        if arrived_signals:
            signal.raise_signal(arrived_signals[0])


def new_folder(parent: Path, name: str) -> Path:
    """A new folder that belongs to the caller alone, even with another harness at work beside it.

    Raises:
        LaunchError: it cannot be made.
    """
    folder = parent / f"{name}-{secrets.token_hex(4)}"
    try:
        files.make_folder(parent)
        folder.mkdir()
    except OSError as e:
        raise LaunchError(f"the run folder {folder} cannot be made: {e.strerror or e}; choose another with --results") from e
    return folder


class Watch:
    """Follows metrics.jsonl by its size alone; reading it in earnest waits until the ranks have gone."""

    def __init__(self, spec: Spec, on_step: Callable[[int], None] | None) -> None:
        self.spec = spec
        self.stall_s = spec.stall_s if spec.stall_s is not None else 0.6 * spec.timeout_s
        self.on_step = on_step
        self.path = spec.written / "metrics.jsonl"
        self.offset = 0
        self.steps = 0
        self.last = time.monotonic()

    def look(self, began: float) -> str:
        """Why the run counts as hanging, or nothing."""
        now = time.monotonic()
        try:
            if self.path.stat().st_size > self.offset:
                with self.path.open("rb") as f:
                    f.seek(self.offset)
                    new = f.read()
                self.offset += len(new)
                self.steps += new.count(b"\n")
                self.last = now
                if self.on_step:
                    self.on_step(self.steps)
        except OSError:
            pass
        if now - began > self.spec.timeout_s:
            return f"did not end within {self.spec.timeout_s:g} s"
        if now - self.last > self.stall_s:
            return f"no step for {self.stall_s:g} s, after step {self.steps}"
        return ""


def _wait(ranks: Sequence[Rank], watch: Watch, began: float, drain_s: float) -> str:
    """Until all ranks have ended, one has failed, or the run hangs; returns why it hangs."""
    finished: float | None = None
    while True:
        still_running = [r for r in ranks if r.process.poll() is None]
        failed = [r.process.returncode for r in ranks if r not in still_running and r.process.returncode not in _IN_ORDER]
        # What one rank refuses all refuse, and rank 0 alone says why: it gets a moment to.
        if failed and set(failed) == {exit_codes.REFUSED}:
            deadline = time.monotonic() + _REFUSAL_S
            while time.monotonic() < deadline and any(r.process.poll() is None for r in still_running):
                time.sleep(_POLL_S / 5)
        if failed or not still_running:
            watch.look(began)
            return ""
        if len(still_running) < len(ranks):
            finished = finished or time.monotonic()
            if time.monotonic() - finished > drain_s:
                return f"rank {still_running[0].index} did not end within {drain_s:g} s of the others"
        hung = watch.look(began)
        if hung:
            return hung
        handles = [r.pidfd for r in still_running if r.pidfd is not None]
        if len(handles) == len(still_running):
            select.select(handles, [], [], _POLL_S)
        else:
            time.sleep(_POLL_S / 5)


def terminate_ranks(ranks: Sequence[Rank], grace_s: float, arrived_signals: list[int]) -> None:
    """End every process of every rank's session: SIGTERM to those still at work, SIGKILL to what is left after a grace, which a signal cuts
    short.

    `exit_code` is set for ranks that had ended before; the others keep None. Closes each pidfd. `arrived_signals` fills while this runs.
    """
    for rank in ranks:
        rank.exit_code = rank.process.poll()
    still_running = [r for r in ranks if r.exit_code is None]
    for rank in still_running:
        _signal_group(rank.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(r.process.poll() is None for r in still_running) and not arrived_signals and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in ranks:
        _signal_group(rank.process.pid, signal.SIGKILL)
    _kill_sessions({r.process.pid for r in ranks})
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(timeout=grace_s + 10)
        if rank.pidfd is not None:
            os.close(rank.pidfd)


def _signal_group(leader: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def _kill_sessions(leaders: set[int]) -> None:
    """Kill what has left its rank's process group but not its session, such as a worker with a group of its own."""
    for process in listed():
        try:
            fields = (process / "stat").read_bytes().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[3]) in leaders and fields[0] != b"Z":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(process.name), signal.SIGKILL)


def retry_if_port_taken(launch: Callable[[], Result], folder: Path) -> Result:
    """A second launch where another process took the port between the asking and the listening; that says nothing about the run."""
    result = launch()
    if result.outcome == "crash" and any(text in result.message for text in _PORT_TAKEN):
        shutil.rmtree(folder, ignore_errors=True)
        result = launch()
    return result


def write_config(spec: Spec) -> Path:
    """The resolved configuration, as JSON: every JSON text is YAML, and no value changes its type on the way.

    `{run}` in `checkpoint.dir` is the run's own folder, which is removed with what is saved there.
    """
    data = {**(trainer_config.dump(spec.config) if spec.resolved is None else spec.resolved), "output": str(spec.written)}
    saving = data["checkpoint"]
    if saving["dir"]:
        data["checkpoint"] = {**saving, "dir": saving["dir"].replace("{run}", str(spec.folder))}
    path = spec.folder / "resolved.yaml"
    try:
        spec.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise LaunchError(f"the run folder {spec.folder} cannot be written: {e.strerror or e}; choose another with --results") from e
    return path
