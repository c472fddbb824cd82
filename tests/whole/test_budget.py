"""Time: what a series does with too little of it, and how a second command goes on with what the first has left."""

import io
from datetime import date
from pathlib import Path

import pytest
from planted_case import bench, stretched
from rich.console import Console

from playbook.errors import StoreError
from playbook.records.read import read
from playbook_app.site.cards import Shelf
from playbook_app.site.evidence import evidence_page
from playbook_app.site.text import NBSP
from playbook_bench.launch import local
from playbook_bench.machine import detect
from playbook_bench.run import replay, report
from playbook_bench.run.journal import Journal, SealedLines
from playbook_bench.run.progress import Progress

STEPS = 16
"""With so many the planted noise of an uninterrupted series has no drift by chance, after which it would start over."""


class Noting(Progress):
    """Keeps what is noted."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def own(notes):
    """What a series says of itself: tests beside this one are other harnesses on the same CPU."""
    return [note for note in notes if not note.startswith("another harness measures")]


@pytest.mark.parametrize(("first", "launches", "verdict"), [(100, 10, "measured"), (900, 1, "inconclusive")])
@pytest.mark.full
def test_a_slow_first_launch_does_not_speak_for_the_later_ones(case, tmp_path, plant, first, launches, verdict):
    """As one that fills compile caches."""
    plant()
    found = bench(case(), tmp_path, launcher=stretched(first, "000-"), budget_s=290.0)
    measured = found.evidence.measured
    assert found.status == verdict
    assert len(measured.runs) == launches


@pytest.mark.parametrize("which", ["000-", "005-"], ids=["before the pairs", "between pairs"])
@pytest.mark.full
def test_a_series_that_time_cut_goes_on_from_its_journal(case, tmp_path, plant, which):
    plant()
    path = case(steps=STEPS)
    cut = bench(path, tmp_path, launcher=stretched(90, which), budget_s=80.0, journal=Journal(tmp_path / "journal", ["here"]))
    assert len(cut.evidence.measured.plan.order) == (2 if which == "005-" else 0)
    # Enough for two launches of 90 s, and for nothing if what the first command has spent were taken off: a budget is for its own command.
    whole = bench(path, tmp_path, budget_s=190.0, journal=Journal(tmp_path / "journal", ["here"]))
    assert (whole.status, len(whole.evidence.measured.plan.order)) == ("measured", 4)
    assert {r.run_id for r in cut.evidence.measured.runs} <= {r.run_id for r in whole.evidence.measured.runs}


@pytest.mark.parametrize(("pairs", "said"), [(99, True), (4, False)])
def test_more_pairs_than_the_case_has_are_not_promised(pairs, said, case, tmp_path, plant):
    plant()
    noting = Noting()
    bench(case(), tmp_path, budget_s=1.0, pairs=pairs, progress=noting)
    assert any("--pairs 99 is more than the" in n for n in noting.notes) is said


@pytest.mark.full
def test_launches_that_a_journal_holds_need_no_time(case, tmp_path, plant, stops_at):
    plant()
    noting = Noting()
    path = case(steps=STEPS)
    stopped(path, tmp_path, stops_at(6))
    lines = SealedLines(tmp_path / "journal" / "planted.jsonl")
    rows = lines.read()
    for row in rows[1:]:
        row["run"]["wall_s"] = 14.0
    lines.replace(rows)
    found = bench(path, tmp_path, budget_s=80.0, progress=noting, journal=Journal(tmp_path / "journal", ["here"]))
    assert own(noting.notes) == [
        "planted: the budget does not hold the 6 launches to the first look; the same command goes on where this one stops"
    ]
    assert len(found.evidence.measured.plan.order) == 4


def stopped(path, tmp_path, launcher, exported=None):
    with pytest.raises(local.Interrupted):
        bench(path, tmp_path, launcher=launcher, journal=Journal(tmp_path / "journal", ["here"], exported))


@pytest.mark.full
def test_a_stopped_series_goes_on_from_its_journal(case, tmp_path, plant, stops_at):
    plant(candidate={"slower": 0.2})
    path = case(steps=STEPS)
    stops_once = stops_at(6)
    launched = stops_once.launched
    stopped(path, tmp_path, stops_once)
    found = bench(path, tmp_path, launcher=stops_once, journal=Journal(tmp_path / "journal", ["here"]))
    measured = found.evidence.measured
    assert found.status == "measured"
    assert len(launched) == 6 + 6, "two burn-ins and one pair are kept; the pair that was cut is whole"
    kept = [r.run_id for r in measured.runs if r.role == "measure"][:2]
    assert set(kept) <= set(launched[:5])
    assert [r.position for r in measured.runs] == list(range(len(measured.runs)))
    assert replay.replay(found.path) == (True, [])
    before = len(launched)
    bench(path, tmp_path, launcher=stops_once, journal=Journal(tmp_path / "journal", ["here"]))
    assert len(launched) == before, "a settled case is not run again"
    found.path.unlink()
    again = bench(path, tmp_path, launcher=stops_once, journal=Journal(tmp_path / "journal", ["here"]))
    assert (again.status, len(launched)) == ("measured", before), "where its record is gone, the kept runs are judged again"


@pytest.mark.full
def test_what_failed_is_launched_again_by_the_next_command(case, tmp_path, plant):
    """A full disk or a missing package is mended, and the same command goes on: the runs that ended well count, the failed one does not."""
    path = case(steps=STEPS)
    plant(candidate={"fault": "crash"})
    failed = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"]))
    assert failed.status == "error"
    plant()
    found = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"]))
    assert found.status == "measured"
    kept = [r for r in failed.evidence.measured.runs if r.outcome == "ok"]
    assert kept
    assert {r.run_id for r in kept} <= {r.run_id for r in found.evidence.measured.runs}
    assert (failed.evidence.measured.failed_before, found.evidence.measured.failed_before) == ({}, {"crash": 1}), (
        "a failure leaves its trace"
    )
    assert replay.replay(found.path) == (True, [])
    shown = Console(file=io.StringIO(), width=200)
    report.print_outcome(found, shown)
    assert "launches that failed before and were repeated: 1 crash\n" in shown.file.getvalue()
    (on_site,) = (r for r in read([tmp_path / "results"]) if r.id == found.evidence.evidence_id)
    assert "| Failed and launched again | 1 crash |" in evidence_page(Shelf({}, [on_site], date(2026, 1, 1), {}), on_site, "").replace(
        NBSP, " "
    )
    found.path.unlink()
    again = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"])).evidence.measured
    assert again.failed_before == {"crash": 1}, "it stays in the journal"


@pytest.mark.full
def test_runs_with_other_exported_variables_are_not_one_series(case, tmp_path, plant, monkeypatch, stops_at):
    """All ranks have what this process exports: who sets `CUDA_LAUNCH_BLOCKING` to find a fault goes on with another machine, in effect."""
    plant()
    path = case(steps=STEPS)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    stopped(path, tmp_path, stops_at(6), exported=detect.exported())
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    with pytest.raises(StoreError, match=r"had CUDA_LAUNCH_BLOCKING=1; set the environment as it was then, or name another folder"):
        bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"], detect.exported()))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    again = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"], detect.exported())).evidence.measured
    assert sum(r.role == "measure" for r in again.runs) == 8


@pytest.mark.full
def test_a_case_that_was_mended_is_not_answered_by_the_record_of_before(case, tmp_path, plant):
    plant()
    counted = "dispatch_bytes_per_token_layer"
    path = case(counted)
    first = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"]))
    assert bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"])).path == first.path
    again = bench(case(counted, steps=13), tmp_path, journal=Journal(tmp_path / "journal", ["here"]))
    assert again.evidence.measured.case.sha != first.evidence.measured.case.sha


@pytest.mark.full
def test_minutes_of_the_case_that_are_spent_are_not_had_again(case, tmp_path, plant):
    """`--budget` is anew for each command; the case's own minutes are not, so that its series is over and nobody is told to come again."""
    plant()
    noting, launcher = Noting(), stretched(310, "001-")
    path = case()
    cut = bench(path, tmp_path, launcher=launcher, progress=noting, journal=Journal(tmp_path / "journal", ["here"]))
    assert cut.evidence.derived.verdict.reason == "budget"
    assert own(noting.notes) == [
        "planted: the 5 minutes of the case do not hold the 8 launches to the first look; its budget.minutes says how many it has"
    ]
    assert bench(path, tmp_path, launcher=launcher, journal=Journal(tmp_path / "journal", ["here"])).path == cut.path
    Path(path).write_text(Path(path).read_text().replace("minutes: 5", "minutes: 50"))
    whole = bench(path, tmp_path, launcher=launcher, journal=Journal(tmp_path / "journal", ["here"]))
    assert {r.run_id for r in cut.evidence.measured.runs} <= {r.run_id for r in whole.evidence.measured.runs}
    assert len(whole.evidence.measured.runs) > len(cut.evidence.measured.runs)


@pytest.mark.full
def test_a_series_that_a_limit_of_pairs_ended_goes_on_with_a_larger_one(case, tmp_path, plant):
    plant(candidate={"slower": 0.2})
    path = case(steps=STEPS)
    short = bench(path, tmp_path, pairs=2, journal=Journal(tmp_path / "journal", ["here"]))
    assert short.evidence.measured.plan.stopped == "pairs"
    assert bench(path, tmp_path, pairs=2, journal=Journal(tmp_path / "journal", ["here"])).path == short.path
    whole = bench(path, tmp_path, journal=Journal(tmp_path / "journal", ["here"]))
    assert len(whole.evidence.measured.plan.order) == 4
    assert {r.run_id for r in short.evidence.measured.runs} <= {r.run_id for r in whole.evidence.measured.runs}
