"""Where the time of a step went between two traces: by class of operation and cause of idle time, which together are the whole step."""

from __future__ import annotations

from dataclasses import dataclass

from playbook_bench.trace.walls import Walls

_IDLE = {"idle for the host": "host_idle", "idle for data": "data_wait", "idle of unknown cause": "unknown_idle"}
_NAMED = 3
_LEAST = 0.05
"""Of the largest part of a difference: what is smaller is not named in the sentence."""


@dataclass(frozen=True)
class Part:
    """One class of operations, or one cause of idle time. Units: milliseconds of a step; operations of a step."""

    name: str
    before_ms: float
    after_ms: float
    change_ms: float
    before_count: float
    after_count: float


@dataclass(frozen=True)
class Difference:
    """Two steps; the parts add up to them, the largest change first."""

    sentence: str
    before_ms: float
    after_ms: float
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def difference(before: Walls, after: Walls) -> Difference:
    """What changed from one trace to the other."""
    first, second = _parts(before), _parts(after)
    parts = []
    for name in {**first, **second}:
        (ms, count), (then_ms, then_count) = (side.get(name, (0.0, 0.0)) for side in (first, second))
        parts.append(Part(name, ms, then_ms, then_ms - ms, count, then_count))
    parts.sort(key=lambda p: -abs(p.change_ms))
    notes = [f"{which}: {note}" for which, w in (("before", before), ("after", after)) for note in w.notes]
    return Difference(_sentence(before, after, parts), before.span_ms, after.span_ms, tuple(parts), tuple(notes))


def _parts(walls: Walls) -> dict[str, tuple[float, float]]:
    """Time and number of operations by class, and idle time by cause, that no two share."""
    parts = {c.name: (c.ms, c.count) for c in walls.classes}
    causes = {name: share for name, key in _IDLE.items() if (share := getattr(walls, key))}
    left = max(0.0, walls.idle - sum(causes.values()))
    if left * walls.span_ms > 1e-6:
        causes["idle"] = left
    return parts | {name: (share * walls.span_ms, 0.0) for name, share in causes.items()}


def _sentence(before: Walls, after: Walls, parts: list[Part]) -> str:
    change = after.span_ms - before.span_ms
    most = max((abs(p.change_ms) for p in parts), default=0.0)
    named = [f"{p.name} {p.change_ms:+.2f}" for p in parts[:_NAMED] if p.change_ms and abs(p.change_ms) >= _LEAST * most]
    kind = "longer" if change > 0 else "shorter"
    took = f"The step takes {abs(change):.2f} ms ({change / before.span_ms:+.1%}) {kind}: {before.span_ms:.2f} to {after.span_ms:.2f} ms"
    return f"{took}; in ms, {', '.join(named)}." if named else f"{took}."
