"""Which GPU or link of a job is slow: readings of `playbook_trainer.preflight` beside what their kind reaches, and beside one another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from playbook.planner.memory import GIB
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.constants import LINK_RING

_PRODUCT_FLOPS = 2.0 * 16384 * 8192 * 8192
_PRODUCT_BYTES = 2.0 * (16384 * 8192 + 8192 * 8192 + 16384 * 8192)
_HELD_DOWN = {
    0x20 | 0x40: "heat holds its clocks down",
    0x8: "its hardware holds its clocks down",
    0x80: "a power brake holds its clocks down",
}
"""Bits of the reasons that a healthy GPU does not show. A power cap under a large product is no fault. Source: NVML,
nvmlClocksEventReasons."""
_TAKEN_BYTES = 1e9
"""A context of CUDA takes about 0.55e9 on an H100; what is above belongs to another process."""


@dataclass(frozen=True)
class Limit:
    """The least share of what is expected of the kind of GPU, and of the median of all of them."""

    least_share_of_expected: float
    least_share_of_median: float
    unit: str
    scale: float
    label: str


LIMITS = {
    "product_flops_per_s": Limit(0.88, 0.93, "TFLOP/s", 1e12, "product"),
    "memory_bytes_per_s": Limit(0.90, 0.95, "GB/s", 1e9, "copy in memory"),
    "launches_per_s": Limit(0.50, 0.60, "/ms", 1e3, "launches"),
    "host_to_device_bytes_per_s": Limit(0.60, 0.75, "GB/s", 1e9, "host to GPU"),
    "device_to_host_bytes_per_s": Limit(0.60, 0.75, "GB/s", 1e9, "GPU to host"),
    "link_bytes_per_s": Limit(0.70, 0.80, "GB/s", 1e9, "link"),
}
_CPU_LEAST_SHARE_OF_MEDIAN = 0.35
"""The same for processes that share a CPU with whatever else runs there."""


@dataclass(frozen=True)
class Reading:
    """A figure of one GPU, or of the link between it and the `other`, in the unit that the metric's name ends with."""

    host: str
    gpu: int
    metric: str
    value: float
    other: tuple[str, int] | None = None


def expected(cluster: Cluster) -> dict[str, float]:
    """What a healthy GPU of this kind reaches, by metric; host figures only where they were measured on this kind."""
    laws = cluster.laws
    product = laws.forward.seconds(_PRODUCT_FLOPS, _PRODUCT_BYTES, cluster.bf16_flops_per_s, cluster.memory_bytes_per_s)
    rates = {
        "product_flops_per_s": _PRODUCT_FLOPS / product,
        "memory_bytes_per_s": laws.memory_share * cluster.memory_bytes_per_s,
    }
    if cluster.domain > 1:
        rates["link_bytes_per_s"] = LINK_RING.value * cluster.link_bytes_per_s
    if not cluster.transferred:
        rates |= {
            "launches_per_s": 1 / laws.launch,
            "host_to_device_bytes_per_s": laws.host_to_device,
            "device_to_host_bytes_per_s": laws.host_to_device,
        }
    return rates


def faults(readings: Sequence[Reading], expected_by_metric: Mapping[str, float], *, cpu: bool = False) -> list[str]:
    """First slow GPUs and links, the smallest share of their reference first; then throttled GPUs and those whose memory another process
    holds.

    Args:
        readings: of all GPUs of the job.
        expected_by_metric: rates in the unit that the metric's name ends with; not used for links between hosts, which are compared with
            their median.
        cpu: the readings are of CPU processes, not GPUs: a looser limit against the median.
    """
    slow: list[tuple[float, str]] = []
    for metric, limit in LIMITS.items():
        for between_hosts in (False, True):
            comparable = [r for r in readings if r.metric == metric and _between_hosts(r) == between_hosts and not _is_second_end(r)]
            slow += _slow(
                comparable,
                limit,
                None if between_hosts else expected_by_metric.get(metric),
                _CPU_LEAST_SHARE_OF_MEDIAN if cpu else limit.least_share_of_median,
            )
    return [text for _, text in sorted(slow)] + list(_conditions(readings))


def _between_hosts(reading: Reading) -> bool:
    """Whether it is of a link between two machines."""
    return reading.other is not None and reading.other[0] != reading.host


def _is_second_end(reading: Reading) -> bool:
    """A link is read at both of its ends; one of them counts."""
    return reading.other is not None and (reading.host, reading.gpu) > reading.other


def _slow(
    readings: Sequence[Reading], limit: Limit, expected_rate: float | None, least_share_of_median: float
) -> Iterator[tuple[float, str]]:
    """Readings of one metric that are below what the kind reaches, or else below the others, with their share of it."""
    middle = statistics.median(r.value for r in readings) if readings else 0.0
    for reading in readings:
        if expected_rate is not None and reading.value < limit.least_share_of_expected * expected_rate:
            reference, of = expected_rate, "what this kind of GPU reaches"
        elif reading.value < least_share_of_median * middle:
            reference, of = middle, f"the median of {len(readings)}"
        else:
            continue
        share, shown = reading.value / reference, (f"{v / limit.scale:,.3g}" for v in (reading.value, reference))
        value, beside = shown
        yield share, f"{_where(reading)}: {limit.label} {value} {limit.unit}, {share:.0%} of {of} ({beside})"


def _conditions(readings: Sequence[Reading]) -> Iterator[str]:
    for reading in readings:
        if reading.metric == "throttle_reasons":
            yield from (f"{_where(reading)}: {text}" for bits, text in _HELD_DOWN.items() if int(reading.value) & bits)
        if reading.metric == "memory_taken_bytes" and reading.value > _TAKEN_BYTES:
            yield (
                f"{_where(reading)}: {reading.value / GIB:.1f} GiB of its memory are taken before the check begins; another process uses it"
            )


def _where(reading: Reading) -> str:
    """The GPU, or the two ends of the link."""
    source = f"{reading.host} GPU {reading.gpu}"
    if reading.other is None:
        return source
    host, gpu = reading.other
    return f"{source} to {'' if host == reading.host else f'{host} '}GPU {gpu}"


def table(readings: Sequence[Reading]) -> list[dict[str, str]]:
    """A row for each GPU: its figures, and its slowest links."""
    rows: dict[tuple[str, int], dict[tuple[str, bool], float]] = {}
    for reading in readings:
        row, key = rows.setdefault((reading.host, reading.gpu), {}), (reading.metric, _between_hosts(reading))
        row[key] = min(reading.value, row.get(key, reading.value))
    return [
        {"host": host, "GPU": str(gpu)} | {_column(*key): _cell(key[0], value) for key, value in row.items() if key[0] in _SHOWN}
        for (host, gpu), row in rows.items()
    ]


_SHOWN = {
    "clock_mhz": ("MHz", 1.0),
    "power_w": ("W", 1.0),
    "temperature_c": ("°C", 1.0),
    "product_flops_per_s": ("TFLOP/s", 1e12),
    "memory_bytes_per_s": ("memory GB/s", 1e9),
    "launches_per_s": ("launches/ms", 1e3),
    "host_to_device_bytes_per_s": ("from host GB/s", 1e9),
    "device_to_host_bytes_per_s": ("to host GB/s", 1e9),
    "link_bytes_per_s": ("link GB/s", 1e9),
}
"""Columns of the table, and what their unit is of the metric's."""


def _column(metric: str, between_hosts: bool) -> str:
    return f"{'network' if between_hosts else 'least'} {_SHOWN[metric][0]}" if metric == "link_bytes_per_s" else _SHOWN[metric][0]


def _cell(metric: str, value: float) -> str:
    return f"{value / _SHOWN[metric][1]:,.4g}"
