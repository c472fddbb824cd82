"""In which order candidates are tried, and which never: by what the planner predicts, else by what a claim was seen to bring, else as
unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from playbook_bench.tune.knobs import Knob, Knobs

UNKNOWN = 0.01
"""What an unknown change counts as, as a share: after what is known to bring more, before what is known to bring less."""
SMALL = 0.05
"""A part of a step below this share leaves a knob that shortens it little to gain."""


@dataclass(frozen=True)
class Predicted:
    """What the planner says of one candidate."""

    gain: float | None = None
    """As a share of the start's speed."""
    refusal: str = ""
    """Why it cannot run, such as too little memory."""


@dataclass(frozen=True)
class Ranked:
    """One candidate in the order."""

    knob: str
    value: str
    place: str
    gain: float | None
    why: str
    skipped: bool = False
    """Whether it is never launched."""


def ranked(knobs: Knobs, predicted: Mapping[tuple[str, str], Predicted], small: Mapping[str, str]) -> list[Ranked]:
    """Every candidate, the most expected gain for a second of the machine first; those that cannot run last.

    A launch of a candidate that gains `g` takes 1 / (1 + g) of the start's time. `small`: walls that are a small part of the current step,
    with the words that say so; a knob that shortens one comes after the others.
    """
    rows = []
    for name, knob in knobs.knobs.items():
        for text in knob.texts[1:]:
            of = predicted.get((name, text), Predicted())
            gain, why = (of.gain, "predicted by the planner") if of.gain is not None else _known(knob)
            if of.refusal:
                rows.append((3, 0.0, Ranked(name, text, knob.place, gain, of.refusal, skipped=True)))
                continue
            worth = UNKNOWN if gain is None else gain
            if reason := small.get(knob.wall or "", ""):
                why = f"{reason}; {why}"
            rows.append((1 if reason else 0, -worth * (1 + max(worth, -0.9)), Ranked(name, text, knob.place, gain, why)))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _known(knob: Knob) -> tuple[float | None, str]:
    """The gain that a claim or the file names, and whose it is."""
    where = f" ({knob.scope})" if knob.scope else ""
    if knob.gain is None:
        return None, f"unknown: claim {knob.claim}{where}" if knob.claim else f"unknown{where}"
    return knob.gain / 100, (f"claim {knob.claim}" if knob.claim else "as the file says") + where
