"""Small drawings for a cell of a table, as wide as the cell; the cells beside them say the same in words."""

from __future__ import annotations

from collections.abc import Sequence


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
    left, right, zero = ((value - low) / span for value in (min(start, end), max(start, end), 0.0))
    line = f'<line class="pb-zero" x1="{zero:.2%}" x2="{zero:.2%}" y1="0" y2="100%"/>'
    rect = f'<rect class="pb-column" x="{left:.2%}" width="{right - left:.2%}" y="20%" height="60%"/>'
    return f'<svg class="pb-strip" aria-hidden="true">{line}{rect}</svg>'
