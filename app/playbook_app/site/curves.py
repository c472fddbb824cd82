"""Figures of measurements: curves of sweeps, effects with their intervals against margins, loss curves of several backends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from playbook.records.evidence import Curve, Evidence, PointFigure
from playbook.records.read import Record
from playbook_app.site.svg import contrasts, curve
from playbook_app.site.text import NBSP, attribute, badge, code, number, percent, quantity, table, text

_MEMORY = "peak_memory_bytes"


def figures(record: Record) -> str:
    """The measured value and the peak memory of each variant, and the contrasts with their intervals; empty without a curve."""
    found = _curve(record)
    if found is None:
        return ""
    points = [_point(p, found.unit) for p in found.points]
    drawn = [(curve(points, found.metric), f"{_label(found.metric)}, from zero")]
    if found.metric != _MEMORY:
        memory = [(n, value, quantity(value, "bytes") if value else "not measured") for n, value in _memory(record, found).items()]
        drawn.append((curve(memory, _MEMORY), f"{_label(_MEMORY)}, from zero"))
    if found.scale == "log_ratio":
        bounded = [
            (c.name, c.effect, c.low, c.high) for c in found.contrasts if c.effect is not None and c.low is not None and c.high is not None
        ]
        drawn.append((contrasts(bounded), "effects"))
    knob = record.get("measured", "case", "content", "knob", default="")
    where = f"{record.machine}, {knob}" if knob else record.machine
    return "\n\n".join(
        f'<figure class="pb-figure">{svg}<figcaption>{attribute(where)}: {attribute(label)}</figcaption></figure>'
        for svg, label in drawn
        if svg
    )


def _curve(record: Record) -> Curve | None:
    return record.content.derived.curve if isinstance(record.content, Evidence) else None


def _label(metric: str) -> str:
    return metric.replace("_", " ")


def tables(record: Record) -> str:
    """The values of a sweep or the cells of an interaction, and the contrasts that the claim's rule looks at."""
    found = _curve(record)
    if found is None:
        return ""
    shown = percent if found.scale == "log_ratio" else number

    def change(value: float | None) -> str:
        return "" if value is None else shown(value)

    memory = _memory(record, found)
    points = [
        [
            code(p.variant),
            quantity(p.value, found.unit) if p.outcome == "ok" else text(p.outcome),
            change(p.effect),
            quantity(value, "bytes") if (value := memory[p.variant]) else "",
        ]
        for p in found.points
    ]
    compared = [[text(c.name), change(c.effect), change(c.low), change(c.high)] for c in found.contrasts]
    stopped = ", between looks" if found.design != "deterministic" and found.look is None else ""
    note = f"{code(found.metric)}, {text(found.better)} is better; {number(found.blocks)} blocks{stopped}."
    parts = [note, table(["Variant", "Value>", "Against the first>", "Peak memory>"], points)]
    return "\n\n".join([*parts, *([table(["Contrast", "Gain>", "from>", "to>"], compared)] if compared else [])])


def _point(point: PointFigure, unit: str) -> tuple[str, float | None, str]:
    if point.outcome == "ok" and point.value is not None:
        return point.variant, point.value, quantity(point.value, unit)
    return point.variant, None, "out of memory" if point.outcome == "oom" else point.outcome


def _memory(record: Record, found: Curve) -> dict[str, float | None]:
    """The most device memory that any launch of each variant allocated."""
    variants = [p.variant for p in found.points]
    return {v: max((r.metrics.get(_MEMORY) or 0.0 for r in record.runs if r.variant == v), default=0.0) or None for v in variants}


ALLOWED = 2.0
"""The largest distance allowed between two ways of training, as a multiple of the distance between repeats of one."""
WANTED = ("run", "repeat", "ranks", "loss", "torch", "megatron")

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 260, 52, 12, 216
_COLOURS = (1, 6, 5, 4, 7, 2, 3, 8)
"""Numbers of the style sheet's colours, those that are easiest to tell apart first."""


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square of the difference of two losses, over the steps; infinite where one of them is no number."""
    assert len(a) == len(b), f"curves of {len(a)} and {len(b)} steps"
    far = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
    return far if math.isfinite(far) else math.inf


def distances(rows: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """The largest distance between repeats of one way, and for each two ways the largest between their runs."""
    within, across = 0.0, dict[str, float]()
    for a, b in combinations(sorted(rows, key=lambda r: (r["run"], r["repeat"])), 2):
        far = distance(a["loss"], b["loss"])
        if a["run"] == b["run"]:
            within = max(within, far)
        else:
            names = f"{a['run']} and {b['run']}"
            across[names] = max(across.get(names, 0.0), far)
    return within, across


def series_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a series: runs with equal keys may be compared."""
    return row["ranks"], row.get("gpus", row["ranks"]), row["torch"], row["megatron"], "lr" in row


def section(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section of the parity page on loss curves, one part for each series; empty without rows."""
    series: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(series_of(row), []).append(row)
    if not series:
        return []
    intro = [
        "## Training side by side",
        "",
        "A small vision-language model with experts, in bfloat16, from the same weights on the same stream of photographs with"
        " questions and answers.",
        "Distance: root mean square of the difference in loss over all steps, the largest of any two such runs. Repeats have the same"
        " seed.",
        f"Asked for: at most {ALLOWED:g} times the distance of repeats.",
        "",
    ]
    return intro + [line for rows_of_series in series.values() for line in _series(rows_of_series)]


def _series(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One series: a picture, a table, and what its repeats are."""
    within, across = distances(rows)
    first, ways = rows[0], list(dict.fromkeys(str(r["run"]) for r in rows))
    equal_repeats = [
        way for way in ways if len(losses := [r["loss"] for r in rows if r["run"] == way]) > 1 and all(loss == losses[0] for loss in losses)
    ]
    if "lr" in first:
        why = (
            "Learning rates of repeats differ by a millionth, as little as the order of a sum does: most ways repeat to the last bit"
            " without that."
        )
    elif equal_repeats:
        why = (
            f"Repeats of {', '.join(map(text, equal_repeats))} are equal to the last bit; those of the rest differ, since sums are not"
            " always added up in one order."
        )
    else:
        why = "Repeats differ because sums on a GPU are not always added up in the same order."
    gpus = first.get("gpus", first["ranks"])
    where = f"on {gpus} GPUs" if gpus == first["ranks"] else f"by {first['ranks']} ranks in turns on one GPU"
    if "weights" not in first:
        why += " Made before both backends began with the same 32-bit weights, and with Megatron-FSDP's gradients in 16 bits."
    return [
        f"### {len(first['loss'])} steps {where}" + (", rates a millionth apart" if "lr" in first else ""),
        "",
        f"{len(rows)} runs. torch {text(first['torch'])}, megatron-core {text(first['megatron'])}. {why}",
        "",
        figure(rows, ways),
        "",
        "| runs | distance | in distances of repeats |",
        "| --- | --: | --: |",
        f"| repeats of one way | {within:.1e} | 1 |",
        *(f"| {text(names)} | {far:.1e} | {f'{far / within:.2f}' if within else '-'} |" for names, far in across.items()),
        "",
    ]


def figure(rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> str:
    """Every run's loss less the mean of all runs at that step, as a line coloured by its way: the losses themselves would lie on each
    other.
    """
    curves = [row["loss"] for row in rows]
    if not all(math.isfinite(v) for loss in curves for v in loss):
        return ""
    means = [math.fsum(at) / len(curves) for at in zip(*curves, strict=True)]
    steps, high = len(means), max(abs(v - m) for loss in curves for v, m in zip(loss, means, strict=True)) or 1.0

    def point(step: int, value: float) -> str:
        x = _LEFT + step / max(steps - 1, 1) * (_WIDTH - _LEFT - 8)
        return f"{x:.1f},{_BOTTOM - (value + high) / (2 * high) * (_BOTTOM - _TOP):.1f}"

    words = f"Difference from the mean loss over {steps} steps, at most {high:.3f}: " + ", ".join(ways)
    out = [f'<svg class="pb-losses" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{attribute(words)}">']
    for value in (-high, 0.0, high):
        y = point(0, value).split(",")[1]
        out += [
            f'<line class="pb-rule" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 8}" y2="{y}"/>',
            f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{f"{value:+.3f}" if value else "0"}</text>',
        ]
    for row in rows:
        colour = _COLOURS[ways.index(row["run"]) % 8]
        points = " ".join(point(step, value - means[step]) for step, value in enumerate(row["loss"]))
        out.append(f'<polyline fill="none" stroke="var(--pb-part-{colour})" stroke-opacity=".7" points="{points}"/>')
    for position, way in enumerate(ways):
        x = _LEFT + position * (_WIDTH - _LEFT) / len(ways)
        out += [
            f'<rect x="{x:.1f}" y="{_HEIGHT - 22}" width="12" height="4" fill="var(--pb-part-{_COLOURS[position % 8]})"/>',
            f'<text x="{x + 17:.1f}" y="{_HEIGHT - 16}">{attribute(way)}</text>',
        ]
    caption = f"Loss of each run less the mean of all runs, step 1 to {steps}; the mean goes from {means[0]:.2f} to {means[-1]:.2f}"
    return f'<figure class="pb-figure">{"".join([*out, "</svg>"])}<figcaption>{caption}</figcaption></figure>'


_LINEAR = 0.1
"""Effects are drawn in proportion up to about this share, and by their logarithm beyond it."""
_TICKS = (-0.9, -0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 30.0)
_WHOLE = 10.0
"""Effects from here on are said without decimals."""
_ROOM = 0.27
"""Least distance of two labels, as a share of the axis."""


@dataclass(frozen=True)
class Bar:
    """One measured effect. Shares of the baseline, positive where the candidate is better."""

    claim: str
    name: str
    """What is compared, such as `pack: off → on`."""
    about: str
    """The title of its card."""
    statement: str
    address: str
    effect: float
    low: float
    high: float
    margin: float | None
    op: str
    status: str


def forest(bars: Sequence[Bar]) -> str:
    """The rows as an HTML table, largest effect first; empty without any. Its text says all that is drawn."""
    drawn = sorted((b for b in bars if all(map(math.isfinite, (b.effect, b.low, b.high)))), key=lambda b: -b.effect)
    if not drawn:
        return ""
    edges = [_bend(v) for b in drawn for v in (b.low, b.high, 0.0, b.effect if b.margin is None else b.margin)]
    span = max(edges) - min(edges) or 1.0
    axis = _EffectAxis(min(edges) - 0.04 * span, max(edges) + 0.04 * span)
    head = f"<tr><th>Claim</th><th>{axis.labels()}</th><th>Effect [interval]</th><th>Verdict</th></tr>"
    return f'<table class="pb-forest"><thead>{head}</thead><tbody>{"".join(_row(axis, b) for b in drawn)}</tbody></table>'


def _row(axis: _EffectAxis, b: Bar) -> str:
    claimed = "" if b.margin is None else {">=": "at least ", "<=": "at most ", "within": "within "}.get(b.op, "") + _tick(b.margin)
    name = (
        f'<a href="{attribute(b.address)}" title="{attribute(b.statement)}"><b>{attribute(b.claim)}</b> {attribute(b.name)}</a>'
        f'<span class="pb-of">{attribute(b.about)}</span>'
    )
    interval = f"{_short(b.low)}, {_short(b.high)}"
    words = f'{_short(b.effect)} % [{interval}]<span class="pb-of">{attribute(claimed)}</span>'
    return f"<tr><td>{name}</td><td>{axis.draw(b)}</td><td>{words}</td><td>{badge(b.status)}</td></tr>"


def _short(value: float) -> str:
    shown = percent(value).removesuffix(NBSP + "%")
    return shown.split(".")[0] if abs(value) >= _WHOLE else shown


def _bend(value: float) -> float:
    return math.asinh(value / _LINEAR)


@dataclass(frozen=True)
class _EffectAxis:
    left: float
    right: float

    def at(self, value: float) -> float:
        """The place of an effect, as a share of the width."""
        return (_bend(value) - self.left) / (self.right - self.left)

    def _line(self, name: str, start: float, end: float, y1: str, y2: str) -> str:
        return f'<line class="{name}" x1="{start:.2%}" x2="{end:.2%}" y1="{y1}" y2="{y2}"/>'

    def draw(self, b: Bar) -> str:
        zero = self.at(0.0)
        parts = [_region(self, b), self._line("pb-zero", zero, zero, "0", "100%")]
        if b.margin is not None:
            parts.append(self._line("pb-margin", self.at(b.margin), self.at(b.margin), "0", "100%"))
        parts.append(self._line("pb-interval", self.at(b.low), self.at(b.high), "50%", "50%"))
        parts.append(f'<circle class="pb-effect" cx="{self.at(b.effect):.2%}" cy="50%" r="4"/>')
        return f'<svg class="pb-strip pb-on-{attribute(b.status)}" aria-hidden="true">{"".join(parts)}</svg>'

    def labels(self) -> str:
        """The scale, with as many labels as have room; zero always has one."""
        places: list[tuple[float, float]] = []
        for value in sorted(_TICKS, key=lambda t: (abs(t) > 0, -abs(t))):
            at = self.at(value)
            if (not value or 0.13 < at < 0.87) and all(abs(at - other) >= _ROOM for other, _ in places):
                places.append((at, value))
        words = "".join(
            f'<text x="{at:.2%}" y="12" text-anchor="{"start" if at < 0.07 else "end" if at > 0.9 else "middle"}">{_tick(value)}</text>'
            for at, value in sorted(places)
        )
        return f'<svg class="pb-strip" aria-hidden="true">{words}</svg>'


def _region(axis: _EffectAxis, b: Bar) -> str:
    """Where the claim holds."""
    if b.margin is None:
        return ""
    low, high = {">=": (axis.at(b.margin), 1.0), "<=": (0.0, axis.at(b.margin))}.get(
        b.op, (axis.at(1 / (1 + b.margin) - 1), axis.at(b.margin))
    )
    return f'<rect class="pb-holds" x="{low:.2%}" width="{max(0.0, high - low):.2%}" y="0" height="100%"/>'


def _tick(value: float) -> str:
    return "0" if not value else percent(value).replace(".0", "")
