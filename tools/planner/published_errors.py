"""Write what each published run showed beside its prediction, which scales plans: `playbook/_tables/published_errors.json`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer")]

from playbook.paths import data_root  # noqa: E402
from playbook.planner.runs.published import ERRORS, RUNS, errors_of  # noqa: E402

if __name__ == "__main__":
    tables = data_root("tables")
    (tables / ERRORS).write_text(errors_of(tables / RUNS), encoding="utf-8")
