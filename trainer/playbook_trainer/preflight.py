"""What each GPU of a job reaches, with all of them at work at once: the measurements of `playbook preflight`.

The kernels are those of `playbook_trainer.calibrate` at one shape each, so that a calibration says what to expect of them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from playbook.errors import ConfigError
from playbook_trainer.join import meet

_PRODUCT = (16384, 8192, 8192)
"""Tokens, width of the input and of the output of the product; the largest square one of the calibration."""
_SMALL = (512, 512, 512)
_COPIED, _SENT, _PINNED = 1 << 31, 1 << 30, 1 << 28
"""Bytes of a copy in memory, of a message between two GPUs, and of a copy from the host."""
_CPU_BYTES = 1 << 24
_LAUNCHES = 2000
_WINDOWS = 5
_PORTS = range(20_000, 30_000)
_READ = "clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"


@dataclass(frozen=True)
class Place:
    """One process of a job."""

    rank: int
    ranks: int
    local: int
    host: str


def place(environment: Mapping[str, str]) -> Place | None:
    """Where torchrun, or `srun` with several tasks, has put this process; None where it was started alone.

    Raises:
        ConfigError: variables of a launcher are missing or are no numbers.
    """
    for names in (("WORLD_SIZE", "RANK", "LOCAL_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")):
        texts = [environment.get(name, "") for name in names]
        if texts[0] in ("", "1"):
            continue
        if not all(text.isascii() and text.isdigit() for text in texts):
            variables = ", ".join(f"{name} '{text[:20]}'" for name, text in zip(names, texts, strict=True))
            raise ConfigError(f"found {variables}; expected three numbers, as torchrun and srun set them")
        ranks, rank, local = map(int, texts)
        return Place(rank, ranks, local, environment.get("SLURMD_NODENAME") or socket.gethostname())
    return None


def readings(seconds: float, placed: Place | None) -> list[dict[str, Any]] | None:
    """What every GPU of the job reaches, at the process of rank 0; None at the others. The CPU stands for a GPU where there is none.

    A row has host, gpu, metric, value, and for a link the host and GPU of its `other` end. Units are those that a metric's name ends with.

    Args:
        seconds: how long the product is repeated; the rest takes about as long again.
        placed: where a launcher put this process; None starts a process for each GPU of this machine.
    """
    if placed is not None:
        return _rank(placed, meeting(placed), seconds)
    ranks = torch.cuda.device_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            return _rank(Place(0, 1, 0, socket.gethostname()), dist.FileStore(f"{folder}/store", 1), seconds)
        multiprocessing.spawn(_spawned, (ranks, folder, seconds), nprocs=ranks)
        return list(json.loads((Path(folder) / "readings.json").read_text(encoding="utf-8")))


def meeting(placed: Place) -> dist.Store:
    """The store of a job's ranks, once all have come to it; where nobody names an address, the step of Slurm does."""
    if "MASTER_ADDR" not in os.environ:
        os.environ |= _address(os.environ)
    return meet(placed.rank, placed.ranks)


def _address(environment: Mapping[str, str]) -> dict[str, str]:
    """Address and port at which the ranks of a step of Slurm meet: its first node, and a port that follows from job and step."""
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]], capture_output=True, text=True, check=False
    )
    first = next(iter(shown.stdout.split()), "")
    described = subprocess.run(["scontrol", "--oneliner", "show", "node", first], capture_output=True, text=True, check=False).stdout
    address = next((word.partition("=")[2] for word in described.split() if word.startswith("NodeAddr=")), first)
    if not address:
        raise ConfigError("scontrol does not name the first node of this step; set MASTER_ADDR and MASTER_PORT for all ranks")
    step = 100 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    return {"MASTER_ADDR": address, "MASTER_PORT": str(_PORTS[step % len(_PORTS)])}


def _spawned(rank: int, ranks: int, folder: str, seconds: float) -> None:
    rows = _rank(Place(rank, ranks, rank, socket.gethostname()), dist.FileStore(f"{folder}/store", ranks), seconds)
    if rows is not None:
        (Path(folder) / "readings.json").write_text(json.dumps(rows), encoding="utf-8")


def _rank(placed: Place, store: dist.Store, seconds: float) -> list[dict[str, Any]] | None:
    """Measure on one rank; rank 0 returns the readings of all."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", placed.local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    with joined(placed, store, device.type):
        places: list[tuple[str, int]] = [("", 0)] * placed.ranks
        dist.all_gather_object(places, (placed.host, placed.local))
        who: dict[str, Any] = {"host": placed.host, "gpu": placed.local}
        turns = max(local for _, local in places) + 1
        rows = [who | {"metric": metric, "value": value, "other": None} for metric, value in _alone(device, placed.local, turns, seconds)]
        rows += [who | {"metric": "link_bytes_per_s", "value": rate, "other": other} for other, rate in _links(placed.rank, places, device)]
        every: list[list[dict[str, Any]]] | None = [[]] * placed.ranks if placed.rank == 0 else None
        dist.gather_object(rows, every)
        return [reading for each in every for reading in each] if every is not None else None


@contextmanager
def joined(placed: Place, store: dist.Store, device: str) -> Iterator[None]:
    """The collectives of a job at this rank, on the GPU of its place."""
    if device == "cuda":
        torch.cuda.set_device(placed.local % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=placed.rank, world_size=placed.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _alone(device: torch.device, turn: int, turns: int, seconds: float) -> Iterator[tuple[str, float]]:
    """The figures of one GPU. Copies from and to the host are measured in turns on a machine, since they share its memory."""
    cuda = device.type == "cuda"
    if cuda:
        free, total = torch.cuda.mem_get_info(device)
        yield "memory_taken_bytes", float(total - free)
    tokens, wide_in, wide_out = _PRODUCT if cuda else _SMALL
    x, w = (
        torch.randn(shape, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
        for shape in ((tokens, wide_in), (wide_in, wide_out))
    )
    dist.barrier()
    sensors = _sensors(device) if cuda else None
    yield "product_flops_per_s", 2.0 * tokens * wide_in * wide_out / _repeated(lambda: x @ w, device, seconds)
    if sensors is not None:
        yield from _answers(sensors)
    source = torch.randint(0, 255, (_COPIED if cuda else _CPU_BYTES,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    dist.barrier()
    yield "memory_bytes_per_s", 2.0 * source.nbytes / _copied(target, source, device, seconds / 4)
    small = torch.zeros(16, device=device)
    yield "launches_per_s", 1 / _issued(lambda: small.add_(1.0), device)
    for now in range(turns):
        dist.barrier()
        if now == turn and cuda:
            pinned = torch.zeros(_PINNED, dtype=torch.uint8).pin_memory()
            yield "host_to_device_bytes_per_s", _PINNED / _copied(target[:_PINNED], pinned, device, seconds / 16)
            yield "device_to_host_bytes_per_s", _PINNED / _copied(pinned, target[:_PINNED], device, seconds / 16)


def _copied(target: Tensor, source: Tensor, device: torch.device, seconds: float) -> float:
    """Median seconds of a copy."""
    return _repeated(lambda: target.copy_(source, non_blocking=True), device, seconds)


def _repeated(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Median seconds of one call while it is repeated for so many seconds, in windows that follow one another."""
    wait = torch.cuda.synchronize if device.type == "cuda" else nothing
    run()
    wait()
    began = time.perf_counter()
    run()
    wait()
    return windows(run, max(1, int(seconds / _WINDOWS / max(time.perf_counter() - began, 1e-6))), wait)


def windows(run: Callable[[], Any], repeats: int, wait: Callable[[], None]) -> float:
    """Median seconds of one call, of so many that follow one another until `wait` says that they are done."""
    times = []
    for _ in range(_WINDOWS):
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times)


def _issued(run: Callable[[], Any], device: torch.device) -> float:
    """Median host seconds of one launch."""
    times = []
    for _ in range(_WINDOWS):
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            run()
        times.append((time.perf_counter() - began) / _LAUNCHES)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return statistics.median(times)


def nothing() -> None:
    """The CPU has nothing to wait for."""


def _sensors(device: torch.device) -> subprocess.Popen[str] | None:
    """nvidia-smi, asked once while the product runs."""
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = f"sleep 0.5; exec nvidia-smi -i {identity} --query-gpu={_READ} --format=csv,noheader,nounits"
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _answers(process: subprocess.Popen[str]) -> Iterator[tuple[str, float]]:
    """Clock, power, temperature and the reasons that hold clocks down, as far as they can be read."""
    try:
        line = process.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return
    for name, text in zip(("clock_mhz", "power_w", "temperature_c", "throttle_reasons"), line.split(","), strict=False):
        try:
            yield name, float(int(text, 16)) if name == "throttle_reasons" else float(text)
        except ValueError:
            continue


def _links(rank: int, places: Sequence[tuple[str, int]], device: torch.device) -> Iterator[tuple[tuple[str, int], float]]:
    """Bytes per second in each direction between this GPU and others: every other one of its machine,
    and its like on the machines before and after.
    """
    size = _SENT if device.type == "cuda" else _CPU_BYTES
    outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    dist.all_reduce(outgoing[:1])  # the first collective of a group has to be one of all ranks
    for pairs in rounds(places):
        other = next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)
        dist.barrier()
        if other is not None:
            yield places[other], size / statistics.median(_exchanged(outgoing, incoming, other, device) for _ in range(_WINDOWS + 1))


def _exchanged(outgoing: Tensor, incoming: Tensor, other: int, device: torch.device) -> float:
    """Seconds in which two ranks have sent each other a tensor."""
    began = time.perf_counter()
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, other), dist.P2POp(dist.irecv, incoming, other)]):
        request.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def rounds(places: Sequence[tuple[str, int]]) -> list[list[tuple[int, int]]]:
    """Which pairs of ranks talk at once, round by round, no rank twice in one:
    all pairs of a machine, then neighbours among the machines, in a ring.
    """
    hosts = list(dict.fromkeys(host for host, _ in places))
    on = {host: [rank for rank, each in enumerate(places) if each[0] == host] for host in hosts}
    within = [_tournament(ranks) for ranks in on.values()]
    all_rounds = [[pair for games in within if turn < len(games) for pair in games[turn]] for turn in range(max(map(len, within)))]
    neighbours = [(a, b) for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True) if a != b][: None if len(hosts) > 2 else 1]
    last = neighbours[-1:] if len(hosts) % 2 and len(hosts) > 2 else []
    ring = neighbours[: len(neighbours) - len(last)]
    for each in (ring[::2], ring[1::2], last):
        if each:
            all_rounds.append([pair for a, b in each for pair in zip(on[a], on[b], strict=False)])
    return all_rounds


def _tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once. Source: the circle method for round-robin tournaments."""
    seats: list[int | None] = [*players, *[None] * (len(players) % 2)]
    all_rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        all_rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return all_rounds
