"""Walls: traces with planted causes, whose answers are known, and hostile ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import in_process
import pytest
from guide_blocks import script
from hypothesis import given
from hypothesis import strategies as st
from test_nsys import database

from playbook.errors import PlaybookError
from playbook.paths import repo_root
from playbook_bench.trace import nsys, reports
from playbook_bench.trace.table import NS_PER_MS, Op, Span, Timeline
from playbook_bench.trace.walls import BUSY, THRESHOLDS, walls

MS = NS_PER_MS
GEMM, ADD, NCCL, MEMCPY = "nvjet_sm90_tst_128x256", "void at::native::vectorized_elementwise_kernel<4>", "ncclDevKernel_AllReduce", "memcpy"
KINDS = {NCCL: "communication", MEMCPY: "copy"}


def op(name: str, start: float, end: float, launch: float | None = None) -> Op:
    """By default launched long before: the device's queue was full."""
    return Op(
        1, round((start - 5 if launch is None else launch) * MS), round(start * MS), round(end * MS), KINDS.get(name, "compute"), name
    )  # type: ignore[arg-type]


def span(name: str, start: float, end: float) -> Span:
    return Span(1, name, round(start * MS), round(end * MS))


def trace(ops: list[Op], *spans: Span, marks: list[Span] | None = None) -> Timeline:
    return Timeline("nsys", "gpu", [span("step", 0, 100), *spans] if marks is None else list(spans), ops, marks=marks or [])


def planted(idle: float, launch: float | None = None) -> list[Op]:
    """100 ms with one idle gap in the middle."""
    half = (100 - idle) / 2
    return [op(GEMM, 0, half), op(GEMM, half + idle, 100, launch)]


def test_a_gap_before_a_late_launch_is_the_hosts() -> None:
    found = walls(trace(planted(40, launch=69.9)))
    assert found.wall == "host-bound"
    assert found.idle == pytest.approx(0.4)
    assert found.host_idle == pytest.approx(0.4)
    assert "40%" in found.sentence
    assert found.data_wait is None  # nothing in the trace tells
    assert any("when data was fetched" in note for note in found.notes)


@pytest.mark.parametrize(("named", "slow"), [(True, 35), (False, 15)])
def test_an_operator_that_holds_most_of_the_hosts_gap_is_named(named: bool, slow: float) -> None:
    timeline = trace(planted(40, launch=69.9))
    timeline.slow.extend([span("aten::prepares", 31, 31 + slow), span("aten::elsewhere", 2, 25)])
    found = walls(timeline)
    assert found.wall == "host-bound"
    assert [(each.name, each.count) for each in found.waits_for] == ([("aten::prepares", 1)] if named else [])
    assert ("1 slow call of aten::prepares (up to 35 ms)" in found.sentence) is named


def test_the_slow_operator_of_a_file_is_the_innermost(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 0, "dur": 100_000},
        {"ph": "X", "cat": "cpu_op", "name": "aten::attention", "pid": 1, "tid": 1, "ts": 20_000, "dur": 70_000},
        {"ph": "X", "cat": "cpu_op", "name": "aten::plan", "pid": 1, "tid": 1, "ts": 21_000, "dur": 68_000},
        {"ph": "X", "cat": "cpu_op", "name": "aten::small", "pid": 1, "tid": 1, "ts": 30_000, "dur": 900},
    ]
    for number, (start, length) in enumerate([(1_000, 19_000), (90_000, 9_000)]):
        shared = {"ph": "X", "pid": 1, "args": {"correlation": number, "device": 0, "stream": 7}}
        events.append({**shared, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": start - 900, "dur": 10})
        events.append({**shared, "cat": "kernel", "name": GEMM, "tid": 7, "ts": start, "dur": length})
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert [each.name for each in walls(reports.timeline_from_file(tmp_path / "t.json")).waits_for] == ["aten::plan"]


def test_a_gap_before_an_early_launch_is_not_the_hosts() -> None:
    found = walls(trace(planted(40, launch=10)))
    assert (found.wall, found.host_idle) == ("idle of unknown cause", 0)
    assert (found.idle, found.unknown_idle) == (pytest.approx(0.4), pytest.approx(0.4))


@pytest.mark.parametrize(("before", "host"), [(0.009, 0.1), (0.011, 0)])
def test_a_kernel_that_runs_as_soon_as_it_can_was_waited_for(before: float, host: float) -> None:
    """A gap of 2 us before each kernel of 18, launched just before the gap began: no queue, and nothing to wait for but the launch."""
    ops = [op(ADD, i * 0.02 + 0.002, (i + 1) * 0.02, i * 0.02 + 0.002 - before) for i in range(5000)]
    assert walls(trace(ops)).host_idle == pytest.approx(host, abs=1e-3)


def test_idle_time_whose_launches_lie_before_the_trace_leads_where_it_is_largest() -> None:
    """63 % idle that nothing explains beside 15 % of exposed communication: the larger is the headline."""
    timeline = trace([op(GEMM, 0, 1), op(NCCL, 1, 17)])
    timeline.unlaunched = [Op(0, at * MS, at * MS, (at + 5) * MS, "compute", GEMM) for at in (40, 60, 80, 95)]
    found = walls(timeline)
    assert found.beyond == ("idle of unknown cause", "exposed communication")
    assert (found.host_idle, found.unknown_idle) == (0, pytest.approx(0.63))
    assert found.sentence.startswith("Idle of unknown cause: for 63% of the step")


def ahead(steps: int, launched: bool) -> Timeline:
    """Steps of 60 ms on the GPU that a host, which runs ahead, marks every 10 ms from zero on; the first kernel comes after 47 ms."""
    marks = [span(f"ProfilerStep#{i}", 10 * i, 10 * i + 10) for i in range(steps)]
    ops = [op(name, 47 + 60 * i + a, 47 + 60 * i + b, 10 * i + 1) for i in range(steps) for name, a, b in ((GEMM, 0, 40), (ADD, 40, 58))]
    timeline = trace(ops if launched else [], marks=marks)
    timeline.device_marks = [span(f"ProfilerStep#{i}", 47 + 60 * i, 47 + 60 * i + 58) for i in range(steps)]
    timeline.unlaunched = [] if launched else ops
    return timeline


@pytest.mark.parametrize("launched", [True, False])
def test_a_step_lasts_from_the_gpus_own_begin_to_the_next(launched: bool) -> None:
    """By the host's marks these are 75 ms a step."""
    found = walls(ahead(3, launched))
    assert (found.span_ms, found.num_steps) == (pytest.approx(60), 2)
    assert found.busy == pytest.approx(58 / 60)
    if launched:  # each step ends with 2 ms of idle time, whose next kernel was launched long before
        assert (found.host_idle, found.unknown_idle) == (0, pytest.approx(2 / 60))
    assert walls(ahead(1, launched)).num_steps == 1


@pytest.mark.parametrize(
    "update",
    ["void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "void multi_tensor_apply_kernel<PointwiseOpScalarListFunctor>"],
)
def test_where_nothing_marks_a_step_the_optimizers_updates_do(update: str) -> None:
    """Each of four updates is two kernels long, with a sum between; the trace begins and ends in the middle of a step."""
    ops = [op(GEMM, 3, 25)]
    for i in range(4):
        end = 60 * i + 40
        ops += [
            op(update, end - 10, end - 6),
            op(ADD, end - 6, end - 5),
            op(update, end - 5, end),
            op(ADD, end, end + 2),
            op(GEMM, end + 2, end + 42),
        ]
    found = walls(trace(ops, marks=[]))
    assert (found.span_ms, found.num_steps) == (pytest.approx(60), 3)
    assert any("optimizer update" in note for note in found.notes)
    assert walls(trace(ops[:11], marks=[])).num_steps == 1


def test_exposed_time_is_told_by_kind_and_group() -> None:
    ops = [op(GEMM, 0, 60), *(op(NCCL, a, b)._replace(group=g) for g, a, b in (("dp #0", 50, 70), ("tp #1", 70, 75), ("tp #1", 80, 90)))]
    found = walls(trace(ops))
    assert found.collectives == {"all-reduce": pytest.approx(0.25)}
    assert found.groups == {"all-reduce tp #1": pytest.approx(0.15), "all-reduce dp #0": pytest.approx(0.1)}


def test_steps_that_begin_at_one_moment_are_none() -> None:
    assert (
        walls(
            trace([op(GEMM, 50, 60, 1), op(GEMM, 50, 70, 11)], marks=[span("ProfilerStep#0", 0, 10), span("ProfilerStep#1", 10, 20)])
        ).num_steps
        == 2
    )


def test_a_gap_under_a_data_range_waits_for_data() -> None:
    for name in (
        "data",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "[pl][profile]train_dataloader_next",
        "get_batch",
    ):
        found = walls(trace(planted(40, launch=69.9), span(name, 20, 65)))
        assert found.wall == "data wait"
        assert found.data_wait == pytest.approx(0.35)
        assert found.host_idle == pytest.approx(0.05)


def test_fetching_that_the_gpu_does_not_wait_for_is_no_wall() -> None:
    found = walls(trace([op(GEMM, 0, 100)], span("data", 0, 90)))
    assert (found.wall, found.data_wait) == ("compute-bound", 0)


def test_a_collective_with_nothing_beside_it_is_exposed() -> None:
    found = walls(trace([op(GEMM, 0, 70), op(NCCL, 60, 90), op(GEMM, 90, 100)]))
    assert found.wall == "exposed communication"
    assert (found.communication, found.exposed) == (pytest.approx(0.3), pytest.approx(0.2))


def test_a_copy_does_not_hide_a_collective_and_computation_does() -> None:
    assert walls(trace([op(GEMM, 0, 80), op(NCCL, 80, 100), op(MEMCPY, 80, 100)])).exposed == pytest.approx(0.2)
    assert walls(trace([op(GEMM, 0, 100), op(NCCL, 20, 100)])).wall == "compute-bound"


@pytest.mark.parametrize(
    ("names", "wall"), [((GEMM, ADD), "compute-bound"), ((ADD, GEMM), "memory-bound kernels"), (("mystery", GEMM), "mixed")]
)
def test_kernels_are_told_apart_by_what_takes_most_of_their_time(names: tuple[str, str], wall: str) -> None:
    found = walls(trace([op(names[0], 0, 60), op(names[1], 60, 95)]))
    assert found.wall == wall
    assert sum(c.share for c in found.classes) == pytest.approx(found.busy)


def test_the_largest_of_several_walls_comes_first_and_the_others_are_named() -> None:
    found = walls(trace([op(GEMM, 0, 40), op(NCCL, 40, 60), op(GEMM, 90, 100, launch=89)]))
    assert found.beyond == ("host-bound", "exposed communication")


@pytest.mark.parametrize("margin", [-0.01, 0.01])
def test_thresholds_decide(margin: float) -> None:
    over = margin > 0
    assert (walls(trace(planted(100 * (THRESHOLDS["host-bound"] + margin), launch=99))).wall == "host-bound") is over
    idle = 100 * (THRESHOLDS["data wait"] + margin)
    assert (walls(trace(planted(idle, launch=99), span("data", 0, 100))).wall == "data wait") is over
    alone = 100 * (THRESHOLDS["exposed communication"] + margin)
    assert (walls(trace([op(GEMM, 0, 100 - alone), op(NCCL, 100 - alone, 100)])).wall == "exposed communication") is over
    assert (walls(trace([op(GEMM, 0, 100 * (BUSY + margin)), op(MEMCPY, 50, 100)])).wall == "compute-bound") is over


def test_steps_are_found_by_the_profilers_marks_or_else_the_whole_trace_counts() -> None:
    marked = walls(trace([op(GEMM, 0, 10), op(GEMM, 50, 90, 49)], marks=[span("ProfilerStep#3", 0, 50), span("ProfilerStep#4", 50, 100)]))
    assert (marked.num_steps, marked.span_ms) == (2, pytest.approx(50))
    bare = walls(trace([op(GEMM, 10, 20), op(GEMM, 50, 90, 49)], marks=[]))
    assert (bare.num_steps, bare.span_ms) == (1, pytest.approx(80))
    assert any("no range marks a step" in note for note in bare.notes)


def test_work_without_a_recorded_launch_is_counted_and_blames_nobody() -> None:
    timeline = trace([op(GEMM, 0, 50)])
    timeline.unlaunched = [Op(0, 90 * MS, 90 * MS, 100 * MS, "compute", GEMM)]
    found = walls(timeline)
    assert (found.busy, found.host_idle) == (pytest.approx(0.6), 0)
    assert any("no recorded launching call" in note for note in found.notes)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(PlaybookError, match="no operations"):
        walls(trace([]))


TIME = st.integers(0, 60)
OPS = st.lists(
    st.builds(
        lambda n, a, d, w: Op(1, a - w, a, a + d, KINDS.get(n, "compute"), n),  # type: ignore[arg-type]
        st.sampled_from([GEMM, ADD, NCCL, MEMCPY, "\x00odd"]), TIME, st.integers(1, 30), st.integers(-5, 40),
    ),
    min_size=1,
    max_size=25,
)  # fmt: skip
SPANS = st.lists(
    st.builds(lambda n, a, d: Span(1, n, a, a + d), st.sampled_from(["step", "data", "x", "ProfilerStep#1"]), TIME, TIME), max_size=6
)


@given(ops=OPS, spans=SPANS)
def test_shares_add_up_for_any_trace(ops: list[Op], spans: list[Span]) -> None:
    try:
        found = walls(Timeline("kineto", "gpu", spans, ops))
    except PlaybookError:
        return
    assert found.host_idle is not None
    assert found.busy + found.idle == pytest.approx(1)
    assert found.host_idle + (found.data_wait or 0) <= found.idle + 1e-9
    assert found.exposed <= found.communication + 1e-9
    assert found.computing + found.exposed <= found.busy + 1e-9
    assert sum(c.share for c in found.classes) == pytest.approx(found.busy)
    assert found.sentence.isprintable()


def chrome(path: Path, *, gap_us: int = 400, data: bool = False, steps: int = 3) -> Path:
    """A trace of torch.profiler without any range of ours: each step 1000 us, with a gap before a late launch."""
    events: list[dict[str, object]] = []
    for i in range(steps):
        t = 1000 * i
        about = {"ph": "X", "pid": 7, "tid": 7}
        events.append({**about, "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": t, "dur": 1000})
        late = t + gap_us - 10
        for k, (name, launch, start, length) in enumerate([(GEMM, late, t + gap_us, 900 - gap_us), (ADD, late + 1, t + 900, 100)]):
            number = 10 * i + k + 1
            events.append(
                {**about, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 3, "args": {"correlation": number}}
            )
            args = {"correlation": number, "device": 0}
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 1, "ts": start, "dur": length, "args": args})
        if data:
            events.append(
                {
                    **about,
                    "cat": "user_annotation",
                    "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                    "ts": t,
                    "dur": gap_us - 20,
                }
            )
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return in_process.run(capsys, "bench", "trace", *words)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """The exit code, and the answer that a program reads."""
    code, out, err = shown(capsys, *words, "--json")
    assert out, err
    return code, json.loads(out)


def test_the_command_answers_with_a_sentence_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, "--file", str(chrome(tmp_path / "t.json")))
    assert code == 0
    assert out.startswith("Host-bound: for 40% of the step")
    assert "by range" not in out
    assert "products" in out
    assert "1.0 ms a step over 2 steps, by kineto" in out
    code, found = answer(capsys, "--file", str(chrome(tmp_path / "t.json", data=True)))
    assert (code, found["wall"], found["num_steps"], found["ranges"]) == (0, "data wait", 2, None)
    assert found["data_wait"] == pytest.approx(0.38, abs=0.01)


def test_ranges_come_after_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chrome(tmp_path / "t.json")
    path.write_text(re.sub(r"ProfilerStep#\d+", "step", path.read_text()))
    code, out, _ = shown(capsys, "--file", str(path))
    assert code == 0
    assert out.startswith("Host-bound: ")
    assert out.index("by range") > out.index("1.0 ms a step over 2 steps, by kineto")
    assert "unattributed" in out[out.index("by range") :]


def test_the_command_wants_a_case_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("case", "--file", "x.json")):
        code, _, err = shown(capsys, *words)
        assert (code, "expected one of them" in err) == (2, True)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"traceEvents": [1, 2, 3]}', '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "x"}]}', "\x00\x01"],
)
def test_hostile_files_are_one_line_and_exit_code_2(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(content)
    code, _, err = shown(capsys, "--file", str(tmp_path / "t.json"))
    assert code == 2
    assert "expected" in err or "valid JSON" in err
    assert "Traceback" not in err


def test_a_short_name_that_tells_nothing_gives_way_to_the_demangled_one() -> None:
    """Nsight Systems' short name of CUTLASS's kernels is `Kernel`."""
    assert nsys._name(["Kernel", "void cutlass::Kernel<cutlass_80_tensorop_s16816gemm>(Params)", "_ZN7cutlass"]).startswith("void cutlass")
    assert (
        nsys._name(["vectorized_elementwise_kernel", "void at::native::vectorized_elementwise_kernel<4>"])
        == "vectorized_elementwise_kernel"
    )
    assert nsys._name(["mystery", "void mystery(int)"]) == "mystery"


def test_a_report_is_exported_by_the_nsys_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, whole = tmp_path / "trace.nsys-rep", database(tmp_path / "whole.sqlite", without="NVTX_EVENTS")
    report.write_text("a report")
    script(tmp_path / "nsys", f'while [ "$1" != -o ]; do shift; done\n/bin/cp {whole} "$2"')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reports.timeline_from_file(report) == reports.timeline_from_file(whole)
    script(tmp_path / "nsys", "exit 3")
    with pytest.raises(PlaybookError, match="nsys export failed"):
        reports.timeline_from_file(report)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PlaybookError, match="where it is, run nsys export"):
        reports.timeline_from_file(report)


@pytest.mark.full
def test_a_real_trace_of_a_slow_loader_waits_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.data import DataLoader

    def slow(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.5)
        return rows[0]

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in DataLoader([torch.ones(64, 64)] * 4, collate_fn=slow):
            (batch @ batch).sum()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    code, found = answer(capsys, "--file", str(tmp_path / "t.json"))
    assert (code, found["wall"]) == (0, "data wait")
    assert found["data_wait"] > 0.5


@pytest.mark.full
def test_a_trace_of_padded_batches_names_the_attention_that_prepares_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    names = {}
    for rows in ("padded", "packed"):
        code, out, _ = shown(capsys, "--file", str(repo_root() / "bench/traces" / f"transformers-{rows}.json.xz"), "--json")
        assert code == 0
        names[rows] = {each["name"] for each in json.loads(out)["waits_for"]}
    assert names == {"padded": {"aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward"}, "packed": set()}


@pytest.mark.full
def test_a_trace_of_a_command_tells_one_kernel_for_all_experts_from_one_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    idle = {}
    for name, grouped in (("cublas", 0), ("cutlass", 16)):
        code, found = answer(capsys, "--file", str(repo_root() / "bench/traces" / f"bare-megatron-{name}.json.gz"))
        assert code == 0
        assert sum(row["count"] for row in found["classes"] if row["name"] == "grouped products") == grouped
        idle[name] = found["idle"]
    assert idle["cublas"] > 3 * idle["cutlass"]
