"""A thread that notices when a rank no longer gets on, says where it stands, and ends it."""

from __future__ import annotations

import faulthandler
import math
import os
import statistics
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import ParallelConfig
from playbook_trainer.exit_codes import HANG
from playbook_trainer.observe.ranges import BACKWARD, elapsed, moment, open_ranges


class Watchdog:
    """Ends this rank once `timeout_s` seconds have passed since the last `alive`, but for a `rest`; with None it does nothing."""

    def __init__(self, timeout_s: float | None, rank: int) -> None:
        self._timeout_s, self._rank = timeout_s, rank
        self._step, self._last = 0, time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(timeout_s,), name="watchdog", daemon=True)
        if timeout_s is not None:
            self._thread.start()

    def alive(self, step: int) -> None:
        """Restart the countdown: a step has ended."""
        self._step, self._last = step, time.monotonic()

    def rest(self) -> None:
        """Pause the countdown until the next `alive`."""
        self._last = math.inf

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()
        if self._timeout_s is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self, timeout_s: float) -> None:
        while not self._closed.wait(min(timeout_s / 10, 5.0)):
            # Where a thread holds the interpreter's lock for good, only faulthandler's own thread still runs; it exits with 1.
            faulthandler.dump_traceback_later(1.5 * timeout_s, exit=True)
            if time.monotonic() - self._last > timeout_s:
                self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        where = " > ".join(open_ranges()) or "no range"
        sys.stderr.write(
            f"rank {self._rank}: no step for {timeout_s:g} s (train.hang_timeout_s), after step {self._step}, in {where}; its threads:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HANG)


# Which rank is slow: every so many steps, the time that each rank spends at its own work.
# The step as a whole takes every rank equally long, since collectives make the fast ones wait. What tells ranks apart is the time inside
# ranges without collectives: waiting for data, and the computation of attention, router and experts. (The loss gathers its matrix under
# FSDP.)


def own_ranges(parallel: ParallelConfig) -> frozenset[str]:
    """The ranges of this layout in which a rank waits for no other one."""
    ranges = {"data", "router", "experts"}
    return frozenset(ranges | {"attention"} if parallel.tp == parallel.cp == 1 else ranges)


class Busy:
    """A sink of ranges that adds up the time inside those that are named, forward and backward; ranges inside one another count once."""

    def __init__(self, names: frozenset[str], device: torch.device) -> None:
        self._names, self._cuda = names, device.type == "cuda"
        self._depth = 0
        self._spans: list[list[Any]] = []

    def push(self, name: str) -> None:
        """A range begins."""
        if name.removesuffix(BACKWARD) in self._names:
            if self._depth == 0:
                self._spans.append([self._now(name)])
            self._depth += 1

    def pop(self, name: str) -> None:
        """A range ends."""
        if name.removesuffix(BACKWARD) in self._names and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self._spans[-1].append(self._now(name))

    def tally(self, name: str, amount: int) -> None:
        """Do nothing: only times are measured."""

    def seconds(self) -> float:
        """Seconds inside the named ranges so far. On a GPU this waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return sum(elapsed(*span) for span in self._spans if len(span) == 2)

    def _now(self, name: str) -> Any:
        # Waiting for data is the host's.
        return moment(self._cuda and name != "data")


def compare(own_seconds: float, axes: Axes, device: torch.device) -> dict[str, Any]:
    """Shortest, median and longest of the ranks' own times in seconds, and the number of the slowest rank."""
    times = [own_seconds]
    if axes.world.size > 1:
        gathered = torch.empty(axes.world.size, dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(gathered, torch.tensor([own_seconds], dtype=torch.float64, device=device))
        times = gathered.tolist()
    longest = max(times)
    return {"min": min(times), "median": statistics.median(times), "max": longest, "slowest": times.index(longest)}
