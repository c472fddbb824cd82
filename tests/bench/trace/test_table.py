"""The table of time per range: attribution and interval arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.errors import PlaybookError
from playbook.kernels import length, subtract, union
from playbook_bench.trace.table import NS_PER_MS, UNATTRIBUTED, Op, RangeRow, Span, Timeline, TraceTable, build

MAIN, GRAD = 1, 2
MS = NS_PER_MS


def row(table: TraceTable, path: str, phase: str = "forward") -> RangeRow:
    found = [r for r in table.rows if (r.path, r.phase) == (path, phase)]
    assert len(found) == 1, f"{path} {phase}: {[(r.path, r.phase) for r in table.rows]}"
    return found[0]


def span(name: str, start: float, end: float, thread: int = MAIN) -> Span:
    return Span(thread, name, round(start * MS), round(end * MS))


def op(launch: float, start: float, end: float, kind: str = "compute", thread: int = MAIN, name: str = "k") -> Op:
    return Op(thread, round(launch * MS), round(start * MS), round(end * MS), kind, name)  # type: ignore[arg-type]


def step() -> list[Span]:
    """One step: 0-10 forward with two parts inside the decoder, 10-18 backward on its own thread, 18-20 optimizer."""
    return [
        span("step", 0, 20),
        span("forward", 0, 10),
        span("decoder", 1, 9),
        span("attention", 1, 4),
        span("dispatch", 4, 8),
        span("backward", 10, 18),
        span("decoder.bwd", 10, 17, GRAD),
        span("dispatch.bwd", 10, 13, GRAD),
        span("attention.bwd", 13, 16, GRAD),
        span("optimizer", 18, 20),
    ]


def table(spans: list[Span], ops: list[Op]) -> TraceTable:
    return build(Timeline("nsys", "gpu", spans, ops))


def test_work_belongs_to_the_range_that_launched_it_not_to_the_one_it_ran_in() -> None:
    t = table(step(), [op(2, 6, 7)])
    assert row(t, "decoder/attention").busy_ms == pytest.approx(1)
    assert row(t, "decoder").busy_ms == pytest.approx(1)
    assert row(t, "decoder").self_ms == 0
    assert row(t, "decoder/dispatch").busy_ms == 0


def test_backward_outside_every_part_is_listed_and_lowers_the_coverage() -> None:
    t = table(step(), [op(11, 11, 12, thread=GRAD), op(17.5, 17.5, 18.5, thread=GRAD, name="orphan")])
    assert row(t, UNATTRIBUTED, "backward").busy_ms == pytest.approx(1)
    assert t.coverage.backward == pytest.approx(0.5)
    assert t.coverage.forward is None
    assert [(u.name, u.phase) for u in t.unattributed] == [("orphan", "backward")]


def test_overlapping_streams_count_once_in_busy_and_twice_in_sum() -> None:
    t = table(step(), [op(2, 2, 4), op(2, 3, 5)])
    assert row(t, "decoder/attention").busy_ms == pytest.approx(3)
    assert row(t, "decoder/attention").sum_ms == pytest.approx(4)
    assert t.busy_ms == pytest.approx(3)


def test_only_communication_without_computation_is_exposed() -> None:
    t = table(step(), [op(5, 5, 8, "communication", name="ncclDevKernel"), op(2, 6, 7)])
    assert row(t, "decoder/dispatch").exposed_comm_ms == pytest.approx(2)
    assert row(t, "decoder/dispatch").self_ms == pytest.approx(2)
    assert row(t, "decoder/attention").self_ms == pytest.approx(1)
    assert t.communication_ms == pytest.approx(3)
    assert t.exposed_comm_ms == pytest.approx(2)


def test_recomputation_is_neither_forward_nor_backward() -> None:
    spans = [*step(), span("attention", 13.5, 14.5, GRAD)]
    t = table(spans, [op(14, 14, 15, thread=GRAD)])
    assert row(t, "decoder/attention", "recompute").busy_ms == pytest.approx(1)
    assert t.coverage.backward == 1


def test_figures_are_per_step() -> None:
    twice = [*step(), *[s._replace(start=s.start + 20 * MS, end=s.end + 20 * MS) for s in step()]]
    t = table(twice, [op(2, 2, 3), op(22, 22, 25)])
    assert t.num_steps == 2
    assert row(t, "decoder/attention").busy_ms == pytest.approx(2)
    assert row(t, "decoder/attention").count == 1
    assert row(t, "decoder/attention").host_ms == pytest.approx(3)


def test_a_trace_without_steps_says_so() -> None:
    t = table([span("attention", 0, 2)], [op(1, 1, 3)])
    assert any("step" in n for n in t.notes)
    assert row(t, "attention").busy_ms == pytest.approx(2)


@pytest.mark.parametrize(("spans", "ops", "what"), [([], [op(1, 1, 2)], "ranges"), (step(), [], "operations")])
def test_an_empty_trace_says_what_is_missing(spans: list[Span], ops: list[Op], what: str) -> None:
    with pytest.raises(PlaybookError, match=f"no {what}"):
        table(spans, ops)


NAMES = st.sampled_from(["forward", "backward", "decoder", "attention", "dispatch", "attention.bwd", "decoder.bwd", "loss", "odd"])
TIME = st.integers(0, 60)
SPANS = st.lists(st.builds(lambda t, n, a, d: Span(t, n, a, a + d), st.sampled_from([MAIN, GRAD, 3]), NAMES, TIME, TIME), max_size=20)
KIND = st.sampled_from(["compute", "communication", "copy"])
OPS = st.lists(
    st.builds(lambda t, w, s, d, k: Op(t, w, s, s + d, k, "k"), st.sampled_from([MAIN, GRAD, 4]), TIME, TIME, st.integers(0, 30), KIND),
    min_size=1,
    max_size=30,
)


@given(SPANS, OPS)
@settings(max_examples=200, deadline=None)
def test_ranges_and_unattributed_and_idle_add_up_to_the_step(spans: list[Span], ops: list[Op]) -> None:
    t = table([Span(MAIN, "step", 0, 70), *spans], ops)
    assert sum(r.self_ms for r in t.rows) == pytest.approx(t.busy_ms, abs=1e-9)
    assert t.busy_ms + t.idle_ms == pytest.approx(t.span_ms, abs=1e-9)
    window = (0, round(t.span_ms * NS_PER_MS))
    inside = union((max(o.start, window[0]), min(o.end, window[1])) for o in ops)
    assert t.busy_ms * NS_PER_MS == pytest.approx(length(inside))
    for r in t.rows:
        assert r.self_ms <= r.busy_ms + 1e-12 <= r.sum_ms + 2e-12
        assert r.exposed_comm_ms <= t.exposed_comm_ms + 1e-12


@given(st.lists(st.tuples(TIME, TIME), max_size=12), st.lists(st.tuples(TIME, TIME), max_size=12))
@settings(max_examples=200, deadline=None)
def test_interval_arithmetic_agrees_with_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def points(found: list[tuple[int, int]]) -> set[int]:
        return {x for s, e in found for x in range(s, e)}

    assert points(union(a)) == points(a)
    assert points(subtract(union(a), union(b))) == points(a) - points(b)
    assert length(union(a)) == len(points(a))
