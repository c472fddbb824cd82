"""A calibration, as `playbook calibrate` writes it, put in the place of the table's figures for its kind of GPU."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from playbook.errors import ConfigError
from playbook.planner.memory import GIB
from playbook.planner.time.cluster import Cluster, cluster
from playbook.planner.time.constants import NIC_RING
from playbook.planner.time.laws import Rows, of_rows

SCHEMA = "calibration/1"
_MOST_ROWS = 20_000
_ABOVE = 1.02
"""No kernel is faster than its peak, by more than the clock's own error."""
_KINDS = {
    "linear": "products", "linear_fp8": "8-bit products", "grouped": "experts' products (torch)", "megatron_grouped": "experts' products "
                                                                                                                      "(megatron)",
    "attention": "attention", "loss": "loss", "norm": "kernels that move bytes", "optimizer": "optimizer", "host_launch": "host",
    "collective": "links",
}  # fmt: skip
"""Kinds of row that an answer names, in its words."""
_RING = ("all_gather", "reduce_scatter")
_LARGE = 1 << 20
"""Bytes from which on a collective shows its rate."""


@dataclass(frozen=True)
class Calibration:
    """What one machine reached. `label` is what the file is called, `device` what the driver calls the GPU."""

    label: str
    device: str
    memory_bytes: float
    torch: str
    rows: Rows


def parse(text: str | bytes, label: str) -> Calibration:
    """A calibration from its file's text.

    Raises:
        ConfigError: it is none, or a row holds no number where one is wanted.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{label}: no JSON ({type(e).__name__}); expected what `playbook calibrate` writes") from e
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f'{label}: no calibration; expected "schema": "{SCHEMA}", as `playbook calibrate` writes it')
    device, rows, packages = data.get("device"), data.get("rows"), data.get("packages")
    if not isinstance(device, dict) or not isinstance(device.get("name"), str) or not isinstance(rows, list) or not rows:
        raise ConfigError(f"{label}: a calibration without device and rows; measure again with `playbook calibrate`")
    if len(rows) > _MOST_ROWS:
        raise ConfigError(f"{label}: {len(rows)} rows; expected at most {_MOST_ROWS}")
    memory = device.get("memory_bytes")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    return Calibration(
        label,
        _shown(device["name"]),
        float(memory) if _is_number(memory) else 0.0,
        _shown(torch) if isinstance(torch, str) else "",
        [_row(row, place, label) for place, row in enumerate(rows)],
    )


def _row(row: Any, place: int, label: str) -> Mapping[str, Any]:
    where = f"{label}: rows[{place}]"
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or not _is_number(row.get("seconds")):
        raise ConfigError(f"{where}: expected a kind and positive seconds")
    for key, value in row.items():
        if not isinstance(value, str) and not _is_number(value):
            raise ConfigError(f"{where}: {_shown(key)} is {_shown(repr(value))}; expected a positive number")
    return row


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a positive number that a rate may be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30 and math.isfinite(value)


def _shown(text: str) -> str:
    """A word of somebody's file as a terminal may show it."""
    return re.sub(r"[^ -~]", "?", text[:80])


def calibrated(calibration: Calibration, base: Cluster | None = None) -> Cluster:
    """The cluster of the calibration's GPU, or `base`, as it was measured; what it has no rows of stays as the table has it.

    Raises:
        ConfigError: its GPU is not known or another than that of `base`, or a row is faster than the GPU's peak.
    """
    try:
        listed = cluster(calibration.device)
    except ConfigError as e:
        if base is None:
            raise ConfigError(f"{calibration.label}: {e}; a hardware file with `gpu:` says which it is") from e
        listed = base
    base = base or listed
    if listed.bf16_flops_per_s != base.bf16_flops_per_s:
        raise ConfigError(
            f"{calibration.label}: measured on {calibration.device}, and gpu is {base.name}; expected a calibration of that GPU"
        )
    _check_peaks(calibration, base)
    reference = cluster("h200").laws.launch
    try:
        laws = of_rows(calibration.rows, base.bf16_flops_per_s, base.fp8_flops_per_s, base.memory_bytes_per_s, base.laws)
    except (TypeError, ZeroDivisionError, OverflowError) as e:
        raise ConfigError(f"{calibration.label}: a row has a word where a number is expected ({type(e).__name__}); measure again") from e
    kinds = {row["kind"] for row in calibration.rows}
    launch = "host_launch" in kinds
    return replace(
        base,
        laws=laws,
        memory_gib=calibration.memory_bytes / GIB if calibration.memory_bytes else base.memory_gib,
        host_speed=reference / laws.launch if launch else base.host_speed,
        host_known=launch or base.host_known,
        transferred="linear" not in kinds and base.transferred,
        rings={**base.rings, **dict(_rings(_of_nodes(calibration.rows, several=False)))},
        **_network(calibration),
        bf16_reached=max(base.bf16_reached, _best(calibration.rows, "linear") / base.bf16_flops_per_s),
        fp8_reached=max(base.fp8_reached, _best(calibration.rows, "linear_fp8") / base.fp8_flops_per_s),
        calibrated=True,
        notes=(*base.notes, _words(calibration, kinds)),
    )


def _check_peaks(calibration: Calibration, base: Cluster) -> None:
    for place, row in enumerate(calibration.rows):
        peak = base.fp8_flops_per_s if row["kind"] == "linear_fp8" else base.bf16_flops_per_s
        rate = row.get("flops_per_s", 0.0)
        if isinstance(rate, str) or rate > _ABOVE * peak:
            shown = rate if isinstance(rate, str) else f"{rate / 1e12:.0f} TFLOP/s"
            raise ConfigError(
                f"{calibration.label}: rows[{place}] has {_shown(shown)}, and the peak of {base.name} is {peak / 1e12:.0f}; is it a "
                f"calibration of this GPU?"
            )


def _best(rows: Rows, kind: str) -> float:
    return max((float(row.get("flops_per_s", 0.0)) for row in rows if row["kind"] == kind), default=0.0)


def _words(calibration: Calibration, kinds: Collection[str]) -> str:
    """What was measured: all but what is named."""
    by = f"{calibration.device}{f', torch {calibration.torch}' if calibration.torch else ''}"
    not_measured = [word for kind, word in _KINDS.items() if kind not in kinds]
    return f"measured, {calibration.label} ({by}): kernels and host" + (
        f"; from the table of GPUs: {', '.join(not_measured)}" if not_measured else ""
    )


def _of_nodes(rows: Rows, *, several: bool) -> Rows:
    """The collectives between nodes, or those within one."""
    return [row for row in rows if row["kind"] == "collective" and (row.get("nodes", 1) > 1) is several]


def _network(calibration: Calibration) -> dict[str, Any]:
    """The rate of a GPU between nodes by the widest ring that was measured there, in the words of an answer; nothing without one."""
    measured = dict(_rings(_of_nodes(calibration.rows, several=True)))
    if not measured:
        return {}
    nodes = max(measured)
    rate = measured[nodes][1]
    words = f"network: {rate / 1e9:.3g} GB/s for each GPU between {nodes} nodes, measured ({calibration.label})"
    return {"nic_bytes_per_s": rate / NIC_RING.value, "network": words}


def _rings(rows: Rows) -> Iterator[tuple[int, tuple[float, float]]]:
    """By number of GPUs, seconds that a gather or scatter takes to start and its bytes per second, by least squares of relative errors."""
    sent: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "collective" and row.get("operation") in _RING and row.get("bytes", 0) >= _LARGE:
            degree = int(row["ranks"])
            sent[degree].append((row["bytes"] * (degree - 1) / degree, row["seconds"]))
    for degree, pairs in sent.items():
        line = _line([(1 / s, b / s) for b, s in pairs])
        if line is not None:
            yield degree, line


def _line(pairs: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Start and rate for which start * x + y / rate comes nearest to 1; None where the pairs tell neither."""
    xx, xy, yy = (sum(a * b for a, b in zip(*cols, strict=True)) for cols in _columns(pairs))
    x, y = (sum(column) for column in zip(*pairs, strict=True))
    whole = xx * yy - xy * xy
    if len(pairs) < 2 or whole <= 0:
        return None
    start, per_byte = (x * yy - y * xy) / whole, (y * xx - x * xy) / whole
    return (max(start, 0.0), 1 / per_byte) if per_byte > 0 else None


def _columns(pairs: list[tuple[float, float]]) -> Iterator[tuple[list[float], list[float]]]:
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    yield from ((xs, xs), (xs, ys), (ys, ys))
