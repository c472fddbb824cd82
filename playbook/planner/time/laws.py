"""Laws of kernels: the few numbers that a calibration's rows come down to, each a share of a peak or a fixed time.

A product takes a fixed time and then runs at a share of the peak, or of the memory's bandwidth if that takes longer. On the H200's 282 dense
products the law is within 5 % (standard deviation) from 1,024 tokens on.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

_LARGE_FLOPS = 5e10
"""Products above this are bound by arithmetic alone."""
_SMALL_FLOPS = 1e10
"""Products from here up to the large ones show the fixed time: smaller ones waited for the host when they were measured."""
_LARGE_BYTES = 1e8
_FULL_ROWS = 4096
"""Rows per expert at which a grouped product runs at its full rate."""
TILE = 128
"""Rows of a tile: an expert's rows are rounded up to it."""

Rows = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Product:
    """The law of one kind of matrix product: seconds of start and end, and shares of the peak and of the memory's bandwidth."""

    fixed: float
    share: float
    memory_share: float

    def seconds(self, flops: float, num_bytes: float, peak: float, bandwidth: float) -> float:
        """The time of a product."""
        return self.fixed + max(flops / (self.share * peak), num_bytes / (self.memory_share * bandwidth))


@dataclass(frozen=True)
class Laws:
    """What kernels reach. `grouped` has both passes for each backend. `attention` has for each kernel, head size and pass the lengths and the shares of the peak at them."""

    forward: Product
    input_gradient: Product
    weight_gradient: Product
    fp8: Product
    grouped: Mapping[str, tuple[Product, Product]]
    loss_share: float
    attention: Mapping[tuple[str, int, str], tuple[tuple[float, ...], tuple[float, ...]]]
    attention_fixed: float
    memory_share: float
    optimizer_share: float
    kernel: float
    launch: float
    host_to_device: float

    def scaled(self, bf16: float, fp8: float) -> Laws:
        """The laws of another GPU, whose products reach so much more of their peak; attention, which exponentials bound as well, is left as it is."""
        return replace(
            self,
            forward=_scale(self.forward, bf16),
            input_gradient=_scale(self.input_gradient, bf16),
            weight_gradient=_scale(self.weight_gradient, bf16),
            fp8=_scale(self.fp8, fp8),
            grouped={name: (_scale(a, bf16), _scale(b, bf16)) for name, (a, b) in self.grouped.items()},
            loss_share=self.loss_share * bf16,
        )

    def attention_share(self, kernel: str, head_dim: int, phase: str, length: float) -> float:
        """The share of the peak that causal attention reaches at a length, between measured ones by its logarithm."""
        size = 64 if head_dim <= 96 else 128
        lengths, shares = self.attention[kernel, size, phase]
        x = log(max(length, 1.0))
        i = bisect(lengths, x)
        if i == 0:
            return shares[0] * sqrt(length / exp(lengths[0]))  # a shorter row fills fewer tiles of the causal square
        if i == len(lengths):
            return shares[-1]
        part = (x - lengths[i - 1]) / (lengths[i] - lengths[i - 1])
        return shares[i - 1] + part * (shares[i] - shares[i - 1])


def _scale(law: Product, factor: float) -> Product:
    return replace(law, share=law.share * factor)


@cache
def calibrated(path: Path, peak: float, bandwidth: float) -> Laws:
    """The laws of a calibration file, whose GPU has this BF16 peak and memory bandwidth."""
    rows: Rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    passes = {p: _product([r for r in rows if r["kind"] == "linear" and r["phase"] == p], peak, bandwidth) for p in _PASSES}
    return Laws(
        forward=passes["forward"],
        input_gradient=passes["input_gradient"],
        weight_gradient=passes["weight_gradient"],
        fp8=_product([r for r in rows if r["kind"] == "linear_fp8"], 2 * peak, bandwidth),
        grouped={name: (_grouped(rows, name, "forward", peak, bandwidth), _grouped(rows, name, "backward", peak, bandwidth)) for name in _GROUPED},
        loss_share=_rate(_kind(rows, "loss"), "flops_per_s") / peak,
        attention={(k, d, p): _attention(rows, k, d, p, peak) for k in ("cudnn", "flash") for d in (64, 128) for p in ("forward", "backward")},
        attention_fixed=_shortest(rows, "linear"),
        memory_share=_rate([r for r in rows if r["kind"] in ("norm", "swiglu", "copy", "permute", "unpermute") and _moved(r) > _LARGE_BYTES], "bytes_per_s") / bandwidth,
        optimizer_share=_rate(_kind(rows, "optimizer"), "bytes_per_s") / bandwidth,
        kernel=_shortest(rows, "copy"),
        launch=_kind(rows, "host_launch")[0]["seconds"],
        host_to_device=_rate(_kind(rows, "host_to_device"), "bytes_per_s"),
    )  # fmt: skip


_GROUPED = {"megatron": "megatron_grouped", "torch": "grouped"}
"""The calibration's kind of row for each backend's product of all experts."""
_PASSES = ("forward", "input_gradient", "weight_gradient")


def _kind(rows: Rows, kind: str) -> Rows:
    return [r for r in rows if r["kind"] == kind]


def _rate(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return median(float(r[key]) for r in rows)


def _moved(row: Mapping[str, Any]) -> float:
    return float(row["seconds"] * row["bytes_per_s"])


def _shortest(rows: Rows, kind: str) -> float:
    return min(float(r["seconds"]) for r in _kind(rows, kind))


def _product(rows: Rows, peak: float, bandwidth: float) -> Product:
    """The share from large products, then the fixed time that small ones take beyond it."""
    share = median(r["flops_per_s"] for r in rows if r["flops_per_s"] * r["seconds"] > _LARGE_FLOPS) / peak
    small = [r for r in rows if r["tokens"] >= 1024 and _SMALL_FLOPS < r["flops_per_s"] * r["seconds"] < _LARGE_FLOPS]
    fixed = median(r["seconds"] - r["flops_per_s"] * r["seconds"] / (share * peak) for r in small)
    few = [r for r in rows if r["tokens"] == 128 and r["wide_in"] * r["wide_out"] > 1 << 26]
    memory = median(2 * r["wide_in"] * r["wide_out"] / r["seconds"] for r in few) / bandwidth if few else 0.6
    return Product(max(fixed, 0.0), share, memory)


def _grouped(rows: Rows, backend: str, phase: str, peak: float, bandwidth: float) -> Product:
    """The share is that of the backend's own kernel; the rest is torch's, since that of Transformer Engine waits for the host below its full rate."""
    own = [r for r in rows if r["kind"] == _GROUPED[backend] and r["phase"] == phase and r.get("library", "cublas") == "cublas"]
    found = [r for r in rows if r["kind"] == "grouped" and r["phase"] == phase]
    share = median(r["flops_per_s"] for r in own if r["rows_per_expert"] == _FULL_ROWS) / peak
    plain = median(r["flops_per_s"] for r in found if r["rows_per_expert"] == _FULL_ROWS) / peak
    fixed = median(r["seconds"] - r["flops_per_s"] * r["seconds"] / (plain * peak) for r in found if r["rows_per_expert"] == 256)
    times = 1 if phase == "forward" else 2
    few = [r for r in found if r["rows_per_expert"] == 64]
    memory = median(times * 2 * r["experts"] * r["wide_in"] * r["wide_out"] / r["seconds"] for r in few) / bandwidth
    return Product(max(fixed, 0.0) / times, share, memory)


def _attention(rows: Rows, kernel: str, head_dim: int, phase: str, peak: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lengths by their logarithm, and the median share at each. A short backward pass waited for the host; it is taken to lose as much as the forward pass."""
    forward, found = (
        {n: median(r["flops_per_s"] for r in same if r["length"] == n) / peak for n in sorted({int(r["length"]) for r in same})}
        for same in (
            [r for r in rows if r["kind"] == "attention" and (r["kernel"], r["head_dim"], r["phase"]) == (kernel, head_dim, p)]
            for p in ("forward", phase)
        )
    )
    least, sure, *_ = sorted(found)
    found[least] = max(found[least], found[sure] * forward[least] / forward[sure])
    return tuple(log(n) for n in found), tuple(found.values())
