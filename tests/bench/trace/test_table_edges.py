"""The table of time per range at its edges: moments at which two things meet, and sums by brute force over single nanoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from test_table import GRAD, MAIN, OPS, SPANS, op, row, span, step, table

from playbook.kernels import subtract, union
from playbook_bench.trace.table import UNATTRIBUTED, Op, Place, RangePath, Span, close_backward, exclusive, main_thread, place


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [([(3, 3)], []), ([(2, 4), (0, 2)], [(0, 4)]), ([(0, 9), (1, 2), (9, 10), (12, 13)], [(0, 10), (12, 13)])],
)
def test_merged_intervals_have_a_gap_between_them(intervals: list, merged: list) -> None:
    assert union(intervals) == merged


@pytest.mark.parametrize(
    ("a", "b", "left"),
    [
        ([(2, 6)], [(1, 3)], [(3, 6)]),
        ([(1, 6)], [(1, 3)], [(3, 6)]),
        ([(1, 3)], [(1, 3)], []),
        ([(1, 3)], [(3, 4)], [(1, 3)]),
        ([(3, 4)], [(1, 3)], [(3, 4)]),
        ([(0, 9), (10, 20)], [(1, 2), (3, 12), (19, 25)], [(0, 1), (2, 3), (12, 19)]),
    ],
)
def test_what_is_left_of_intervals_has_no_empty_pieces(a: list, b: list, left: list) -> None:
    assert subtract(a, b) == left


NONE: RangePath = ()


@pytest.mark.parametrize(
    ("own", "main", "forward_path", "expected"),
    [
        (("step", "forward", "decoder", "attention"), NONE, NONE, Place("forward", ("decoder", "attention"))),
        (("attention",), NONE, NONE, Place("forward", ("attention",))),
        (("odd",), ("step", "forward"), NONE, Place("forward", ("odd",))),
        (("odd", "attention"), NONE, NONE, Place("forward", ("odd", "attention"))),
        (("step", "optimizer"), NONE, NONE, Place("other", ("optimizer",))),
        (NONE, ("step",), ("attention",), Place("other", NONE)),
        (NONE, ("step", "backward"), ("attention",), Place("backward", ("attention",))),
        (("decoder.bwd", "odd"), NONE, ("loss",), Place("backward", ("decoder", "odd"))),
        (("decoder.bwd", "decoder.bwd", "attention.bwd"), NONE, NONE, Place("backward", ("decoder", "attention"))),
        (("step", "backward", "odd"), NONE, NONE, Place("backward", ("odd",))),
        # A forward range inside the backward pass is recomputation, in the tower that is run backward and nowhere else.
        (("attention",), ("step", "backward"), NONE, Place("recompute", ("attention",))),
        (("attention", "odd"), ("step", "backward"), NONE, Place("recompute", ("attention", "odd"))),
        (("step", "backward", "attention"), NONE, NONE, Place("recompute", ("attention",))),
        (("step", "backward", "decoder.bwd", "dispatch.bwd", "attention"), NONE, NONE, Place("recompute", ("decoder", "attention"))),
        (("decoder.bwd", "odd", "attention"), NONE, NONE, Place("recompute", ("decoder", "odd", "attention"))),
        (("vision.bwd", "vision", "attention"), NONE, NONE, Place("recompute", ("vision", "attention"))),
        (("loss.bwd", "attention"), NONE, NONE, Place("recompute", ("attention",))),
        (("attention", "decoder.bwd", "dispatch.bwd"), NONE, NONE, Place("backward", ("attention", "decoder", "dispatch"))),
        (("attention", "dispatch.bwd"), NONE, NONE, Place("backward", ("attention", "dispatch"))),
        (("attention.bwd", "vision.bwd", "dispatch"), NONE, NONE, Place("recompute", ("dispatch",))),
    ],
)
def test_a_moment_belongs_to_a_phase_and_a_part(own: RangePath, main: RangePath, forward_path: RangePath, expected: Place) -> None:
    assert place(own, main, forward_path) == expected


def test_the_thread_of_the_steps_is_the_main_one_however_few_its_ranges() -> None:
    busy = [span(f"attention{i}", i, i + 1, GRAD) for i in range(5)]
    assert main_thread([*busy, span("step", 0, 5)]) == MAIN
    assert main_thread([*busy, span("odd", 0, 5)]) == GRAD
    assert main_thread([]) is None


def test_a_backward_range_ends_with_the_pass_that_it_began_in() -> None:
    passes = [Span(MAIN, "backward", 30, 38), Span(MAIN, "backward", 10, 18)]

    def closed(name: str, start: int, end: int) -> tuple[int, int]:
        found = close_backward([*passes, Span(GRAD, name, start, end)])[-1]
        return found.start, found.end

    assert closed("a.bwd", 10, 99) == (10, 18)
    assert closed("a.bwd", 12, 18) == (12, 18)
    assert closed("a.bwd", 17, 19) == (17, 18)
    assert closed("a.bwd", 31, 99) == (31, 38)
    assert closed("a.bwd", 18, 29) == (18, 29)
    assert closed("a.bwd", 9, 20) == (9, 20)
    assert closed("a.bwd", 25, 40) == (25, 40)
    assert closed("attention", 12, 40) == (12, 40)
    assert close_backward([*passes, Span(GRAD, "a.bwd", 5, 5)]) == passes


def test_a_step_has_what_it_launched_up_to_its_end() -> None:
    """The first nanosecond counts, the one after the last does not; without steps everything does."""
    first, after = op(0, 19, 24), op(20, 20, 30)
    t = table(step(), [first])
    assert (t.span_ms, t.busy_ms) == (24, 5)
    t = table(step(), [op(5, 5, 6), after])
    assert (t.span_ms, t.busy_ms) == (20, 1)
    t = table(step(), [op(5, -3, 1), op(5, 19, 22)])
    assert (t.span_ms, t.busy_ms, t.idle_ms) == (22, 4, 18)
    t = table([span("odd", 3, 4), span("attention", 5, 6)], [op(5, 5, 9)])
    assert (t.span_ms, t.busy_ms, t.num_steps) == (6, 4, 1)
    t = table([span("odd", 3, 11)], [op(1, 2, 9), op(1, 1, 1)])
    assert (t.span_ms, t.busy_ms, sum(r.num_ops for r in t.rows)) == (10, 7, 1)


def test_steps_of_another_thread_are_no_steps() -> None:
    t = table(
        [*step(), *(s._replace(start=s.start + 20_000_000, end=s.end + 20_000_000) for s in step()), span("step", 0, 90, 3)], [op(2, 2, 3)]
    )
    assert (t.num_steps, t.span_ms) == (2, 20)


def test_one_thousand_million_nanoseconds_are_a_second() -> None:
    t = table([Span(MAIN, "step", 0, 10**9)], [Op(MAIN, 0, 0, 5 * 10**8, "compute", "k")])
    assert (t.span_ms, t.busy_ms, t.idle_ms) == (1000, 500, 500)


def test_of_a_deep_nest_the_innermost_ranges_are_named() -> None:
    nest = [span("step", 0, 100), *(span(f"r{i}", i, 100 - i) for i in range(40))]
    (deepest,) = (r.path.split("/") for r in table(nest, [op(45, 45, 46)]).rows if r.self_ms)
    assert deepest == [f"r{i}" for i in range(8, 40)]


def test_the_eight_largest_orphans_are_listed() -> None:
    ops = [op(17.5, 20 * i, 20 * i + i, thread=GRAD, name=f"orphan{i}") for i in range(1, 11)]
    twice = [*ops, op(17.5, 300, 301, thread=GRAD, name="orphan9")]
    found = table([*step(), span("step", 20, 400)], twice).unattributed
    assert [(u.name, u.phase, u.count, u.busy_ms) for u in found] == [
        (f"orphan{i}", "backward", (2 if i == 9 else 1) / 2, (i + (i == 9)) / 2) for i in (9, 10, 8, 7, 6, 5, 4, 3)
    ]


def test_shares_of_parallel_work_go_to_computation_then_communication_then_copies_then_to_the_earliest() -> None:
    kinds = [("copy", 0, 10), ("communication", 2, 8), ("compute", 4, 6), ("compute", 5, 7), ("communication", 1, 3)]
    ops = [Op(MAIN, 0, a, b, kind, "k") for kind, a, b in kinds]
    assert exclusive(ops) == [1 + 2, 1 + 1, 2, 1, 2]


def brute(ops: list[Op]) -> list[int]:
    """Each nanosecond to one of the operations that run in it."""
    shares = [0] * len(ops)
    for at in range(min(o.start for o in ops), max(o.end for o in ops)):
        running = [i for i, o in enumerate(ops) if o.start <= at < o.end]
        if running:
            shares[min(running, key=lambda i: (["compute", "communication", "copy"].index(ops[i].kind), ops[i].start, i))] += 1
    return shares


@given(OPS)
@settings(max_examples=100, deadline=None)
def test_shares_are_those_of_single_nanoseconds(ops: list[Op]) -> None:
    assert exclusive(ops) == brute(ops)


@given(SPANS, OPS)
@settings(max_examples=60, deadline=None)
def test_exposed_communication_is_that_without_computation_in_the_same_nanosecond(spans: list[Span], ops: list[Op]) -> None:
    t = table([Span(MAIN, "step", 0, 70), *spans], ops)
    ends = round(t.span_ms * 1_000_000)

    def moments(kind: str) -> set[int]:
        return {at for o in ops if o.kind == kind for at in range(max(o.start, 0), min(o.end, ends))}

    assert t.communication_ms * 1_000_000 == pytest.approx(len(moments("communication")))
    assert t.exposed_comm_ms * 1_000_000 == pytest.approx(len(moments("communication") - moments("compute")))


def test_a_range_is_counted_where_it_is_entered_and_a_part_in_itself_once() -> None:
    spans = [
        *step(),
        span("attention", 2, 3),  # inside attention
        span("loss", -5, 0.5),
        span("loss", 19.5, 25),
        span("router", -5, 0),  # over before the step begins
        span("router", 20, 25),
        span("vision.bwd", 11, 12, GRAD),
        span("odd", 11, 12, 3),  # on a thread of its own, while the main one waits in its backward pass
    ]
    t = table(spans, [op(2.5, 2.5, 3.5), op(5, 5, 6), op(18.5, 18.5, 19)])
    assert [(r.path, r.phase, r.count, r.host_ms) for r in t.rows if r.path.endswith("loss")] == [
        ("loss", "forward", 1, 0.5),
        ("optimizer/loss", "forward", 1, 0.5),
    ]
    attention = row(t, "decoder/attention")
    assert (attention.count, attention.host_ms, attention.num_ops, attention.busy_ms) == (1, 3, 1, 1)
    assert row(t, "decoder").num_ops == 2
    assert (row(t, "decoder/dispatch/vision", "backward").count, row(t, "decoder/dispatch/vision", "backward").host_ms) == (1, 1)
    assert [r.phase for r in t.rows if r.path == "odd"] == ["backward"]
    assert not any("router" in r.path for r in t.rows)
    assert [r.path == UNATTRIBUTED for r in t.rows if r.phase == "forward"][-1]
    assert [r.phase for r in t.rows] == sorted((r.phase for r in t.rows), key=["forward", "backward", "recompute", "other"].index)
    assert t.coverage.total == 1


def test_a_part_in_itself_counts_once_where_no_step_is_named() -> None:
    t = table([span("attention", 0, 9), span("attention", 2, 3)], [op(2, 2, 3)])
    assert [(r.path, r.count, r.host_ms) for r in t.rows if r.count] == [("attention", 1, 9)]


def test_numbers_of_operations_are_per_step_and_names_have_an_end() -> None:
    t = table([*step(), span("step", 20, 40)], [op(2, 2, 3), op(17.5, 3, 4, thread=GRAD, name="k" * 300)])
    assert row(t, "decoder/attention").num_ops == 0.5
    assert [u.name for u in t.unattributed] == ["k" * 200]


def test_what_no_part_encloses_lowers_the_coverage_of_all() -> None:
    t = table(step(), [op(2, 2, 5), op(0.5, 6, 7)])
    assert (t.coverage.forward, t.coverage.backward, t.coverage.total) == (0.75, None, 0.75)
    t = table(step(), [op(2, 2, 5), op(17.5, 6, 7, thread=GRAD)])
    assert (t.coverage.forward, t.coverage.backward, t.coverage.total) == (1, 0, 0.75)
