"""Traces: where the time of a step goes, by range and variant. `playbook_bench.trace` makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from playbook.records.evidence import Machine, RunOutcome, Variant
from playbook.yaml_files import Strict

TRACE_VERSION: Literal["trace/1"] = "trace/1"

Collector = Literal["nsys", "kineto"]
Phase = Literal["forward", "backward", "recompute", "other"]


class RangeRow(Strict):
    """Time of one range, per step, its inner ranges included (except `self_ms`)."""

    path: str
    phase: Phase
    count: float = Field(ge=0)
    """How often the range was entered."""
    num_ops: float = Field(ge=0)
    """Its operations; where host time is measured, stretches of operator time."""
    host_ms: float = Field(ge=0)
    """Time between entering and leaving, on the host."""
    busy_ms: float = Field(ge=0)
    """Union of the intervals in which its operations ran."""
    sum_ms: float = Field(ge=0)
    """Sum of its operations' durations; larger than busy where streams overlap."""
    self_ms: float = Field(ge=0)
    """Its own share of the busy time, inner ranges excluded; over all rows these add up to the busy time exactly."""
    exposed_comm_ms: float = Field(ge=0)
    """Communication during which no computation ran anywhere on the device."""


class Coverage(Strict):
    """Share of the busy time that lies in a named part, 0 to 1; null where a phase has no busy time."""

    forward: float | None
    backward: float | None
    total: float | None


class UnattributedOp(Strict):
    """An operation outside every named part."""

    name: str
    phase: Phase
    count: float
    busy_ms: float


class TraceTable(Strict):
    """Time per range of one rank, per step."""

    collector: Literal["nsys", "kineto"]
    measures: Literal["gpu", "host"]
    num_steps: int = Field(ge=1)
    span_ms: float = Field(ge=0)
    busy_ms: float = Field(ge=0)
    idle_ms: float = Field(ge=0)
    communication_ms: float = Field(ge=0)
    exposed_comm_ms: float = Field(ge=0)
    coverage: Coverage
    rows: list[RangeRow]
    unattributed: list[UnattributedOp]
    """The largest operations behind the `(unattributed)` rows."""
    notes: list[str]


class ReportFile(Strict):
    """A collector's own file, kept beside the table."""

    name: str
    """Path from the folder that holds the record."""
    sha256: str
    num_bytes: int


class VariantTrace(Strict):
    """The traced launch of one variant."""

    outcome: RunOutcome
    message: str = ""
    config_sha: str
    """The same as that of the timed launches; where results go and what is profiled does not enter it."""
    ranks: int
    rank: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    files: list[ReportFile] = Field(default_factory=list)
    table: TraceTable | None = None


class TraceResult(Strict):
    """Both variants of a case, traced one after the other on one machine."""

    schema_version: Literal["trace/1"] = TRACE_VERSION
    trace_id: str = Field(pattern=r"^[0-9a-z]{8,40}$")
    created: str
    case: str
    profile: str
    machine: Machine
    collector: Collector
    collector_version: str
    command: str
    variants: dict[Variant, VariantTrace]
    sha256: str = ""

    @property
    def ok(self) -> bool:
        """Whether every variant gave a table."""
        return all(v.table is not None for v in self.variants.values())


def waterfall(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What makes up the difference between the steps of two tables, in milliseconds, the largest part first; the parts add up to it
    exactly.

    A part is a range without those inside it, over its passes; idle is when nothing ran. Of a sweep, the tables are of two of its variants.
    """
    parts: Counter[str] = Counter()
    for sign, table in ((-1, baseline), (1, candidate)):
        for row in table["rows"]:
            parts[row["path"].rsplit("/", 1)[-1]] += sign * row["self_ms"]
        parts["idle"] += sign * (table["span_ms"] - table["busy_ms"])
    return sorted(((name, ms) for name, ms in parts.items() if ms), key=lambda part: -abs(part[1]))
