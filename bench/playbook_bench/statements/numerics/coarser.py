"""Rounding errors of low-precision formats, one against the next."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from playbook.errors import ConfigError
from playbook_bench.judge.verdict import Statement
from playbook_bench.statements.number_formats import FORMATS, rounding_error


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
    errors = {f: rounding_error(f, values) for f in formats}
    found = list(errors.values())
    holds = all(b >= factor * a for a, b in pairwise(found))
    sentence = "rounding error, relative to the numbers: " + ", ".join(f"{f} {e:.1%}" for f, e in errors.items())
    return holds, sentence, {"errors": errors, "count": count}
