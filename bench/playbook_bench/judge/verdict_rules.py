"""What turns launches into intervals and says whether step time is steady. The rules have a version, which a record names in its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from playbook.cards.model import Expect, in_words
from playbook.records.evidence import Curve
from playbook_bench.judge import design, statistics
from playbook_bench.judge.design import Launch
from playbook_bench.judge.statistics import Interval

VERSION = 3


class Rules:
    """The rules of today. A later version is a class that overrides what differs, and older ones keep deciding their records."""

    spent = 0.76
    """The part of the error rate that the looks spend. Their levels are those of normal deviates, which the statistics of few launches, and of noise with a period, exceed
    more often, by up to 1.3 times (`tools/simulate/verdicts.py`)."""
    has_aa = False
    """Whether launches of one variant against itself say how much launches differ. Since version 3 the launches that are compared say it."""
    by_block = False
    """Whether values are compared with the first of their block; since version 3 all of them are with one value, so that each launch keeps its own noise."""
    balanced_noise = True
    """A/A pairs count as A B B A: the second launch less the first, then the first less the second, so that a drift cancels."""
    not_steady = "step time is not steady"

    def level(self, looks: Sequence[int], alpha: float, blocks: int) -> float:
        """The error rate of the interval after so many blocks: that of the look there, or of the next look if there is none."""
        rates = statistics.levels(tuple(looks), self.spent * alpha)
        return next((rate for look, rate in zip(looks, rates, strict=True) if look >= blocks), rates[-1])

    def intervals(
        self,
        rows: Sequence[Sequence[float]],
        launches: Sequence[Launch],
        weights: Sequence[Sequence[float]],
        alpha: float,
        noise: Sequence[float],
    ) -> list[Interval]:
        """A two-sided interval of error rate `alpha` for each contrast `weights` of the variants.

        Shapes: rows [blocks, variants], launches [blocks x variants] in their order, weights [contrasts, variants]; `noise` are
        differences of A/A pairs.

        Raises:
            ValueError: fewer than two blocks, or a value that is not finite.
        """
        out, n = [], len(rows)
        for weight in weights:
            found = design.contrast(rows, launches, weight)
            mean, error = float(found.mean), float(found.error)
            common = len(launches) - len(weight)
            half = statistics.t_quantile(alpha, float(found.freedom)) * error
            used = half * math.sqrt(n) / statistics.t_quantile(alpha, common)
            deviation = error * math.sqrt(n)
            out.append(Interval(mean, mean - half, mean + half, deviation, used, deviation, common))
        return out

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
