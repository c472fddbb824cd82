"""Train many configurations in few processes: `python many.py JOBS SECONDS`.

JOBS is a JSON file with a list of {"ranks": n, "words": [...]}, SECONDS is the time that one may take.

Starting a rank costs seconds and training ten steps of a tiny model costs one. So this process imports everything once, and forks the ranks
of all jobs of one size; they train their jobs in turn. When a job breaks, its ranks end, and the jobs after it get new ones. The file
JOBS with the ending .errors receives a list: for each job null or what its ranks said.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playbook_bench.launch import free_port
from playbook_trainer import checks, environment
from playbook_trainer.config import load, parse_overrides
from playbook_trainer.loop import train


def main(path: Path, stall: float) -> int:
    jobs = json.loads(path.read_text())
    errors: list[str | None] = [None] * len(jobs)
    for ranks in sorted({job["ranks"] for job in jobs}):
        left = [i for i, job in enumerate(jobs) if job["ranks"] == ranks]
        while left:
            done, error = together([jobs[i]["words"] for i in left], ranks, stall)
            if error is not None:
                errors[left[done]] = error
                print(f"{jobs[left[done]]['words'][-1]}: broke", flush=True)
            left = left[done + (error is not None) :]
            path.with_suffix(".errors").write_text(json.dumps(errors))
    return 0


def together(jobs: list[list[str]], ranks: int, stall: float) -> tuple[int, str | None]:
    """Train the jobs on ranks of their own; how many went well, and what the ranks of the next one said."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        read, write = os.pipe()
        children = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                rank_main(jobs, rank, ranks, port, stall, write, logs[rank])
            children[pid] = rank
        os.close(write)
        done, broken = watch(children, read, ranks, stall)
        os.close(read)
        if done == len(jobs) and not broken:
            return done, None
        said = [f"rank {rank}: {log.read_text()[-3000:].strip()}" for rank, log in enumerate(logs) if log.is_file() and log.stat().st_size]
        return min(done, len(jobs) - 1), "\n".join([broken or "its ranks ended early", *said])


def watch(children: dict[int, int], read: int, ranks: int, stall: float) -> tuple[int, str]:
    """Wait for the ranks, each of which writes its number after every job; end them all when one ends in error or none gets on."""
    finished: Counter[int] = Counter()
    broken, last, running = "", time.monotonic(), set(children)
    while running:
        ready = select.select([read], [], [], 0.1)[0]
        got = os.read(read, 4096) if ready else b""
        finished.update(got)
        if got:
            last = time.monotonic()
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not broken:
                    broken = f"rank {children[pid]} ended with {code}"
                    last = time.monotonic() - stall + 3  # the others have a moment to say what they saw
        if running and time.monotonic() - last > stall:
            broken = broken or f"no rank got on for {stall:.0f} s"
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            running.clear()
    while got := os.read(read, 4096):
        finished.update(got)
    return min(finished[rank] for rank in range(ranks)), broken


def rank_main(jobs: list[list[str]], rank: int, ranks: int, port: int, stall: float, progress: int, log: Path) -> None:
    """One rank: train the jobs in turn, and end."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    code = 1
    try:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", rank) if cuda else None
        if cuda:
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=stall))
        for number, words in enumerate(jobs):
            train_one(words, rank, ranks, dist.PrefixStore(str(number), store), device, stall * 2 / 3)
            os.ftruncate(out, 0)  # what a rank said of a job that went well is of no use
            os.lseek(out, 0, os.SEEK_SET)
            os.write(progress, bytes([rank]))
        code = 0
    except BaseException:  # whatever it was, the other ranks wait for this one
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train_one(words: list[str], rank: int, ranks: int, store: Any, device: torch.device | None, patience: float) -> None:
    """One job, in process groups of its own."""
    began = time.monotonic()
    config = load(Path(words[0]), parse_overrides(words[1:]))
    checks.check(config, ranks)
    applied = environment.apply(config)
    if ranks > 1:
        backend = "nccl" if device is not None else "gloo"
        timeout = timedelta(seconds=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device, timeout=timeout)
    outcome = train(config, rank, ranks)
    for name in applied:  # the next job has its own
        os.environ.pop(name)
    if dist.is_initialized():
        if ranks > 1:
            dist.barrier()  # none closes its connections while another still reads
        dist.destroy_process_group()
    gc.collect()
    if device is not None:
        torch.cuda.empty_cache()
    if rank == 0:
        print(f"{words[-1]}: {outcome}, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
