"""Train many configurations in few processes: `python many.py JOBS SECONDS [WORKERS]`.

JOBS is a JSON file with a list of {"ranks": n, "words": [...], "chain": name}, SECONDS is the time that one may take. Jobs of a chain are
trained one after the other; an empty name is no chain.

Starting a rank costs seconds and training ten steps of a tiny model costs one. So this process imports everything once, and forks the ranks
of all jobs of one size; they train their jobs in turn. When a job breaks, its ranks end, and the jobs after it get new ones. With WORKERS
above 1 all sizes go on at once, and jobs of one rank are dealt out to so many workers, each on a GPU of its own as far as there are some.
Files beside JOBS with the ending .errors receive an object each: of jobs that broke, by their number, what their ranks said.
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
from nodes import place

from playbook.processes import die_with_parent
from playbook_trainer.config import checks, environment
from playbook_trainer.config.environment import Platform
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.loop import train


def main(path: Path, stall: float, workers: int = 1) -> int:
    die_with_parent(os.getppid())()  # ranks that go on would keep their GPUs from who comes next
    jobs = json.loads(path.read_text())
    platform = environment.this_platform(os.environ)
    dealt: list[tuple[int, list[int]]] = []
    for ranks in sorted({job["ranks"] for job in jobs}):
        chains: dict[str, list[int]] = {}
        for i, job in enumerate(jobs):
            if job["ranks"] == ranks:
                chains.setdefault(job["chain"] or str(i), []).append(i)
        shares = min(workers, len(chains)) if ranks == 1 else 1
        dealt += [(worker, [i for chain in list(chains.values())[worker::shares] for i in chain]) for worker in range(shares)]
    if workers == 1:
        for index, (_, numbers) in enumerate(dealt):
            work(jobs, numbers, 0, stall, platform, path.with_suffix(f".{index}.errors"))
        return 0
    children, end_with_us = [], die_with_parent(os.getpid())
    for index, (worker, numbers) in enumerate(dealt):
        pid = os.fork()
        if pid == 0:
            try:
                end_with_us()
                work(jobs, numbers, worker, stall, platform, path.with_suffix(f".{index}.errors"))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def work(jobs: list[dict[str, Any]], left: list[int], worker: int, stall: float, platform: Platform, errors: Path) -> None:
    """Train jobs of one size, those after a broken one in new ranks."""
    ranks, broken = jobs[left[0]]["ranks"], {}
    first = worker % max(1, torch.cuda.device_count()) if ranks == 1 else 0
    while left:
        done, error = together([jobs[i]["words"] for i in left], ranks, first, stall, platform)
        if error is not None:
            broken[left[done]] = error
            print(f"{jobs[left[done]]['words'][-1]}: broke: {error.splitlines()[-1][:300]}", flush=True)
        left = left[done + (error is not None) :]
        errors.write_text(json.dumps(broken))


def together(jobs: list[list[str]], ranks: int, first: int, stall: float, platform: Platform) -> tuple[int, str | None]:
    """Train the jobs on ranks of their own, from GPU `first` on; how many went well, and what the ranks of the next one said."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        read, write = os.pipe()
        children, end_with_us = {}, die_with_parent(os.getpid())
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                end_with_us()
                os.close(read)
                os.environ |= place(rank, ranks, first)
                rank_main(jobs, rank, ranks, Path(folder), stall, platform, write)
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
                    last = time.monotonic() - stall + 15  # the others have a moment to say what they saw
        if running and time.monotonic() - last > stall:
            broken = broken or f"no rank got on for {stall:.0f} s"
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            running.clear()
    while got := os.read(read, 4096):
        finished.update(got)
    return min(finished[rank] for rank in range(ranks)), broken


def rank_main(jobs: list[list[str]], rank: int, ranks: int, folder: Path, stall: float, platform: Platform, progress: int) -> None:
    """One rank: train the jobs in turn, and end."""
    out = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    code = 1
    try:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None
        if device is not None:
            torch.cuda.set_device(device)
        store = meet(rank, ranks, folder, stall)
        for number, words in enumerate(jobs):
            before = dict(os.environ)
            train_one(words, rank, ranks, dist.PrefixStore(str(number), store), device, stall * 2 / 3, platform)
            clean(before)
            os.ftruncate(out, 0)  # what a rank said of a job that went well is of no use
            os.lseek(out, 0, os.SEEK_SET)
            os.write(progress, bytes([rank]))
        code = 0
    except BaseException:  # whatever it was, the other ranks wait for this one
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def meet(rank: int, ranks: int, folder: Path, patience: float) -> dist.TCPStore:
    """The ranks' store. Rank 0 listens wherever the system lets it and writes down where: nobody can come in between, as between the choice
    of a free port and its use.
    """
    said, timeout = folder / "port", timedelta(seconds=patience)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, timeout=timeout, wait_for_workers=False)
        said.with_suffix(".new").write_text(str(store.port))
        said.with_suffix(".new").rename(said)
        return store
    deadline = time.monotonic() + patience
    while not said.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 does not say where it listens")
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(said.read_text()), ranks, False, timeout=timeout, wait_for_workers=False)


def train_one(
    words: list[str], rank: int, ranks: int, store: Any, device: torch.device | None, patience: float, platform: Platform
) -> None:
    """One job, in process groups of its own."""
    began = time.monotonic()
    config = load(Path(words[0]), parse_overrides(words[1:]))
    checks.check(config, ranks)
    environment.apply(config, platform=platform)
    if device is None:
        gc.freeze()  # the loop's collections look through what is new: what a tiny model leaves behind is less than what looking for it takes
    if ranks > 1:
        backend = "nccl" if device is not None else "gloo"
        timeout = timedelta(seconds=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device, timeout=timeout)
    outcome = train(config, rank, ranks)
    if dist.is_initialized():
        if ranks > 1:
            dist.barrier()  # none closes its connections while another still reads
        dist.destroy_process_group()
    if device is not None:
        gc.collect()
        torch.cuda.empty_cache()
    if rank == 0:
        print(f"{words[-1]}: {outcome}, {time.monotonic() - began:.1f} s", flush=True)


def clean(before: dict[str, str]) -> None:
    """The environment of before a job: megatron-core tells Transformer Engine by variables which attention to take, which keeps its choice."""
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ |= {name: value for name, value in before.items() if os.environ.get(name) != value}
    chosen = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    if chosen is not None:
        chosen._attention_backends["backend_selection_requires_update"] = True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))
