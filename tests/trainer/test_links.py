"""Calibration of collectives: every rank ends, every operation and size has a row, and what is moved is what the operation says."""

import pytest

from playbook_trainer import calibrate

SIZES = (1 << 12, 1 << 22)


NAMES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
@pytest.mark.full
def test_every_operation_has_a_time_at_every_size_within_a_node_and_between_nodes(ranks, nodes):
    found = list(calibrate.collective_rows(ranks, "cpu", SIZES, nodes))
    expected = {(name, size) for name in NAMES for size in SIZES}
    within, between = ([r for r in found if ("nodes" in r) is crosses] for crosses in (False, True))
    assert {(r["operation"], r["bytes"]) for r in within} == expected
    assert {(r["operation"], r["bytes"]) for r in between} == (expected if nodes > 1 else set())
    assert len(found) == nodes * len(expected)
    assert all(r["ranks"] == 2 and r["kind"] == "collective" and 0 < r["seconds"] < 60 for r in found)
    assert all(r["nodes"] == nodes for r in between)
