"""Figures as inline SVG: drawn from records, coloured by the page's own style sheet, readable without a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from playbook.records.evidence import Run
from playbook_app.site.text import attribute, percent

_WIDTH = 720
_MAX_POINTS = 80
_LABEL = {"burn_in": "burn-in", "aa": "A/A", "measure": ""}


def effect_axis(effect: float, low: float, high: float, margin: float | None, op: str) -> str:
    """The effect with its interval against the claimed margin: shares of the baseline, positive where the candidate is better."""
    claimed, bound = [] if margin is None else [margin], {">=": "at least ", "<=": "at most "}.get(op, "")
    if op == "within" and margin is not None:
        claimed.append(1 / (1 + margin) - 1)  # the band is one of logarithms: as much slower as it is faster above
    edges = [0.0, low, high, *claimed]
    if not all(math.isfinite(e) for e in [effect, *edges]):
        return ""
    span = max(edges) - min(edges) or 0.01
    least, most = min(edges) - 0.12 * span, max(edges) + 0.12 * span

    def x(value: float) -> str:
        return f"{40 + (value - least) / (most - least) * (_WIDTH - 80):.1f}"

    words = f"effect {percent(effect)}, interval {percent(low)} to {percent(high)}"
    out = [
        f'<svg class="pb-axis" viewBox="0 0 {_WIDTH} 98" role="img" aria-label="{attribute(words)}">',
        f'<line class="pb-rule" x1="40" y1="40" x2="{_WIDTH - 40}" y2="40"/>',
        _mark(x(0.0), "pb-zero", "no difference", 72),
        *(_mark(x(value), "pb-margin", f"claim: {bound}{percent(value)}", 16) for value in claimed if value),
        f'<line class="pb-interval" x1="{x(low)}" y1="40" x2="{x(high)}" y2="40"/>',
        f'<circle class="pb-effect" cx="{x(effect)}" cy="40" r="5"/>',
        _label(x(effect), f"measured {percent(effect)}", 93),
        "</svg>",
    ]
    return "".join(out)


def _mark(x: str, name: str, label: str, y: int) -> str:
    return f'<line class="{name}" x1="{x}" y1="26" x2="{x}" y2="54"/>{_label(x, label, y)}'


def _label(x: str, label: str, y: int) -> str:
    anchor = "start" if float(x) < 120 else "end" if float(x) > _WIDTH - 120 else "middle"
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{attribute(label)}</text>'


def samples(runs: Sequence[Run]) -> str:
    """Seconds of every timed step, launch by launch in the order in which they ran; the bar is a launch's mean."""
    series = [(run, [s.seconds for s in run.samples if s.timed]) for run in sorted(runs, key=lambda r: r.position)]
    values = [v for _, s in series for v in s]
    if not values:
        return ""
    height, axis_px, bottom = 220, 64, 180
    low, high = min(values), max(values)
    pad = (high - low) * 0.08 or high * 0.05 or 1.0
    low, high = max(0.0, low - pad), high + pad
    column = (_WIDTH - axis_px - 8) / len(series)

    def y(value: float) -> str:
        return f"{bottom - (value - low) / (high - low) * (bottom - 12):.1f}"

    out = [f'<svg class="pb-samples" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="milliseconds per step, by launch">']
    for value in (low + (high - low) * f for f in (0.0, 0.5, 1.0)):
        out += [
            f'<line class="pb-rule" x1="{axis_px}" y1="{y(value)}" x2="{_WIDTH - 8}" y2="{y(value)}"/>',
            f'<text x="{axis_px - 6}" y="{float(y(value)) + 4:.1f}" text-anchor="end">{value * 1000:.4g} ms</text>',
        ]
    out += [_launch(run, seconds, axis_px + i * column, column, y, bottom) for i, (run, seconds) in enumerate(series)]
    return "".join([*out, "</svg>"])


def _launch(run: Run, seconds: Sequence[float], at: float, column: float, y: Any, bottom: int) -> str:
    """One launch: a dot for each of its steps, a line at their mean, and its letter and role below."""
    variant = "candidate" if run.variant == "candidate" else "baseline"
    aside = "" if run.role == "measure" else " pb-aside"
    shown = seconds[:: max(1, math.ceil(len(seconds) / _MAX_POINTS))]
    step = column * 0.7 / max(1, len(shown))
    first = at + column * 0.15 + step / 2
    dots = "".join(f'<circle cx="{first + j * step:.1f}" cy="{y(v)}" r="2"/>' for j, v in enumerate(shown))
    mean = (
        f'<line x1="{at + column * 0.12:.1f}" y1="{y(fmean(seconds))}" x2="{at + column * 0.88:.1f}" y2="{y(fmean(seconds))}"/>'
        if seconds
        else ""
    )
    middle = f"{at + column / 2:.1f}"
    letter = "B" if variant == "candidate" else "A"
    role = _LABEL[run.role]
    label = f'<text x="{middle}" y="{bottom + 16}" text-anchor="middle">{letter}</text>'
    below = f'<text class="pb-small" x="{middle}" y="{bottom + 30}" text-anchor="middle">{role}</text>' if role else ""
    return f'<g class="pb-{variant}{aside}">{dots}{mean}{label}{below}</g>'


def curve(points: Sequence[tuple[str, float | None, str]], label: str) -> str:
    """A value for each variant of a sweep, in its order, joined by a line; a variant without one says why instead.

    `points` are name, value and the value in words (or the reason why there is none).
    """
    values = [v for _, v, _ in points if v is not None]
    if not values or not all(math.isfinite(v) for v in values):
        return ""
    height, top, bottom = 168, 34, 140
    most = max(values) or 1.0
    column = (_WIDTH - 40) / len(points)

    def at(i: int, value: float) -> tuple[float, float]:
        return 20 + (i + 0.5) * column, bottom - value / most * (bottom - top)

    words = f"{label}: " + ", ".join(f"{name} {shown}" for name, _, shown in points)
    places = [at(i, v) for i, (_, v, _) in enumerate(points) if v is not None]
    out = [
        f'<svg class="pb-curve" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{attribute(words)}">',
        f'<line class="pb-rule" x1="20" y1="{bottom}" x2="{_WIDTH - 20}" y2="{bottom}"/>',
        f'<polyline class="pb-path" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>',
    ]
    for i, (name, value, shown) in enumerate(points):
        x, y = at(i, value if value is not None else 0.0)
        out += [
            f'<circle class="pb-effect" cx="{x:.1f}" cy="{y:.1f}" r="5"/>' if value is not None else "",
            f'<text x="{x:.1f}" y="{y - 12:.1f}" text-anchor="middle">{attribute(shown)}</text>',
            f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{attribute(name)}</text>',
        ]
    return "".join([*out, "</svg>"])


def contrasts(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Effects with their intervals on one axis: name, effect, low and high, as shares of the value compared with."""
    edges = [0.0, *(v for _, *values in rows for v in values)]
    if not rows or not all(math.isfinite(e) for e in edges):
        return ""
    span, line, axis_px = max(edges) - min(edges) or 0.01, 26, 170
    height = line * len(rows) + 34

    def x(value: float) -> str:
        return f"{axis_px + (value - min(edges)) / span * (_WIDTH - axis_px - 90):.1f}"

    words = "; ".join(f"{n}: {percent(e)}, interval {percent(a)} to {percent(b)}" for n, e, a, b in rows)
    out = [
        f'<svg class="pb-contrasts" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{attribute(words)}">',
        f'<line class="pb-zero" x1="{x(0.0)}" y1="8" x2="{x(0.0)}" y2="{height - 22}"/>',
        f'<text x="{x(0.0)}" y="{height - 8}" text-anchor="middle">no difference</text>',
    ]
    for i, (name, effect, low, high) in enumerate(rows):
        y = line * i + 20
        out += [
            f'<text x="{axis_px - 14}" y="{y + 4}" text-anchor="end">{attribute(name)}</text>',
            f'<line class="pb-interval" x1="{x(low)}" y1="{y}" x2="{x(high)}" y2="{y}"/>',
            f'<circle class="pb-effect" cx="{x(effect)}" cy="{y}" r="5"/>',
            f'<text x="{float(x(high)) + 12:.1f}" y="{y + 4}">{percent(effect)}</text>',
        ]
    return "".join([*out, "</svg>"])


def dots(values: Sequence[float], most: float, mark: float) -> str:
    """Values on an axis from zero to `most`, with a line at `mark`."""
    line = f'<line class="pb-zero" x1="{mark / most:.2%}" x2="{mark / most:.2%}" y1="0" y2="100%"/>'
    drawn = "".join(f'<circle class="pb-dot" cx="{min(v / most, 1):.2%}" cy="50%" r="4"/>' for v in values)
    return f'<svg class="pb-strip" aria-hidden="true">{line}{drawn}</svg>'


def bars(values: Sequence[float], capacity: float) -> str:
    """One column for each value; the top edge is the capacity."""
    width = 100 / len(values)
    columns = "".join(
        f'<rect class="pb-column" x="{i * width + 0.1 * width:.2f}%" width="{0.8 * width:.2f}%" y="{1 - min(v / capacity, 1):.2%}"'
        f' height="{min(v / capacity, 1):.2%}"/>'
        for i, v in enumerate(values)
    )
    return f'<svg class="pb-strip pb-stages" aria-hidden="true">{columns}<line class="pb-margin" x1="0" x2="100%" y1="0.5" y2="0.5"/></svg>'


def part(start: float, end: float, low: float, high: float) -> str:
    """One bar of a waterfall: from where the parts before it end to where it ends, on an axis from `low` to `high`."""
    span = high - low or 1.0
    least, most, zero = ((value - low) / span for value in (min(start, end), max(start, end), 0.0))
    line = f'<line class="pb-zero" x1="{zero:.2%}" x2="{zero:.2%}" y1="0" y2="100%"/>'
    rect = f'<rect class="pb-column" x="{least:.2%}" width="{most - least:.2%}" y="20%" height="60%"/>'
    return f'<svg class="pb-strip" aria-hidden="true">{line}{rect}</svg>'
