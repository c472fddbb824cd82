"""Estimates beside measured peaks, run by run; `docs/experiments/peak-memory.md` has the medians."""

from __future__ import annotations

from statistics import median

import pytest
from memory_table import compared

RUNS = list(compared())


@pytest.mark.parametrize(("group", "middle", "worst"), [("megatron-core", 0.03, 0.10), ("torchtitan", 0.08, 0.25)])
def test_measured_peaks_are_estimated_closely(group: str, middle: float, worst: float) -> None:
    errors = [abs(run.error) for run in RUNS if run.group == group]
    assert len(errors) >= 14
    assert median(errors) <= middle
    assert max(errors) <= worst


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.id)
def test_a_run_that_was_made_is_legal(run) -> None:
    assert run.plan.broken() == []
