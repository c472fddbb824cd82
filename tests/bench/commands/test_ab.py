"""`playbook ab`: what two commands become, and what the answer is. Most launches are invented here, for speed."""

import json
import random
import re
import sys
import venv
from pathlib import Path

import in_process
import pytest

from playbook.cards.model import SHORT_METRICS
from playbook.errors import ConfigError
from playbook.records.commands import Steps
from playbook.records.evidence import Comparison
from playbook_bench.launch.outcome import Result
from playbook_bench.run import ab, replay, schedule
from playbook_bench.variants import checkout
from playbook_bench.variants import program as variant
from playbook_bench.variants.program import Program, start

SCRIPT = str(Path(__file__).parents[2] / "support" / "ranks" / "foreign_script.py")
COMMAND = [sys.executable, SCRIPT, "--launch", "{run}"]


@pytest.fixture
def invented(monkeypatch):
    """Launches take no time: their steps are drawn, slower by `--slower`, by a launch noise of `noise`."""

    def set_(seed=1, noise=0.003, step_noise=0.005):
        draw = random.Random(seed)

        def start(program, folder, on_step=None):
            slower = next((float(w.partition("=")[2]) for w in program.words if w.startswith("--slower=")), 0.0)
            launch = 0.1 * (1 + slower) * (1 + draw.gauss(0, noise))
            tokens = program.tokens or 8
            seconds = [launch * (1 + draw.gauss(0, step_noise)) for _ in range(20)]
            rows = [
                {"step": i, "timed": i >= 4, "seconds": s, "useful_tokens": tokens, "raw_tokens": tokens, "loss": 1.0}
                for i, s in enumerate(seconds)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            env = {"strict": {"packages": {}, "world_size": 1}}
            (folder / "summary.json").write_text(json.dumps({"outcome": "ok", "seconds": {"timed": sum(seconds[4:])}, "env": env}))
            return Result("ok", 0, "", 1.0, 3.0)

        monkeypatch.setattr(variant, "start", start)

    return set_


@pytest.fixture
def run(tmp_path, capsys, monkeypatch, planned):
    def run_(*words):
        monkeypatch.chdir(tmp_path)
        code, out, err = in_process.run(capsys, "ab", "--json", "--seed", "1", *words)
        lines = out.splitlines()
        assert len(lines) <= 1
        return code, json.loads(lines[0]) if lines else None, err

    return run_


@pytest.mark.full
def test_two_commands_with_nothing_installed_but_playbook(run):
    """Launches are real, and their seconds planned; the log is recognised, the record replays."""
    code, found, err = run("--", *COMMAND, "--slower", "1", "--vs", *COMMAND)
    assert (code, found["verdict"]) == (0, "faster"), err
    assert found["effect_percent"]["low"] < 100 < found["effect_percent"]["high"]
    assert list(found) == ["schema", "verdict", "sentence", "metric", "effect_percent", "margin_percent", "pairs", "aa_percent", "record"]
    assert (found["margin_percent"], "not vouched for: data" in found["sentence"]) == (2, True)
    assert (found["schema"], found["metric"], found["pairs"]) == ("ab/1", "step_time", 4)
    assert 0 < found["aa_percent"] < 2
    assert replay.replay(Path(found["record"])) == (True, [])
    assert "launch 10 of 10" in err
    assert "faster  +" in err


@pytest.mark.parametrize(
    ("margin", "words", "code", "verdict"),
    [
        ("2%", ["--slower=0.1"], 1, "slower"),
        ("2%", ["--slower=-0.1"], 0, "faster"),
        ("2%", ["--slower=0.005"], 0, "equivalent"),
        ("2%", [], 0, "equivalent"),
        ("15%", ["--slower=0.1"], 0, "equivalent"),
    ],
)
def test_planted_differences(run, invented, margin, words, code, verdict):
    invented()
    got, found, err = run("--margin", margin, "--", *COMMAND, "--vs", *COMMAND, *words)
    assert (got, found["verdict"]) == (code, verdict), err


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        ({"noise": 0.2}, "quieten the machine"),
        ({"noise": 0.0, "step_noise": 0.1}, "let each launch make more steps: four times as many halve it"),
    ],
)
@pytest.mark.sample("noise0-quieten the machine")
def test_after_the_first_look_it_is_said_what_effect_shows_at_all_and_what_would_show_a_smaller_one(run, invented, noise, says):
    invented(**noise)
    code, found, err = run("--", *COMMAND, "--vs", *COMMAND)
    assert (code, found["verdict"]) == (3, "undecided")
    note, after = err.split("launch 11 of")[0], float(re.search(r"12 pairs show an effect from about (\d+) % on", found["sentence"])[1])
    assert says in note
    assert says in found["sentence"]
    invented(seed=2, **noise)
    verdicts = {run("--seed", "2", "--", *COMMAND, "--vs", *COMMAND, f"--slower={slower * after / 100}")[1]["verdict"] for slower in (2, 4)}
    assert "slower" in verdicts


def test_values_that_point_the_other_way_than_the_effect_are_explained():
    """Drift that favours the baseline: its launches came when the machine was quicker."""
    found = Comparison(
        metric="step_seconds", unit="s", better="lower", design="launches_abba", scale="log_ratio", baseline=1.0, candidate=1.1, effect=0.265,
        low=-0.2, high=0.9, pairs=12, look=5,
    )  # fmt: skip
    assert "the means alone say -9.1 %, and +26.5 % is what is left" in schedule.order_matters(found)
    assert schedule.order_matters(found.model_copy(update={"candidate": 0.9})) == ""
    assert schedule.order_matters(found.model_copy(update={"better": "higher"})) == ""


def test_another_loss_ends_it_after_two_launches_and_names_the_option(run):
    words = [
        sys.executable,
        "-c",
        "import sys,json\nfor i in range(1, 21): print(json.dumps({'step': i, 'seconds': (1 + i % 3 / 1e3) / 1e5, 'loss': float(sys.argv[1]), 'tokens': 4}))",
    ]
    code, found, err = run("--", *words, "4", "--vs", *words, "5")
    assert (code, found["verdict"], err.count("launch ")) == (3, "undecided", 2), err
    assert found["sentence"].endswith("where that is meant: --loss any")


def test_what_a_second_command_goes_on_from_is_told_as_it_is(run, invented, monkeypatch):
    """Launches are said to take 3 s each: half a pair is never kept, and without git nothing is."""
    invented()
    words = ("--budget", "4s", "--", *COMMAND, "--vs", *COMMAND, "--slower=0.1")
    assert "a second command starts again, for without git" in run(*words)[2]
    monkeypatch.setattr(checkout, "source_of", lambda folder: "a commit")
    assert "goes on where this one stops, with a budget that holds a pair of launches (about 6 s)" in run(*words)[2]


def test_lines_of_several_steps_vouch_for_no_single_one(run):
    script = "import json\nfor i in range(1, 21): print(json.dumps({'step': 10 * i, 'seconds': (1 + i % 3 / 1000) / 1e5, 'loss': 1.0, 'tokens': 4}))"
    words = [sys.executable, "-c", script]
    _, found, _ = run("--pairs", "1", "--", *words, "--vs", *words)
    assert "single steps (a line covers 10)" in found["sentence"]


@pytest.mark.parametrize(
    ("candidate", "said"),
    [([*COMMAND, "--fault", "ends early"], "7 of 16"), ([sys.executable, "-c", "raise RuntimeError('broken')"], "broken")],
)
@pytest.mark.sample("candidate0-7 of 16")
def test_a_launch_that_fails_is_an_error(run, candidate, said):
    code, found, err = run("--pairs", "2", "--", *COMMAND, "--vs", *candidate)
    assert (code, found["verdict"], found["effect_percent"]["value"]) == (5, "error", None)
    assert said in err
    assert said in found["sentence"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--log", "megatron-lm", "no adapter 'megatron-lm'"),
        ("--log", "regex:(", "no regular expression"),
        ("--steps", "1", "--steps"),
        ("--warm-up", "-1", "--warm-up"),
        ("--timeout", "0s", "--timeout is 0"),
        ("--timeout", "soon", "--timeout is 'soon'"),
        ("--loss", "0%", "--loss is 0 %"),
        ("--tokens", "4096,", "--tokens is '4096,'"),
        ("--work", "more", "--work is 'more'"),
        ("--metric", "step_tine", "did you mean 'step_time'?"),
        ("--metric", "throughput", "expected one of: memory, step_time, tokens_per_s"),
    ],
)
def test_an_option_that_nothing_can_meet_is_said_before_anything_runs(run, option, value, said):
    code, found, err = run(option, value, "--", *COMMAND, "--vs", *COMMAND)
    assert (code, found) == (2, None)
    assert said in err
    assert "launch 1" not in err


@pytest.mark.full
def test_two_pythons_are_what_is_compared_where_the_commands_name_them(run, tmp_path):
    """Versions of packages are in the record; where one Python runs both, other versions are a fault of the comparison."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    code, found, err = run("--pairs", "2", "--", *COMMAND, "--vs", bare, *COMMAND[1:])
    assert found["pairs"] == 2, err
    strict = json.loads(Path(found["record"]).read_text())["measured"]["strict"].values()
    assert sorted(bool(each["packages"].get("numpy")) for each in strict) == [False, True]
    code, found, err = run("--pairs", "2", "--env", f"PATH={Path(bare).parent}", "--", "python", *COMMAND[1:])
    assert (code, found["pairs"]) == (3, 0)
    assert "packages.numpy" in err


def test_a_command_that_does_not_exist_is_an_error(run):
    code, found, err = run("--", "no-such-program", "--vs", *COMMAND)
    assert (code, found["verdict"]) == (5, "error")
    assert "could not be started" in err
    assert "could not be started" in found["sentence"]


def test_the_candidate_by_a_setting_and_a_variable(run, invented):
    invented()
    code, found, err = run("--pairs", "2", "--set", "slower=0.5", "--env", "NCCL_ALGO=Ring", "--", *COMMAND, "--slower=0.0")
    record = json.loads(Path(found["record"]).read_text())["measured"]["case"]["content"]
    assert code == 3, err
    assert found["effect_percent"]["value"] == pytest.approx(-33, abs=2)
    assert record["candidate"] == {"arguments": ["--slower=0.5"], "environment": {"NCCL_ALGO": "Ring"}}


@pytest.mark.parametrize(
    ("words", "key", "value", "expected"),
    [
        (["a.py", "lr=1"], "lr", "2", ["a.py", "lr=2"]),
        (["a.py", "--lr", "1"], "lr", "2", ["a.py", "--lr", "2"]),
        (["a.py", "--micro-batch=1"], "micro_batch", "2", ["a.py", "--micro-batch=2"]),
        (["a.py", "--x"], "lr", "2", ["a.py", "--x", "--lr=2"]),
        (["a.py"], "train.lr", "2", ["a.py", "train.lr=2"]),
        (["a.py", "--task", "lr", "--lr", "1"], "lr", "2", ["a.py", "--task", "lr", "--lr", "2"]),
        (["a.py", "--lr", "1", "--lr", "3"], "lr", "2", ["a.py", "--lr", "1", "--lr", "2"]),
    ],
)
def test_a_setting_takes_the_place_of_the_one_that_is_there(words, key, value, expected):
    assert ab.question(words, [f"{key}={value}"], []).candidate == expected


@pytest.mark.parametrize(
    ("words", "settings", "variables", "message"),
    [
        (["a"], [], [], "only one command"),
        (["a", "--vs"], [], [], "a command is missing"),
        (["--vs", "b"], [], [], "a command is missing"),
        (["a"], ["lr"], [], "expected key=value"),
        (["a"], [], ["X"], "expected NAME=VALUE"),
        (["a"], [], ["WANDB_API_KEY=1"], "--env WANDB_API_KEY looks like a secret"),
        (["a"], [], ["DB_PASS=1"], "--env DB_PASS looks like a secret"),
        (["a"], [], ["AUTH=1"], "--env AUTH looks like a secret"),
        (["a", "--vs", "a", "hf_" + "a1B" * 12], [], [], "word 2 looks like a secret"),
        (["a", "--db-pass", "x9y8z7w6"], ["lr=1"], [], "the value of --db-pass looks like a secret"),
    ],
)
def test_mistakes_are_one_message(words, settings, variables, message):
    with pytest.raises(ConfigError, match=message):
        ab.question(words, settings, variables)


@pytest.mark.parametrize(
    ("options", "verdict", "says"),
    [
        (["--metric", "tokens_per_s"], "undecided", "; where that is meant: --work any"),
        (["--work", "any"], "undecided", "; where that is meant: --metric tokens_per_s --work any"),
        (["--metric", "tokens_per_s", "--work", "any"], "faster", "faster  +"),
    ],
)
def test_batches_that_differ_on_purpose_are_compared_by_tokens(run, invented, options, verdict, says):
    """The candidate's step takes 1.5 times as long and has twice the tokens."""
    invented()
    _, found, err = run(*options, "--tokens", "4096,8192", "--", *COMMAND, "--vs", *COMMAND, "--slower=0.5")
    assert (found["verdict"], says in found["sentence"] + err) == (verdict, True), found["sentence"] + err
    if verdict == "faster":
        assert found["effect_percent"]["low"] < 100 / 3 < found["effect_percent"]["high"]


@pytest.mark.parametrize("told", [True, False])
def test_tokens_that_are_named_count_where_the_log_tells_none(tmp_path, told):
    rows = [{"step": i, "seconds": (1 + i / 999) / 1e3, "loss": 2.0} | ({"tokens": 16} if told else {}) for i in range(1, 9)]
    words = [sys.executable, "-c", "".join(f"print({json.dumps(json.dumps(row))})\n" for row in rows)]
    ended = start(Program(words, tmp_path, {}, None, 1, 60.0, Steps(), tokens=4096), tmp_path)
    if told:
        assert "its log tells the tokens of a step itself; leave out the 4096" in ended.message
    else:
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert {row["useful_tokens"] for row in rows} == {4096}
        assert json.loads((tmp_path / "summary.json").read_text())["env"]["strict"]["not_told"] == []


@pytest.mark.full
def test_tokens_that_are_named_vouch_for_no_equal_work(run):
    silent = [*COMMAND, "--fault", "no tokens"]
    _, found, err = run("--tokens", "16", "--", *silent, "--vs", *silent, "--fast")
    assert "not vouched for: data, equal work" in found["sentence"], found["sentence"] + err


def test_an_unknown_log_ends_with_a_pattern_that_reads_it(run):
    words = [sys.executable, "-c", "for i in range(1, 9): print(f'it {i} loss=2.{i} (4.{i} s/it)')"]
    code, found, _ = run("--pairs", "1", "--", *words, "--vs", *words)
    assert code == 5
    assert "ended well, and its figures cannot be had: " in found["sentence"]
    assert "This pattern fits its lines: 'regex:it" in found["sentence"]


@pytest.mark.parametrize(("metric", "fault", "field"), [("memory", "", "memory_bytes"), ("tokens_per_s", "no tokens", "tokens")])
def test_a_metric_whose_figure_the_log_lacks_is_told_with_the_field_to_log(run, metric, fault, field):
    code, found, _ = run("--metric", metric, "--", *COMMAND, "--fault", fault, "--vs", *COMMAND, "--fault", fault, "--fast")
    assert (code, found["verdict"]) == (5, "error")
    assert f"the log of the baseline holds no such figure for {SHORT_METRICS[metric]}; log '{field}' in each step" in found["sentence"]
