"""How well the planner predicts the published runs that ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from playbook.paths import data_root
from playbook.planner.runs import check
from playbook_bench.judge.verdict import Statement

_MANY = 10
"""Runs above which a group's 90th percentile is looked at."""


def published_runs_predicted(*, leave_one_out: bool, bounds: Mapping[str, Sequence[float]]) -> Statement:
    """Whether each figure of `playbook plan check` on the shipped table lies within its two bounds; with `leave_one_out`, scaled to the others.

    Figures: `median_error`, `p90_error`, `covered`, `width` (median of high over low), `winner_within_5_percent`, `mean_regret`, `impossible` (runs
    that are said not to fit), and `behind_constant_mfu` (groups of more than ten runs whose 90th percentile a constant share of the peak beats).
    """
    found = _figures(leave_one_out)
    told = {name: {"value": found[name], "at_least": low, "at_most": high} for name, (low, high) in bounds.items()}
    holds = all(f["at_least"] <= f["value"] <= f["at_most"] for f in told.values())
    words = ", ".join(f"{name} {f['value']:.3g} [{f['at_least']:g}, {f['at_most']:g}]" for name, f in told.items())
    return holds, f"{found['runs']} published runs: {words}", {"runs": found["runs"], **told}


@cache
def _figures(leave_one_out: bool) -> dict[str, Any]:
    rows = check.check(data_root("tables") / "published_runs.csv", leave_out="configuration" if leave_one_out else "")
    total, order = check.total(rows), check.ranking(rows)
    if total is None or order is None:
        raise ValueError("the shipped table has no runs that can be compared")
    large = [g for g in check.groups(rows) if g["runs"] > _MANY]
    behind = sum(g["p90_error"] >= g["constant_mfu"]["p90_error"] for g in large)
    return {**total, **order, "impossible": len(check.impossible(rows)), "behind_constant_mfu": behind}
