"""A table of runs against the planner: each row's prediction, errors by group, order of layouts, and what cannot be told."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.memory import GIB
from playbook.planner.runs.anchor import NO_SCALE, Anchor, Anchors, Scale, newest_release_ids
from playbook.planner.runs.predict import Prediction, predict, quantile, speed
from playbook.planner.runs.table import Measured, Run, read_runs
from playbook.planner.time.cluster import Cluster

_LAYOUT = ("mbs", "tp", "cp", "pp", "vpp", "ep", "etp", "fsdp", "dispatcher", "recompute")
_PROBLEM = ("source_group", "model", "hardware", "gpus", "precision", "seq_len", "gbs", "layers", "hidden", "heads", "task")
_NEAR = 0.05
"""A choice is right if it is this close to the best."""
_LAYOUTS = 3
"""Layouts that a group must have for its order to count."""


@dataclass(frozen=True)
class Row:
    """One run with its prediction, or why there is none; `counts` if it is its configuration's newest release and was measured."""

    run: Run
    measured: Measured
    prediction: Prediction | None
    why: str | None
    scale: Scale = NO_SCALE
    counts: bool = False

    @property
    def error(self) -> float:
        """The logarithm of measured over predicted speed; 0 where either is missing."""
        log_error = self.prediction.error(self.measured) if self.prediction else None
        return 0.0 if log_error is None else log_error - self.scale.log

    @property
    def difference(self) -> float:
        """By how much more was predicted than measured, as a share of what was measured."""
        return exp(-self.error) - 1

    @property
    def relative(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.difference)

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        if self.prediction is None:
            return False
        interval, shown = self.interval, speed(self.prediction, self.measured)
        return shown is not None and interval.low <= shown <= interval.high

    @property
    def interval(self) -> Any:
        """Tokens per second and GPU, with the interval."""
        assert self.prediction is not None
        return self.prediction.interval(exp(self.scale.log), self.prediction.spread * self.scale.left)

    @property
    def utilisation(self) -> float:
        """The share of the peak that was measured."""
        assert self.prediction is not None
        return (speed(self.prediction, self.measured) or 0.0) * self.prediction.flops_per_token / 1e12 / self.prediction.peak_tflops


def check(path: Path, *, on: Cluster | None = None, anchor: Path | None = None, leave_out: str = "") -> list[Row]:
    """The rows of a table with their predictions, scaled to another table's runs or, with `leave_out`, to the table's own.

    Rows that name the kind of GPU of the machine `on`, or none, are predicted for it; what was predicted before a row was measured stands
    as it was written. `leave_out` is what does not count for a row: `configuration`, its own, or `source`, everything of its source too.

    Raises:
        ConfigError: a file is no table of runs, or its predictions were sealed and something would scale them.
    """
    rows = _rows(path, on)
    if (anchor is not None or leave_out) and any(r.run.sealed for r in rows):
        raise ConfigError(f"{path}: its predictions stand as they were written; leave out --anchor, --leave-one-out and --leave-source-out")
    if anchor is not None:
        return _scaled(rows, _rows(anchor, on), leave_out=leave_out)
    return _scaled(rows, rows, leave_out=leave_out) if leave_out else rows


def _rows(path: Path, on: Cluster | None = None) -> list[Row]:
    table = read_runs(path)
    latest = newest_release_ids(run for run, _ in table)
    rows = []
    for run, measured in table:
        prediction = predict(run, on)
        if isinstance(prediction, str):
            rows.append(Row(run, measured, None, prediction))
            continue
        if run.sealed:
            prediction = prediction.as_written(run.sealed)
        shown = prediction.error(measured) is not None
        rows.append(Row(run, measured, prediction, None, counts=shown and run.id in latest))
    return rows


def _scaled(rows: list[Row], by: list[Row], *, leave_out: str) -> list[Row]:
    counted = _anchors(by)
    if not counted:
        return rows
    anchors = Anchors(counted)
    return [replace(r, scale=anchors.scale(_anchor(r, r.prediction), leave_out=leave_out)) if r.prediction else r for r in rows]


def anchors_of(path: Path) -> list[Anchor]:
    """What the runs of a table showed beside their predictions: the newest measured run of each configuration.

    Raises:
        ConfigError: the file is no table of runs.
    """
    return _anchors(_rows(path))


def _anchors(rows: Sequence[Row]) -> list[Anchor]:
    return [_anchor(r, r.prediction) for r in rows if r.counts and r.prediction]


def _anchor(row: Row, prediction: Prediction) -> Anchor:
    return Anchor(row.run, prediction.error(row.measured) or 0.0, prediction.spread, prediction.parts)


def groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors by hardware and precision, those of one constant utilisation beside them."""
    counted = [r for r in rows if r.counts]
    constant = _constant(rows)
    named: dict[str, list[Row]] = defaultdict(list)
    for row in counted:
        named[f"{row.run.word('hardware')} {row.run.word('precision')}".strip()].append(row)
    return [_summary(name, members, constant) for name, members in sorted(named.items(), key=lambda item: -len(item[1]))]


def total(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The errors of all rows that count; None where none was measured."""
    counted = [r for r in rows if r.counts]
    return _summary("all", counted, _constant(rows)) if counted else None


def _constant(rows: Sequence[Row]) -> Callable[[Row], float]:
    """The error of a constant utilisation: the median of the table's other configurations, or as the anchors make it."""
    counted = [r for r in rows if r.counts]
    logs = [log(r.utilisation) for r in counted]
    middle = median(logs) if logs else 0.0
    if not any(r.scale.log for r in rows):
        return lambda row: log(row.utilisation) - middle
    wide = pstdev(logs)
    anchors_of = [
        replace(_anchor(r, r.prediction), error=u - middle, spread=wide) for r, u in zip(counted, logs, strict=True) if r.prediction
    ]
    anchors, anchor_of = Anchors(anchors_of), {a.run.id: a for a in anchors_of}
    return lambda row: anchor_of[row.run.id].error - anchors.scale(anchor_of[row.run.id], leave_out="configuration").log


def _summary(name: str, rows: Sequence[Row], constant: Callable[[Row], float]) -> dict[str, Any]:
    errors = [r.relative for r in rows]
    others = [abs(exp(-constant(r)) - 1) for r in rows]
    return {
        "group": name,
        "runs": len(rows),
        "median_error": quantile(errors, 0.5),
        "p90_error": quantile(errors, 0.9),
        "bias": exp(-median(r.error for r in rows)) - 1,
        "covered": fmean(r.covered for r in rows),
        "width": median(r.interval.high / r.interval.low for r in rows),
        "constant_mfu": {"median_error": quantile(others, 0.5), "p90_error": quantile(others, 0.9)},
    }


def ranking(rows: Sequence[Row]) -> dict[str, Any] | None:
    """How well the planner chooses between layouts of one model on one cluster; None without a group of three.

    `regret` is how much slower the choice is than the best; `spearman` is of all rows' speeds, `order` the mean of it within the groups.
    """
    counted = [r for r in rows if r.counts]
    problems: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in counted:
        problems[tuple(row.run.word(c).lower() for c in _PROBLEM)].append(row)
    tried = [group for group in problems.values() if len({tuple(r.run.word(c) for c in _LAYOUT) for r in group}) >= _LAYOUTS]
    if not tried:
        return None
    regrets = []
    for group in tried:
        best = max(_speeds(group))
        chosen = max(group, key=lambda r: r.interval.value)
        regrets.append(best / _speeds([chosen])[0] - 1)
    return {
        "groups": len(tried),
        "winner_within_5_percent": sum(r <= _NEAR for r in regrets) / len(tried),
        "mean_regret": fmean(regrets),
        "order": fmean(_spearman(_speeds(group), [r.interval.value for r in group]) for group in tried),
        "spearman": _spearman(_speeds(counted), [r.interval.value for r in counted]),
    }


def _speeds(rows: Iterable[Row]) -> list[float]:
    return [speed(r.prediction, r.measured) or 0.0 for r in rows if r.prediction]


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs."""
    x, y = _ranks(a), _ranks(b)
    mx, my = fmean(x), fmean(y)
    top = sum((i - mx) * (j - my) for i, j in zip(x, y, strict=True))
    bottom = (sum((i - mx) ** 2 for i in x) * sum((j - my) ** 2 for j in y)) ** 0.5
    return top / bottom if bottom else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything as one document, `plan-check/1`."""
    return {
        "schema": "plan-check/1",
        "rows": [_entry(row) for row in rows],
        "groups": groups(rows),
        "total": total(rows),
        "ranking": ranking(rows),
        "impossible": [r.run.id for r in impossible(rows)],
    }


def _entry(row: Row) -> dict[str, Any]:
    """One row as plain data. Units: tokens and 1e12 model FLOPs per second and GPU, GiB."""
    prediction = row.prediction
    if prediction is None:
        return {"id": row.run.id, "predicted": None, "why": row.why}
    interval, peak_bytes = row.interval, prediction.memory_bytes
    return {
        "id": row.run.id,
        "predicted": {
            "tokens_per_s_per_gpu": {"value": interval.value, "low": interval.low, "high": interval.high},
            "tflops_per_gpu": interval.value * prediction.flops_per_token / 1e12,
            "memory_gib": None if peak_bytes is None else peak_bytes / GIB,
            "fits": prediction.fits,
        },
        "why": None,
        "assumed": list(prediction.words),
    }


def impossible(rows: Sequence[Row]) -> list[Row]:
    """Rows that ran and that the planner says cannot."""
    return [r for r in rows if r.measured.ran and r.prediction and r.prediction.fits is False]
