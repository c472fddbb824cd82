"""Estimated beside measured peaks of memory: prints each run, then median and worst of each group, as `docs/experiments/peak-memory.md`
tells them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playbook.planner import memory  # noqa: E402
from playbook.planner.models import MODELS  # noqa: E402
from playbook.planner.plan import Plan, parse  # noqa: E402
from playbook.yaml_files import read  # noqa: E402

RUNS = ROOT / "tests" / "fixtures" / "memory_runs.yaml"


@dataclass(frozen=True)
class Compared:
    """One run: its settings, and what was measured. Units: GiB."""

    id: str
    group: str
    model: str
    words: str
    plan: Plan
    measured: float

    @property
    def estimated(self) -> float:
        """Peak allocated memory of the fullest rank."""
        return memory.peak(self.plan) / memory.GIB

    @property
    def error(self) -> float:
        """Estimated over measured, less one."""
        return self.estimated / self.measured - 1


def compared() -> Iterator[Compared]:
    """Every run of the file."""
    groups: list[dict[str, Any]] = read(RUNS)[0]
    for group in groups:
        shape = MODELS[group["model"]]
        shape = replace(shape, experts=group.get("experts", shape.experts))
        for run in group["runs"]:
            words = f"{group['base']} {run['set']}".strip()
            plan = parse(group["model"], words.split(), shape=shape)
            yield Compared(run["id"], group["group"], group["model"], words, plan, float(run["gib"]))


def table() -> str:
    """Markdown: one line for each run, then median and worst of each group."""
    runs = list(compared())
    lines = ["| run | model | settings | measured | estimated | error |", "| --- | --- | --- | --: | --: | --: |"]
    lines += [f"| {r.id} | {r.model} | `{r.words}` | {r.measured:.1f} | {r.estimated:.1f} | {r.error:+.1%} |" for r in runs]
    for group in dict.fromkeys(r.group for r in runs):
        errors = [abs(r.error) for r in runs if r.group == group]
        lines.append(f"\n{group}: {len(errors)} runs, median {median(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
