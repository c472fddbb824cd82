"""Predictions that were written down before there was a figure: a change of them is found, and a row is scored once it is filled in."""

import csv

import pytest
from in_process import printed

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.runs.check import check, total

PREDICTIONS = data_root("tables") / "predictions.csv"


@pytest.fixture(scope="module")
def shipped():
    with PREDICTIONS.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def written(tmp_path, shipped):
    def write(number=4, **cells):
        path = tmp_path / "predictions.csv"
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, shipped[0])
            out.writeheader()
            out.writerows([*shipped[: number - 1], shipped[number - 1] | cells][:number])
        return path

    return write


def test_every_shipped_prediction_is_sealed_and_has_an_interval():
    rows = check(PREDICTIONS)
    assert 20 <= len(rows) <= 60
    for row in rows:
        assert row.run.sealed
        assert row.prediction, row.why
        assert row.interval.value == row.run.sealed.value
        assert row.interval.low < row.interval.value < row.interval.high


def test_memory_that_was_written_down_is_what_counts_and_is_sealed_too(written, shipped):
    at, row = next((n, row) for n, row in enumerate(shipped, 1) if row["predicted_gib"])
    prediction = check(written(at))[-1].prediction
    assert prediction.memory_bytes == float(row["predicted_gib"]) * 2**30
    with pytest.raises(ConfigError, match="it was changed after it was sealed"):
        check(written(at, predicted_gib=row["predicted_gib"] + "1"))
    ways = {(r["fsdp"], bool(r["lora"]), r["base"]) for r in shipped if r["gpus"] == "1"}
    assert ways >= {
        ("ddp", True, ""),
        ("ddp", True, "nf4"),
        ("ddp", False, ""),
        ("zero1", False, ""),
        ("zero2", False, ""),
        ("zero3", False, ""),
    }


@pytest.mark.parametrize("column", ["predicted", "predicted_high", "predicted_on", "hardware", "gbs", "sha256"])
def test_a_change_after_sealing_is_found(written, shipped, column):
    with pytest.raises(ConfigError, match="line 5: it was changed after it was sealed"):
        check(written(**{column: shipped[3][column] + "1"}))


def test_a_row_that_is_left_out_or_moved_is_found(written, shipped):
    with pytest.raises(ConfigError, match="line 5: it was changed"):
        check(written(**shipped[4]))


@pytest.mark.parametrize(("factor", "inside"), [(1.01, True), (3.0, False)])
def test_a_row_is_scored_once_it_is_filled_in(written, shipped, factor, inside):
    said = float(shipped[3]["predicted"])
    rows = check(written(tokens_per_s_per_gpu=str(said * factor), source="its page"))
    assert [r.counts for r in rows] == [False, False, False, True]
    assert rows[3].relative == pytest.approx(1 - 1 / factor)
    assert rows[3].covered is inside
    assert total(rows)["runs"] == 1


def test_what_has_no_figure_is_said(written, shipped, capsys):
    shown = printed(capsys, "plan", "check", str(written(tokens_per_s_per_gpu=shipped[3]["predicted"])))
    assert f"seal {shipped[3]['sha256'][:16]} holds; 3 rows without a figure yet" in shown
    assert "+0.0%" in shown


def test_what_was_written_is_not_scaled_afterwards(written):
    with pytest.raises(ConfigError, match="leave out --anchor"):
        check(written(), leave_out="source")
