"""Sweeps and interactions: the figures of a curve, for the card and for the page of its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from playbook.records.evidence import Evidence
from playbook.records.read import Record
from playbook.records.table import to_frame
from playbook_app.site.figures.svg import contrasts, curve
from playbook_app.site.text import attribute, code, number, percent, quantity, table, text

_MEMORY = "peak_memory_bytes"


def figures(record: Record) -> str:
    """The measured value and the peak memory of each variant, and the contrasts with their intervals; empty without a curve."""
    found = record.get("derived", "curve")
    if not isinstance(found, Mapping):
        return ""
    unit, metric = str(found.get("unit")), str(found.get("metric"))
    points = [_point(p, unit) for p in _rows(found, "points")]
    drawn = [(curve(points, metric), f"{_label(metric)}, from zero")]
    if metric != _MEMORY:
        memory = [
            (n, value, quantity(value, "bytes") if value else "not measured") for n, value in _memory(record, [n for n, *_ in points])
        ]
        drawn.append((curve(memory, _MEMORY), f"{_label(_MEMORY)}, from zero"))
    if found.get("scale") == "log_ratio":
        drawn.append((contrasts(list(_intervals(found))), "effects"))
    knob = record.get("measured", "case", "content", "knob", default="")
    where = f"{record.machine}, {knob}" if knob else record.machine
    return "\n\n".join(
        f'<figure class="pb-figure">{svg}<figcaption>{attribute(where)}: {attribute(label)}</figcaption></figure>'
        for svg, label in drawn
        if svg
    )


def _intervals(found: Mapping[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    for row in _rows(found, "contrasts"):
        effect, low, high = (_number(row.get(k)) for k in ("effect", "low", "high"))
        if effect is not None and low is not None and high is not None:
            yield str(row.get("name")), effect, low, high


def _label(metric: str) -> str:
    return metric.replace("_", " ")


def tables(record: Record) -> str:
    """The values of a sweep or the cells of an interaction, and the contrasts that the claim's rule looks at."""
    found = record.get("derived", "curve")
    if not isinstance(found, Mapping):
        return ""
    unit, relative = str(found.get("unit")), found.get("scale") == "log_ratio"

    def change(value: object) -> str:
        return "" if not isinstance(value, int | float) else percent(value) if relative else number(value)

    memory = dict(_memory(record, [str(p.get("variant")) for p in _rows(found, "points")]))
    points = [
        [
            code(p.get("variant")),
            quantity(p.get("value"), unit) if p.get("outcome") == "ok" else text(p.get("outcome")),
            change(p.get("effect")),
            quantity(value, "bytes") if (value := memory.get(str(p.get("variant")))) else "",
        ]
        for p in _rows(found, "points")
    ]
    compared = [[text(c.get("name")), *(change(c.get(k)) for k in ("effect", "low", "high"))] for c in _rows(found, "contrasts")]
    stopped = ", between looks" if found.get("design") != "deterministic" and found.get("look") is None else ""
    note = f"{code(found.get('metric'))}, {text(found.get('better'))} is better; {number(found.get('blocks'))} blocks{stopped}."
    parts = [note, table(["Variant", "Value>", "Against the first>", "Peak memory>"], points)]
    return "\n\n".join([*parts, *([table(["Contrast", "Gain>", "from>", "to>"], compared)] if compared else [])])


def _rows(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [r for r in found.get(key) or [] if isinstance(r, Mapping)]


def _point(point: Mapping[str, Any], unit: str) -> tuple[str, float | None, str]:
    value = point.get("value")
    if point.get("outcome") == "ok" and isinstance(value, int | float):
        return str(point.get("variant")), float(value), quantity(value, unit)
    return str(point.get("variant")), None, {"oom": "out of memory"}.get(str(point.get("outcome")), str(point.get("outcome")))


def _memory(record: Record, variants: list[str]) -> list[tuple[str, float | None]]:
    """The most device memory that any launch of a variant allocated."""
    launches = to_frame([record.content]) if isinstance(record.content, Evidence) else None
    if launches is None or f"metric.{_MEMORY}" not in launches:
        return [(v, None) for v in variants]
    most = launches.groupby("variant")[f"metric.{_MEMORY}"].max()
    return [(v, float(most[v]) if most.get(v, 0.0) > 0 else None) for v in variants]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
