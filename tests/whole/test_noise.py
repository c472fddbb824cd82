"""The noise of a machine, from runs of one configuration against itself: `bench aa`, and what records of version 2 hold of it."""

import functools
import io
import json

import pytest
from planted_case import FAKE, options
from typer.testing import CliRunner

from playbook.paths import data_root
from playbook.records.consistency import contradictions
from playbook.records.read import EVIDENCE, read
from playbook_app.cli.app import app
from playbook_bench.launch import local
from playbook_bench.run import aa, report
from playbook_bench.run import options as defaults


@pytest.fixture(scope="module")
def borrowed():
    """A shipped record whose noise is of another configuration."""
    return next(
        r.content
        for r in read([data_root("results")])
        if r.schema == EVIDENCE
        and (noise := r.content.measured.aa)
        and not {x.config_sha for x in noise.runs} <= r.content.measured.configs.keys()
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another configuration", {"config": {"backend": "another"}}),
        ("not measured within", {"runs": None}),
        ("noise key", {"place": None}),
    ],
)
def test_in_a_record_of_version_2_a_noise_from_elsewhere_or_of_another_workload_is_not_shared(borrowed, name, change):
    noise = borrowed.measured.aa
    if "runs" in change:
        change = {"runs": [r.model_copy(update={"started": "2026-01-01T00:00:00Z"}) for r in noise.runs]}
    if "config" in change:
        change = {"config": {**noise.config, **change["config"]}}
    measured = borrowed.measured.model_copy(update={"aa": noise.model_copy(update=change)})
    assert not any(name in line for line in contradictions(borrowed))
    assert any(name in line for line in contradictions(borrowed.model_copy(update={"measured": measured})))


@pytest.mark.full
def test_a_disturbed_noise_says_so(case, tmp_path, plant, monkeypatch):
    """The launches that A B B A calls A are slower, as beside a neighbour that comes and goes."""
    monkeypatch.setattr(defaults, "LocalLauncher", functools.partial(local.LocalLauncher, FAKE))
    words = ["bench", "aa", case(), "--profile", "cpu", "--results", str(tmp_path / "results")]
    plant(baseline={"slower": 0.1, "launches": [1, 4, 5, 8]})
    disturbed = CliRunner().invoke(app, words)
    assert disturbed.exit_code == 3, disturbed.output
    assert "contaminated" in disturbed.output
    plant()
    clean = CliRunner().invoke(app, [*words, "--json"])
    assert clean.exit_code == 0, clean.output
    assert json.loads(clean.stdout)["contaminated"] is False


@pytest.mark.full
def test_the_pair_of_a_launch_that_stands_out_is_measured_again(case, tmp_path, plant):
    plant()
    quiet = aa.run(case(), options(tmp_path / "quiet", profile="cpu"))
    plant(baseline={"slower": 0.1, "launches": [4]})
    odd = aa.run(case(), options(tmp_path, profile="cpu"))
    assert [r.pair for r in odd.runs] == [0, 0, None, None, 2, 2, 3, 3, 4, 4], "what was set aside stays on record"
    assert odd.rms_difference < 2 * quiet.rms_difference
    out = io.StringIO()
    report.print_noise(odd, report.console(out))
    assert "4 pairs" in out.getvalue()
    assert "one pair was set aside" in " ".join(out.getvalue().split())


@pytest.mark.full
def test_pairs_stay_where_a_launch_of_the_repetition_stands_out_as_well(case, tmp_path, plant):
    """Two odd launches in ten are what this machine does: the floor has to hold them."""
    plant(baseline={"slower": 0.1, "launches": [4, 9]})
    found = aa.run(case(), options(tmp_path, profile="cpu"))
    assert [r.pair for r in found.runs] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert found.rms_difference > 0.04


@pytest.mark.full
def test_a_stopped_noise_goes_on_from_the_launches_that_had_ended(case, tmp_path, plant, stops_at):
    plant(baseline={"noise": 0.01})
    path, launcher = case(), stops_at(5)
    with pytest.raises(local.Interrupted):
        aa.run(path, options(tmp_path, launcher=launcher, profile="cpu"))
    found = aa.run(path, options(tmp_path, launcher=launcher, profile="cpu"))
    # A burn-in, a pair and half of one before it was stopped: the half is launched again.
    assert len(launcher.launched) == 5 + 6
    assert sorted(r.pair for r in found.runs) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not list((tmp_path / "results" / "journal").iterdir())
