"""Loss curves of one model trained by several backends and layouts: how far apart they are, beside repeats of the same run.

One row per run: its way (`run`), which repeat it is, and the loss of every step. All start from the same weights and read the same stream. `gpus` is
named where ranks took one in turns, `weights` is the precision that holds the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from playbook_app.site.text import attribute, text

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
        "A small vision-language model with experts, in bfloat16, from the same weights on the same stream of photographs with questions and answers.",
        "Distance: root mean square of the difference in loss over all steps, the largest of any two such runs. Repeats have the same seed.",
        f"Asked for: at most {ALLOWED:g} times the distance of repeats.",
        "",
    ]
    return intro + [line for found in series.values() for line in _series(found)]


def _series(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One series: a picture, a table, and what its repeats are."""
    within, across = distances(rows)
    first, ways = rows[0], list(dict.fromkeys(str(r["run"]) for r in rows))
    same = [way for way in ways if len(own := [r["loss"] for r in rows if r["run"] == way]) > 1 and all(loss == own[0] for loss in own)]
    if "lr" in first:
        why = "Learning rates of repeats differ by a millionth, as little as the order of a sum does: most ways repeat to the last bit without that."
    elif same:
        why = f"Repeats of {', '.join(map(text, same))} are equal to the last bit; those of the rest differ, since sums are not always added up in one order."
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
        *(f"| {text(names)} | {far:.1e} | {_times(far, within)} |" for names, far in across.items()),
        "",
    ]


def _times(far: float, within: float) -> str:
    return f"{far / within:.2f}" if within else "-"


def figure(rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> str:
    """Every run's loss less the mean of all runs at that step, as a line coloured by its way: the losses themselves would lie on each other."""
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
        out.append(f'<line class="pb-rule" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 8}" y2="{y}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{f"{value:+.3f}" if value else "0"}</text>')
    for row in rows:
        colour = _COLOURS[ways.index(row["run"]) % 8]
        points = " ".join(point(step, value - means[step]) for step, value in enumerate(row["loss"]))
        out.append(f'<polyline fill="none" stroke="var(--pb-part-{colour})" stroke-opacity=".7" points="{points}"/>')
    for number, way in enumerate(ways):
        x = _LEFT + number * (_WIDTH - _LEFT) / len(ways)
        out.append(f'<rect x="{x:.1f}" y="{_HEIGHT - 22}" width="12" height="4" fill="var(--pb-part-{_COLOURS[number % 8]})"/>')
        out.append(f'<text x="{x + 17:.1f}" y="{_HEIGHT - 16}">{attribute(way)}</text>')
    caption = f"Loss of each run less the mean of all runs, step 1 to {steps}; the mean goes from {means[0]:.2f} to {means[-1]:.2f}"
    return f'<figure class="pb-figure">{"".join([*out, "</svg>"])}<figcaption>{caption}</figcaption></figure>'
