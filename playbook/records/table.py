"""Evidence as a pandas table, for people who compute with it: a row for each launch, or for each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from playbook.records.evidence import Evidence, Run, Sample

if TYPE_CHECKING:
    import pandas as pd

_SUMS = ("seconds", "useful_tokens", "raw_tokens", "images", "data_seconds", "compile_seconds", "recompiles")


def to_frame(records: Iterable[Evidence], per: Literal["launch", "step"] = "launch") -> pd.DataFrame:
    """One row for each launch of the records, or for each of its steps, in the order in which they ran.

    Shapes: columns that name the record (`evidence`, `claim`, `card`, `case`, `machine`, `gpu`, `gpus`, `profile`, `status`, `created`), then those
    that name the launch (`run_id`, `variant`, `role`, `pair`, `position`, `outcome`, `ranks`, `config_sha`, `strict_sha`). A row for a launch goes on
    with `started`, `wall_s`, `num_parameters`, `timed_steps`, the sums over its timed steps (`timed_seconds`, `timed_useful_tokens`, ...), its
    `peak_memory_bytes`, and one column `metric.NAME` for each figure that the trainer reported. A row for a step goes on with the fields of
    `playbook.records.evidence.Sample`. Launches of a stored A/A that a record cites are not among its rows.
    Units: seconds and bytes; token counts are of all ranks together.
    """
    import pandas as pd  # a third of a second, which no other command needs

    make = _launch if per == "launch" else _steps
    rows = [row for record in records for run in record.measured.runs for row in make(_record(record) | _named(run), run)]
    return pd.DataFrame(rows, columns=None if rows else _columns(per))


def _record(record: Evidence) -> dict[str, Any]:
    measured = record.measured
    return {
        "evidence": record.evidence_id,
        "claim": measured.claim.id if measured.claim else None,
        "card": measured.claim.card if measured.claim else None,
        "case": measured.case.id if measured.case else None,
        "machine": measured.machine.name,
        "gpu": measured.machine.gpu,
        "gpus": measured.machine.gpus,
        "profile": measured.profile,
        "status": record.derived.verdict.status,
        "created": record.created,
    }


def _named(run: Run) -> dict[str, Any]:
    names = ("run_id", "variant", "role", "pair", "position", "outcome", "ranks", "config_sha", "strict_sha")
    return {name: getattr(run, name) for name in names}


def _launch(named: dict[str, Any], run: Run) -> Iterator[dict[str, Any]]:
    timed = [s for s in run.samples if s.timed]
    yield {
        **named,
        "started": run.started,
        "wall_s": run.wall_s,
        "num_parameters": run.num_parameters,
        "timed_steps": len(timed),
        **{f"timed_{name}": sum(getattr(s, name) for s in timed) for name in _SUMS},
        "peak_memory_bytes": max((s.peak_memory_bytes for s in timed), default=None),
        **{f"metric.{name}": value for name, value in run.metrics.items()},
    }


def _steps(named: dict[str, Any], run: Run) -> Iterator[dict[str, Any]]:
    return ({**named, **{name: getattr(sample, name) for name in Sample.model_fields}} for sample in run.samples)


def _columns(per: Literal["launch", "step"]) -> list[str]:
    """The columns of a table without rows, so that what selects some of them works on it too."""
    named = [
        "evidence",
        "claim",
        "card",
        "case",
        "machine",
        "gpu",
        "gpus",
        "profile",
        "status",
        "created",
        "run_id",
        "variant",
        "role",
        "pair",
        "position",
        "outcome",
        "ranks",
        "config_sha",
        "strict_sha",
    ]
    launch = ["started", "wall_s", "num_parameters", "timed_steps", *(f"timed_{name}" for name in _SUMS), "peak_memory_bytes"]
    return named + (launch if per == "launch" else list(Sample.model_fields))
