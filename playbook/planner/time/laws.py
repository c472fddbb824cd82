"""Laws of kernels: the few numbers that a calibration's rows come down to, each a share of a peak or a fixed time.

A product takes a fixed time and then runs at a share of the peak, or of the memory's bandwidth if that takes longer. On the H200's 282
dense
products the law is within 5 % (standard deviation) from 1,024 tokens on.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median
from typing import Any, TypeVar

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
Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Lengths by their logarithm, and the share of the peak at each."""
T = TypeVar("T")


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
    """What kernels reach. `grouped` has both passes for each backend. `attention` has for each kernel, head size and pass the lengths and
    the shares of the peak at them.
    """

    forward: Product
    input_gradient: Product
    weight_gradient: Product
    fp8: Product
    grouped: Mapping[str, tuple[Product, Product]]
    loss_share: float
    attention: Mapping[tuple[str, int, str], Curve]
    attention_fixed: float
    memory_share: float
    optimizer_share: float
    launch: float
    host_to_device: float

    def scaled(self, bf16: float, fp8: float, attention: float = 1.0) -> Laws:
        """The laws of another GPU, whose products and attention reach so much more of their peak; exponentials bound attention as well, so
        it does not go with products.
        """
        return replace(
            self,
            forward=_scale(self.forward, bf16),
            input_gradient=_scale(self.input_gradient, bf16),
            weight_gradient=_scale(self.weight_gradient, bf16),
            fp8=_scale(self.fp8, fp8),
            grouped={name: (_scale(a, bf16), _scale(b, bf16)) for name, (a, b) in self.grouped.items()},
            loss_share=self.loss_share * bf16,
            attention={
                kernel: (lengths, tuple(attention * share for share in shares)) for kernel, (lengths, shares) in self.attention.items()
            },
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


def of_rows(rows: Rows, peak: float, fp8_peak: float, bandwidth: float, otherwise: Laws | None = None) -> Laws:
    """The laws of a calibration's rows, whose GPU has these peaks and this memory bandwidth; `otherwise` has those of which there are no
    rows.

    Raises:
        ValueError, IndexError, KeyError: rows are missing, and nothing stands for them.
    """

    def or_(measured: Callable[[], T], stands: Callable[[Laws], T]) -> T:
        try:
            return measured()
        except (ValueError, IndexError, KeyError):
            if otherwise is None:
                raise
            return stands(otherwise)

    def linear(phase: str) -> Product:
        return _product([r for r in _kind(rows, "linear") if r["phase"] == phase], peak, bandwidth)

    def grouped(name: str) -> tuple[Product, Product]:
        def both() -> tuple[Product, Product]:
            return _grouped(rows, name, "forward", peak, bandwidth), _grouped(rows, name, "backward", peak, bandwidth)

        return or_(both, lambda o: o.grouped[name])

    def attention(kernel: str, head_dim: int, phase: str) -> Curve:
        return or_(lambda: _attention(rows, kernel, head_dim, phase, peak), lambda o: o.attention[kernel, head_dim, phase])

    moved = [r for r in rows if r["kind"] in _MOVES and r["seconds"] * r["bytes_per_s"] > _LARGE_BYTES]
    return Laws(
        forward=or_(lambda: linear("forward"), lambda o: o.forward),
        input_gradient=or_(lambda: linear("input_gradient"), lambda o: o.input_gradient),
        weight_gradient=or_(lambda: linear("weight_gradient"), lambda o: o.weight_gradient),
        fp8=or_(lambda: _product(_kind(rows, "linear_fp8"), fp8_peak, bandwidth), lambda o: o.fp8),
        grouped={name: grouped(name) for name in _GROUPED},
        loss_share=or_(lambda: _rate(_kind(rows, "loss"), "flops_per_s") / peak, lambda o: o.loss_share),
        attention={(k, d, p): attention(k, d, p) for k in ("cudnn", "flash") for d in (64, 128) for p in ("forward", "backward")},
        attention_fixed=or_(lambda: min(float(r["seconds"]) for r in _kind(rows, "linear")), lambda o: o.attention_fixed),
        memory_share=or_(lambda: _rate(moved, "bytes_per_s") / bandwidth, lambda o: o.memory_share),
        optimizer_share=or_(lambda: _rate(_kind(rows, "optimizer"), "bytes_per_s") / bandwidth, lambda o: o.optimizer_share),
        launch=or_(lambda: float(_kind(rows, "host_launch")[0]["seconds"]), lambda o: o.launch),
        host_to_device=or_(lambda: _rate(_kind(rows, "host_to_device"), "bytes_per_s"), lambda o: o.host_to_device),
    )


_MOVES = ("norm", "swiglu", "copy", "permute", "unpermute")
"""Kinds of row whose kernels only move bytes."""
_GROUPED = {"megatron": "megatron_grouped", "torch": "grouped"}
"""The calibration's kind of row for each backend's product of all experts."""


def _kind(rows: Rows, kind: str) -> Rows:
    return [r for r in rows if r["kind"] == kind]


def _rate(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return median(float(r[key]) for r in rows)


def _product(rows: Rows, peak: float, bandwidth: float) -> Product:
    """The share from large products, then the fixed time that small ones take beyond it."""
    share = median(r["flops_per_s"] for r in rows if r["flops_per_s"] * r["seconds"] > _LARGE_FLOPS) / peak
    small = [r for r in rows if r["tokens"] >= 1024 and _SMALL_FLOPS < r["flops_per_s"] * r["seconds"] < _LARGE_FLOPS]
    fixed = median(r["seconds"] - r["flops_per_s"] * r["seconds"] / (share * peak) for r in small)
    few = [r for r in rows if r["tokens"] == 128 and r["wide_in"] * r["wide_out"] > 1 << 26]
    memory = median(2 * r["wide_in"] * r["wide_out"] / r["seconds"] for r in few) / bandwidth if few else 0.6
    return Product(max(fixed, 0.0), share, memory)


def _grouped(rows: Rows, backend: str, phase: str, peak: float, bandwidth: float) -> Product:
    """The share is that of the backend's own kernel; the rest is torch's, since that of Transformer Engine waits for the host below its
    full rate.
    """
    backend_rows = [r for r in rows if r["kind"] == _GROUPED[backend] and r["phase"] == phase and r.get("library", "cublas") == "cublas"]
    torch_rows = [r for r in rows if r["kind"] == "grouped" and r["phase"] == phase]
    share = median(r["flops_per_s"] for r in backend_rows if r["rows_per_expert"] == _FULL_ROWS) / peak
    plain = median(r["flops_per_s"] for r in torch_rows if r["rows_per_expert"] == _FULL_ROWS) / peak
    fixed = median(r["seconds"] - r["flops_per_s"] * r["seconds"] / (plain * peak) for r in torch_rows if r["rows_per_expert"] == 256)
    times = 1 if phase == "forward" else 2
    few = [r for r in torch_rows if r["rows_per_expert"] == 64]
    memory = median(times * 2 * r["experts"] * r["wide_in"] * r["wide_out"] / r["seconds"] for r in few) / bandwidth
    return Product(max(fixed, 0.0) / times, share, memory)


def _attention(rows: Rows, kernel: str, head_dim: int, phase: str, peak: float) -> Curve:
    """Lengths by their logarithm, and the median share at each. A short backward pass waited for the host; it is taken to lose as much as
    the forward pass.
    """
    forward, shares = (
        {n: median(r["flops_per_s"] for r in chosen if r["length"] == n) / peak for n in sorted({int(r["length"]) for r in chosen})}
        for chosen in (
            [r for r in rows if r["kind"] == "attention" and (r["kernel"], r["head_dim"], r["phase"]) == (kernel, head_dim, p)]
            for p in ("forward", phase)
        )
    )
    least, sure, *_ = sorted(shares)
    shares[least] = max(shares[least], shares[sure] * forward[least] / forward[sure])
    return tuple(log(n) for n in shares), tuple(shares.values())
