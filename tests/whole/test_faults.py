"""Planted faults with real processes: each ends as the outcome it is, and nothing stays behind.

The ranks are `planted.py`, which invents its step times; the tests under `test_real_trainer` run the real trainer under it.
"""

import io
import itertools
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
from planted_case import REAL, bench, only, options

from playbook.errors import PlaybookError, StoreError
from playbook_bench.launch import outcome
from playbook_bench.launch.local import Interrupted
from playbook_bench.machine.telemetry import Ticks
from playbook_bench.run import aa, confirm, replay, report, store
from playbook_bench.run.progress import Progress


@pytest.mark.full
def test_a_series_runs_burn_in_and_pairs_and_its_evidence_replays(case, tmp_path, plant):
    plant(candidate={"slower": 0.2})
    found = bench(case(), tmp_path)
    measured, derived = found.evidence.measured, found.evidence.derived
    assert found.status == "measured"
    assert derived.comparison.effect == pytest.approx(-0.2 / 1.2, abs=0.02)
    assert derived.comparison.low < derived.comparison.effect < derived.comparison.high
    assert [r.role for r in measured.runs[:2]] == ["burn_in", "burn_in"]
    assert measured.aa is None
    assert sorted("".join(measured.plan.order)) == [*"AAAABBBB"]
    assert replay.replay(found.path) == (True, [])
    assert not list((tmp_path / "results" / "work").glob("*")), "a clean series leaves no run folders"


@pytest.mark.parametrize(
    ("op", "margin", "slower", "status"),
    [
        (">=", 5, -0.2, "confirmed"),
        ("<=", -3, -0.2, "refuted"),
        ("within", 10, 0.0, "confirmed"),
    ],
)
@pytest.mark.sample("<=--3--0.2-refuted")
def test_a_planted_effect_gets_the_verdict_it_deserves(card, tmp_path, plant, op, margin, slower, status):
    plant(candidate={"slower": slower})
    found = only(confirm.run([card(op, margin)], options(tmp_path, seed=3)))
    assert (found.status, found.name) == (status, "Z1")
    assert replay.replay(found.path)[0]


def test_a_claim_that_noise_puts_out_of_reach_ends_after_the_second_look_and_what_has_none_goes_on(card, case, tmp_path, plant):
    plant(baseline={"noise": 0.1}, candidate={"noise": 0.1})
    cards = [card(">=", 0)]
    path = Path(case())
    path.write_text(path.read_text().replace("[4, 8]", "[2, 4, 6]"))
    assert bench(str(path), tmp_path, settles=lambda *_: False).evidence.derived.comparison.pairs == 6
    found = only(confirm.run(cards, options(tmp_path, seed=1)))
    measured, verdict = found.evidence.measured, found.evidence.derived.verdict
    assert (found.status, verdict.reason, measured.plan.stopped) == ("inconclusive", "power", "out_of_reach")
    assert "out of reach after 4 of 6 pairs; about " in verdict.sentence
    assert replay.replay(found.path)[0]


def test_a_deterministic_metric_takes_one_pair_and_no_noise(card, tmp_path, plant):
    plant()
    found = only(confirm.run([card("<=", 0, "dispatch_bytes_per_token_layer")], options(tmp_path)))
    assert found.status == "confirmed"
    assert len(found.evidence.measured.runs) == 2
    assert found.evidence.measured.aa is None
    assert report.as_json([found])["exit_code"] == 0


@pytest.mark.parametrize(
    ("fault", "outcome", "reason", "code"),
    [
        ("nan", "nan", "run_error", 5),
        ("crash", "crash", "run_error", 5),
        ("kill", "killed", "run_error", 5),
        ("oom", "oom", "oom", 3),
        ("memory", "oom", "oom", 3),
        ("silent", "crash", "run_error", 5),
    ],
)
@pytest.mark.sample("crash-crash-run_error-5", "oom-oom-oom-3", "nan-nan-run_error-5")
def test_a_failing_run_is_an_outcome_and_never_slower(card, tmp_path, plant, fault, outcome, reason, code):
    plant(candidate={"fault": fault})
    found = only(confirm.run([card("<=", 5)], options(tmp_path)))
    bad = [r for r in found.evidence.measured.runs if r.outcome != "ok"]
    assert [r.outcome for r in bad] == [outcome]
    assert found.evidence.derived.verdict.reason == reason
    assert confirm.exit_code([found]) == code
    assert found.evidence.derived.comparison is None
    assert replay.replay(found.path)[0]


@pytest.mark.parametrize(("full", "fits", "status"), [("baseline", "candidate", "confirmed"), ("candidate", "baseline", "refuted")])
def test_what_fits_is_judged_alike_where_the_first_or_the_second_does_not(card, tmp_path, plant, full, fits, status):
    plant(**{full: {"fault": "oom"}})
    found = only(confirm.run([card(">=", 100, "fits", "points")], options(tmp_path)))
    assert found.evidence.measured.plan.order == ["AB"]
    assert {r.variant: r.outcome for r in found.evidence.measured.runs} == {full: "oom", fits: "ok"}
    assert (found.status, found.evidence.derived.verdict.reason) == (status, "exact")
    assert replay.replay(found.path)[0]


def test_another_rank_killed_takes_the_run_down_at_once(case, tmp_path, plant):
    plant(candidate={"fault": "kill", "rank": 1})
    found = bench(case(), tmp_path)
    assert found.evidence.measured.runs[-1].outcome == "killed"  # and not ended at its time limit
    assert "rank 1 ended with SIGKILL" in found.evidence.measured.runs[-1].message


@pytest.mark.full
def test_the_noise_of_a_metric_that_the_runs_do_not_report_is_refused(case, tmp_path, plant):
    plant()
    with pytest.raises(PlaybookError, match="baseline reported no mfu"):
        aa.run(case("mfu"), options(tmp_path, profile="cpu"))
    assert not list((tmp_path / "results").rglob("*.json"))


def test_a_feature_that_did_not_run_is_an_error_not_a_slowdown(card, tmp_path, plant):
    plant(candidate={"fault": "disable", "slower": 0.3})
    found = only(confirm.run([card("<=", -3)], options(tmp_path)))
    assert (found.status, found.evidence.derived.verdict.reason) == ("error", "not_activated")
    assert [r.role for r in found.evidence.measured.runs] == ["burn_in", "burn_in"], "no pair is spent on what the first runs show"
    assert replay.replay(found.path) == (True, [])


@pytest.mark.full
def test_a_count_that_the_receipt_cannot_give_is_an_error_with_a_record(case, tmp_path, plant):
    plant()
    path = Path(case("dispatch_bytes_per_token_layer"))
    path.write_text(path.read_text().replace("inside: dispatch}]}\n  candidate", "inside: dispatch, count: 4 * layerz}]}\n  candidate"))
    found = bench(str(path), tmp_path)
    assert (found.status, found.evidence.derived.verdict.reason) == ("error", "not_activated")
    assert "== 4 * layerz" in found.evidence.derived.verdict.sentence
    assert confirm.exit_code([found]) == 5
    assert replay.replay(found.path)[0]


@pytest.mark.full
def test_clocks_are_those_of_the_timed_steps_and_what_held_them_down_is_shown(case, tmp_path, plant, monkeypatch):
    """Beside them, in one series: a host that keeps the GPU waiting, and processor time that other machines had."""
    plant(baseline={"late": 1.0, "computing": 31})
    counts = (Ticks(1000 * n, 150 * n) for n in itertools.count())
    monkeypatch.setattr("playbook_bench.run.series.ticks", lambda: next(counts))

    def read(self, start, end):
        clock, limits = {"p5": 1500.0, "p50": 1695.0, "p95": 1980.0}, {"power": 91.0, "heat": 0.0}
        return {"clock_sm_mhz": clock, "throttle_reasons": ["0x4"], "limited_percent": limits, "window": [start, end]}

    monkeypatch.setattr("playbook_bench.machine.telemetry.Telemetry.between", read)
    out, found = io.StringIO(), bench(case(), tmp_path)
    runs = found.evidence.measured.runs
    # The planted summary says 0.01 s of start-up, the sums of the steps of warm-up and of the timed ones, and 0.02 s more than those in all.
    assert [r.telemetry["window"][1] - r.telemetry["window"][0] for r in runs] == pytest.approx([r.seconds.timed for r in runs], abs=1e-3)
    late, *others = [r.telemetry["window"][0] - datetime.fromisoformat(r.started).timestamp() for r in runs]
    assert min(others) > 0.01 + min(r.seconds.warm_up for r in runs) - 1e-3
    assert late > 0.9, "the ranks of the first launch began a second after it"
    assert {r.telemetry["over"] for r in runs} == {"timed steps"}
    report.print_outcome(found, report.console(out))
    assert "the GPU's clock was held down by power in 91 % of baseline (1,695 MHz), 91 % of candidate (1,695 MHz)" in out.getvalue()
    assert "heat" not in out.getvalue()
    assert {r.telemetry["stolen_percent"] for r in runs} == {15.0}
    assert "of the processor time the hypervisor kept 15 % from baseline, 15 % from candidate" in out.getvalue()
    assert "the GPU computes 31 % of the step in baseline, 100 % of the step in candidate" in out.getvalue()
    assert out.getvalue().startswith("planted moe.dispatcher alltoall -> allgather  "), (
        "a name longer than its column stays a word of its own"
    )


def test_a_run_that_failed_keeps_the_clocks_of_its_whole_launch(case, tmp_path, plant, monkeypatch):
    plant(baseline={"fault": "crash", "at": 4}, candidate={"fault": "crash", "at": 4})
    monkeypatch.setattr("playbook_bench.machine.telemetry.Telemetry.between", lambda self, start, end: {"throttle_reasons": ["0x48"]})
    runs = bench(case(), tmp_path).evidence.measured.runs
    assert [r.telemetry["over"] for r in runs] == ["launch"] * len(runs)


# The real trainer under the same faults.


@pytest.mark.full
def test_real_trainer_that_hangs(case, tmp_path, plant):
    plant(baseline={"fault": "hang", "rank": 1})
    found = bench(case("dispatch_bytes_per_token_layer", timeout=12, steps=400), tmp_path, command=REAL)
    assert found.evidence.measured.runs[-1].outcome == "hang"
    assert found.status == "error"


@pytest.mark.full
def test_real_trainer_with_its_feature_disabled(case, tmp_path, plant):
    plant(candidate={"fault": "disable"})
    found = bench(case("dispatch_bytes_per_token_layer", steps=4), tmp_path, command=REAL)
    assert (found.status, found.evidence.derived.verdict.reason) == ("error", "not_activated")


def test_a_verdict_is_printed_before_it_is_stored_and_kept_where_storing_fails(case, tmp_path, plant, monkeypatch):
    """A full disk lost the whole series: the record was written before anything was printed."""
    plant()
    events, real = [], store.write_once

    class Told(Progress):
        def finished(self, outcome):
            events.append(outcome.status)

    def full(path, text, *more):
        events.append("written")
        if path.is_relative_to(tmp_path / "results"):
            raise StoreError(f"{path} cannot be written: No space left on device; free some space")
        real(path, text, *more)

    monkeypatch.setattr(store, "write_once", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(StoreError, match=r"No space left.*the verdict above stands, and its record is .*elsewhere.*json"):
        bench(case("dispatch_bytes_per_token_layer"), tmp_path, progress=Told())
    assert events == ["measured", "written", "written"]
    (kept,) = (tmp_path / "elsewhere").rglob("*.json")
    assert replay.replay(kept) == (True, [])


@pytest.mark.full
def test_a_stopped_series_goes_on_without_having_asked_for_a_journal(case, tmp_path, plant, stops_at):
    plant()
    launcher = stops_at(4)
    with pytest.raises(Interrupted):
        bench(case(), tmp_path, launcher=launcher)
    assert bench(case(), tmp_path, launcher=launcher).status in ("measured", "inconclusive")
    assert launcher.launched[4].startswith("002-"), "the burn-ins are not measured again"
    assert not list((tmp_path / "results" / "journal").glob("*")), "a command that ended leaves nothing to go on with"


@pytest.mark.parametrize(
    ("log", "code", "ended", "says"),
    [
        (
            "step 1\nTraceback (most recent call last):\n  x\nValueError: planted\n[W] c10d\n",
            1,
            "crash",
            "rank 0 ended with exit code 1: ValueError: planted",
        ),
        ("Traceback:\nMemoryError\n", 1, "oom", "rank 0 ended with exit code 1: MemoryError"),
        ("error: a data worker died: DataLoader worker (pid 7) is killed by signal: Killed.\n", 1, "crash", "error: a data worker died"),
        ("step 1\n", -9, "killed", "rank 0 ended with SIGKILL (most often the host was out of memory"),
    ],
)
def test_the_first_line_of_a_failure_names_its_cause(tmp_path, log, code, ended, says):
    (tmp_path / "rank0.log").write_text(log)
    found = outcome.judge([outcome.Ended(0, code, tmp_path / "rank0.log")], tmp_path, 0.0, 1.0)
    assert (found.outcome, says in found.message.splitlines()[0]) == (ended, True)
