"""Rounding of low-precision formats, simulated on drawn numbers: what a recipe loses before any GPU is asked. Standard library only.

Formats: E4M3 and E2M1 with a shared scale per block of values (Open Compute Project, Microscaling Formats 1.0; NVFP4: blocks of 16 with an
E4M3 scale, MXFP8: blocks of 32 with a power of two), and bfloat16 with 8 significant bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from playbook.errors import ConfigError
from playbook_bench.judge.verdict import Statement


@dataclass(frozen=True)
class Format:
    """An element type with its block: explicit mantissa bits, least normal exponent, largest value, and how the scale is stored."""

    mantissa: int
    least: int
    largest: float
    block: int
    scale_mantissa: int | None
    """Mantissa bits of the scale; None keeps it exact (float32)."""


FORMATS = {
    "blockwise": Format(3, -6, 448.0, 128, None),
    "mxfp8": Format(3, -6, 448.0, 32, 0),
    "nvfp4": Format(1, 0, 6.0, 16, 3),
}
"""By the names of recipes. Source: Transformer Engine, `common/recipe` (block sizes); OCP Microscaling Formats 1.0 (elements)."""


def significant(x: float, bits: int) -> float:
    """`x` rounded to that many significant bits."""
    if x == 0.0:
        return 0.0
    unit = 2.0 ** (math.floor(math.log2(abs(x))) + 1 - bits)
    return round(x / unit) * unit


def element(x: float, kind: Format) -> float:
    """`x` as an element of the format, without a scale: subnormals below the least exponent, the largest value as the ceiling."""
    if x == 0.0:
        return 0.0
    unit = 2.0 ** (max(math.floor(math.log2(abs(x))), kind.least) - kind.mantissa)
    return math.copysign(min(abs(round(x / unit) * unit), kind.largest), x)


def rounded(values: Sequence[float], kind: Format) -> list[float]:
    """The values as the format holds them, block by block; a scale is rounded up, so that nothing overflows."""
    out: list[float] = []
    for start in range(0, len(values), kind.block):
        block = values[start : start + kind.block]
        scale = max(map(abs, block)) / kind.largest or 1.0
        if kind.scale_mantissa is not None:
            unit = 2.0 ** (math.floor(math.log2(scale)) - kind.scale_mantissa)
            scale = math.ceil(scale / unit) * unit
        out += [element(x / scale, kind) * scale for x in block]
    return out


def _rounding_error(name: str, values: Sequence[float]) -> float:
    """Root mean square error of the format on these values, as a share of their root mean square."""
    quantized = rounded(values, FORMATS[name])
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(values, quantized, strict=True)) / sum(a * a for a in values))


def coarser(*, formats: Sequence[str], factor: float, count: int = 8192, seed: int = 0) -> Statement:
    """Whether each format of the list loses at least `factor` times as much as the one before it, on normally distributed numbers.

    Raises:
        ConfigError: a format that is not known, or fewer than two.
    """
    unknown = [f for f in formats if f not in FORMATS]
    if unknown or len(formats) < 2:
        raise ConfigError(f"formats {', '.join(formats)}: expected two or more of {', '.join(FORMATS)}")
    draw = random.Random(seed)
    values = [draw.gauss(0.0, 1.0) for _ in range(count)]
    errors = {f: _rounding_error(f, values) for f in formats}
    losses = list(errors.values())
    holds = all(b >= factor * a for a, b in pairwise(losses))
    sentence = "rounding error, relative to the numbers: " + ", ".join(f"{f} {e:.1%}" for f, e in errors.items())
    return holds, sentence, {"errors": errors, "count": count}


def _chosen(logits: Sequence[float], top_k: int) -> frozenset[int]:
    return frozenset(sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k])


def routing_flips(*, experts: int, top_k: int, tokens: int, spread: float, least: float, seed: int = 0) -> Statement:
    """Whether rounding router logits to bfloat16 changes the chosen experts of at least a share `least` of the tokens.

    Logits are normally distributed with standard deviation `spread`; ties go to the lower index, as top-k implementations do.
    """
    draw = random.Random(seed)
    changed = 0
    for _ in range(tokens):
        logits = [draw.gauss(0.0, spread) for _ in range(experts)]
        changed += _chosen(logits, top_k) != _chosen([significant(x, 8) for x in logits], top_k)
    share = changed / tokens
    sentence = f"top-{top_k} of {experts} logits rounded to bfloat16: other experts for {share:.1%} of {tokens} tokens"
    return share >= least, sentence, {"share": share, "tokens": tokens}
