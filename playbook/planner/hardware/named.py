"""What `--hardware` names, as a cluster: a kind of GPU, a calibration, or a hardware file."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from playbook import yaml_files
from playbook.errors import ConfigError
from playbook.files import read_bytes
from playbook.planner.hardware.calibration import calibrated, parse
from playbook.planner.hardware.networks import on_network
from playbook.planner.time.cluster import Cluster, cluster
from playbook.planner.time.constants import NIC_RING
from playbook.yaml_files import Strict

_MOST_BYTES = 5_000_000
_FILE = re.compile(r".*\.(?:json|ya?ml)", re.IGNORECASE | re.DOTALL)
_CALIBRATION = re.compile(r"\s*\{\s*\"schema\":\s*\"calibration/")
_NO_FILE = "hardware"
"""What an answer calls the text of a file."""
_GIGA = 1e9
_Word = Annotated[str, Field(min_length=1, max_length=200)]


class Hardware(Strict):
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
