"""Reading the Chrome trace that torch.profiler writes."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.errors import PlaybookError
from playbook_bench.trace import kineto
from playbook_bench.trace.table import UNATTRIBUTED, TraceTable, build

MAIN, GRAD, GLOO = 100, 101, 102
EVALUATE = "autograd::engine::evaluate_function: "


def event(cat: str, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start * 1000, "dur": (end - start) * 1000, "args": args}


def flow(number: int, source: tuple[int, float], target: tuple[int, float]) -> list[dict[str, Any]]:
    ends = [("s", source), ("f", target)]
    return [{"ph": p, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 1, "tid": t, "ts": at * 1000} for p, (t, at) in ends]


def ranges(*extra: dict[str, Any]) -> list[dict[str, Any]]:
    """A step of 20 ms: attention 1-5 and dispatch 5-9 forward, backward 10-18, optimizer 18-20."""
    found = [("ProfilerStep#3", 0, 20), ("step", 0, 20), ("forward", 0, 10), ("attention", 1, 5), ("dispatch", 5, 9), ("backward", 10, 18)]
    return [*(event("user_annotation", n, a, b) for n, a, b in found), event("user_annotation", "optimizer", 18, 20), *extra]


def gpu(name: str, tid: int, launch: float, start: float, end: float, number: int, cat: str = "kernel") -> list[dict[str, Any]]:
    call = event("cuda_runtime", "cudaLaunchKernel", launch, launch + 0.01, tid, correlation=number)
    return [call, event(cat, name, start, end, 7, correlation=number, stream=7)]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def read(tmp_path: Path, *events: dict[str, Any]) -> TraceTable:
    return build(kineto.read(write(tmp_path / "trace.json", list(events))))


def busy(table: TraceTable) -> dict[tuple[str, str], float]:
    return {(r.path, r.phase): r.busy_ms for r in table.rows if r.busy_ms}


def test_kernels_lie_where_they_were_launched(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        *ranges(event("user_annotation", "dispatch.bwd", 11, 14, GRAD)),
        *gpu("flash", MAIN, 2, 6, 7, 1),
        *gpu("ncclDevKernel_SendRecv", MAIN, 6, 7, 9, 2),
        *gpu("ncclDevKernel_SendRecv", GRAD, 12, 12, 13, 3),
        *gpu("copy", MAIN, 18.5, 19, 20, 4, "gpu_memcpy"),
    )
    assert (table.collector, table.measures) == ("kineto", "gpu")
    assert busy(table) == pytest.approx(
        {("attention", "forward"): 1, ("dispatch", "forward"): 2, ("dispatch", "backward"): 1, ("optimizer", "other"): 1}
    )
    assert table.exposed_comm_ms == pytest.approx(3)


def backward(number: int) -> list[dict[str, Any]]:
    """Backward work with no `.bwd` range, whose forward operator of sequence number 5 ran in `dispatch`."""
    args = {"Sequence number": number, "Fwd thread id": 1}
    return [
        event("cpu_op", "aten::gelu", 2, 3, MAIN, **{"Sequence number": 5, "Fwd thread id": 0}),
        event("cpu_op", "aten::mm", 6, 7, MAIN, **{"Sequence number": 5, "Fwd thread id": 0}),
        event("cpu_op", EVALUATE + "MmBackward0", 11, 13, GRAD, **args),
        event("cpu_op", "MmBackward0", 11.1, 12.9, GRAD, **args),
        *gpu("gemm_bwd", GRAD, 12, 12, 14, 9),
        *flow(1, (MAIN, 6), (GRAD, 11)),
    ]


def test_backward_without_a_range_is_traced_to_its_forward_operator(tmp_path: Path) -> None:
    table = read(tmp_path, *ranges(), *backward(5))
    # Both forward operators carry number 5; the one that began last is the differentiable one.
    assert busy(table) == pytest.approx({("dispatch", "backward"): 2})
    assert table.coverage.backward == 1


def test_without_a_gpu_busy_is_host_time_and_says_so(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        *ranges(event("user_annotation", "attention.bwd", 12, 14)),
        event("cpu_op", "aten::linear", 4, 6),
        event("cpu_op", "aten::addmm", 4.5, 5.5),
        event("cpu_op", EVALUATE + "AddBackward0", 10.5, 15),
        event("cpu_op", "AddBackward0", 10.5, 15),
        event("cpu_op", "aten::add", 11, 13),
        event("user_annotation", "gloo:all_to_all", 7, 8, GLOO),
        event("user_annotation", "gloo:all_reduce", 12.5, 14.5, GLOO),
    )
    assert table.measures == "host"
    assert any("host time" in n for n in table.notes)
    assert busy(table) == pytest.approx(
        {
            ("attention", "forward"): 1,
            ("dispatch", "forward"): 2,
            (UNATTRIBUTED, "backward"): 1,
            ("attention", "backward"): 2.5,
        }
    )
    # A node of autograd that waits for communication does not hide it; an operator at work does.
    assert table.exposed_comm_ms == pytest.approx(1 + 1.5)


def test_what_differs_from_call_to_call_does_not_split_a_range(tmp_path: Path) -> None:
    fsdp = [event("user_annotation", f"FSDP::pre_forward (layers.{i})", 1 + i, 1.5 + i) for i in (0, 1)]
    nested = [event("user_annotation", f"FSDP::all_gather (layers.{i})", 1.1 + i, 1.4 + i) for i in (0, 1)]
    table = read(tmp_path, *ranges(*fsdp, *nested), *gpu("ag", MAIN, 1.2, 2, 3, 1), *gpu("ag", MAIN, 2.2, 4, 5, 2))
    assert busy(table) == pytest.approx({("attention", "forward"): 2, ("attention/fsdp", "forward"): 2})
    assert [(r.count, r.host_ms) for r in table.rows if r.path == "attention/fsdp"] == [(2, pytest.approx(1))]


def test_gzip_and_a_bare_list_are_read_too(tmp_path: Path) -> None:
    events = [*ranges(), *gpu("flash", MAIN, 2, 6, 7, 1)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    assert busy(build(kineto.read(path))) == pytest.approx({("attention", "forward"): 1})


def test_unknown_events_and_fields_are_ignored(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"ph": "Q"},
        {"ph": "i", "ts": 1},
        {"ph": "X", "cat": "new_kind", "name": "n", "tid": 1, "ts": 1, "dur": 1, "extra": []},
    ]
    table = read(tmp_path, *ranges(), *gpu("flash", MAIN, 2, 6, 7, 1), *odd)
    assert busy(table) == pytest.approx({("attention", "forward"): 1})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"traceEvents": 3}', b"[1, 2]", b"\x1f\x8bnonsense", b"[" * 100_000, b"\xff\xfe\x00", b'{"traceEvents": [{"ph": "X"}]}'],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(PlaybookError):
        build(kineto.read(path))


def moved(events: list[dict[str, Any]], pid: Any = 1, later: float = 0.0) -> list[dict[str, Any]]:
    """The events as those of another process, some milliseconds later."""
    return [e | {"pid": pid, "ts": e["ts"] + later * 1000} for e in events]


def test_a_trace_merged_from_several_ranks_is_refused(tmp_path: Path) -> None:
    """Threads and correlations of one process would be taken for those of the other."""
    one = ranges(event("cpu_op", "aten::mm", 2, 3))
    for other in (moved(one, 2), moved(one, 2, 100), moved(one, "rank1 1"), moved([event("cpu_op", "aten::mm", 40, 50)], 2)):
        with pytest.raises(PlaybookError, match=r"trace.json: holds the work of 2 processes \(pid 1, .*\); expected the trace of one rank"):
            read(tmp_path, *one, *other)
    with pytest.raises(PlaybookError, match="holds two steps at the same time, as where traces of several ranks were merged"):
        read(tmp_path, *one, *moved(one, later=3))  # of containers, in each of which the rank is process 1
    kernels = [*gpu("flash", MAIN, 2, 6, 7, 1), *gpu("flash", MAIN, 12, 16, 17, 2)]
    for number, kernel in enumerate(k for k in kernels if k["cat"] == "kernel"):
        kernel["args"]["device"], kernel["pid"] = number, number
    with pytest.raises(PlaybookError, match="holds kernels of 2 GPUs"):
        read(tmp_path, *one, *kernels)


def test_what_kineto_writes_around_the_work_of_one_process_is_no_other_one(tmp_path: Path) -> None:
    """The profiler's own spans have words for processes, what runs on a GPU has its number, and steps follow each other."""
    one = ranges(event("cpu_op", "aten::mm", 2, 3))
    around = [event("Trace", "PyTorch Profiler (0)", 0, 20) | {"pid": "Spans"}, event("gpu_user_annotation", "step", 0, 20) | {"pid": 0}]
    kernel = [e | {"pid": 0} if e["cat"] == "kernel" else e for e in gpu("flash", MAIN, 2, 6, 7, 1)]
    assert read(tmp_path, *one, *moved(one, later=20), *around, *kernel).measures == "gpu"


def test_what_several_processes_wrote_into_one_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", ranges())
    path.write_text(path.read_text() * 2)
    with pytest.raises(PlaybookError, match="goes on behind its end, as where several processes wrote into one file"):
        kineto.read(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PlaybookError, match="cannot be read"):
        kineto.read(tmp_path / "none.json")


WILD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.just(10**400)
)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["ph", "cat", "name", "tid", "ts", "dur", "args", "id"]), WILD), max_size=8))
@settings(max_examples=20)
def test_wild_fields_never_end_in_anything_but_a_clear_error(tmp_path: Path, changes: list[tuple[int, str, Any]]) -> None:
    events = [*ranges(), *backward(5)]
    for i, key, value in changes:
        events[i % len(events)][key] = value
    with suppress(PlaybookError):
        table = read(tmp_path, *events)
        assert table.busy_ms + table.idle_ms == pytest.approx(table.span_ms)
