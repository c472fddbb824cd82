"""Predictions that were written down before there was a figure: cells of a table, sealed so that a later change of them shows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

COLUMNS = ("predicted_on", "predicted_low", "predicted", "predicted_high", "sha256")
"""What a table of such predictions has beside what was set: a date, tokens per second and GPU with their 80 % interval, and the seal."""
_MEMORY = "predicted_gib"
"""Beside these, where it was predicted: the peak of the fullest rank, in GiB."""
FIRST = ""
"""What the seal of the first row follows."""


@dataclass(frozen=True)
class Sealed:
    """What was predicted, in tokens per second and GPU, on a day."""

    day: str
    low: float
    value: float
    high: float
    seal: str
    memory_gib: float | None = None


def seal(before: str, cells: Mapping[str, str], columns: tuple[str, ...]) -> str:
    """The SHA-256 of what a row states and predicts and of the seal `before` it, so that no row can be changed, left out or moved; measured
    cells are free.
    """
    stated = {name: cells[name].strip() for name in (*columns, *COLUMNS[:-1], _MEMORY) if cells.get(name, "").strip()}
    return hashlib.sha256(json.dumps([before, stated], sort_keys=True).encode()).hexdigest()


def opened(before: str, cells: Mapping[str, str], columns: tuple[str, ...]) -> Sealed:
    """What a row predicted.

    Raises:
        ValueError: a cell is missing, or is not what was sealed.
    """
    day, *numbers, written = (cells.get(name, "").strip() for name in COLUMNS)
    if written != seal(before, cells, columns):
        raise ValueError(
            "it was changed after it was sealed, or a row before it was; restore the file: only what was measured may be filled in"
        )
    try:
        low, value, high = map(float, numbers)
    except ValueError:
        low = value = high = 0.0
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or not 0 < low < value < high or not isfinite(high):
        raise ValueError(f"{', '.join(COLUMNS[:-1])} are {[day, *numbers]}; expected a date and three rising numbers above 0")
    memory = cells.get(_MEMORY, "").strip()
    return Sealed(day, low, value, high, written, float(memory) if re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,3}", memory) else None)
