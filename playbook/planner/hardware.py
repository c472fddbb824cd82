"""What `--hardware` names, as a cluster: a kind of GPU, a calibration, or a hardware file; and the network that joins its nodes."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from pydantic import Field

from playbook import yaml_files
from playbook.errors import ConfigError
from playbook.files import read_bytes
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
        transferred=0.0 if "linear" in kinds else base.transferred,
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
    xs, ys = zip(*pairs, strict=True)
    x, y = sum(xs), sum(ys)
    xx, xy, yy = (sum(a * b for a, b in zip(*columns, strict=True)) for columns in ((xs, xs), (xs, ys), (ys, ys)))
    whole = xx * yy - xy * xy
    if len(pairs) < 2 or whole <= 0:
        return None
    start, per_byte = (x * yy - y * xy) / whole, (y * xx - x * xy) / whole
    return (max(start, 0.0), 1 / per_byte) if per_byte > 0 else None


_NAME = re.compile(r"(?:(?P<gbe>\d{1,4})GbE|(?P<kind>IB|RoCE|EFA)-(?P<rate>\d{1,5}))", re.IGNORECASE | re.ASCII)
_EXPECTED = (
    "100GbE (of one adapter for a node), RoCE-200 or IB-400 (of one adapter for each GPU), or EFA-3200 (of a node); the numbers are Gbit/s"
)
_NO_INFINIBAND = frozenset({"none", "no infiniband", "no-infiniband", "ethernet"})
_ETHERNET = "100GbE"
"""What stands for a network of which is known only that it is not InfiniBand."""
_BITS = 8


def on_network(cluster: Cluster, network: str) -> Cluster:
    """The cluster with its nodes joined by a network such as `100GbE`, `RoCE-200`, `IB-400` or `EFA-3200`; `none` says that there is no
    InfiniBand.

    InfiniBand and RoCE are rates of an adapter, of which a GPU has one unless a file says otherwise; Ethernet and EFA are rates of a node,
    which its GPUs share.

    Raises:
        ConfigError: no such network is known.
    """
    plain = network.strip()
    name = _ETHERNET if plain.lower() in _NO_INFINIBAND else plain
    match = _NAME.fullmatch(name)
    gbits = int(match["gbe"] or match["rate"]) if match else 0
    if match is None or not gbits:
        raise ConfigError(f"network is '{plain[:40]}'; expected {_EXPECTED}; or none, without InfiniBand")
    of_a_gpu = bool(match["kind"]) and match["kind"].lower() != "efa"
    rate = gbits * _GIGA / _BITS * (cluster.adapters if of_a_gpu else 1 / cluster.node)
    taken_as = f", taken as {_ETHERNET}" if name != plain else ""
    return _joined_by(cluster, rate, f"network {plain}{taken_as}: {rate / _GIGA:.3g} GB/s for each GPU between nodes")


@lru_cache(maxsize=256)
def _joined_by(cluster: Cluster, rate: float, words: str) -> Cluster:
    """One object for one network, since times of layers are remembered by their cluster."""
    return replace(cluster, nic_bytes_per_s=rate, network=words)


_MOST_BYTES = 5_000_000
_FILE = re.compile(r".*\.(?:json|ya?ml)", re.IGNORECASE | re.DOTALL)
_CALIBRATION = re.compile(r"\s*\{\s*\"schema\":\s*\"calibration/")
_NO_FILE = "hardware"
"""What an answer calls the text of a file."""
_GIGA = 1e9
_Word = Annotated[str, Field(min_length=1, max_length=200)]


class Hardware(yaml_files.Strict):
    """A machine and the network between such machines; what a file leaves out is as the table of GPUs has it."""

    gpu: _Word | None = None
    """Kind of GPU, such as `h100`; the calibration's, if not given."""
    calibration: _Word | None = None
    """File of `playbook calibrate`, relative to this one."""
    gpus_per_node: int | None = Field(default=None, ge=1, le=1024)
    nvlink_domain: int | None = Field(default=None, ge=1, le=1024)
    """GPUs that reach one another over NVLink or its like; 1 where there is none."""
    link_gb_s: float | None = Field(default=None, gt=0, le=100_000)
    """GB/s of one GPU in one direction within that domain."""
    adapters_per_gpu: float | None = Field(default=None, gt=0, le=16)
    """Adapters of InfiniBand or RoCE for each GPU: 0.5 where two share one."""
    network: _Word | None = None
    """Between nodes, such as `100GbE`, `RoCE-200`, `IB-400`, `EFA-3200`."""
    network_gb_s: float | None = Field(default=None, gt=0, le=10_000)
    """Instead: GB/s that each GPU was measured to send between nodes, all at once."""
    host_speed: float | None = Field(default=None, ge=0.05, le=20)
    """How fast the host launches work, relative to the machine of `playbook/clusters/h200.json`."""
    memory_gib: float | None = Field(default=None, gt=0, le=100_000)
    """Memory of a GPU that the driver shows."""


def is_file(text: str) -> bool:
    """Whether what names hardware is a file's name and no kind of GPU."""
    return bool(_FILE.fullmatch(text.strip()))


def is_text(text: str) -> bool:
    """Whether what names hardware is the content of such a file."""
    return text.lstrip().startswith("{")


_BEFORE, _AFTER = re.compile(r"([0-9]{1,7}) ?x ?(\S.*)", re.I), re.compile(r"(\S.*) ?x ?([0-9]{1,7})", re.I)


def counted(hardware: str, gpus: int | None = None) -> tuple[str, int | None]:
    """The kind of GPU that `64xH100`, `h100x64` or `h100` names, and how many: those named there, else `gpus`. A file says nothing of their
    number.

    Raises:
        ConfigError: it names another number than `gpus`, or none.
    """
    if is_file(hardware) or is_text(hardware):
        return hardware, gpus
    text = hardware.strip()[:200]
    before, after = _BEFORE.fullmatch(text), _AFTER.fullmatch(text)
    after = after if after and _is_known(after[1]) and not _is_known(text) else None
    kind, number = (before[2], int(before[1])) if before else (after[1], int(after[2])) if after else (text, None)
    if number is None:
        return kind, gpus
    if number < 1 or gpus not in (None, number):
        raise ConfigError(
            f"hardware '{text[:40]}' names {number} GPUs, and gpus is {gpus or 'not given'}; expected the same number, or one of the two"
        )
    return kind, number


def _is_known(name: str) -> bool:
    try:
        return bool(cluster(name))
    except ConfigError:
        return False


def machine(text: str, network: str = "") -> Cluster:
    """The cluster that a kind of GPU or a file names, on the `network` that is named beside it.

    Raises:
        ConfigError: no such GPU, file or network.
        FileError: the file holds something else than hardware.
    """
    path = Path(text.strip())
    return _joined(_of_content(_text(path), str(path), path.parent) if is_file(text) else cluster(text), network)


def of_text(text: str, network: str = "") -> Cluster:
    """The same of a kind of GPU or of a file's text, for callers whose words may name no file here.

    Raises:
        ConfigError, FileError: as `machine`.
    """
    return _joined(_of_content(text, "", None) if is_text(text) else cluster(text), network)


def _joined(machine_named: Cluster, network: str) -> Cluster:
    return on_network(machine_named, network) if network else machine_named


def _of_content(text: str, file: str, folder: Path | None) -> Cluster:
    """The cluster of a calibration or of a hardware file; without a `folder` it may name no calibration."""
    if _CALIBRATION.match(text):
        return _measured(text, file, None)
    data, marks = yaml_files.parse(text, file or _NO_FILE)
    stated = yaml_files.validate(data, marks, Hardware, file or _NO_FILE)
    if stated.calibration is None:
        return _stated(stated, file, None, "")
    if folder is None:
        raise ConfigError("hardware: calibration names a file, and text has no folder; give the calibration's own text")
    path = folder / stated.calibration
    return _stated(stated, file, _text(path), path.name)


def _label(file: str) -> str:
    """A file as an answer names it."""
    return re.sub(r"[^ -~]", "?", Path(file).name[:80]) if file else _NO_FILE


@lru_cache(maxsize=16)
def _measured(text: str, file: str, base: Cluster | None) -> Cluster:
    """One object for one content, since times of layers are remembered by their cluster."""
    return replace(calibrated(parse(text, _label(file)), base), file=file)


@lru_cache(maxsize=16)
def _stated(stated: Hardware, file: str, measured: str | None, name: str) -> Cluster:
    """The cluster of a hardware file, on the calibration that it names."""
    label = _label(file)
    base = cluster(stated.gpu) if stated.gpu else None
    if measured is not None:
        base = _measured(measured, name, base)
    if base is None:
        raise ConfigError(f"{label}: neither gpu nor calibration; expected one, such as gpu: h100")
    if stated.network and stated.network_gb_s:
        raise ConfigError(f"{label}: network and network_gb_s; expected one of them")
    changes: dict[str, Any] = {"file": file} | {
        field: getattr(stated, key) for key, field in _PLAIN.items() if getattr(stated, key) is not None
    }
    changes |= {"link_bytes_per_s": stated.link_gb_s * _GIGA} if stated.link_gb_s else {}
    changes |= {"host_known": True} if stated.host_speed else {}
    if stated.nvlink_domain or stated.link_gb_s:  # what was measured over other links does not hold here
        changes["rings"] = {n: ring for n, ring in base.rings.items() if not stated.link_gb_s and n <= (stated.nvlink_domain or n)}
    stated_cluster = replace(base, **changes)
    words = [words.format(getattr(stated, key)) for key, words in _WORDS.items() if getattr(stated, key) is not None]
    if words:
        stated_cluster = replace(stated_cluster, notes=(*stated_cluster.notes, f"stated, {label}: {', '.join(words)}"))
    if stated.network:
        return on_network(stated_cluster, stated.network)
    if stated.network_gb_s:
        network_words = f"network: {stated.network_gb_s:.3g} GB/s for each GPU between nodes, measured ({label})"
        return replace(stated_cluster, nic_bytes_per_s=stated.network_gb_s * _GIGA / NIC_RING.value, network=network_words)
    if stated.adapters_per_gpu:
        rate = stated_cluster.nic_bytes_per_s * stated.adapters_per_gpu
        network_words = (
            f"network: {rate / _GIGA:.3g} GB/s for each GPU between nodes, {stated.adapters_per_gpu:g} adapters of the data sheet;"
            " --network names another"
        )
        return replace(stated_cluster, nic_bytes_per_s=rate, network=network_words)
    return stated_cluster


_PLAIN = {
    "gpus_per_node": "node",
    "nvlink_domain": "domain",
    "adapters_per_gpu": "adapters",
    "host_speed": "host_speed",
    "memory_gib": "memory_gib",
}
"""Keys of the file, and the figures of a cluster that they are."""
_WORDS = {
    "gpus_per_node": "{} GPUs in a node", "nvlink_domain": "{} in one NVLink domain", "link_gb_s": "{:g} GB/s over its links",
    "adapters_per_gpu": "{:g} adapters for a GPU", "host_speed": "a host {:g} times as fast as the calibrated one",
    "memory_gib": "{:g} GiB of memory",
}  # fmt: skip
"""What an answer says of each key."""


def _text(path: Path) -> str:
    shown = str(path)[:200]
    try:
        raw = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as e:
        raise ConfigError(f"hardware {shown}: {getattr(e, 'strerror', None) or e}; expected a calibration or a hardware file") from e
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"hardware {shown}: too large; at most {_MOST_BYTES:,} bytes are read")
    return raw.decode("utf-8", "replace")
