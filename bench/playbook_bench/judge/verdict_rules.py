"""What turns launches into intervals and says whether step time is steady. The rules have a version, which a record names in its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from playbook.cards.model import Expect, in_words
from playbook.records.evidence import Curve
from playbook_bench.judge import statistics
from playbook_bench.judge.statistics import Interval

VERSION = 2


class Rules:
    """The rules of today. A later version is a class that overrides what differs, and older ones keep deciding their records."""

    balanced_noise = True
    """A/A pairs count as A B B A: the second launch less the first, then the first less the second, so that a drift cancels."""
    not_steady = "step time is not steady"

    def level(self, looks: Sequence[int], alpha: float, blocks: int) -> float:
        """The error rate of the interval after so many blocks: that of the look there, or of the next look if there is none."""
        rates = statistics.levels(tuple(looks), statistics.SPENT * alpha)
        return next((rate for look, rate in zip(looks, rates, strict=True) if look >= blocks), rates[-1])

    def intervals(
        self, rows: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], alpha: float, noise: Sequence[float]
    ) -> list[Interval]:
        """The interval of each contrast."""
        return statistics.intervals(rows, weights, alpha, noise)

    def unsteady(self, label: str, launches: Sequence[Sequence[float]], alpha: float, tolerance: float) -> str:
        """How a variant's step time changes inside its timed window by more than `tolerance`; nothing where it is steady."""
        found = statistics.change(launches, alpha)
        return f"{label} {found}" if found and found.certain and abs(found.size) > tolerance else ""

    def fragile(self, curve: Curve, op: str) -> bool:
        """Whether a decided claim is left open because mean and median of the pairs disagree. Never since version 2: the interval alone decides."""
        return False

    def claimed(self, expect: Expect, kind: str) -> str:
        """A claim in words."""
        return in_words(expect, kind)

    def pair_figures(self, curve: Curve, used: float, alpha: float, wanted: tuple[str, float] | None) -> dict[str, Any]:
        """What the record of a pair says of its resolution; `wanted` is the claim's operator and margin."""
        return {"mde": statistics.least_effect(curve.blocks, used, alpha), "pairs_needed": curve.blocks_needed}
