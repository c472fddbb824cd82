"""Single rows of an Nsight Systems export: which are read, which launch an operation is of, and where reading ends."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_nsys import GRAD, MAIN, MS, PID, WORKER, database

from playbook.errors import PlaybookError
from playbook_bench.trace import nsys
from playbook_bench.trace.table import Timeline

NVTX = "INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,NULL)"
CALL = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,0)"


def read(tmp_path: Path, *statements: tuple[str, tuple]) -> Timeline:
    (tmp_path / "t.sqlite").unlink(missing_ok=True)
    path = database(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        for sql, values in statements:
            db.execute(sql, values)
    return nsys.read(path)


def test_ranges_by_start_and_end_are_ranges_and_other_events_are_not(tmp_path: Path) -> None:
    rows = [(NVTX, (3 * MS, 4 * MS, kind, f"kind {kind}", MAIN)) for kind in (33, 58, 59, 60, 61)]
    found = {s.name for s in read(tmp_path, *rows).spans}
    assert {n for n in found if n.startswith("kind")} == {"kind 59", "kind 60"}


def test_a_range_that_nothing_closed_lasts_until_the_last_known_time(tmp_path: Path) -> None:
    (open_,) = [s for s in read(tmp_path).spans if s.name == "vision.bwd"]
    assert open_.end == 20 * MS
    (open_,) = [s for s in read(tmp_path, (NVTX, (21 * MS, None, 59, "late", MAIN))).spans if s.name == "vision.bwd"]
    assert open_.end == 21 * MS


def test_names_have_an_end_and_a_range_without_one_is_left_out(tmp_path: Path) -> None:
    rows = [(NVTX, (3 * MS, 4 * MS, 59, name, MAIN)) for name in ("n" * 300, "", None)]
    before = len(read(tmp_path).spans)
    found = read(tmp_path, *rows).spans
    assert len(found) == before + 1
    assert "n" * 200 in {s.name for s in found}


def test_the_process_of_the_steps_is_read_or_where_there_are_none_the_one_with_the_most_ranges(tmp_path: Path) -> None:
    rows = [(NVTX, (i, i + 1, 59, "decode image", WORKER)) for i in range(50)]
    assert {s.thread for s in read(tmp_path, *rows).spans} == {MAIN, GRAD}
    assert {s.thread for s in read(tmp_path, ("DELETE FROM NVTX_EVENTS WHERE text = 'step'", ()), *rows).spans} == {WORKER}


@pytest.mark.parametrize("earlier", [True, False])
def test_the_call_that_began_first_is_the_launch(tmp_path: Path, earlier: bool) -> None:
    """Kernel 1 was launched at 6 ms by the main thread."""
    other = 5 * MS if earlier else 7 * MS
    (found,) = [o for o in read(tmp_path, (CALL, (other, other + 9, GRAD, 1))).ops if o.start == 6 * MS]
    assert (found.thread, found.launch_ns) == ((GRAD, 5 * MS) if earlier else (MAIN, 6 * MS))


def test_every_operation_without_a_launch_is_counted(tmp_path: Path) -> None:
    found = read(tmp_path, ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId IN (5, 6, 99)", ()))
    assert found.notes == ["3 operations have no recorded launching call and are left out"]
    assert read(tmp_path).notes == []


def test_what_has_no_name_is_called_after_its_table(tmp_path: Path) -> None:
    graphs = "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER)"
    found = read(
        tmp_path, (graphs, ()), ("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?,?,99,?)", (16 * MS, 17 * MS, PID))
    )  # fmt: skip
    assert {(o.name, o.kind) for o in found.ops if o.launch_ns == MS} == {("memcpy", "copy"), ("CUDA graph", "compute")}


def test_so_many_rows_are_read_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest table of the export, that of ranges, has eleven rows."""
    monkeypatch.setattr(nsys, "MAX_ROWS", 11)
    read(tmp_path)
    monkeypatch.setattr(nsys, "MAX_ROWS", 10)
    with pytest.raises(PlaybookError, match="NVTX_EVENTS has more than 10 rows"):
        nsys.read(tmp_path / "t.sqlite")


def test_a_file_that_keeps_sqlite_busy_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "_TICK", 1)
    read(tmp_path)
    monkeypatch.setattr(nsys, "_MAX_TICKS", 20)
    with pytest.raises(PlaybookError, match="interrupted"):
        nsys.read(tmp_path / "t.sqlite")


@pytest.mark.parametrize("time", [1 << 62, -(1 << 62), "soon"])
def test_a_time_beyond_any_clock_or_a_word_is_damage(tmp_path: Path, time: object) -> None:
    with pytest.raises(PlaybookError, match="where a time or an id was expected"):
        read(tmp_path, ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = ? WHERE correlationId = 1", (time,)))


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GPU_OF_EACH = f"globalPid = {PID}"


def without_ranges(path: Path, foreign_ms: int, device: str) -> Timeline:
    """An export of CUDA alone whose other process computes so long; its own kernels run for 13.5 ms."""
    changes = (
        f"UPDATE {KERNELS} SET end = {foreign_ms * MS} WHERE globalPid != {PID}",
        f"ALTER TABLE {KERNELS} ADD COLUMN deviceId INTEGER",
        f"UPDATE {KERNELS} SET deviceId = {device}",
        f"ALTER TABLE {KERNELS} DROP COLUMN demangledName",
    )
    return nsys.read(database(path, *changes, without="NVTX_EVENTS"), ranges=False)


@pytest.mark.parametrize(("foreign_ms", "own"), [(13, True), (14, False)])
def test_an_export_without_ranges_is_read_for_the_process_that_computes_most(tmp_path: Path, foreign_ms: int, own: bool) -> None:
    names = {o.name for o in without_ranges(tmp_path / "t.sqlite", foreign_ms, GPU_OF_EACH).ops}
    assert ("gemm" in names, "foreign" in names) == (own, not own)


def test_without_ranges_a_process_of_two_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlaybookError, match="2 GPUs in one process"):
        without_ranges(tmp_path / "t.sqlite", 13, "correlationId % 2")
