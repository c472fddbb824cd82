"""The noise of a machine, from runs of one configuration against itself: kept, checked by a fresh pair, and measured anew where it misleads."""

import functools
import io
import json
import signal
from collections import Counter
from datetime import datetime, timedelta

import pytest
from planted_case import FAKE, bench, options
from typer.testing import CliRunner

from playbook.records.consistency import NEIGHBOURHOOD, contradictions
from playbook_app.cli.app import app
from playbook_bench.launch import local
from playbook_bench.run import aa, confirm, replay, report, store
from playbook_bench.run import options as defaults


@pytest.mark.full
def test_a_stored_noise_is_used_again_and_checked_by_a_fresh_pair(case, tmp_path, plant):
    plant()
    noise = aa.run(case(), options(tmp_path, profile="cpu"))
    assert 0 < noise.deviation < 0.05
    found = bench(case(), tmp_path)
    assert found.evidence.measured.aa == noise.baseline
    assert sum(r.role == "aa" for r in found.evidence.measured.runs) == 2


@pytest.mark.full
def test_series_of_one_workload_share_the_noise_of_their_neighbourhood(case, tmp_path, plant, monkeypatch):
    """Another configuration, minutes later, in the same place: ten launches instead of eighteen, and the record says whose noise it is."""
    monkeypatch.setattr(aa, "LEAST_GPUS", 0)
    plant(candidate={"slower": 0.3})
    first, second = bench(case(), tmp_path), bench(case(steps=13), tmp_path)
    roles = [Counter(r.role for r in found.evidence.measured.runs) for found in (first, second)]
    assert roles == [Counter(burn_in=2, measure=8)] * 2
    assert [o.evidence.seconds.total > sum(r.wall_s for r in o.evidence.measured.runs) + 0.5 for o in (first, second)] == [True, False]
    assert second.evidence.measured.aa == first.evidence.measured.aa
    assert "measured for planted, in the same place" in second.evidence.derived.gates[-2].detail
    assert store.load_checked(second.path)[1] == []
    assert replay.replay(second.path) == (True, [])


@pytest.mark.full
def test_what_the_neighbourhood_does_not_settle_gets_a_noise_of_its_own(case, tmp_path, plant, monkeypatch):
    """The neighbour is ten times as noisy as this workload: at the first look its noise says nothing of an effect of 3 %."""
    monkeypatch.setattr(aa, "LEAST_GPUS", 0)
    plant(baseline={"noise": 0.05}, candidate={"slower": 0.5})
    noisy = bench(case(), tmp_path).evidence.measured.aa
    plant(candidate={"slower": 0.03})
    found = confirm.bench_run(case(steps=13), options(tmp_path, profile="cpu", settles=lambda d: d.comparison.high < 0))[0]
    measured = found.evidence.measured
    assert measured.aa.noise_key != noisy.noise_key
    assert {r.config_sha for r in measured.aa.runs} <= {r.config_sha for r in measured.runs}
    assert Counter(r.role for r in measured.runs) == Counter(burn_in=2, measure=8)
    assert found.evidence.derived.comparison.high < 0
    assert store.load_checked(found.path)[1] == []
    assert replay.replay(found.path) == (True, [])


@pytest.mark.full
def test_pairs_noisier_than_their_neighbourhood_go_on_without_a_noise_of_their_own(case, tmp_path, plant, monkeypatch):
    """They are held to their own deviation already; four more pairs cost what another A/A would, and decide more."""
    monkeypatch.setattr(aa, "LEAST_GPUS", 0)
    plant()
    quiet = bench(case(), tmp_path).evidence.measured.aa
    plant(candidate={"noise": 0.1})
    found = confirm.bench_run(case(steps=13), options(tmp_path, profile="cpu", settles=lambda d: d.comparison.pairs == 8))[0]
    measured = found.evidence.measured
    assert measured.aa == quiet
    assert Counter(r.role for r in measured.runs) == Counter(burn_in=2, measure=16)
    assert found.evidence.derived.comparison.look == 2
    assert store.load_checked(found.path)[1] == []
    assert replay.replay(found.path) == (True, [])


@pytest.mark.full
def test_a_noise_from_elsewhere_or_of_another_workload_is_not_shared(case, tmp_path, plant, monkeypatch):
    monkeypatch.setattr(aa, "LEAST_GPUS", 0)
    plant(candidate={"slower": 0.3})
    first = bench(case(), tmp_path)
    second = bench(case(steps=13), tmp_path).evidence
    for name, change in {
        "another configuration": {"config": {**first.evidence.measured.aa.config, "backend": "megatron"}},
        "not measured within": {
            "runs": [r.model_copy(update={"started": "2026-01-01T00:00:00Z"}) for r in first.evidence.measured.aa.runs]
        },
        "noise key": {"place": None},
    }.items():
        measured = second.measured.model_copy(update={"aa": second.measured.aa.model_copy(update=change)})
        assert any(name in line for line in contradictions(second.model_copy(update={"measured": measured}))), name
    noise, machine = first.evidence.measured.aa, first.evidence.measured.machine
    last = max(datetime.fromisoformat(r.started) for r in noise.runs)
    for after, near in ((-1, 0), (0, 1), (7200, 1), (7201, 0)):  # a series that goes on hours later has what it began with
        found = store.neighbours(
            tmp_path / "results/baselines", machine, noise.place, noise.surroundings, last + timedelta(seconds=after), NEIGHBOURHOOD
        )
        assert [b.created for b in found] == [noise.created] * near
    monkeypatch.setattr(aa.detect, "place", lambda: ["another host"])
    third = bench(case(steps=14), tmp_path).evidence.measured
    assert third.aa != first.evidence.measured.aa


@pytest.mark.full
def test_a_disturbed_noise_is_not_stored_and_says_so(case, tmp_path, plant, monkeypatch):
    """The launches that A B B A calls A are slower, as beside a neighbour that comes and goes."""
    monkeypatch.setattr(defaults, "LocalLauncher", functools.partial(local.LocalLauncher, FAKE))
    words = ["bench", "aa", case(), "--profile", "cpu", "--results", str(tmp_path / "results")]
    plant(baseline={"slower": 0.1, "launches": [1, 4, 5, 8]})
    disturbed = CliRunner().invoke(app, words)
    assert disturbed.exit_code == 3, disturbed.output
    assert "contaminated" in disturbed.output
    assert "not stored" in disturbed.output
    assert not list((tmp_path / "results").rglob("*.json"))
    plant()
    clean = CliRunner().invoke(app, [*words, "--json"])
    assert clean.exit_code == 0, clean.output
    (stored,) = (tmp_path / "results").rglob("*.json")
    assert json.loads(clean.stdout)["path"] == str(stored)


@pytest.mark.full
def test_a_fresh_pair_that_contradicts_the_stored_noise_has_it_measured_anew(case, tmp_path, plant):
    plant()
    stored = aa.run(case(), options(tmp_path, profile="cpu"))
    plant(candidate={"slower": 0.5}, baseline={"slower": 0.1, "launches": [2]})
    found = bench(case(), tmp_path)
    now = found.evidence.measured.aa
    assert len(now.runs) == len(stored.baseline.runs) + 2, "the pair that showed it stays in"
    assert not any(r.role == "aa" for r in found.evidence.measured.runs)
    assert found.evidence.derived.comparison.floor > 2 * stored.deviation
    assert found.status == "measured"
    assert replay.replay(found.path)[0]


@pytest.mark.full
def test_the_pair_of_a_launch_that_stands_out_is_measured_again_before_the_noise_is_stored(case, tmp_path, plant):
    plant()
    quiet = aa.run(case(), options(tmp_path / "quiet", profile="cpu"))
    plant(baseline={"slower": 0.1, "launches": [4]})
    odd = aa.run(case(), options(tmp_path, profile="cpu"))
    assert [r.pair for r in odd.baseline.runs] == [0, 0, None, None, 2, 2, 3, 3, 4, 4], "what was set aside stays on record"
    assert odd.path is not None
    assert odd.deviation < 2 * quiet.deviation
    out = io.StringIO()
    report.print_noise(odd, report.console(out))
    assert "4 pairs" in out.getvalue()
    assert "one pair was set aside" in " ".join(out.getvalue().split())
    found = bench(case(), tmp_path)
    assert found.evidence.measured.aa == odd.baseline, "it is not measured again by the next series"
    assert found.evidence.derived.comparison.floor == pytest.approx(odd.deviation)
    assert replay.replay(found.path) == (True, [])


@pytest.mark.full
def test_pairs_stay_where_a_launch_of_the_repetition_stands_out_as_well(case, tmp_path, plant):
    """Two odd launches in ten are what this machine does: the floor has to hold them."""
    plant(baseline={"slower": 0.1, "launches": [4, 9]})
    found = aa.run(case(), options(tmp_path, profile="cpu"))
    assert [r.pair for r in found.baseline.runs] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert found.deviation > 0.04


@pytest.mark.full
def test_a_noise_stored_with_a_launch_that_stands_out_is_measured_anew_by_the_next_series(case, tmp_path, plant):
    """A noise of before the rule, or of a series whose fresh pair was odd, would else hide effects until it expires."""
    plant()
    aa.run(case(), options(tmp_path, profile="cpu"))
    plant(baseline={"slower": 0.1, "launches": [2]})
    assert bench(case(), tmp_path).evidence.derived.comparison.floor > 0.03, "the series that saw it keeps it"
    plant()
    for _ in range(2):
        found = bench(case(), tmp_path)
        assert found.evidence.derived.comparison.floor < 0.01
        assert replay.replay(found.path) == (True, [])
    assert sum(r.role == "aa" for r in found.evidence.measured.runs) == 2, "measured anew once, then checked by a fresh pair"


@pytest.mark.full
def test_a_noise_of_a_disturbed_machine_expires_when_fresh_pairs_are_quieter(case, tmp_path, plant):
    """Two harnesses at once stored a deviation of 20.7 %, which hid effects for half a year."""
    plant(baseline={"noise": 0.1})
    assert aa.run(case(), options(tmp_path, profile="cpu")).deviation > 0.05
    plant(baseline={"noise": 0.001})
    found = bench(case(), tmp_path)
    assert found.evidence.derived.comparison.floor < 0.01
    assert replay.replay(found.path) == (True, [])


def test_a_stopped_noise_goes_on_from_the_launches_that_had_ended(case, tmp_path, plant):
    plant(baseline={"noise": 0.01})
    calls = []

    class Stopped(local.LocalLauncher):
        """Stops the command at its fifth launch, as Ctrl-C does."""

        def run(self, spec, on_step=None):
            calls.append(spec)
            if len(calls) == 5:
                raise local.Interrupted(signal.SIGINT)
            return super().run(spec, on_step)

    path = case()
    with pytest.raises(local.Interrupted):
        aa.run(path, options(tmp_path, launcher=Stopped, profile="cpu"))
    found = aa.run(path, options(tmp_path, launcher=Stopped, profile="cpu"))
    # A burn-in, a pair and half of one before it was stopped: the half is launched again.
    assert len(calls) == 5 + 6
    assert sorted(r.pair for r in found.baseline.runs) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not list((tmp_path / "results" / "journal").iterdir())
