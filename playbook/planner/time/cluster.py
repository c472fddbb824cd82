"""Clusters by the name of their GPU: rates of data sheets, and efficiencies that a calibration measured or others published. The table of
GPUs is held to what a planner can reckon with: every figure between its bounds and with a source that the file states.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, FileError, Finding
from playbook.paths import repo_root
from playbook.planner.time.constants import STRAGGLERS
from playbook.planner.time.laws import Laws, of_rows
from playbook.yaml_files import KeyPath, did_you_mean, locate, read

_RATE, _SHARE = (1.0, 100_000.0), (0.01, 1.0)
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "bf16_tflops": _RATE, "fp8_tflops": _RATE, "memory_gib": (1, 10_000), "memory_gb_s": (10, 1_000_000), "board_w": (10, 10_000),
    "link_gb_s": (0.1, 10_000), "domain": (1, 4096), "nic_gb_s": (0.01, 10_000), "node": (1, 4096), "bf16_reached": _SHARE,
    "fp8_reached": _SHARE, "host_speed": (0.05, 20), "stragglers": (0.0, 1.0), "transferred": (0.0, 1.0),
}  # fmt: skip
"""The least and the most of each figure, in its own unit."""
_WHOLE = ("domain", "node")
_NEEDED = ("bf16_tflops", "memory_gib", "memory_gb_s", "link_gb_s", "domain", "nic_gb_s", "bf16_reached", "host_speed")
_LARGE = ("bf16", "fp8", "attention")
_LARGE_SHARE = (0.01, 2.0)
"""Attention is a share of the H200's, which another GPU may exceed."""
_RING = {"microseconds": (0.1, 100_000.0), "GB/s": (0.1, 10_000.0)}


def read_gpus(path: Path) -> Any:
    """The table's content.

    Raises:
        FileError: unreadable, or a row that no cluster can be made of: the first such field, with what was found and what was expected.
    """
    data, marks = read(path)
    for where, message in _wrong(data):
        raise FileError([Finding(str(path), *locate(marks, where), f"{'.'.join(map(str, where)) or 'the table'}: {message}")])
    return data


def _wrong(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Where the table is wrong, and how."""
    for part in ("sources", "gpus"):
        if not isinstance(data, Mapping) or not isinstance(data.get(part), Mapping):
            yield (), f"expected sources and gpus, each a mapping; '{part}' is none"
            return
    for name, source in data["sources"].items():
        if not isinstance(source, Mapping) or set(source) != {"kind", "of"}:
            yield ("sources", name), f"expected {{kind: ..., of: ...}}, found {_shown(source)}"
    for name, row in data["gpus"].items():
        if not isinstance(row, Mapping):
            yield ("gpus", name), f"expected a mapping of figures, found {_shown(row)}"
            continue
        names = row.get("names")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
            yield ("gpus", name, "names"), f"expected a list of names, such as [H100], found {_shown(names)}"
        missing = [key for key in _NEEDED if key not in row]
        if missing:
            yield ("gpus", name), f"has no {missing[0]}; add {missing[0]}: [value, source]"
        for key, figure in row.items():
            if key != "names":
                yield from ((("gpus", name, key), message) for message in _figure(key, figure, data["sources"]))


def _figure(key: str, figure: Any, sources: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one figure of a row."""
    if key not in (*_BOUNDS, "large", "rings"):
        yield f"is no figure of a GPU{did_you_mean(key, (*_BOUNDS, 'large', 'rings'))}"
    elif not isinstance(figure, list) or len(figure) != 2:
        yield f"expected [value, source], found {_shown(figure)}"
    elif not isinstance(figure[1], str) or figure[1] not in sources:
        yield f"source {_shown(figure[1])} is not among the table's sources{did_you_mean(str(figure[1]), sources)}"
    elif key == "rings":
        yield from _rings(figure[0])
    elif key == "large":
        yield from _large(figure[0])
    else:
        yield from _number(figure[0], *_BOUNDS[key], whole=key in _WHOLE)


def _large(shares: Any) -> Iterator[str]:
    if not isinstance(shares, Mapping) or set(shares) != set(_LARGE):
        yield f"expected {{{', '.join(f'{k}: share' for k in _LARGE)}}}, found {_shown(shares)}"
        return
    for name, share in shares.items():
        yield from (f"{name} {message}" for message in _number(share, *_LARGE_SHARE))


def _rings(rings: Any) -> Iterator[str]:
    if not isinstance(rings, Mapping) or not all(
        str(k).isdecimal() and int(k) > 1 and isinstance(v, list) and len(v) == 2 for k, v in rings.items()
    ):
        yield f"expected {{GPUs: [microseconds, GB/s]}}, such as {{2: [33, 270]}}, found {_shown(rings)}"
        return
    for gpus, ring in rings.items():
        for (what, bounds), value in zip(_RING.items(), ring, strict=True):
            yield from (f"{what} on {gpus} GPUs {message}" for message in _number(value, *bounds))


def _number(value: Any, least: float, most: float, *, whole: bool = False) -> Iterator[str]:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        yield f"expected a {'whole ' * whole}number from {least:g} to {most:g}, found {_shown(value)}"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_GPUS = "gpus.yaml"
_CALIBRATION = "h200.json"
REFERENCE = "h200"
"""The GPU whose kernels were measured; the laws of all others are its laws, scaled."""
_NODE = 8
"""GPUs of a node where the table says nothing."""
_TRANSFERRED = 0.08
"""How far the reference GPU's laws, scaled, may be off on a GPU that nobody calibrated."""
_GIGA = 1e9
_TERA = 1e12
_MICRO = 1e-6


@dataclass(frozen=True, eq=False)
class Cluster:
    """One kind of GPU with its host and networks; bandwidths are for one GPU and one direction.

    `domain` is the number of GPUs that reach one another over NVLink; beyond it a GPU has its network adapter. `host_speed` is relative to
    the
    calibrated machine. `rings` has, by number of GPUs in one domain, seconds that a gather takes to start and its rate, where they were
    measured.
    `transferred` is how far laws that were measured on another kind of GPU may be off on this one, as the standard deviation of the
    logarithm of a step's time, and 0 where they are its own; `host_known` says that the host's speed was measured or published.
    `provenance` has the source of each figure.
    Units: FLOP/s, bytes per second, GiB.
    """

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    memory_gib: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    domain: int
    nic_bytes_per_s: float
    host_speed: float
    laws: Laws
    transferred: float
    has_fp8: bool = True
    rings: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    host_known: bool = True
    provenance: dict[str, str] = field(default_factory=dict)
    bf16_reached: float = 1.0
    fp8_reached: float = 1.0
    """The best share of the peak that matrix products reached, as measured or published."""
    network: str = ""
    """What is said of the network between domains, where somebody said it."""
    node: int = 8
    """GPUs of a node."""
    adapters: float = 1.0
    """Adapters of InfiniBand or RoCE for each GPU."""
    file: str = ""
    """The file that a question names it by."""
    calibrated: bool = False
    """Whether the kernels were measured on the very machine, by a file that the question names."""
    notes: tuple[str, ...] = ()
    """What such a file measured and states."""
    stragglers: float = STRAGGLERS.value
    """What waiting for the slowest of a domain's GPUs adds to a step, as a share of it."""
    board_w: float | None = None
    """The most watts that a GPU may draw; None where no source says it."""

    @property
    def option(self) -> str:
        """What `--hardware` takes for it."""
        return self.file or self.name

    def straggling(self, gpus: int) -> float:
        """What waiting for the slowest of so many GPUs adds to a step, as a share of it; beyond one domain as where it was measured."""
        return 0.0 if gpus == 1 else self.stragglers if gpus <= self.domain else STRAGGLERS.value

    def about_network(self, gpus: int) -> tuple[str, ...]:
        """What is said of the network between domains; nothing where one domain holds all GPUs."""
        if gpus <= self.domain:
            return ()
        source = self.provenance["nic_gb_s"].partition(":")[0]
        usual = f"network: {self.nic_bytes_per_s / _GIGA:.3g} GB/s for each GPU between nodes, {source}; --network names another"
        return (self.network or usual,)


def cluster(name: str) -> Cluster:
    """The cluster of a kind of GPU, by our name, its product name or what its driver calls it.

    Raises:
        ConfigError: no such GPU is known.
    """
    name_of_table = _names().get(_plain(name))
    if name_of_table is None:
        raise ConfigError(f"hardware '{name[:40]}' is not known; expected one of {', '.join(clusters())}")
    return _load(name_of_table)


@cache
def clusters() -> tuple[str, ...]:
    """Names of all clusters that are known."""
    return tuple(_file()["gpus"])


@cache
def _names() -> dict[str, str]:
    return {_plain(word): name for name, row in _file()["gpus"].items() for word in (name, *row["names"])}


_SILENT = re.compile(r"\b(?:nvidia|amd|instinct|[hd]gx|sxm[0-9]?|nvl72|hbm[0-9]e?|[0-9]+ ?x)\b|(?<=[0-9]) ?gi?b?\b")
"""What of a product's name says nothing of its speed: vendor, board, rack, kind of memory, number of GPUs, and the unit of the memory's
size."""


def _plain(name: str) -> str:
    """A GPU's name without that and without punctuation."""
    words = re.sub("[^a-z0-9]+", " ", re.sub("^([0-9]+)x", r"\1x ", name[:200].lower()))
    return _SILENT.sub("", words).replace(" ", "")


def spelled() -> tuple[str, Mapping[str, str]]:
    """For who reads names elsewhere: the pattern of what is left out of a name, and the cluster of each name without it."""
    return _SILENT.pattern, _names()


@cache
def _file() -> Any:
    return read_gpus(repo_root() / "playbook" / "clusters" / _GPUS)


@cache
def _reference_laws(bf16: float, fp8: float, bandwidth: float) -> Laws:
    text = (repo_root() / "playbook" / "clusters" / _CALIBRATION).read_text(encoding="utf-8")
    return of_rows(json.loads(text)["rows"], bf16, fp8, bandwidth)


@cache
def _load(name: str) -> Cluster:
    """The cluster of one row of the table of GPUs, in bytes and FLOPs per second; its laws are the reference GPU's, scaled."""
    data = _file()
    rows = {gpu: {k: v for k, v in data["gpus"][gpu].items() if k != "names"} for gpu in (name, REFERENCE)}
    figures, reference = ({key: value for key, (value, _) in rows[gpu].items()} for gpu in (name, REFERENCE))
    provenance = {key: "{kind}: {of}".format(**data["sources"][source]) for key, (_, source) in rows[name].items()}
    laws = _reference_laws(reference["bf16_tflops"] * _TERA, reference["fp8_tflops"] * _TERA, reference["memory_gb_s"] * _GIGA)
    return Cluster(
        name=name,
        bf16_flops_per_s=figures["bf16_tflops"] * _TERA,
        fp8_flops_per_s=figures.get("fp8_tflops", figures["bf16_tflops"]) * _TERA,
        memory_gib=figures["memory_gib"],
        memory_bytes_per_s=figures["memory_gb_s"] * _GIGA,
        link_bytes_per_s=figures["link_gb_s"] * _GIGA,
        domain=figures["domain"],
        nic_bytes_per_s=figures["nic_gb_s"] * _GIGA,
        host_speed=figures["host_speed"],
        laws=_of_another(laws, figures, reference),
        transferred=0.0 if name == REFERENCE else figures.get("transferred", _TRANSFERRED),
        has_fp8="fp8_tflops" in figures,
        rings={int(degree): (start * _MICRO, rate * _GIGA) for degree, (start, rate) in figures.get("rings", {}).items()},
        host_known=not provenance["host_speed"].startswith("assumed"),
        provenance=provenance,
        bf16_reached=figures["bf16_reached"],
        fp8_reached=figures.get("fp8_reached", figures["bf16_reached"]),
        node=figures.get("node", _NODE),
        board_w=figures.get("board_w"),
        stragglers=figures.get("stragglers", STRAGGLERS.value),
    )


def _of_another(laws: Laws, figures: Mapping[str, Any], reference: Mapping[str, Any]) -> Laws:
    """The reference GPU's laws as those of another: by what its large products reach where that was published, else by the best."""
    large = figures.get("large")
    if large:
        return laws.scaled(large["bf16"] / laws.forward.share, large["fp8"] / laws.fp8.share, large["attention"])
    bf16 = figures["bf16_reached"] / reference["bf16_reached"]
    return laws.scaled(bf16, figures["fp8_reached"] / reference["fp8_reached"] if "fp8_reached" in figures else bf16)
