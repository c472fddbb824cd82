"""Records as a pandas table: each launch and each step once, with its record's fields."""

from __future__ import annotations

import io
import sys

import in_process
import pandas as pd
import pytest

from playbook.paths import data_root
from playbook.records.evidence import Evidence, to_frame
from playbook.records.read import read


@pytest.fixture(scope="module")
def records():
    return [r.content for r in read([data_root("results")]) if isinstance(r.content, Evidence)]


def test_there_is_a_row_for_each_launch_with_its_sums(records):
    frame = to_frame(records)
    runs = [(e.evidence_id, r) for e in records for r in e.measured.runs]
    assert list(zip(frame.evidence, frame.run_id, strict=True)) == [(e, r.run_id) for e, r in runs]
    assert frame.timed_seconds.tolist() == pytest.approx([sum(s.seconds for s in r.samples if s.timed) for _, r in runs])
    assert frame["metric.mfu"].dropna().tolist() == [r.metrics["mfu"] for _, r in runs if r.metrics.get("mfu") is not None]


def test_there_is_a_row_for_each_step(records):
    frame = to_frame(records, per="step")
    assert frame.seconds.tolist() == [s.seconds for e in records for r in e.measured.runs for s in r.samples]
    assert set(frame.role) == {"burn_in", "aa", "measure"}


@pytest.mark.parametrize("per", ["launch", "step"])
def test_a_table_without_rows_has_the_columns_of_one_with(records, per):
    empty, full = to_frame([], per), to_frame(records, per)
    assert list(empty.columns) == [c for c in full.columns if not c.startswith("metric.")]


@pytest.mark.parametrize("form", ["csv", "parquet", "markdown"])
def test_the_command_line_writes_each_format(tmp_path, monkeypatch, capsys, form, records):
    monkeypatch.chdir(tmp_path)
    assert in_process.run(capsys, "evidence", "table", "--format", form, "-o", "out")[0] == 0
    read_back = {"csv": pd.read_csv, "parquet": pd.read_parquet}.get(form)
    rows = len(read_back("out")) if read_back else len((tmp_path / "out").read_text().splitlines()) - 2
    assert rows == sum(len(e.measured.runs) for e in records)


def test_steps_go_to_a_pipe_as_csv(tmp_path, monkeypatch, capsys, records):
    monkeypatch.chdir(tmp_path)
    code, out = in_process.run(capsys, "evidence", "table", "--steps")[:2]
    assert code == 0
    assert len(pd.read_csv(io.StringIO(out))) == sum(len(r.samples) for e in records for r in e.measured.runs)


def test_parquet_asks_for_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    in_process.refused(capsys, "evidence", "table", "--format", "parquet")


@pytest.mark.parametrize(
    ("words", "package"), [((), "pandas"), (("--format", "markdown"), "tabulate"), (("--format", "parquet", "-o", "t"), "pyarrow")]
)
def test_without_the_packages_for_tables_one_message_says_how_to_get_them(tmp_path, monkeypatch, capsys, words, package):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    err = in_process.refused(capsys, "evidence", "table", *words)
    assert err.strip() == f"error: the package '{package}' is not installed; run pip install '.[tables]' in a clone of Playbook"
    assert not (tmp_path / "t").exists()
