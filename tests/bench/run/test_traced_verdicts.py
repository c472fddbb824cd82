"""A timed verdict from GPUs is followed by a trace of its variants, whose parts add up to the difference."""

import time

import pytest
from test_report import printed_by

from playbook.errors import LaunchError
from playbook.paths import data_root
from playbook.records.case import load_case
from playbook.records.read import read_file
from playbook.records.trace import waterfall
from playbook_bench.run import report, store, tracing
from playbook_bench.run.options import Options

RECORDS = {
    "timed": "h200x1/01M84V49QM966YCH8B4ETTZQE7",
    "counted": "h200x1/01M84TQ0JCKG2WZ82G3VV2DEQF",
    "cpu": "cpu/01M841WH4X4GZQ3YBN3ZFTSWWN",
}
TRACE = data_root("results") / "traces" / "vlm-mock-vs-real-h200x1-11c096c2.json"


@pytest.mark.parametrize(
    ("name", "left_s", "traces", "note"),
    [("timed", None, 1, ""), ("timed", 600.0, 1, ""), ("timed", 5.0, 0, "no time is left"), ("counted", None, 0, ""), ("cpu", None, 0, "")],
)
def test_a_timed_verdict_from_gpus_is_traced_where_time_is_left(tmp_path, monkeypatch, name, left_s, traces, note):
    monkeypatch.setattr(tracing, "run", lambda name, **given: (name, given["profile"]))
    record = store.load(data_root("results") / f"{RECORDS[name]}.json")
    notes = []
    options = Options(results=tmp_path, trace=True, budget_s=left_s, began=time.monotonic())
    trace = tracing.follow_up(load_case(record.measured.case.id), [record], options, notes.append)
    assert trace == ((record.measured.case.id, "h200x1") if traces else None)
    assert [note in text for text in notes] == [True] * bool(note)


def test_a_trace_that_fails_is_said_and_leaves_the_verdict(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise LaunchError("no kernel was seen")

    monkeypatch.setattr(tracing, "run", fails)
    record = store.load(data_root("results") / f"{RECORDS['timed']}.json")
    notes = []
    assert tracing.follow_up(load_case(record.measured.case.id), [record], Options(results=tmp_path, trace=True), notes.append) is None
    assert notes == ["no trace: no kernel was seen"]


def test_the_parts_of_a_waterfall_add_up_to_the_difference_of_the_traced_steps():
    trace = read_file(TRACE).content
    before, after = (v.table.model_dump() for v in trace.variants.values())
    parts = waterfall(before, after)
    assert sum(ms for _, ms in parts) == pytest.approx(after["span_ms"] - before["span_ms"], abs=1e-9)
    assert parts[0][0] == "vision", "a batch without images has no tower to run"
    assert [abs(ms) for _, ms in parts] == sorted((abs(ms) for _, ms in parts), reverse=True)
    assert "-619.3 ms (nsys)" in printed_by(report.print_waterfall, trace)


@pytest.mark.parametrize(("record", "said"), [("01M8557QBZ2CYTSY7G2T76JPRQ", True), ("01M84V49QM966YCH8B4ETTZQE7", False)])
def test_a_verdict_from_a_host_that_differs_from_itself_by_three_percent_says_so(record, said):
    path = data_root("results") / "h200x1" / f"{record}.json"
    shown = printed_by(report.print_outcome, store.Outcome(store.load(path), path))
    assert ("this host is the limit: pairs of launches differ by 3.8 %" in shown) is said
