"""The guide's tables of adapters and walls are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import log_excerpts as logs
from test_real_outputs import written

from playbook.paths import repo_root
from playbook_bench.logs import read
from playbook_bench.logs.adapters import ADAPTERS
from playbook_bench.logs.checks import FIELDS
from playbook_bench.trace import walls

PAGE = (repo_root() / "docs/guide/logs-and-traces.md").read_text(encoding="utf-8")


def cells(first: str) -> list[str]:
    found = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    assert len(found) == 1, first
    return [cell.strip() for cell in found[0].strip("|").split(" | ")]


def test_each_adapter_has_its_row_with_what_it_holds(tmp_path: Path) -> None:
    for adapter in ADAPTERS:
        log = read(written(tmp_path) if adapter.binary else logs.of_adapter(adapter.name), running=True)
        assert log.adapter == adapter.name
        holds = [name for name in FIELDS if name not in log.unknown]
        row = f"| `{adapter.name}` | {adapter.reads} | {', '.join(holds)} | {adapter.each_step} | {adapter.timed} |"
        assert row in PAGE.splitlines(), f"docs/guide/logs-and-traces.md needs the row {row}"
    assert len(re.findall(r"^\| `[a-z]", PAGE, re.MULTILINE)) == len(ADAPTERS)


def test_the_thresholds_are_those_of_the_code() -> None:
    said = {name: [int(n) for n in re.findall(r"(\d+) %", cells(name)[1])] for name in walls.THRESHOLDS}
    assert said == {name: [share * 100] for name, share in walls.THRESHOLDS.items()}
    for name in ("memory-bound kernels", "compute-bound"):
        assert [int(n) for n in re.findall(r"(\d+) %", cells(name)[1])] == [walls.BUSY * 100, walls.MOST * 100]
