"""What the machine does while a series runs: clocks, power and temperature of its GPUs, and the processor time that its hypervisor keeps
from it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from playbook.records.evidence import Machine
from playbook_bench.machine import detect, requirements

_QUERY = "timestamp,clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"
_FORMAT = "%Y/%m/%d %H:%M:%S.%f"
_NAMES = ("clock_sm_mhz", "power_w", "temperature_c")
_LIMITS = {"power": 0x4 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x8}
"""What holds clocks down, by bits of the reasons. An idle GPU (0x1), and clocks that somebody has set, are no such limits.

Source: NVML, nvmlClocksEventReasons: software power cap and power brake, thermal slowdown by software and by hardware, slowdown by
hardware.
"""
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Ticks:
    """Processor time since the machine started, in ticks of all its processors: what they worked or wanted to, and what of it other
    machines had.
    """

    demanded: int
    stolen: int


def ticks(path: Path = _STAT) -> Ticks | None:
    """The present count of a Linux machine; None elsewhere.

    Source: proc_stat(5). Of the first line's fields, idle and iowait are time that nobody wanted, guest and guest_nice are counted in user
    and nice.
    """
    try:
        label, *fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
    except (OSError, ValueError):
        return None
    return Ticks(user + nice + system + irq + softirq + stolen, stolen) if label == "cpu" else None


def stolen_percent(before: Ticks | None, after: Ticks | None) -> float | None:
    """Of the processor time that was wanted between two counts, the percentage that other machines on the same hardware had."""
    if before is None or after is None or after.demanded <= before.demanded:
        return None
    return round(100 * max(0, after.stolen - before.stolen) / (after.demanded - before.demanded), 2)


class Telemetry:
    """A context: NVML, or nvidia-smi in its place, writes a line per second and GPU that the profile may use into a file. Without such GPUs
    it does nothing.
    """

    def __init__(self, machine: Machine, profile: str, folder: Path) -> None:
        self.devices = detect.device_ids(requirements.restrict(machine, profile))
        self.path = folder / "telemetry.csv"
        self._writer = contextlib.ExitStack()

    def __enter__(self) -> Telemetry:
        """Start the sampler, or nvidia-smi where NVML does not answer; neither is an error where it is missing."""
        if not self.devices:
            return self
        sampler = detect.Sampler(self.devices, self.path)
        if sampler.start():
            self._writer.callback(sampler.stop)
            return self
        which, query = ["-i", ",".join(self.devices)], [f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms", "1000"]
        with contextlib.suppress(OSError), self.path.open("wb") as out:
            process = subprocess.Popen(["nvidia-smi", *which, *query], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
            self._writer.enter_context(process)
            self._writer.callback(process.kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def between(self, start: float, end: float) -> dict[str, Any]:
        """What `summarize` makes of the readings between two times, seconds since the epoch."""
        try:
            lines = self.path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        return summarize(lines, start, end)


def summarize(lines: Sequence[str], start: float, end: float) -> dict[str, Any]:
    """nvidia-smi's lines between two times (seconds since the epoch): percentiles of each reading, the reasons seen, and how often each
    limit held.

    `limited_percent` is of the readings that name reasons, of all GPUs together.
    """
    columns: dict[str, list[float]] = {name: [] for name in _NAMES}
    reasons: Counter[str] = Counter()
    for line in lines:
        fields = [f.strip() for f in line.split(",")]
        if len(fields) != 1 + len(_NAMES) + 1 or not start <= _when(fields[0]) <= end:
            continue
        for name, text in zip(_NAMES, fields[1:], strict=False):
            with contextlib.suppress(ValueError):
                columns[name].append(float(text))
        reasons[fields[-1]] += 1
    out: dict[str, Any] = {name: _percentiles(values) for name, values in columns.items() if values}
    return out | {"throttle_reasons": sorted(reasons), "limited_percent": _limited(reasons)} if out else {}


def _limited(reasons: Counter[str]) -> dict[str, float]:
    """Of the readings whose reasons can be read, the percentage in which each limit held; nothing where none can."""
    read: Counter[int] = Counter()
    for text, times in reasons.items():
        with contextlib.suppress(ValueError):
            read[int(text, 16)] += times
    every = read.total()
    return {name: round(100 * sum(n for r, n in read.items() if r & bits) / every, 1) for name, bits in _LIMITS.items()} if every else {}


def _when(text: str) -> float:
    try:
        return datetime.strptime(text, _FORMAT).timestamp()
    except (ValueError, OverflowError):
        return -1.0


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (5, 50, 95)}
