"""The page of recipes: what each configuration file stands for, whether it fits, and how to run it or carry it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.site.text import block, code, front_matter, link, mapping, number, table, text

TARGETS = ("megatron-lm", "megatron-bridge", "torchtitan")

TIGHT = 0.05
"""The share of a GPU's memory that an estimate has to leave free."""

INTRO = (
    "Configurations that somebody published, as files that this trainer loads. Each passes a dry run at the world size stated, and its estimated "
    "peak is below the memory of the GPUs named; that is an estimate, and no run of that size stands behind it. **Tight** is one within 5 % of that memory: an allocator's "
    "gaps may not fit into the rest, and where images are counted the estimate takes every token for an image's. For the megatron "
    "backend tests also build the real model of the first and the last stage at that size, without memory behind its parameters, and count them. Each has a small version that "
    "fits four H200s by the same estimate. [Configuration families](families.md) say which cards they belong to."
)


def recipes_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every recipe: an overview, then a section each."""
    head = ["Recipe", "Model", "Layout", "GPUs>", "Hardware", "Peak, GiB>", "of>"]
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
    parts = [front_matter("Recipes", description="Published configurations as files, with estimates and commands"), "# Recipes", INTRO]
    return "\n\n".join([*parts, table(head, cells), *(_section(row) for row in rows)]) + "\n"


def _peak(peak_gib: float, memory_gib: float) -> str:
    return f"{peak_gib:.0f}{', **tight**' if peak_gib > (1 - TIGHT) * memory_gib else ''}"


def anchor(path: str) -> str:
    """The place of a recipe on the page."""
    return Path(path).stem.replace("_", "-")


def _section(row: Mapping[str, Any]) -> str:
    source, path = row["source"], row["path"]
    worlds = " or ".join(number(n) for n in row["gpus"])
    lines = [
        f"- File: {code(path)}, {row['num_parameters'] / 1e9:,.1f} B parameters on {worlds} {text(row['hardware'])}",
        f"- Source: {text(source['title'])}, {text(source['origin'])}, {text(source['date'])}",
    ]
    if row["differs"]:
        lines.append(f"- Differs from its source: {text(row['differs'])}")
    lines.append(f"- Small version: {row['small_peak_gib']:.0f} of {row['small_memory_gib']:.0f} GiB on four H200s, by the same estimate")
    own = [row["run"], row["slurm"]] if row["run"] else [row["slurm"]]
    target, *others = TARGETS
    commands = [row["dry_run"], *own, row["run_small"], f"playbook config export {path} --to {target} --platform {row['platform']}"]
    return "\n\n".join(
        [
            f"## {text(row['title'])} {{ #{anchor(path)} }}",
            "\n".join(lines),
            block("\n".join(commands), "text"),
            f"`--to` also takes {' and '.join(map(code, others))}; {code('platform: ' + row['platform'])} in the cluster's file sets the variables of "
            "these GPUs.",
        ]
    )
