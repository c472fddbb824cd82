"""Write down what is predicted for each row of `playbook/_tables/predictions.csv` that has no prediction yet, and seal it; rows that have
one stay as they are."""

from __future__ import annotations

import csv
import io
import sys
import tempfile
from datetime import UTC, datetime
from math import exp
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer")]

from playbook.paths import data_root  # noqa: E402
from playbook.planner.memory import GIB  # noqa: E402
from playbook.planner.runs import table  # noqa: E402
from playbook.planner.runs.anchor import Anchor  # noqa: E402
from playbook.planner.runs.predict import predict  # noqa: E402
from playbook.planner.runs.published import scaling  # noqa: E402
from playbook.planner.runs.table import Run, read_runs, seal  # noqa: E402

TABLE = data_root("tables") / "predictions.csv"


def predicted(run: Run) -> dict[str, str]:
    """Tokens per second and GPU with their 80 % interval, scaled to the published runs as `playbook plan` does it, and the memory of the
    fullest rank."""
    prediction = predict(run)
    if isinstance(prediction, str):
        raise SystemExit(f"{run.id}: {prediction}")
    scale = scaling().scale(Anchor(run, 0.0, prediction.spread, prediction.parts))
    interval = prediction.interval(exp(scale.log), prediction.spread * scale.left)
    memory = {} if prediction.memory_bytes is None else {"predicted_gib": f"{prediction.memory_bytes / GIB:.2f}"}
    return {
        **memory,
        "predicted_low": f"{interval.low:.0f}",
        "predicted": f"{interval.value:.0f}",
        "predicted_high": f"{interval.high:.0f}",
    }


def main() -> None:
    """Fill the table."""
    rows = list(csv.DictReader(io.StringIO(TABLE.read_text(encoding="utf-8"))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "asked.csv")
        path.write_text(
            _text([{k: v for k, v in row.items() if k not in (*table.COLUMNS, "predicted_gib")} for row in rows]), encoding="utf-8"
        )
        runs = [run for run, _ in read_runs(path)]
    before = table.FIRST
    for row, run in zip(rows, runs, strict=True):
        if not row["sha256"]:
            row |= {"predicted_on": datetime.now(UTC).date().isoformat(), **predicted(run)}
            row["sha256"] = seal(before, row)
        before = row["sha256"]
    TABLE.write_text(_text(rows), encoding="utf-8")


def _text(rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    out = csv.DictWriter(text, rows[0], lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
