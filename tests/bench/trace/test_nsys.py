"""Reading the SQLite export of an Nsight Systems report."""

from __future__ import annotations

import random
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from test_kineto import busy

from playbook.errors import PlaybookError
from playbook_bench.trace import nsys
from playbook_bench.trace.table import UNATTRIBUTED, TraceTable, build
from playbook_bench.trace.walls import walls

PID = 0x0100_1234_5600_0000
MAIN, GRAD, WORKER = PID | 1, PID | 2, 0x0100_9999_9900_0001
MS = 1_000_000
RANGES = [
    ("step", 0, 20, MAIN),
    ("forward", 0, 10, MAIN),
    ("attention", 1, 5, MAIN),
    ("dispatch", 5, 9, MAIN),
    ("backward", 10, 18, MAIN),
    ("dispatch.bwd", 10, 13, GRAD),
    ("attention.bwd", 13, 17, GRAD),
    ("optimizer", 18, 20, MAIN),
]
KERNELS = [  # name, launching thread, launch, start, end
    ("flash_fwd", MAIN, 2, 3, 5),
    ("ncclDevKernel_SendRecv", MAIN, 6, 6, 10),
    ("gemm", MAIN, 7, 8, 9),
    ("ncclDevKernel_SendRecv", GRAD, 11, 11, 13),
    ("flash_bwd", GRAD, 14, 14, 16),
    ("reduce", GRAD, 17.5, 17.5, 18),
    ("adam", MAIN, 18, 18, 20),
]


def database(path: Path, *changes: str, texts_by_id: bool = False, without: str = "") -> Path:
    """An export of one process beside another, after these statements of SQL."""
    db = sqlite3.connect(path)
    names: dict[str, int] = {}

    def number(text: str) -> int:
        return names.setdefault(text, len(names) + 1)

    db.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER)")
    db.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
    )
    columns = "start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER"
    db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns}, demangledName INTEGER, shortName INTEGER)")
    db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns}, bytes INTEGER)")
    db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    for name, start, end, tid in RANGES:
        text = (None, number(name)) if texts_by_id else (name, None)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,?,?,?)", (start * MS, end * MS, text[0], tid, text[1]))
    db.execute("INSERT INTO NVTX_EVENTS VALUES (?,NULL,59,'vision.bwd',?,NULL)", (round(17.2 * MS), GRAD))
    db.execute("INSERT INTO NVTX_EVENTS VALUES (0,?,34,'a mark',?,NULL)", (MS, MAIN))
    db.execute("INSERT INTO NVTX_EVENTS VALUES (0,?,59,'decode image',?,NULL)", (9 * MS, WORKER))
    for i, (name, tid, launch, begin, until) in enumerate(KERNELS):
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,0)", (round(launch * MS), round(launch * MS) + 9, tid, i))
        kernel = (round(begin * MS), round(until * MS), i, PID, number("long " + name), number(name))
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?)", kernel)
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,99,0)", (MS, MS + 9, MAIN))
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,99,?,4096)", (MS, 2 * MS, PID))
    # Another process uses the same correlation number; it must not be taken for ours.
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,0,0)", (MS, MS + 9, WORKER))
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,?,?,?)",
        (0, 20 * MS, WORKER & ~0xFFFFFF, number("foreign"), number("foreign")),
    )
    db.executemany("INSERT INTO StringIds VALUES (?,?)", [(i, n) for n, i in names.items()])
    if without:
        db.execute(f"DROP TABLE {without}")
    for change in changes:
        db.execute(change)
    db.commit()
    db.close()
    return path


def read(path: Path) -> TraceTable:
    return build(nsys.read(path))


@pytest.mark.parametrize("texts_by_id", [False, True])
def test_each_kernel_lies_in_its_range_forward_and_backward(tmp_path: Path, texts_by_id: bool) -> None:
    path = database(tmp_path / "t.sqlite", texts_by_id=texts_by_id)
    table, names = read(path), {o.name for o in nsys.read(path).ops}
    assert "flash_fwd" in names, "the short name"
    assert "foreign" not in names, "of another process"
    assert (table.collector, table.measures, table.num_steps) == ("nsys", "gpu", 1)
    assert busy(table) == pytest.approx(
        {
            ("attention", "forward"): 3,  # the copy 1-2 and the kernel 3-5
            ("dispatch", "forward"): 4,
            ("dispatch", "backward"): 2,
            ("attention", "backward"): 2,
            ("vision", "backward"): 0.5,
            ("optimizer", "other"): 2,
        }
    )
    assert table.exposed_comm_ms == pytest.approx(3 + 2)


def test_a_kernel_is_communication_by_the_namespace_that_its_short_name_lacks(tmp_path: Path) -> None:
    path = database(
        tmp_path / "t.sqlite",
        "UPDATE StringIds SET value = 'dispatch' WHERE value = 'ncclDevKernel_SendRecv'",
        "UPDATE StringIds SET value = 'void deep_ep::intranode::dispatch<8>(int4 *)' WHERE value = 'long ncclDevKernel_SendRecv'",
        "UPDATE StringIds SET value = 'void gemm(ncclWindow_t)' WHERE value = 'long gemm'",
    )
    kinds = {o.name: o.kind for o in nsys.read(path).ops}
    assert (kinds["dispatch"], kinds["gemm"]) == ("communication", "compute")
    assert read(path).exposed_comm_ms == pytest.approx(3 + 2)


WITHOUT_BACKWARD = "DELETE FROM NVTX_EVENTS WHERE text LIKE '%.bwd'"


def test_backward_without_its_ranges_is_unattributed(tmp_path: Path) -> None:
    table = read(database(tmp_path / "t.sqlite", WITHOUT_BACKWARD))
    assert busy(table)[UNATTRIBUTED, "backward"] == pytest.approx(4.5)
    assert table.coverage.backward == 0
    assert table.coverage.forward == 1


def test_a_graph_that_was_recorded_whole_is_busy_where_it_was_launched(tmp_path: Path) -> None:
    path = database(
        tmp_path / "t.sqlite",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({2 * MS},{2 * MS + 9},{MAIN},200,0)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES ({16 * MS},{17 * MS},200,{PID})",
    )
    before, table = read(database(tmp_path / "without.sqlite")), read(path)
    assert table.busy_ms == pytest.approx(before.busy_ms + 1)
    assert busy(table)["attention", "forward"] == pytest.approx(busy(before)["attention", "forward"] + 1)
    assert any("1 launches of CUDA graphs were recorded whole" in n for n in table.notes)


@pytest.mark.parametrize("name", ["ncclAllGather", "ncclGroupEnd", "cub::DeviceRadixSort", "nvte_cublas_gemm"])
def test_a_range_of_a_library_is_no_part_of_the_step(tmp_path: Path, name: str) -> None:
    added = f"INSERT INTO NVTX_EVENTS VALUES ({10 * MS},{18 * MS},59,'{name}',{GRAD},NULL)"
    table = read(database(tmp_path / "t.sqlite", WITHOUT_BACKWARD, added))
    assert busy(table)[UNATTRIBUTED, "backward"] == pytest.approx(4.5)
    assert table.coverage.backward == 0


def test_memory_operations_may_be_absent(tmp_path: Path) -> None:
    table = read(database(tmp_path / "t.sqlite", without="CUPTI_ACTIVITY_KIND_MEMCPY"))
    assert busy(table)["attention", "forward"] == pytest.approx(2)


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"])
def test_a_missing_table_is_named_with_what_to_do(tmp_path: Path, table: str) -> None:
    with pytest.raises(PlaybookError, match=f"no table {table}.*nsys profile"):
        read(database(tmp_path / "t.sqlite", without=table))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN correlationId TO correlation", "KERNEL has no column correlationId"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE correlationId = 1", "'soon'"),
    ],
    ids=["a column is gone", "text where a time belongs"],
)
def test_a_table_that_is_not_as_written_is_an_error_that_says_where(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(PlaybookError, match=said):
        read(database(tmp_path / "t.sqlite", change))


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + b"\xff" * 300])
def test_a_file_that_is_no_database_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)
    with pytest.raises(PlaybookError, match=r"t\.sqlite"):
        read(path)


def test_a_view_in_place_of_a_table_is_not_read(tmp_path: Path) -> None:
    path = database(tmp_path / "t.sqlite", without="CUPTI_ACTIVITY_KIND_KERNEL")
    with sqlite3.connect(path) as db:
        forever = "WITH RECURSIVE r(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM r) SELECT start, start AS end, start AS correlationId FROM r"
        db.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {forever}")
    db.close()
    with pytest.raises(PlaybookError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        read(path)


def test_damaged_databases_never_end_in_anything_but_a_clear_error(tmp_path: Path) -> None:
    whole = database(tmp_path / "t.sqlite").read_bytes()
    random_ = random.Random(7)
    readable = 0
    for i in range(150):
        data = bytearray(whole)
        if i % 3 == 0:
            data = data[: random_.randrange(len(data))]
        else:
            for _ in range(random_.choice([1, 20, 400])):
                data[random_.randrange(16, len(data))] = random_.randrange(256)
        path = tmp_path / f"{i}.sqlite"
        path.write_bytes(data)
        with suppress(PlaybookError):
            read(path)
            readable += 1
        with suppress(PlaybookError):
            found = walls(nsys.read(path, ranges=False))
            assert found.busy + found.idle == pytest.approx(1)
        path.unlink()
    assert readable < 120
