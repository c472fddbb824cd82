"""Effects with their intervals against claimed margins, one row each: a table whose middle column is a drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from playbook_app.site.text import NBSP, attribute, badge, percent

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
    axis = _Axis(min(edges) - 0.04 * span, max(edges) + 0.04 * span)
    head = f"<tr><th>Claim</th><th>{axis.labels()}</th><th>Effect [interval]</th><th>Verdict</th></tr>"
    return f'<table class="pb-forest"><thead>{head}</thead><tbody>{"".join(_row(axis, b) for b in drawn)}</tbody></table>'


def _row(axis: _Axis, b: Bar) -> str:
    claimed = "" if b.margin is None else {">=": "at least ", "<=": "at most ", "within": "within "}.get(b.op, "") + _tick(b.margin)
    name = f'<a href="{attribute(b.address)}" title="{attribute(b.statement)}"><b>{attribute(b.claim)}</b> {attribute(b.name)}</a><span class="pb-of">{attribute(b.about)}</span>'
    interval = f"{_short(b.low)}, {_short(b.high)}"
    words = f'{_short(b.effect)} % [{interval}]<span class="pb-of">{attribute(claimed)}</span>'
    return f"<tr><td>{name}</td><td>{axis.draw(b)}</td><td>{words}</td><td>{badge(b.status)}</td></tr>"


def _short(value: float) -> str:
    said = percent(value).removesuffix(NBSP + "%")
    return said.split(".")[0] if abs(value) >= _WHOLE else said


def _bend(value: float) -> float:
    return math.asinh(value / _LINEAR)


@dataclass(frozen=True)
class _Axis:
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


def _region(axis: _Axis, b: Bar) -> str:
    """Where the claim holds."""
    if b.margin is None:
        return ""
    low, high = {">=": (axis.at(b.margin), 1.0), "<=": (0.0, axis.at(b.margin))}.get(
        b.op, (axis.at(1 / (1 + b.margin) - 1), axis.at(b.margin))
    )
    return f'<rect class="pb-holds" x="{low:.2%}" width="{max(0.0, high - low):.2%}" y="0" height="100%"/>'


def _tick(value: float) -> str:
    return "0" if not value else percent(value).replace(".0", "")
