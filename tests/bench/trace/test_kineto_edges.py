"""Single events of torch.profiler's trace: which are read, which launch a kernel is of, and how operators on a thread are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_kineto import EVALUATE, GLOO, GRAD, MAIN, event, flow, gpu, ranges, write

from playbook.errors import PlaybookError
from playbook_bench.trace import kineto
from playbook_bench.trace.table import Timeline, build

MS = 1_000_000


def read(tmp_path: Path, *events: Any) -> Timeline:
    return kineto.read(write(tmp_path / "trace.json", list(events)))


def works(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Each operation with its begin and its end in milliseconds, in order."""
    return sorted(((o.name, o.start / MS, o.end / MS) for o in timeline.ops), key=lambda w: (w[1], w[2]))


@pytest.mark.parametrize(
    ("ts", "dur", "found"),
    [
        (6000, 1000, [("k", 6, 7)]),
        ("6000", "1000.5", [("k", 6, 7.0005)]),
        ("6000" + "." + "0" * 34, 1000, [("k", 6, 7)]),
        ("6000" + "." + "0" * 35, 1000, []),
        ("soon", 1000, []),
        (True, 1000, []),
        (10**16, 1000, []),
        (10**16 - 1, 0, [("k", 10**13 - 0.001, 10**13 - 0.001)]),
        (6000, -1, []),
        (6000, 0, [("k", 6, 6)]),
        (6000, None, []),
    ],
)
def test_a_time_is_a_number_or_its_text_in_microseconds(tmp_path: Path, ts: Any, dur: Any, found: list) -> None:
    call, kernel = gpu("k", MAIN, 2, 6, 7, 1)
    other = gpu("other", MAIN, 2, 1, 2, 2)
    assert works(read(tmp_path, *ranges(), call, *other, {**kernel, "ts": ts, "dur": dur})) == [("other", 1, 2), *found]


def test_an_event_without_a_duration_is_a_moment(tmp_path: Path) -> None:
    call, kernel = gpu("k", MAIN, 2, 6, 7, 1)
    del kernel["dur"]
    assert works(read(tmp_path, *ranges(), call, kernel)) == [("k", 6, 6)]


@pytest.mark.parametrize("broken", [{"ph": "X", "cat": "c", "name": "n"}, 3])
def test_half_of_the_events_may_be_damaged(tmp_path: Path, broken: Any) -> None:
    whole = [*ranges(), *gpu("k", MAIN, 2, 6, 7, 1)]
    assert works(read(tmp_path, *whole, *[broken] * len(whole))) == [("k", 6, 7)]
    with pytest.raises(PlaybookError, match=f"{len(whole) + 1} of {2 * len(whole) + 1} events have no usable time"):
        read(tmp_path, *whole, *[broken] * (len(whole) + 1))


def test_a_kernel_needs_no_thread_and_a_range_does(tmp_path: Path) -> None:
    call, kernel = gpu("k", MAIN, 2, 6, 7, 1)
    del kernel["tid"]
    lost = event("user_annotation", "decoder", 1, 9)
    del lost["tid"]
    found = read(tmp_path, *ranges(), lost, call, kernel)
    assert works(found) == [("k", 6, 7)]
    assert "decoder" not in {s.name for s in found.spans}


def test_names_have_an_end(tmp_path: Path) -> None:
    assert works(read(tmp_path, *ranges(), *gpu("k" * 400, MAIN, 2, 6, 7, 1)))[0][0] == "k" * 300


def test_the_call_that_began_first_is_the_launch(tmp_path: Path) -> None:
    """A runtime call contains the driver call of its number; operators and others carry numbers too."""
    runtime, kernel = gpu("k", MAIN, 2, 6, 7, 1)
    driver = event("cuda_driver", "cuLaunchKernel", 2.001, 2.002, GRAD, correlation=1)
    operator = event("cpu_op", "aten::mm", 1, 3, GRAD, correlation=1)
    for calls in ([runtime, driver, operator], [operator, driver, runtime]):
        (found,) = read(tmp_path, *ranges(), *calls, kernel).ops
        assert (found.thread, found.launch_ns) == (MAIN, 2 * MS)


def test_kernels_whose_launch_was_not_recorded_are_counted(tmp_path: Path) -> None:
    lost = [gpu(f"lost{i}", MAIN, 2, 6, 7, 10 + i)[1] for i in range(2)]
    nameless = {**gpu("nameless", MAIN, 2, 6, 7, 20)[1], "args": {}}
    first = event("cuda_runtime", "cudaLaunchKernel", 3, 3.01, MAIN, correlation=1)
    found = read(tmp_path, *ranges(), first, *gpu("k", MAIN, 2, 6, 7, 2), *lost, nameless)
    assert works(found) == [("k", 6, 7)]
    assert found.notes == ["3 operations have no recorded launching call and are left out"]
    assert read(tmp_path, *ranges(), *gpu("k", MAIN, 2, 6, 7, 1)).notes == []


def test_operators_are_cut_at_ranges_and_named_by_the_outermost(tmp_path: Path) -> None:
    """Attention is from 1 to 5 and dispatch from 5 to 9; what touches is one stretch, and each outermost operator begins a piece."""
    found = read(
        tmp_path,
        *ranges(),
        event("cpu_op", "aten::addmm", 4, 4.5),
        event("cpu_op", "aten::linear", 4, 7),
        event("cpu_op", "aten::view", 6, 7),
        event("cpu_op", "aten::mul", 7, 8),
        event("cpu_op", "aten::add", 7.5, 9.5),
        event("cpu_op", "aten::sum", 9.5, 9.6),
        event("cpu_op", "aten::norm", 18.5, 19),
        event("cpu_op", "no operator", 12, 13),
        event("cpu_op", EVALUATE + "X", 14, 15),
        event("user_annotation", "gloo:all_reduce", 11, 12, GLOO),
    )
    assert works(found) == [
        ("aten::linear", 4, 5),
        ("aten::linear", 5, 7),
        ("aten::mul", 7, 7.5),
        ("aten::add", 7.5, 9),
        ("aten::add", 9, 9.5),
        ("aten::sum", 9.5, 9.6),
        ("gloo:all_reduce", 11, 12),
        ("aten::norm", 18.5, 19),
    ]
    assert {(o.name, o.thread, o.kind) for o in found.ops if o.kind == "communication"} == {("gloo:all_reduce", MAIN, "communication")}


def hinted(tmp_path: Path, launch: float, *events: dict[str, Any]) -> tuple[str, ...]:
    """Where the forward operator lies whose backward launched a kernel on autograd's thread at this moment."""
    (found,) = read(tmp_path, *ranges(), *events, *gpu("k", GRAD, launch, 15, 16, 1)).ops
    return found.forward_path


def forward(number: int, start: float, thread: int = MAIN) -> dict[str, Any]:
    return event("cpu_op", "aten::mm", start, start + 0.5, thread, **{"Sequence number": number, "Fwd thread id": 0})


def wrapper(number: int, start: float, end: float) -> dict[str, Any]:
    return event("cpu_op", EVALUATE + "Mm", start, end, GRAD, **{"Sequence number": number, "Fwd thread id": 1})


def test_the_innermost_wrapper_that_still_runs_says_what_is_run_backward(tmp_path: Path) -> None:
    known = [*flow(1, (MAIN, 2), (GRAD, 11)), forward(5, 2), forward(6, 6), forward(0, 6)]
    outer, inner = wrapper(5, 11, 14), wrapper(6, 12, 13)
    assert hinted(tmp_path, 11.5, *known, inner, outer) == ("attention",)
    assert hinted(tmp_path, 12.5, *known, inner, outer) == ("dispatch",)
    assert hinted(tmp_path, 13, *known, inner, outer) == ("dispatch",)
    assert hinted(tmp_path, 13.5, *known, inner, outer) == ("attention",)
    assert hinted(tmp_path, 14, *known, outer) == ("attention",)
    assert hinted(tmp_path, 14.5, *known, outer) == ()
    assert hinted(tmp_path, 10.9, *known, outer) == ()
    assert hinted(tmp_path, 11.5, *known, wrapper(0, 11, 14)) == ("dispatch",)
    assert hinted(tmp_path, 11.5, *known, wrapper(7, 11, 14)) == ()
    assert hinted(tmp_path, 11.5, forward(5, 2), wrapper(5, 11, 14)) == ()


def test_of_operators_with_one_number_the_last_before_the_backward_pass_is_meant(tmp_path: Path) -> None:
    known = flow(1, (MAIN, 2), (GRAD, 11))
    assert hinted(tmp_path, 11.5, *known, forward(5, 6), forward(5, 2), forward(5, 18.5), wrapper(5, 11, 14)) == ("dispatch",)
    assert hinted(tmp_path, 11.5, *known, forward(5, 18.5), wrapper(5, 11, 14)) == ()
    assert hinted(tmp_path, 11.5, *known, forward(5, 6, GLOO), wrapper(5, 11, 14)) == ()


def test_without_a_gpu_each_operator_is_traced_from_its_own_begin(tmp_path: Path) -> None:
    known = [*flow(1, (MAIN, 2), (GRAD, 11)), forward(5, 2), forward(6, 6)]
    backward = [event("cpu_op", "aten::mm", start, start + 1, GRAD) for start in (11, 12)]
    found = read(tmp_path, *ranges(), *known, wrapper(5, 11, 12), wrapper(6, 12, 13), *backward)
    assert [(o.launch_ns / MS, o.forward_path) for o in found.ops if o.thread == GRAD] == [(11, ("attention",)), (12, ("dispatch",))]


def test_a_trace_of_many_wrappers_still_has_its_table(tmp_path: Path) -> None:
    known = [*flow(1, (MAIN, 2), (GRAD, 11)), forward(5, 2)]
    short = [wrapper(5, 11 + i / 100, 11.005 + i / 100) for i in range(7)]
    long = wrapper(5, 10.5, 14)
    assert hinted(tmp_path, 13, *known, long, *short) == ("attention",)
    assert build(read(tmp_path, *ranges(), *known, long, *short, *gpu("k", GRAD, 13, 15, 16, 1))).coverage.backward == 1
