"""A team's own cards and cases beside those that ship: begun by one command, found by all of them."""

import os
import sys
from pathlib import Path

import in_process
import planned_clock
import pytest

from playbook.cards.load import load_all
from playbook.errors import ConfigError, FileError
from playbook.paths import DEFAULT_RESULTS, data_root, default_results, folders
from playbook.records.case import list_cases, load_case
from playbook_bench.run.options import Options


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAYBOOK_CARDS", "")
    monkeypatch.setenv("PLAYBOOK_CASES", "")

    def run_(*words):
        code, out, err = in_process.run(capsys, *words)
        return code, out + err

    return run_


def test_a_playbook_of_ones_own_is_begun_checked_and_found(run, tmp_path):
    assert run("cards", "init", "our-loader")[0] == 0
    assert load_all()["our-loader"].claims[0].case == "our-loader"
    assert load_case("our-loader").command[:2] == ["python", "train.py"]
    assert "our-loader" in list_cases()
    code, told = run("cards", "check", "cards")
    assert code == 0, told
    code, told = run("cards", "show", "our-loader")
    assert "at least 3 %" in told
    code, told = run("search", "our training script waits for loader workers")
    assert "our-loader" in told
    assert run("cards", "init", "our-loader")[0] == 2
    assert run("cards", "init", "Our Loader")[0] == 2


def test_one_in_a_folder_of_its_own_is_found_from_where_it_was_begun(run, tmp_path):
    """There the case's command runs too; what is printed to do next works as it stands."""
    told = run("cards", "init", "our-loader", "--folder", "perf")[1]
    assert "then playbook cards check perf/cards and playbook confirm our-loader" in told
    assert run("cards", "check", "perf/cards")[0] == 0
    assert "our-loader" in load_all()


def test_a_second_card_takes_the_next_claim(run):
    run("cards", "init", "first")
    run("cards", "init", "second")
    assert {load_all()[name].claims[0].id for name in ("first", "second")} == {"U1", "U2"}


def test_folders_are_named_on_the_command_line_too(run, tmp_path):
    run("cards", "init", "first")
    told = run("cards", "init", "ours", "--folder", "elsewhere")[1]
    assert "playbook --cards elsewhere/cards --cases elsewhere/cases confirm ours" in told
    assert "ours" not in load_all()
    code, told = run("--cards", "elsewhere/cards", "--cases", "elsewhere/cases", "cards", "show", "ours")
    assert code == 0, told
    assert Path(os.environ["PLAYBOOK_CARDS"]) == tmp_path / "elsewhere" / "cards"


def test_an_id_that_ships_already_is_told_with_its_place(run, tmp_path):
    run("cards", "init", "ours")
    path = tmp_path / "cards" / "ours.yaml"
    path.write_text(path.read_text().replace("id: U1", "id: W9"))
    with pytest.raises(FileError, match="claim id 'W9' is already used"):
        load_all()


@pytest.mark.parametrize(
    ("text", "message"), [("cards = 3", "no text"), ("cards", "cannot be read"), ("card = 'x'", "not known"), ("cards = 'x'", "no folder")]
)
def test_a_file_that_names_no_folders_is_one_message(run, tmp_path, text, message):
    (tmp_path / "playbook.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        folders("cards")


def test_records_lie_beside_the_file_from_wherever_below_it_a_command_is_called(run, tmp_path, monkeypatch):
    run("cards", "init", "ours")
    assert default_results() == DEFAULT_RESULTS
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert Options().results == tmp_path / DEFAULT_RESULTS


def test_a_profile_that_no_machine_has_is_found_by_the_check(run, tmp_path):
    run("cards", "init", "ours")
    path = tmp_path / "cases" / "ours.yaml"
    text = path.read_text()
    assert "cpu: {}" in text
    path.write_text(text.replace("cpu: {}", "gpu: {}"))
    code, told = run("cards", "check", "cards")
    assert (code, "profile 'gpu' is neither cpu nor of the form h200x4" in told) == (2, True)


@pytest.mark.parametrize(("metric", "full"), [("step_time", "step_seconds"), ("memory", "peak_memory_bytes")])
def test_a_short_name_of_a_metric_is_answered_with_the_full_one(run, tmp_path, metric, full):
    run("cards", "init", "ours")
    path = tmp_path / "cards" / "ours.yaml"
    path.write_text(path.read_text().replace("metric: step_seconds", f"metric: {metric}"))
    assert f"metric '{metric}' is not known; did you mean '{full}'?" in run("cards", "check", "cards")[1]


def test_without_any_there_are_those_that_ship(run):
    assert folders("cards") == [data_root("cards")]


@pytest.mark.full
def test_its_claim_is_confirmed_by_matched_runs_of_the_command(run, tmp_path, monkeypatch):
    run("cards", "init", "ours")
    case = tmp_path / "cases" / "ours.yaml"
    case.write_text(case.read_text().replace("[python,", f"[{sys.executable},"))
    (tmp_path / "train.py").write_text(
        "import json, pathlib, random, sys\nworkers, launches = int(sys.argv[2]), pathlib.Path(__file__).with_name('launches')\n"
        "number = len(launches.read_text()) if launches.exists() else 0\nlaunches.write_text('.' * (number + 1))\nrandom.seed(number)\nlaunch = 0.08 / workers * (1 + random.gauss(0, 0.003))\n"
        "steps = [launch * (1 + random.gauss(0, 0.01)) for _ in range(50)]\n"
        "for i, seconds in enumerate(steps): print(json.dumps({'step': i, 'seconds': seconds, 'loss': 1.0, 'tokens': 8}))\n"
    )
    planned_clock.install(monkeypatch.setattr)
    code, told = run("confirm", "ours", "--profile", "cpu", "--seed", "1")
    assert code == 0, told
    assert "U1    workers 2 -> 8" in told
    assert "confirmed  +" in told
    assert "activation not proven" in told
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert "U1  confirmed" in " ".join(run("cards", "show", "ours")[1].split(" "))
