"""A real Slurm on this machine, for tests: munge, one controller and two virtual nodes, started and stopped with a folder of their own.

Run as a script it stays up until Enter is pressed: `sudo python tests/support/ranks/localhost.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NEEDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
# Credentials that expire soon let a requeued job start soon: Slurm holds it back until the old one cannot be used any more.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm and munge that are not on PATH; Debian keeps the daemons in /usr/sbin."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    return [name for name in NEEDS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Slurm up and idle; what a client needs in its environment. Everything started here ends with the block."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + os.pathsep + "/usr/sbin"}
    _write(folder)
    daemons = [_munge(folder, environment)]
    try:
        _wait(lambda: (folder / "munge/socket").exists(), "munged did not come up", folder)
        for name, words in (("slurmctld", ["slurmctld", "-D"]), ("n1", ["slurmd", "-D", "-N", "n1"]), ("n2", ["slurmd", "-D", "-N", "n2"])):
            daemons.append(_start(words, folder / f"{name}.out", environment))
        _wait(lambda: _idle(environment) == 2, "the two nodes did not come up", folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=environment, check=False, timeout=200, capture_output=True)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _write(folder: Path) -> None:
    for name in ("state", "spool/n1", "spool/n2", "munge"):
        (folder / name).mkdir(parents=True)
    ports = _ports()
    user, host = getpass.getuser(), socket.gethostname().split(".")[0]
    text = CONF.format(folder=folder, user=user, host=host, port=ports[0], first=ports[1], last=ports[2])
    (folder / "slurm.conf").write_text(text, encoding="utf-8")


def _ports() -> range:
    """Three free ports in a row, below those that the system hands out by itself."""
    while True:
        first = 15_000 + secrets.randbelow(17_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 3):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return range(first, first + 3)


def _munge(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A munge of this test's own: its key and socket lie in the folder, so that none of the system's is needed or touched."""
    own = folder / "munge"
    (own / "key").write_bytes(os.urandom(128))
    for path in (own, own / "key"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    words = [f"--{option}={own / name}" for option, name in names.items()]
    return _start(["munged", "--foreground", "--force", *words], folder / "munged.out", environment)


def _start(words: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def _idle(environment: dict[str, str]) -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True, check=False, timeout=200)
    return done.stdout.split().count("idle")


def _wait(ready, problem: str, folder: Path) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in sorted(folder.glob("*.out")))
            raise RuntimeError(f"{problem} within 60 s\n{logs}")
        time.sleep(0.3)


if __name__ == "__main__":
    with slurm(Path(sys.argv[1]).resolve()) as env:
        print(f"export SLURM_CONF={env['SLURM_CONF']}")
        sys.stdin.readline()
