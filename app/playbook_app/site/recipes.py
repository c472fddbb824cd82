"""The page of recipes: what each configuration file stands for, whether it fits, and how to run it or carry it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.planner.memory import TIGHT
from playbook_app.site.pages import render
from playbook_app.site.shelf import TARGETS
from playbook_app.site.text import link, mapping, number, text


def recipes_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every recipe: an overview, then a section each."""
    cells = [
        [
            link(text(row["title"]), f"#{anchor(row['path'])}"),
            f"{text(row['model'])}<br>{text(row['backend'])}",
            mapping(row["layout"]) if row["layout"] else "data parallel",
            "<br>".join(number(n) for n in row["gpus"]),
            text(row["hardware"]),
            "<br>".join(_peak(row["peaks_gib"][n], row["memory_gib"]) for n in row["gpus"]),
            f"{row['memory_gib']:.0f}",
        ]
        for row in rows
    ]
    return render("recipes.md", overview=cells, recipes=rows, anchor=anchor, commands=_commands, targets=list(TARGETS))


def _peak(peak_gib: float, memory_gib: float) -> str:
    return f"{peak_gib:.0f}{', **tight**' if peak_gib > (1 - TIGHT) * memory_gib else ''}"


def anchor(path: str) -> str:
    """The heading id of a recipe."""
    return Path(path).stem.replace("_", "-")


def _commands(row: Mapping[str, Any]) -> str:
    """Commands for a recipe, one to a line: dry run, full size, small version, export."""
    own = [row["run"], row["slurm"]] if row["run"] else [row["slurm"]]
    export = f"playbook config export {row['path']} --to {next(iter(TARGETS))} --platform {row['platform']}"
    return "\n".join([row["dry_run"], *own, row["run_small"], export])
