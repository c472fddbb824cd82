"""Published rates as shares of a data sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.planner import peaks
from playbook_bench.judge.verdict import Statement


def published_utilization(*, rows: Sequence[Mapping[str, Any]], at_least: float, at_most: float) -> Statement:
    """Whether published rates, as shares of the data sheet's dense BF16 peak, lie within the two bounds."""
    found = []
    for row in rows:
        peak = peaks.dense_bf16(row["gpu"])
        if peak is None:
            raise ValueError(f"the peak of '{row['gpu']}' is not in the table")
        found.append({**row, "peak": peak.name, "share": row["tflops_per_gpu"] * 1e12 / peak.flops_per_s})
    holds = all(at_least <= row["share"] <= at_most for row in found)
    words = ", ".join(f"{row['tflops_per_gpu']:g} TFLOP/s on {row['gpu']} are {row['share']:.1%} of {row['peak']}" for row in found)
    return holds, f"{words}; claimed {at_least:.0%} to {at_most:.0%}", {"rows": found}
