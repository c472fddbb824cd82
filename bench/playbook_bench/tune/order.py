"""In which order candidates are tried, and which never: by what the planner predicts, else by what a claim was seen to bring, else as
unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from playbook_bench.tune.knobs import Knobs

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


def ranked(knobs: Knobs, predicted: Mapping[tuple[str, str], Predicted], shares: Mapping[str, float]) -> list[Ranked]:
    """Every candidate, the most expected gain for a launch first; those that cannot run last.

    A launch of a candidate that gains `g` takes 1 / (1 + g) of the start's time. `shares` are the parts of the current step that a trace
    shows, by wall.
    """
    rows = []
    for name, knob in knobs.knobs.items():
        small = knob.wall is not None and shares.get(knob.wall, 1.0) < SMALL
        for text in knob.texts[1:]:
            of = predicted.get((name, text), Predicted())
            gain, why = (of.gain, "predicted by the planner") if of.gain is not None else _known(knob.gain, knob.claim, knob.scope)
            if of.refusal:
                rows.append((3, 0.0, Ranked(name, text, knob.place, gain, of.refusal, skipped=True)))
                continue
            worth = UNKNOWN if gain is None else gain
            if small:
                why = f"{knob.wall} is {100 * shares[str(knob.wall)]:.1f} % of the traced step; {why}"
            rows.append((1 if small else 0, -worth * (1 + max(worth, -0.9)), Ranked(name, text, knob.place, gain, why)))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _known(gain: float | None, claim: str | None, scope: str) -> tuple[float | None, str]:
    if gain is None:
        return None, f"claim {claim}: effect not measured in this scope" if claim else "unknown"
    return gain / 100, " ".join(filter(None, [f"claim {claim}" if claim else "as the file says", f"({scope})" if scope else ""]))
