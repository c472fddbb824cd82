"""The published runs that ship as anchors: what each showed beside its prediction, from a file, because predicting them takes as long as a
plan.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.runs.anchor import Anchor, Anchors
from playbook.planner.runs.check import anchors_of
from playbook.planner.runs.predict import Prediction, predict
from playbook.planner.runs.table import Run, Table, of_source, read_runs
from playbook.yaml_files import did_you_mean

RUNS = "published_runs.csv"
ERRORS = "published_errors.json"
"""By id of a run: the logarithm of measured over predicted speed, its spread, and what the parts contribute to it, as `spread.weights` has
them."""


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


@cache
def cells() -> Mapping[str, Mapping[str, str]]:
    """Every cell of the published runs that says something, by id and column."""
    with (data_root("tables") / RUNS).open(encoding="utf-8", newline="") as file:
        return {row["id"]: {k: v for k, v in row.items() if v} for row in csv.DictReader(file)}


def others(run: Run, prediction: Prediction) -> float:
    """Tokens per second and GPU that are predicted for a published run, scaled to the others; those of its configuration do not count."""
    scale = scaling().scale(Anchor(run, 0.0, prediction.spread, prediction.parts), leave_out="configuration")
    return prediction.tokens_per_s_per_gpu * exp(scale.log)


def one(name: str) -> dict[str, Any]:
    """A published run as plain data: its cells, its page, and tokens per second and GPU as predicted, from constants alone and scaled to
    the others, or why not.

    Raises:
        ConfigError: there is no such run.
    """
    about = cells()
    if name not in about:
        expected = "expected an id as `plan` and `diagnose` print it, such as r294"
        raise ConfigError(f"no published run '{name[:40]}'; {expected}{did_you_mean(name[:40], about)}")
    run = next(run for run, _ in table() if run.id == name)
    prediction = predict(run)
    plain = {"schema": "published-run/1", **about[name], "link": link(about[name]["source_group"], about[name]["source"])}
    if isinstance(prediction, str):
        return plain | {"predicted": None, "scaled": None, "assumes": [], "why": prediction}
    return plain | {
        "predicted": prediction.tokens_per_s_per_gpu,
        "scaled": others(run, prediction),
        "assumes": list(prediction.words),
        "why": None,
    }


def link(group: str, source: str) -> str:
    """The page of a source: a paper, a repository, or the file that it names; nothing of one that is none of these."""
    first, _, after = source.partition(" ")
    if first == "arXiv":
        return f"https://arxiv.org/abs/{after.split()[0].rstrip(',;:')}" if after else ""
    pages = of_source(group).get("pages")
    if pages:
        return pages + first
    owner, slash, _ = first.partition("/")
    host = "https://" if "." in owner else "https://github.com/"
    return host + first if slash else ""


def errors_of(path: Path) -> str:
    """The file of errors for a table of runs: a line for each."""
    rows = {a.run.id: [round(v, 4) for v in (a.error, a.spread, *a.parts)] for a in anchors_of(path)}
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}\n"
