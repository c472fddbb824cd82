"""The published runs that ship as anchors: what each showed beside its prediction, from a file, because predicting them takes as long as a plan."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from playbook.paths import data_root
from playbook.planner.runs.anchor import Anchor, Anchors
from playbook.planner.runs.check import anchors_of
from playbook.planner.runs.table import Table, read_runs

RUNS = "published_runs.csv"
ERRORS = "published_errors.json"
"""By id of a run: the logarithm of measured over predicted speed, its spread, and what the parts contribute to it, as `spread.weights` has them."""


@cache
def table() -> Table:
    """The published runs."""
    return read_runs(data_root("tables") / RUNS)


@cache
def anchors() -> tuple[Anchor, ...]:
    """Those that scale predictions: the newest measured run of each configuration."""
    errors = json.loads((data_root("tables") / ERRORS).read_text(encoding="utf-8"))
    return tuple(
        Anchor(run, error, spread, tuple(parts)) for run, _ in table() if run.id in errors for error, spread, *parts in (errors[run.id],)
    )


@cache
def scaling() -> Anchors:
    """The published runs, ready to scale."""
    return Anchors(anchors())


def errors_of(path: Path) -> str:
    """The file of errors for a table of runs: a line for each."""
    rows = {a.run.id: [round(v, 4) for v in (a.error, a.spread, *a.parts)] for a in anchors_of(path)}
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}\n"
