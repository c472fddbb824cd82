"""The table of GPUs, held to what a planner can reckon with: every figure between its bounds and with a source that the file states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from playbook.errors import FileError, Finding
from playbook.yaml_files import KeyPath, did_you_mean, locate, read

_RATE, _SHARE = (1.0, 100_000.0), (0.01, 1.0)
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "bf16_tflops": _RATE, "fp8_tflops": _RATE, "memory_gib": (1, 10_000), "memory_gb_s": (10, 1_000_000), "board_w": (10, 10_000),
    "link_gb_s": (0.1, 10_000), "domain": (1, 4096), "nic_gb_s": (0.01, 10_000), "node": (1, 4096), "bf16_reached": _SHARE,
    "fp8_reached": _SHARE, "host_speed": (0.05, 20),
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
