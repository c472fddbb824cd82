"""Calibration of collectives: every rank ends, every operation and size has a row, and what is moved is what the operation says."""

import pytest

from playbook_trainer import calibrate

SIZES = (1 << 12, 1 << 22)


@pytest.mark.full
def test_every_operation_has_a_time_at_every_size():
    found = list(calibrate.collective_rows(2, "cpu", SIZES))
    names = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
    assert {(r["operation"], r["bytes"]) for r in found} == {(name, size) for name in names for size in SIZES}
    assert all(r["ranks"] == 2 and r["kind"] == "collective" and 0 < r["seconds"] < 60 for r in found)
