"""The page of published runs: how fast others were, by hardware and precision, and every run in a table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from playbook.planner.runs.published import link
from playbook_app.site.figures.strips import dots
from playbook_app.site.pages import markdown, render
from playbook_app.site.text import attribute, number, text

_ASKED = 25.0
"""The MFU that the ladder marks, in percent: what a slow run often is at."""
_FEWEST = 5
"""Runs that a step of the ladder needs."""
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
Row = Mapping[str, str]


def published_page(path: Path) -> str:
    """The runs of a table as `playbook plan check` reads it."""
    with path.open(encoding="utf-8", newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["status"] == "ok"]
    speeds = [row for row in rows if row["tokens_per_s_per_gpu"] or row["mfu_pct"]]
    models, hardware = (sorted({row[k] for row in speeds}) for k in ("model", "hardware"))
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {h: h for h in hardware})}
    return render(
        "published.md",
        asked=number(_ASKED),
        ladder=markdown(_ladder(rows)),
        choices=choices,
        rows=[_run(row) for row in sorted(speeds, key=_order)],
    )


def _order(row: Row) -> tuple[str, str, int, float]:
    return row["model"], row["hardware"], int(row["gpus"] or 0), -float(row["mfu_pct"] or 0)


def _kind(row: Row) -> str:
    sparse = row["params_active_B"] and float(row["params_active_B"]) < 0.9 * float(row["params_total_B"] or 0)
    return "mixture of experts" if sparse else "dense"


def _ladder(rows: Sequence[Row]) -> str:
    """A step for each kind of model, hardware and precision with enough runs, the highest median first."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["mfu_pct"] and row["task"].startswith("pretrain"):
            groups.setdefault((_kind(row), row["hardware"], row["precision"]), []).append(float(row["mfu_pct"]))
    steps = sorted(((name, sorted(v)) for name, v in groups.items() if len(v) >= _FEWEST), key=lambda s: -median(s[1]))
    most = 1.05 * max((v[-1] for _, v in steps), default=1.0)
    lines = "".join(_step(name, values, most) for name, values in steps)
    head = f"<tr><th>Runs</th><th>MFU, 0 to {most:.0f} %</th><th>Lowest, median, highest</th><th>At {_ASKED:.0f} % or above</th></tr>"
    return f'<table class="pb-forest"><thead>{head}</thead><tbody>{lines}</tbody></table>' if steps else ""


def _step(name: tuple[str, str, str], values: Sequence[float], most: float) -> str:
    kind, hardware, precision = map(attribute, name)
    above = sum(v >= _ASKED for v in values)
    words = f"{values[0]:.0f}, {median(values):.0f}, {values[-1]:.0f} %"
    return (
        f"<tr><td><b>{hardware} {precision}</b>, {kind}</td><td>{dots(values, most, _ASKED)}</td><td>{words}</td>"
        f"<td>{above} of {len(values)}</td></tr>"
    )


def _run(row: Row) -> list[str]:
    words = " ".join([row["id"], row["model"], row["hardware"], row["precision"], row["dispatcher"]]).lower()
    page = link(row["source_group"], row.get("source", ""))
    source = f"[{text(row['source_group'])}]({page})" if page else text(row["source_group"])
    marks = f'#{attribute(row["id"])} data-text="{attribute(words)}" data-model="{attribute(row["model"])}" data-platform="{attribute(row["hardware"])}"'
    layout = " ".join(f"{k} {row[k]}" for k in _DEGREES if row[k] not in ("", "1"))
    return [
        f'{text(row["model"])}<br><span class="pb-of">{text(row["id"])}, {text(row["task"])}, {source} {text(row["release_or_date"])}</span> {{ {marks} }}',
        text(f"{row['gpus']} {row['hardware']}".strip()),
        text(row["precision"]),
        _cell(row["seq_len"], "tokens a row"),
        text(layout or "data parallel"),
        _cell(row["tokens_per_s_per_gpu"], "tokens/s per GPU"),
        _cell(row["mfu_pct"], "MFU, %"),
    ]


def _cell(value: str, label: str) -> str:
    return f'{number(float(value))} {{ data-label="{label}" }}' if value else ""
