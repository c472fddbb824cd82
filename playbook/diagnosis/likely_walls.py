"""Which wall a step runs into: from the planner's breakdown of a plan, what its reader saw, or a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from playbook.diagnosis import seen as sight
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import StepTime, step_time

_LEAST = 0.01
"""A share under this is not told by its name."""


@dataclass(frozen=True)
class Wall:
    """A share of the step, predicted or traced; None where nothing tells. `beyond`: above the threshold from which on it is worth work."""

    name: str
    share: float | None
    threshold: float
    sign: str

    @property
    def beyond(self) -> bool:
        """Whether the share is above its threshold."""
        return self.share is not None and self.share > self.threshold


@dataclass(frozen=True)
class _Kind:
    """How a wall is known: the parts of a predicted step, the share of a trace, the least share that counts, and its sign."""

    parts: tuple[str, ...]
    traced: str
    threshold: float
    sign: str


_KINDS: Mapping[str, _Kind] = {
    "host-bound": _Kind(("host",), "host_idle", 0.10, "the GPU is idle until the next kernel is launched"),
    "exposed communication": _Kind(("tp", "ep", "cp", "pp", "dp"), "exposed", 0.15, "collectives run and nothing is computed beside them"),
    "data wait": _Kind((), "data_wait", 0.10, "the GPU is idle while the host fetches a batch"),
    "idle of unknown cause": _Kind(
        (), "unknown_idle", 0.10, "the GPU is idle though the next kernel was launched, or its launch is not in the trace"
    ),
    "bubble": _Kind(
        ("bubble",), "", 0.05, "the first and the last stage are idle at the ends of a step; more micro-batches make tokens faster"
    ),
    "stragglers": _Kind(("stragglers",), "", 0.10, "the same collective takes longer on some ranks: trace two of them"),
    "memory": _Kind((), "", 0.05, "layers are computed again in the backward pass, or state travels to the host, so that the run fits"),
    "memory-bound kernels": _Kind(("elementwise", "optimizer"), "", 0.25, "most kernels move bytes and multiply nothing"),
    "compute-bound": _Kind(("products", "grouped", "attention"), "", 1.0, "products and attention fill the step"),
}
"""The thresholds of what a trace shows are those of `playbook bench trace --file`; a predicted share is held against the same."""


def predicted(time: StepTime, plan: Plan, cluster: Cluster, shares_seen: Mapping[str, float] = MappingProxyType({})) -> list[Wall]:
    """The walls of a plan, the largest that count first; what was `seen` goes before what is predicted. What the host fetches is not
    predicted.
    """
    parts = sight.composition(time.parts, shares_seen)
    shares = {name: sum(parts.get(p, 0.0) for p in kind.parts) for name, kind in _KINDS.items() if kind.parts}
    lean = sight.changed(parts, time.parts, step_time(_lean(plan), cluster).parts)
    shares["memory"] = max(0.0, sum(parts.values()) - sum(lean.values()))
    seen_walls = sight.walls(shares_seen)
    return _ordered(
        {name: max(seen_walls[name], shares.get(name, 0.0)) if name in seen_walls else shares.get(name) for name in _KINDS}, shares_seen
    )


def only(shares_seen: Mapping[str, float]) -> list[Wall]:
    """The walls that were seen, of a run of which nothing is predicted."""
    return _ordered(sight.walls(shares_seen), shares_seen)


def traced(trace: Mapping[str, Any]) -> list[Wall]:
    """The walls of a trace as `playbook bench trace --file FILE --json` gives them."""
    shares = {name: trace.get(kind.traced) for name, kind in _KINDS.items() if kind.traced}
    shares["compute-bound"] = trace["computing"]
    return _ordered(shares, sight.of_trace(trace))


def _ordered(shares: Mapping[str, float | None], shares_seen: Mapping[str, float]) -> list[Wall]:
    """Those beyond their thresholds first, each by its share; what nothing tells last."""
    walls = [Wall(name, share, _KINDS[name].threshold, f"{_KINDS[name].sign}{_of_it(name, shares_seen)}") for name, share in shares.items()]
    return sorted(walls, key=lambda w: (not w.beyond, w.share is None, -(w.share or 0.0)))


def _of_it(wall: str, shares_seen: Mapping[str, float]) -> str:
    """What was seen of a wall under names of its own, the largest first."""
    named = {
        name: share for name, share in shares_seen.items() if sight.KINDS[name].wall == wall and name != "communication" and share >= _LEAST
    }
    listed = ", ".join(f"{name} {share:.0%}" for name, share in sorted(named.items(), key=lambda n: -n[1]))
    return f" (seen: {listed})" if listed else ""


def _lean(plan: Plan) -> Plan:
    """The plan with nothing computed again and nothing on the host, whether it fits or not."""
    return replace(plan, options=replace(plan.options, recompute=(), optimizer_offload=0, offload=False, offload_modules=()))
