"""Runs the rows of `megatron_rows.py`, one short run of the trainer each, and writes a JSON line per row: the tables of the megatron
backend.

    python tools/megatron_table.py one two four --budget 150        # the switches, into docs/parity/megatron-switches.jsonl
    python tools/megatron_table.py cp --budget 420                  # context parallelism by length, into docs/parity/megatron-cp.jsonl

On as many GPUs as are visible, several rows at a time where they need fewer. A row that fails is a row, with the reason. Rows that the
budget leaves out are run by the next call, which keeps what the file holds (`--again` runs everything anew, `--only WORDS` the rows whose
names hold all of the words).

Ranks are forks of one process that has imported torch, megatron-core and Transformer Engine, as long as none of these has touched a GPU by
then; else each is a process of its own, which costs its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer"), str(Path(__file__).parent)]

from megatron_rows import CONFIG, GPUS, Row, rows  # noqa: E402

from playbook.records.case import Rule  # noqa: E402
from playbook.records.evidence import Observed  # noqa: E402
from playbook_bench.judge import receipt  # noqa: E402
from playbook_bench.launch import local, outcome  # noqa: E402
from playbook_bench.machine import detect  # noqa: E402
from playbook_trainer import fork_server  # noqa: E402
from playbook_trainer.config import environment as variables  # noqa: E402
from playbook_trainer.config import tree as trainer  # noqa: E402

FILES = {"cp": "megatron-cp.jsonl"}
FILE = "megatron-switches.jsonl"
_NO_FORK = ("initialization error", "Cannot re-initialize CUDA", "CUDA error: not initialized")
_TAIL = 20_000
LEFT_OUT = 3
"""Exit code where the budget has left something out: the next call goes on."""


@dataclass
class Job:
    """A row that runs."""

    row: Row | None
    """None for a run of no table."""
    gpus: tuple[str, ...]
    folder: Path
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    forked: bool = True
    ended: str = ""
    """Why it was ended from outside."""


def words(row: Row, folder: Path) -> list[str]:
    """The arguments of the trainer; values are JSON, which is YAML."""
    return [CONFIG, *(f"{k}={json.dumps(v)}" for k, v in row.overrides.items()), f"output={folder}"]


def start(row: Row, gpus: tuple[str, ...], fork: bool) -> Job:
    """All ranks of a row, on these GPUs."""
    job = Job(row, gpus, Path(tempfile.mkdtemp(prefix="megatron-row-")), forked=fork)
    port = local.free_port()
    for rank in range(row.gpus):
        start_rank = fork_server.fork if fork else _spawn
        job.pids.append(start_rank(words(row, job.folder), environment(rank, gpus, port), job.folder / f"rank{rank}.log"))
    return job


def environment(rank: int, gpus: Sequence[str], port: int) -> dict[str, str]:
    """The environment of one of as many ranks as there are GPUs."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(gpus)),
        "LOCAL_WORLD_SIZE": str(len(gpus)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        # The compiler's pool of processes would cost more than the few functions that it compiles.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(local.import_paths()),
        "OMP_NUM_THREADS": "1",  # as torchrun sets
    }


def _spawn(arguments: list[str], env: dict[str, str], log: Path) -> int:
    with log.open("ab") as out:
        command = [sys.executable, "-m", "playbook_trainer", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    process.returncode = 0  # it is waited for by its number, as forks are
    return process.pid


def run_forked(
    arguments: list[str], gpus: Sequence[str], folder: Path, limit_s: float, run: Callable[[list[str]], int] | None = None
) -> Job:
    """Ranks by fork, one for each GPU, of the trainer or of `run`, with what the configuration asks of the environment; until all have
    ended."""
    job, port = Job(None, tuple(gpus), folder), local.free_port()
    config = trainer.load(Path(arguments[0]), trainer.parse_overrides(arguments[1:]))
    for rank in range(len(gpus)):
        env = environment(rank, gpus, port)
        variables.apply(config, env)
        job.pids.append(fork_server.fork([*arguments, f"output={folder}"], env, folder / f"rank{rank}.log", run=run))
    while not is_done(job, limit_s):
        time.sleep(0.1)
    return job


def launch(
    arguments: list[str],
    gpus: Sequence[str],
    limit_s: float,
    figures: Callable[[Path], dict[str, Any]],
    run: Callable[[list[str]], int] | None = None,
) -> dict[str, Any]:
    """One launch by forks in a folder of its own: what `figures` reads there, or why it has none."""
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as name:
        job = run_forked(arguments, gpus, Path(name), limit_s, run)
        out: dict[str, Any] = {"wall_s": round(time.monotonic() - job.began, 1), "outcome": "ok"}
        if job.ended or any(job.codes.values()):
            return out | {"outcome": "failed", "message": job.ended or reason(ended(job))}
        return out | figures(Path(name))


def ended(job: Job) -> list[outcome.Ended]:
    """How its ranks ended."""
    return [outcome.Ended(r, code, job.folder / f"rank{r}.log") for r, code in sorted(job.codes.items())]


def is_done(job: Job, limit_s: float) -> bool:
    """Whether all ranks have ended; where one failed or the time is up, the rest are ended first."""
    for rank, pid in enumerate(job.pids):
        if rank not in job.codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                job.codes[rank] = os.waitstatus_to_exitcode(status)
    if len(job.codes) < len(job.pids) and (any(job.codes.values()) or time.monotonic() - job.began > limit_s):
        if not any(job.codes.values()):
            job.ended = f"did not end within {limit_s:g} s"
        left = [each for each in enumerate(job.pids) if each[0] not in job.codes]
        for _, pid in left:  # all of them before any is waited for
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
        for rank, pid in left:
            os.waitpid(pid, 0)
            job.codes[rank] = 0
    return len(job.codes) == len(job.pids)


def record(job: Job) -> dict[str, Any]:
    """The row as a JSON object."""
    row, ranks = job.row, ended(job)
    assert row is not None
    result = outcome.judge(ranks, job.folder, 0.0, time.monotonic() - job.began)
    out: dict[str, Any] = {
        "table": row.table,
        "group": row.group,
        "name": row.name,
        "gpus": row.gpus,
        "settings": row.set,
        "outcome": "hang" if job.ended else result.outcome,
        "wall_s": round(result.wall_s, 1),
    }
    if out["outcome"] != "ok":
        return out | {"message": job.ended or reason(ranks)}
    return out | measured(job.folder, row.gpus, row.proof)


def measured(folder: Path, gpus: int, proof: Sequence[Rule]) -> dict[str, Any]:
    """What a run that came to its end has left in its folder, and whether its receipt shows what it must."""
    files = outcome.read_run(folder)
    timed = [s for s in files.fields["samples"] if s.timed]
    observed = files.fields["observed"]
    checks = [receipt.judge_rule(rule, False, "row", observed or Observed()) for rule in proof]
    return {
        "step_s": round(statistics.median(s.seconds for s in timed), 5),
        "tokens_per_s_per_gpu": round(sum(s.useful_tokens for s in timed) / sum(s.seconds for s in timed) / gpus, 1),
        "peak_memory_bytes": max(s.peak_memory_bytes for s in timed),
        "losses": [s.loss for s in files.fields["samples"]],
        "grad_norm": files.fields["samples"][0].grad_norm,
        "proof": [{"rule": c.rule, "observed": c.observed, "expected": c.expected, "ok": c.ok} for c in checks],
        "gpu_computing_percent": round(observed.counters.get("gpu_computing_percent", 0.0), 1) if observed else None,
        "versions": versions(),
        "device": files.fingerprint.strict.get("device_name"),
        "revision": files.fields["performance_revision"],
    }


def versions() -> dict[str, str]:
    """Of the packages that a row is about."""
    return {k: v for k, v in detect.versions().items() if k in ("torch", "megatron-core", "transformer-engine")}


def reason(ranks: Sequence[outcome.Ended]) -> str:
    """Why a run failed, in one line without paths."""
    failed = next((r for r in ranks if r.exit_code), ranks[0])
    lines = (
        [line.strip() for line in failed.log.read_text(errors="replace")[-_TAIL:].splitlines() if line.strip()]
        if failed.log.is_file()
        else []
    )
    start = next((i for i, line in enumerate(lines) if line.startswith("error:")), None)
    message = (
        " ".join(lines[start : start + 6])
        if start is not None
        else next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|rank \d+:)", line)), "")
    )
    return re.sub(r"(/[\w.+-]+){2,}", "...", message or f"ended with code {failed.exit_code}")[:400]


def run(todo: list[Row], *, devices: Sequence[str], deadline: float, limit_s: float, fork: bool, done: Any) -> int:
    """Every row for which there is time, as many at once as there are GPUs for; how many were left out."""
    free, running, waiting, left_out = list(devices), list[Job](), list(todo), 0
    while waiting or running:
        for job in [j for j in running if is_done(j, limit_s)]:
            running.remove(job)
            free = sorted([*free, *job.gpus], key=devices.index)
            figures = record(job)
            logs = "".join(p.read_text(errors="replace")[-_TAIL:] for p in job.folder.glob("rank*.log"))
            shutil.rmtree(job.folder, ignore_errors=True)
            if figures["outcome"] == "crash" and job.forked and any(text in logs for text in _NO_FORK):
                fork = False
                waiting.insert(0, job.row)
                continue
            if figures["outcome"] == "crash":
                print(logs[-3000:], file=sys.stderr)
            done(figures)
        if time.monotonic() > deadline and waiting:
            print(f"the budget leaves out {len(waiting)} rows: {', '.join(f'{r.table}/{r.name}' for r in waiting)}", flush=True)
            left_out += len(waiting)
            waiting.clear()
        while waiting and waiting[0].gpus <= len(free):
            row = waiting.pop(0)
            running.append(start(row, tuple(free[: row.gpus]), fork and row.can_fork))
            del free[: row.gpus]
        time.sleep(0.1)
    return left_out


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("tables", nargs="+", choices=sorted(GPUS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "parity", help="folder of the files")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no row is started")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a row may take")
    parser.add_argument("--again", action="store_true", help="run rows that the file already holds")
    parser.add_argument("--only", nargs="*", default=[], help="words that a row's group and name must hold")
    arguments = parser.parse_args()
    began = time.monotonic()
    devices = detect.device_ids(detect.detect())
    measured_rows = {FILES.get(t, FILE): read(arguments.out / FILES.get(t, FILE)) for t in arguments.tables}
    todo = [
        r
        for r in sorted(rows(), key=lambda r: arguments.tables.index(r.table) if r.table in arguments.tables else -1)
        if r.table in arguments.tables
        and r.gpus <= len(devices)
        and all(w in f"{r.group} {r.name}" for w in arguments.only)
        and (arguments.again or measured_rows[FILES.get(r.table, FILE)].get(key_of(r), {}).get("outcome") not in ("ok", "oom"))
    ]
    fork = fork_server.import_all("megatron")
    print(
        f"{len(todo)} rows on {len(devices)} GPUs, {'forked' if fork else 'each a process'}, imports {time.monotonic() - began:.0f} s",
        flush=True,
    )

    def done(row: dict[str, Any]) -> None:
        """Write the row into its file, in the order of the table, and print it."""
        file = FILES.get(row["table"], FILE)
        measured_rows[file][(row["table"], row["group"], row["name"])] = row
        order = [key_of(r) for r in rows()]
        text = "".join(json.dumps(measured_rows[file][k]) + "\n" for k in order if k in measured_rows[file])
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / file).write_text(text, encoding="utf-8")
        figures = f"{1000 * row['step_s']:.0f} ms  {row['peak_memory_bytes'] / 2**30:.1f} GiB" if "step_s" in row else row["message"]
        if row.get("gpu_computing_percent"):
            figures += f"  the GPU computes {row['gpu_computing_percent']:.0f} %"
        unproven = "".join(f"  NOT SHOWN: {p['rule']} (found {p['observed']})" for p in row.get("proof", []) if not p["ok"])
        print(
            f"{row['table']}  {row['group']}: {row['name']}  {row['outcome']}  {figures}{unproven}  [{row['wall_s']} s]",
            flush=True,
        )

    left_out = run(todo, devices=devices, deadline=began + arguments.budget, limit_s=arguments.limit, fork=fork, done=done)
    return LEFT_OUT if left_out else 0


def key_of(row: Row) -> tuple[str, str, str]:
    """What tells rows apart."""
    return row.table, row.group, row.name


def leave(code: int) -> NoReturn:
    """End at once: taking the interpreter down takes seconds once libraries for GPUs are in it."""
    sys.stdout.flush()
    os._exit(code)


def read(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows that a file holds."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return {(r["table"], r["group"], r["name"]): r for r in lines}


if __name__ == "__main__":
    leave(main())
