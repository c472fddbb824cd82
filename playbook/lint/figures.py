"""Lint rules on numbers: wrong units, numbers written as text, and figures that contradict arithmetic or each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from playbook.cards.load import LoadedCard
from playbook.cards.model import Quantity
from playbook.lint.base import LintInput, LintRule, Problem, each, gpus_named, linked, overlap, place
from playbook.yaml_files import KeyPath

_UNITS: Mapping[str, tuple[str, ...]] = {
    "model_tflops_per_gpu": ("tflops",),
    "peak_tflops": ("tflops",),
    "mfu": ("percent",),
    "step_time": ("seconds",),
    "peak_memory": ("gib", "bytes"),
    "training_state": ("gib", "bytes"),
    "training_state_per_parameter": ("bytes",),
    "tokens_per_s_per_gpu": ("tokens",),
    "parameters": ("count",),
    "hybridep_ranks_per_nvlink_domain": ("count", "gpus"),
    "throughput_gain": ("percent", "ratio"),
    "memory_saved": ("percent", "gib", "bytes"),
}
"""The figures that a card may state outside its claims, with the units that fit."""

_ADAM_BYTES = (16.0, 18.0)
"""Bytes per parameter of mixed-precision Adam: 2 weights, 2 or 4 gradients, 4 master weights, 8 moments.

Source: ZeRO, https://arxiv.org/abs/1910.02054, section 3.1 (16); Megatron-LM `theoretical_memory_usage.py` (18)."""

_PEAK_TOLERANCE = 0.02
_NUMERIC = re.compile(
    r"[~≈]?\s*[0-9]+(?:\.[0-9]+)?\s*(?:-\s*[0-9]+(?:\.[0-9]+)?)?\s*(%|percent|gb|gib|tb|ms|s|tf|tflops|tok/s|x)\Z", re.IGNORECASE
)
_TILDE = re.compile(r"[~≈]\s*[0-9]+(?:\.[0-9]+)?\Z")


def _figure_units(shelf: LintInput) -> Iterator[Problem]:
    """Figures of an unknown name, or in a unit that does not fit it."""
    for entry in shelf.checked:
        for where, name, value in _quantities(entry):
            if name not in _UNITS:
                yield Problem(entry, where, f"figure '{name}' is not known; expected one of: {', '.join(sorted(_UNITS))}")
            elif value.unit not in _UNITS[name]:
                yield Problem(entry, where, f"{name} is in '{value.unit}'; expected {' or '.join(_UNITS[name])}")


def _text_numbers(shelf: LintInput) -> Iterator[Problem]:
    """Numbers written as text."""
    for entry in shelf.checked:
        places: list[tuple[KeyPath, Mapping[str, Any]]] = [
            (("families", i, "settings"), f.settings) for i, f in enumerate(entry.card.families)
        ]
        places += [(("decide", i, part), getattr(d, part)) for i, d in enumerate(entry.card.decide) for part in ("when", "set")]
        for where, values in places:
            for key, value in values.items():
                if isinstance(value, str) and is_text_number(value):
                    yield Problem(
                        entry,
                        (*where, key),
                        f"'{key}' is the text '{value}'; write a number, or a measured figure {{value, unit, approx}}",
                    )


def is_text_number(text: str) -> bool:
    """Whether a text is really a number, such as `~300` or `19 %`."""
    return len(text) <= 40 and bool(_NUMERIC.match(text.strip()) or _TILDE.match(text.strip()))


def state_bytes(shelf: LintInput) -> Iterator[Problem]:
    """Training-state figures below or above what mixed-precision Adam needs per parameter."""
    low, high = _ADAM_BYTES
    for entry, i, figure in each(shelf.checked, lambda card: card.figures):
        per = _bytes_per_parameter(figure.name, figure.value, figure.when)
        if per is None or str(figure.when.get("optimizer", "adam")).lower() != "adam":
            continue
        if not low * 0.97 <= per <= high * 1.03:
            yield Problem(
                entry,
                ("figures", i, "value"),
                f"{figure.name} is {per:.3g} bytes per parameter; mixed-precision Adam keeps {low:g} to {high:g}"
                " (2 weights, 2 or 4 gradients, 12 master weights and moments); correct the figure, or name the optimizer",
            )


def _bytes_per_parameter(name: str, value: Quantity, when: Mapping[str, Any]) -> float | None:
    amount = value.value * (1024**3 if value.unit == "gib" else 1)
    if name == "training_state_per_parameter":
        return amount
    count = when.get("parameters")
    if name != "training_state" or isinstance(count, bool) or not isinstance(count, int | float) or count <= 0:
        return None
    return amount / count


def _implied_peak(shelf: LintInput) -> Iterator[Problem]:
    """Rows of one chip and precision that imply different peaks. The peak of a row is its TFLOP/s divided by its MFU."""
    rows = [row for entry in shelf.every for row in _peaks(entry)]
    for (first, _, name_a, key_a, low_a, high_a), (second, where, name_b, key_b, low_b, high_b) in shelf.rivals([rows]):
        if key_a != key_b or linked(first, None, second, None):
            continue
        if max(low_a, low_b) > min(high_a, high_b):
            gpu, precision = key_b
            yield Problem(
                second,
                where,
                f"'{name_b}' implies a peak of {low_b:.0f} to {high_b:.0f} TFLOP/s for {gpu} in {precision},"
                f" '{place(first, second, name_a)}' one of {low_a:.0f} to {high_a:.0f}; state both by one peak, or correct the MFU",
            )


def _peaks(entry: LoadedCard) -> Iterator[tuple[LoadedCard, KeyPath, str, tuple[str, str], float, float]]:
    """The peaks that a card's families imply: entry, place, name, (GPU, precision), low and high in TFLOP/s."""
    for i, family in enumerate(entry.card.families):
        rate, mfu = family.measured.get("model_tflops_per_gpu"), family.measured.get("mfu")
        gpus, precision = gpus_named(family.hardware), family.settings.get("precision")
        if rate and mfu and mfu.value > 0 and len(gpus) == 1 and isinstance(precision, str):
            (r_low, r_high), (m_low, m_high) = rounding(rate), rounding(mfu)
            yield (
                entry,
                ("families", i, "measured"),
                family.name,
                (next(iter(gpus)), precision),
                100 * r_low / m_high * (1 - _PEAK_TOLERANCE),
                100 * r_high / m_low * (1 + _PEAK_TOLERANCE),
            )


def rounding(value: Quantity) -> tuple[float, float]:
    """The interval of values that round to a written number: half a unit of its last significant digit to either side, if it is rounded."""
    if not value.approx:
        return value.value, value.value
    text = f"{value.value:.6f}".rstrip("0").rstrip(".")
    decimals = len(text.partition(".")[2])
    zeros = 0 if decimals else len(text) - len(text.rstrip("0"))
    half = 0.5 * 10.0 ** (zeros - decimals)
    return max(value.value - half, 1e-9), value.value + half


def _figure_conflicts(shelf: LintInput) -> Iterator[Problem]:
    """One figure with two values in situations that overlap."""
    for (first, _, a), (second, i, b) in shelf.rivals([list(each(shelf.every, lambda card: card.figures))]):
        comparable = a.name == b.name and a.value.unit == b.value.unit and a.when.keys() == b.when.keys()
        if not comparable or not overlap(a.when, b.when) or linked(first, None, second, None):
            continue
        (low_a, high_a), (low_b, high_b) = rounding(a.value), rounding(b.value)
        apart = max(low_a, low_b) > min(high_a, high_b)
        if apart and not math.isclose(a.value.value, b.value.value, rel_tol=0.01):
            yield Problem(
                second,
                ("figures", i, "value"),
                f"{b.name} is {b.value.value:g} {b.value.unit} here and {a.value.value:g} in {place(first, second, 'another figure')}"
                " for the same situation; keep one, or say in `when` what differs",
            )


def _quantities(entry: LoadedCard) -> Iterator[tuple[KeyPath, str, Quantity]]:
    for i, family in enumerate(entry.card.families):
        yield from ((("families", i, "measured", name), name, value) for name, value in family.measured.items())
    yield from ((("figures", i, "value"), f.name, f.value) for i, f in enumerate(entry.card.figures))


RULES = (
    LintRule("number-unit", "A figure in a unit that does not fit it, or of a name that nobody knows", _figure_units),
    LintRule("number-text", "A number written as text, such as `~300` or `19 %`", _text_numbers),
    LintRule("number-state", "Training state that is not what the optimizer keeps per parameter", state_bytes),
    LintRule("number-peak", "Two rows of one chip and precision whose TFLOP/s and MFU imply different peaks", _implied_peak),
    LintRule("number-conflict", "One figure with two values in the same situation", _figure_conflicts),
)
