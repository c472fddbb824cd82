"""A table of runs as people keep it: one row a run, empty cells unknown, what was measured apart from what was set. Predictions that were
written down before there was a figure are sealed, so that a later change of them shows.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from playbook.errors import ConfigError
from playbook.files import read_bytes
from playbook.planner.runs import spelling
from playbook.yaml_files import did_you_mean, shipped_table

COLUMNS = ("predicted_on", "predicted_low", "predicted", "predicted_high", "sha256")
"""What a table of such predictions has beside what was set: a date, tokens per second and GPU with their 80 % interval, and the seal."""
_MEMORY = "predicted_gib"
"""Beside these, where it was predicted: the peak of the fullest rank, in GiB."""
FIRST = ""
"""What the seal of the first row follows."""


@dataclass(frozen=True)
class Sealed:
    """What was predicted, in tokens per second and GPU, on a day."""

    day: str
    low: float
    value: float
    high: float
    seal: str
    memory_gib: float | None = None


def seal(before: str, cells: Mapping[str, str]) -> str:
    """The SHA-256 of what a row states and predicts and of the seal `before` it, so that no row can be changed, left out or moved; measured
    cells are free.
    """
    stated = {name: cells[name].strip() for name in (*_SET, *COLUMNS[:-1], _MEMORY) if cells.get(name, "").strip()}
    return hashlib.sha256(json.dumps([before, stated], sort_keys=True).encode()).hexdigest()


def opened(before: str, cells: Mapping[str, str]) -> Sealed:
    """What a row predicted.

    Raises:
        ValueError: a cell is missing, or is not what was sealed.
    """
    day, *numbers, written = (cells.get(name, "").strip() for name in COLUMNS)
    if written != seal(before, cells):
        raise ValueError(
            "it was changed after it was sealed, or a row before it was; restore the file: only what was measured may be filled in"
        )
    try:
        low, value, high = map(float, numbers)
    except ValueError:
        low = value = high = 0.0
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or not 0 < low < value < high or not math.isfinite(high):
        raise ValueError(f"{', '.join(COLUMNS[:-1])} are {[day, *numbers]}; expected a date and three rising numbers above 0")
    memory = cells.get(_MEMORY, "").strip()
    return Sealed(day, low, value, high, written, float(memory) if re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,3}", memory) else None)


_MAX_BYTES = 20_000_000
_MAX_ROWS = 20_000
_MAX_CELL = 2_000
_MEASURED = ("tflops_per_gpu", "tokens_per_s_per_gpu", "step_time_s", "mfu_pct", "mem_gb")
_ABOUT = ("mem_unit", "mem_kind", "quality", "status", "other", "source", "params_total_B", "params_active_B")
_SET = (
    "id", "source_group", "release_or_date", "model", "task", "hardware", "gpus", "precision", "seq_len", "mbs", "gbs", "tp", "cp", "pp",
    "vpp",
    "ep", "etp", "dp", "fsdp", "dispatcher", "recompute", "cuda_graph", "offload", "routing", "backend", "attention", "layers", "experts",
    "lora", "lora_targets", "base", "loss", "ulysses",
)  # fmt: skip
_NEEDED = ("model", "hardware", "gpus")
_COLUMNS = {name.lower(): name for name in (*_SET, *_MEASURED, *_ABOUT)}
_UNITS = {"": 1.0, "GiB": 1.0, "GB": 1e9 / 2**30, "MiB": 1 / 1024, "MB": 1e6 / 2**30}
_VTRAIN = {
    "# GPUs": "gpus", "global batch": "gbs", "micro batch": "mbs", "hidden size": "hidden", "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq_len", "tensor parallelism": "tp", "data parallelism": "dp", "pipeline parallelism": "pp",
    "iteration time (ms)": "step_time_ms",
}  # fmt: skip
"""Columns of the vTrain project's table of timed iterations: GPTs of stated sizes on A100s, every layer recomputed."""


_VTRAIN_RUNS = {
    "hardware": "A100", "precision": "bf16", "recompute": "full", "fsdp": "none", "attention": "unfused", "cuda_graph": "none", "cp": "1",
    "vpp": "1", "source_group": "vTrain",
}  # fmt: skip
"""What all of them have; the schedule is 1F1B, as the files in `config/` of github.com/VIA-Research/vTrain say."""


@dataclass(frozen=True)
class Run:
    """What was set for one run, by column; cells that say nothing are left out. Nothing that was measured is in it."""

    id: str
    line: int
    said: Mapping[str, str]
    folder: Path
    sealed: Sealed | None = None

    def word(self, column: str) -> str:
        """A cell's words; empty where it is unknown."""
        return self.said.get(column, "")

    @property
    def release_date(self) -> str:
        """The release or date as YYYY, YYYY-MM or YYYY-MM-DD, so that text sorts by time: `26.04` is 2026-04. Empty where it is unknown."""
        released = self.word("release_or_date")
        return "20" + released.replace(".", "-") if re.match(r"\d\d\.\d\d", released) else released

    def count(self, column: str) -> int | None:
        """A cell's whole number; None where it is unknown.

        Raises:
            ConfigError: it is something else, or not in 1 to 2 ** 30.
        """
        text = self.word(column)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= 1 << 30):
            raise ConfigError(
                f"line {self.line}: {column} is '{text[:40]}'; expected a whole number from 1, or nothing where it is unknown"
            )
        return int(text)


@dataclass(frozen=True)
class Measured:
    """What a run showed; None where the table does not say. Units: tokens per second and GPU, 1e12 FLOP/s per GPU, seconds, GB or GiB as
    stated.
    """

    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    step_time_s: float | None = None
    memory_gib: float | None = None
    ran: bool = True


Table = list[tuple[Run, Measured]]


def read_runs(path: Path) -> Table:
    """The runs of a CSV file, in its order.

    Raises:
        ConfigError: the file is no such table; the message names the line.
    """
    header, *body = _rows(path) or [(1, [])]
    names = [name.strip() for name in header[1]]
    vtrain = set(_VTRAIN) <= set(names)
    names = [_COLUMNS.get(name.lower(), name) for name in names]
    _check_header(path, names, vtrain)
    if not body:
        raise ConfigError(f"{path}: a header and no run; add a row for each run")
    runs = [_run(path, names, line, cells, vtrain) for line, cells in body]
    if COLUMNS[-1] in names:
        runs = _opened(path, runs, [dict(zip(names, cells, strict=True)) for _, cells in body])
    line_of: dict[str, int] = {}
    for run, _ in runs:
        if line_of.setdefault(run.id, run.line) != run.line:
            raise ConfigError(f"{path}: line {run.line}: id '{run.id[:40]}' stands in line {line_of[run.id]} too; give each run its own")
    return runs


def _opened(path: Path, table: Table, cells: Iterable[Mapping[str, str]]) -> Table:
    """The runs with what was predicted for them before they were measured."""
    rows, before = [], FIRST
    for (run, measured), row in zip(table, cells, strict=True):
        try:
            written = opened(before, row)
        except ValueError as e:
            raise ConfigError(f"{path}: line {run.line}: {e}") from e
        rows.append((replace(run, sealed=written), measured))
        before = written.seal
    return rows


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    try:
        data = read_bytes(path, _MAX_BYTES)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES // 1_000_000} MB; expected a table of runs")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 at byte {e.start}; save it as CSV in UTF-8") from e
    if "\0" in text:
        raise ConfigError(f"{path}: holds a zero byte; expected text")
    return list(_parsed(path, text))


def _parsed(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for number, cells in enumerate(reader):
            if number > _MAX_ROWS:
                raise ConfigError(f"{path}: more than {_MAX_ROWS} runs; split the table")
            if any(len(cell) > _MAX_CELL for cell in cells):
                raise ConfigError(f"{path}: line {reader.line_num}: a cell has more than {_MAX_CELL} characters; is a quote missing?")
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as e:
        raise ConfigError(f"{path}: line {reader.line_num}: {e}; expected comma-separated values") from e


def _check_header(path: Path, names: list[str], vtrain: bool) -> None:
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ConfigError(f"{path}: column '{twice[0][:40]}' stands twice in the header")
    if vtrain:
        return
    missing = [n for n in _NEEDED if n not in names]
    if missing:
        near = next(
            (f"; '{n[:40]}' is not a column{did_you_mean(n[:40], _SET)}" for n in names if n not in (*_SET, *_MEASURED, *_ABOUT)), ""
        )
        raise ConfigError(f"{path}: no column {', '.join(missing)}{near}; expected columns of {', '.join((*_SET, *_MEASURED))}")


def _run(path: Path, names: list[str], line: int, cells: list[str], vtrain: bool) -> tuple[Run, Measured]:
    """One line of a table as what was set and what was measured, by the columns' names.

    Raises:
        ConfigError: another number of cells than the header has, or no number where one is expected.
    """
    if len(cells) != len(names):
        raise ConfigError(f"{path}: line {line}: {len(cells)} cells; expected {len(names)}, as in the header")
    ours = [_VTRAIN.get(name, "") for name in names] if vtrain else names
    row = {name: word for name, cell in zip(ours, cells, strict=True) if name and (word := spelling.said(name, cell))}
    if vtrain:
        milliseconds = _number(path, line, "iteration time (ms)", row.pop("step_time_ms", ""))
        row |= {"id": f"line{line}", **_VTRAIN_RUNS}
        return Run(row["id"], line, row, path.parent), Measured(step_time_s=milliseconds and milliseconds / 1e3)
    numbers = {name: _number(path, line, name, row.get(name, "")) for name in _MEASURED}
    unit = row.get("mem_unit", "")
    if unit not in _UNITS:
        raise ConfigError(
            f"{path}: line {line}: mem_unit is '{unit[:40]}'; expected one of {', '.join(u for u in _UNITS if u)}, or nothing"
        )
    gib = numbers["mem_gb"] and numbers["mem_gb"] * _UNITS[unit]
    cells_set = {**of_source(row.get("source_group", "")), **{k: v for k, v in row.items() if k in _SET}}
    shown = Measured(
        numbers["tokens_per_s_per_gpu"], numbers["tflops_per_gpu"], numbers["step_time_s"], gib, ran=row.get("status", "ok") == "ok"
    )
    return Run(row.get("id", f"line{line}"), line, cells_set, path.parent), shown


def of_source(group: str) -> dict[str, str]:
    """What a source says of all its runs."""
    sources: dict[str, dict[str, str]] = shipped_table("run_sources.yaml")
    return sources.get(group, {})


def _number(path: Path, line: int, name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(spelling.number(text)) if len(text) < 40 else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value < 1e15):
        raise ConfigError(f"{path}: line {line}: {name} is '{text[:40]}'; expected a number above 0, or nothing where it is unknown")
    return value
