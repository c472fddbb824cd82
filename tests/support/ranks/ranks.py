"""Start ranks of the trainer as torchrun would, and read what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from nodes import gpus, place

from playbook_bench.launch.local import free_port

__all__ = ["ROOT", "SUPPORT", "alive", "environment", "environments", "leave", "run", "start", "steps", "summary", "trained"]

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
PATHS = [
    ROOT,
    ROOT / "app",
    ROOT / "bench",
    ROOT / "trainer",
    ROOT / "tools",
    *(SUPPORT / folder for folder in ("ranks", "megatron", "examples")),
]


def environment(**more: str) -> dict[str, str]:
    """What a program of tests/support needs to import the packages and its neighbours."""
    paths = [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def environments(ranks: int, port: int | None = None) -> list[dict[str, str]]:
    """Each rank's own, as a launcher makes them."""
    port = port or free_port()
    return [environment(**place(rank, ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) for rank in range(ranks)]


def start(words: list[str], ranks: int, *, command: list[str] | None = None) -> list[subprocess.Popen[str]]:
    processes = []
    for env in environments(ranks):
        line = [*(command or [sys.executable, "-m", "playbook_trainer"]), *words]
        processes.append(subprocess.Popen(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return processes


def run(
    words: list[str], ranks: int = 1, timeout: float = 1200, *, script: Path | None = None, command: list[str] | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank of the trainer, or of a `script`: forked where no GPU is. Ranks of a `command` are fresh processes."""
    if command is None and not gpus():
        import forking

        return forking.run(words, ranks, timeout, script)
    processes = start(words, ranks, command=[sys.executable, str(script)] if script else command)
    try:
        outputs = [p.communicate(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, outputs, strict=True)]


def trained(folder: Path, ranks: int, *words: str) -> Path:
    """The folder, into which so many ranks have trained to a good end."""
    results = run([*words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return folder


def leave(code: int = 0) -> NoReturn:
    """End a rank as `python -m playbook_trainer` does, without taking the interpreter down.

    Where groups are alive, a thread of gloo may still hold tensors of the last collective; one that lets go of them while the interpreter is being taken
    down aborts the process ("terminate called without an active exception"; pytorch/pytorch 190489). It is rare: once in thousands of ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint."""
    index = json.loads((folder / "checkpoint.json").read_text())
    files = {p.name: p.read_bytes() for p in folder.glob("*.distcp")}
    return {
        f"{name} {piece['offsets']}": files[piece["file"]][piece["start"] : piece["start"] + piece["length"]]
        for name, tensor in index["tensors"].items()
        for piece in tensor["pieces"]
    }
