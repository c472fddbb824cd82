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
    assert not any("nodes" in r for r in found)


@pytest.mark.full
def test_ranks_on_several_nodes_have_rows_within_a_node_and_between_nodes():
    found = list(calibrate.collective_rows(4, "cpu", SIZES, nodes=2))
    within, between = ([r for r in found if ("nodes" in r) is crosses] for crosses in (False, True))
    assert len(within) == len(between) == 5 * len(SIZES)
    assert all(r["ranks"] == 2 for r in found)
    assert all(r["nodes"] == 2 for r in between)
