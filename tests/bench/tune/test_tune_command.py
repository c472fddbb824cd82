"""`playbook tune` on a command with planted knobs: two help, six do nothing, one hurts, one crashes, one changes the loss, one runs out of memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import yaml

from playbook.paths import repo_root, sources
from playbook_app.cli.app import app, run_command
from playbook_bench.launch.local import Interrupted
from playbook_bench.machine import detect
from playbook_bench.run.journal import SealedLines

SCRIPT = repo_root() / "tests" / "support" / "ranks" / "tuned_script.py"
CLOCK = SCRIPT.with_name("planned_clock.py")
OFF_ON = 'values: ["off", "on"]'
KNOBS = "knobs:\n" + "\n".join(
    [
        f"  idle0: {{argument: --idle0, {OFF_ON}}}",
        "  crash: {argument: --crash, values: [false, true]}",
        f"  cut: {{argument: --cut, {OFF_ON}}}",
        "  big: {argument: --big, values: [false, true]}",
        f"  careful: {{argument: --careful, {OFF_ON}}}",
        f'  fuse: {{argument: --fuse, {OFF_ON}, require: [{{log: "fused kernel is on"}}]}}',
        *(f"  idle{i}: {{argument: --idle{i}, {OFF_ON}}}" for i in range(1, 6)),
        '  workers: {environment: WORKERS, values: [null, "8"]}',
        "",
    ]
)


@pytest.fixture
def playbook(capfd, tmp_path, monkeypatch):
    """Runs a command in a folder without git."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capfd.readouterr()
        code = run_command(app, list(words))
        out, err = capfd.readouterr()
        return SimpleNamespace(exit_code=code, stdout=out, stderr=err)

    return run


@pytest.fixture
def tune(playbook, tmp_path):
    """Runs `playbook tune` on the script with these knobs."""

    def run(*options, knobs=KNOBS, words=(sys.executable, str(SCRIPT), "--launch", "{run}"), seed="3"):
        (tmp_path / "knobs.yaml").write_text(knobs)
        return playbook("tune", "--knobs", "knobs.yaml", "--results", "results", "--seed", seed, "--json", *options, "--", *words)

    return run


def answer(done):
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_planted(found, idle=6):
    assert {(row["knob"], row["value"]) for row in found["kept"]} == {("fuse", "on"), ("workers", "8")}
    reasons = {row["knob"]: row["reason"] for row in found["refused"]}
    assert set(reasons) == {"crash", "cut", "big", "careful", *(f"idle{i}" for i in range(idle))}
    assert reasons["crash"].startswith("crashed: ")
    assert "not built" in reasons["crash"]
    assert reasons["big"].startswith("out of memory")
    assert "loss" in reasons["cut"]
    assert reasons["careful"] == "did not look better"
    assert found["final"]["verdict"] == "faster"
    assert found["final"]["effect_percent"]["low"] < 18.7 < found["final"]["effect_percent"]["high"]
    for row, gain in zip(sorted(found["kept"], key=lambda row: row["knob"]), (12, 6), strict=True):
        assert row["effect_percent"]["low"] < gain < row["effect_percent"]["high"]


def test_the_right_two_are_kept_every_other_says_why_not_and_a_record_that_was_changed_does_not_replay(tune, playbook, launches):
    done = tune()
    assert done.exit_code == 0, done.stderr
    found = answer(done)
    check_planted(found)
    assert found["ended"] == "complete"
    assert found["launches"] + 10 == len(launches.words)
    assert "kept      fuse=on" in done.stderr
    for launch in ("burn-in start", "measure crash=true", "measure best so far", "measure all that looked better", "measure without fuse"):
        assert f": {launch}\n" in done.stderr
    assert found["run"] == f"env WORKERS=8 {sys.executable} {SCRIPT} --launch '{{run}}' --fuse on"
    record = Path(found["record"])
    figure = record.with_name("ladder.svg").read_text()
    assert ET.fromstring(figure).tag.endswith("svg")
    assert all(name in figure for name in ("fuse=on", "workers=8", "together"))
    assert playbook("bench", "replay", found["record"], found["final"]["record"]).exit_code == 0
    data = json.loads(record.read_text())
    for row in data["events"]:
        if ["fuse", "on"] in row["launch"]["settings"] and row["observation"]["value"]:
            row["observation"]["value"] *= 1.12
    record.write_text(json.dumps(data))
    done = playbook("bench", "replay", str(record))
    assert done.exit_code == 5
    assert "sha256" in done.stderr
    assert "due was" in done.stderr


PLAIN = str(repo_root() / "tools/cases/tune-one-gpu-plain.yaml")
BARE = str(repo_root() / "tools/cases/tune-bare-megatron.yaml")


@pytest.fixture
def on_h200(monkeypatch):
    """This machine has one H200."""
    row = ["NVIDIA H200", "143771", "570.1", "700.00", "GPU-0"]
    monkeypatch.setattr(detect, "_gpus", lambda: [row])
    monkeypatch.setattr("playbook_bench.machine.requirements.unmet_requirements", lambda *given, **more: [])


def explained(playbook, *words):
    done = playbook("tune", *words, "--explain", "--json")
    assert done.exit_code == 0, done.stderr
    return {(row["knob"], row["value"]): row for row in json.loads(done.stdout)}


def test_on_a_gpu_what_gains_most_comes_first_by_planner_or_claim_and_the_unknown_after(playbook, launches, on_h200):
    rows = explained(playbook, PLAIN)
    first, second, third, *others = rows
    assert first == ("fused-loss", "true")
    assert rows[first]["why"].startswith("claim C3 (measured on h200x1")
    assert (second, third) == (("attention", "auto"), ("master-weights", "remainder"))
    assert rows[second]["why"] == rows[third]["why"] == "predicted by the planner"
    assert 5 < rows[second]["expected_percent"] < 20  # cuDNN against torch's own: +11.7 % was measured
    assert {rows[each]["expected_percent"] for each in others[:-1]} == {None}
    assert "vision" in rows["compiled-decoder", "true"]["why"]  # what its claim is about, and this run has not
    assert launches.words == []


def test_on_one_gpu_what_is_about_communication_comes_last(playbook, launches, on_h200):
    rows = explained(playbook, BARE)
    first, *_, last = rows
    assert first == ("cutlass", "1")
    assert last == ("connections", "1")
    assert "one GPU sends nothing" in rows["connections", "1"]["why"]


LARGE = """
knobs:
  rows: {sets: {"8": {}, "4": {train.micro_batch_size: 4}, "64": {train.micro_batch_size: 64, train.global_batch_size: 64}}}
  split: {key: parallel.tp, values: [1, 3]}
"""


def test_what_does_not_fit_into_memory_is_never_launched(playbook, launches, on_h200, tmp_path):
    (tmp_path / "knobs.yaml").write_text(LARGE)
    rows = explained(playbook, PLAIN, "--knobs", "knobs.yaml")
    assert [pair for pair, row in rows.items() if not row["launched"]] == [("rows", "64"), ("split", "3")]
    assert "GiB of 140" in rows["rows", "64"]["why"]
    assert rows["split", "3"]["why"].startswith("cannot run: ")


def test_what_is_never_launched_is_part_of_the_answer(tune, launches):
    knobs = "knobs:\n  split: {key: parallel.tp, values: [1, 3]}\n  slow: {environment: SLOW, values: [null, 1]}\n"
    done = tune(knobs=knobs, words=("train", "trainer_steps", str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml")))
    assert "never     split=3  cannot run" in done.stderr
    assert [row["knob"] for row in answer(done)["never"]] == ["split"]


def test_knobs_without_a_file_prints_the_set_that_fits_as_a_file(playbook, launches, on_h200, tmp_path):
    done = playbook("tune", "--knobs", "--profile", "h200x1", PLAIN)
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["knobs"]["fused-loss"] == {
        "key": "train.fused_loss",
        "values": [False, True],
        "excludes": ["compiled-loss"],
        "claim": "C3",
        "gain": explained(playbook, PLAIN)["fused-loss", "true"]["expected_percent"],
        "scope": "measured on h200x1",
    }
    (tmp_path / "mine.yaml").write_text(done.stdout)
    assert explained(playbook, PLAIN, "--knobs", "mine.yaml") == explained(playbook, PLAIN)
    assert launches.words == []


def test_what_a_trace_says_is_small_comes_last(playbook, launches, tmp_path):
    """A step of 100 ms whose collective runs alone for 2 ms, on streams of one GPU."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": i * 1e5, "dur": 1e5, "pid": 0, "tid": 1} for i in (1, 2)
    ]
    for i in (1, 2):
        for name, begin, took, stream in (("nvjet_sm90_tst_128x256", 0, 0.98e5, 7), ("ncclDevKernel_AllReduce", 0.98e5, 0.02e5, 8)):
            about = {"stream": stream, "correlation": i * 10 + stream, "device": 0}
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "ts": i * 1e5 + begin, "dur": took, "pid": 0, "tid": stream, "args": about}
            )
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "knobs.yaml").write_text(
        f"knobs:\n  overlap: {{argument: --overlap, {OFF_ON}, wall: communication, gain: 20}}\n  fuse: {{argument: --fuse, {OFF_ON}}}\n"
    )
    done = playbook("tune", "--knobs", "knobs.yaml", "--explain", "--trace", "trace.json", "--", "train")
    assert done.exit_code == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["fuse=on", "overlap=on"]
    assert "communication is 2.0 % of the traced step" in done.stdout


BY_PROFILE = """
id: by-profile
kind: command
summary: A command whose layers the profile names.
command: [python, train.py, "model.num_layers={layers}"]
baseline: {}
candidate: {arguments: [--other]}
steps: {log: jsonl, count: 10, warm_up: 4}
metric: step_seconds
profiles: {cpu: {layers: 2}}
"""


def test_the_command_to_paste_has_the_values_of_the_profile(playbook, launches, monkeypatch, tmp_path):
    (tmp_path / "by-profile.yaml").write_text(BY_PROFILE)
    (tmp_path / "knobs.yaml").write_text("knobs: {fuse: {argument: --fuse, values: [null, 'on']}}\n")
    monkeypatch.chdir(tmp_path)
    done = playbook("tune", "by-profile.yaml", "--profile", "cpu", "--knobs", "knobs.yaml", "--json", "--seed", "1", "--results", "results")
    assert "model.num_layers=2" in answer(done)["run"]
    assert answer(done)["run"].endswith(" --fuse on")


MEGATRON = ("torchrun", "pretrain_gpt.py", "--micro-batch-size", "1", "--recompute-granularity", "full")
HUGGING_FACE = ("python", "train.py", "--per_device_train_batch_size", "2", "--gradient_checkpointing", "True")


@pytest.mark.sample("words0-proposed0-left_out0", "words2-proposed2-left_out2")
@pytest.mark.parametrize(
    ("words", "proposed", "left_out"),
    [
        (MEGATRON, {"recompute", "loss-fusion", "overlap-gradients"}, {"permute-fusion", "router-fusion", "grouped-gemm"}),
        ((*MEGATRON, "--num-experts", "8"), {"recompute", "permute-fusion", "grouped-gemm", "cutlass"}, set()),
        (HUGGING_FACE, {"recompute", "fused-loss", "compile", "workers"}, set()),
        ((*HUGGING_FACE, "--torch_compile", "true"), {"recompute"}, {"compile"}),
        (("torchrun", "-m", "torchtitan.train", "--activation_checkpoint.mode", "full"), {"recompute", "compile"}, {"garbage"}),
    ],
)
def test_the_ready_set_is_of_the_framework_without_what_the_command_has(playbook, launches, on_h200, words, proposed, left_out):
    done = playbook("tune", "--knobs", "--", *words)
    assert done.exit_code == 0, done.stderr
    names = yaml.safe_load(done.stdout)["knobs"].keys()
    assert proposed <= names
    assert not left_out & names


def test_a_command_of_no_framework_needs_a_file(playbook, launches):
    done = playbook("tune", "--knobs", "--", "python", "train.py")
    assert done.exit_code == 2
    assert "--knobs FILE" in done.stderr


def test_what_was_decided_becomes_claims_of_the_users_own(tune, playbook, launches, tmp_path, monkeypatch):
    assert "your own cards" in tune("--emit-claims").stderr
    (tmp_path / "own" / "mine").mkdir(parents=True)
    monkeypatch.setenv("PLAYBOOK_CARDS", str(tmp_path / "own" / "mine"))
    found = answer(tune("--emit-claims"))
    (card,) = (tmp_path / "own" / "mine").glob("*.yaml")
    claims = yaml.safe_load(card.read_text())["claims"]
    assert [c["expect"]["op"] for c in claims] == [">="] * len(found["kept"])
    assert claims[0]["expect"]["margin"]["value"] == round(found["kept"][0]["effect_percent"]["low"], 1)
    assert playbook("cards", "check", str(card)).exit_code == 0


def test_a_final_comparison_that_does_not_bear_it_out_says_why(tune, launches):
    launches.cut_from = answer(tune())["launches"]
    launches.words.clear()
    done = tune()
    assert answer(done)["final"]["verdict"] == "undecided"
    assert "together  undecided: the first run of each shows that they cannot be compared: loss: " in done.stderr
    assert "careful   the comparison on fresh launches does not bear out" in done.stderr


@pytest.mark.parametrize("at", [3, 9, 30])
@pytest.mark.sample("9")
def test_ctrl_c_leaves_a_valid_answer_and_resume_goes_on(tune, launches, at):
    launches.stop_at, launches.stop = at, Interrupted(2)
    done = tune("--resume")
    assert done.exit_code == 130
    found = answer(done)
    assert found["ended"] == "interrupted"
    assert found["kept"] == []
    assert found["undecided"]
    assert found["launches"] == at
    done = tune("--resume")
    assert done.exit_code == 0, done.stderr
    check_planted(answer(done))
    assert len(launches.words) == answer(done)["launches"] + 10  # none is made again
    again = tune("--resume")
    assert answer(again)["kept"] == answer(done)["kept"]
    assert len(launches.words) == answer(done)["launches"] + 10


def test_a_machine_of_the_same_kind_goes_on_whatever_its_name(tune, launches, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "first")
    launches.stop_at, launches.stop = 9, Interrupted(2)
    tune("--resume")
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    check_planted(answer(tune("--resume")))
    assert len(launches.words) == answer(tune("--resume"))["launches"] + 10
    cores = detect.cores() + 1
    monkeypatch.setattr(detect, "cores", lambda: cores)
    done = tune("--resume")
    assert done.exit_code == 2
    assert "another machine" in done.stderr


@pytest.fixture
def stopped(tune, launches, tmp_path):
    """The journal of a tuning that was stopped at its fifth launch."""
    launches.stop_at, launches.stop = 5, Interrupted(2)
    tune("--resume")
    (journal,) = tmp_path.rglob("events.jsonl")
    return journal


def test_a_tuning_that_goes_on_is_left_alone(tune, stopped, monkeypatch):
    before = stopped.read_bytes()
    monkeypatch.setattr("playbook.files.take", lambda folder: "process 7 on this host")
    for options in ((), ("--resume",)):
        done = tune(*options, seed="3")
        assert done.exit_code == 2
        assert "process 7" in done.stderr
    assert stopped.read_bytes() == before


@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_line_of_the_journal_loses_no_launch(tune, stopped, number):
    lines = stopped.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number][9:]
    stopped.write_bytes(b"".join(lines))
    done = tune("--resume")
    assert done.exit_code == 2, done.stderr
    assert "cannot be read" in done.stderr
    assert stopped.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("junk", [{"run": {"samples": 3}}, {"seconds": "x"}, {"observation": {"outcome": "won"}}, {"launch": None}])
def test_a_line_that_says_what_no_launch_says_is_one_message(tune, stopped, junk):
    rows = SealedLines(stopped).read()
    rows[1] |= junk
    SealedLines(stopped).replace(rows)
    before = stopped.read_bytes()
    done = tune("--resume")
    assert done.exit_code == 2, done.stderr
    assert done.stderr.startswith("error: event 1 of ")
    assert stopped.read_bytes() == before


def test_a_budget_leaves_candidates_out_in_time_for_proof_and_comparison(tune, launches):
    """30 launches of 20 s: the start, what was adopted, its proof and the comparison."""
    first = KNOBS.replace("knobs:\n", "knobs:\n  first: {environment: WORKERS, values: [null, '8']}\n").rsplit("  workers", 1)[0]
    found = answer(tune("--budget", "600s", knobs=first))
    assert found["ended"] == "complete"
    assert {row["knob"] for row in found["kept"]} == {"first"}
    assert found["final"]["verdict"] == "faster"
    assert any("time was up" in row["reason"] for row in found["refused"])
    assert launches.spent <= 600


def test_a_budget_for_no_candidate_says_how_much_one_takes_and_loses_no_launch(tune, launches):
    done = tune("--budget", "300s")
    assert done.exit_code == 2
    least = int(re.search(r"give at least (\d+)s, or --resume --seed 3, which goes on", done.stderr).group(1))
    made = len(launches.words)
    launches.spent = 0.0
    assert answer(tune("--budget", f"{least}s"))["launches"] > made
    assert tune("--budget", "300s").exit_code == 2
    found = answer(tune("--resume"))
    assert found["ended"] == "complete"
    assert {row["knob"] for row in found["kept"]} == {"fuse", "workers"}


ALL_GOOD = "knobs:\n" + "".join(
    f"  {name}: {{argument: --{name}, {OFF_ON}}}\n" for name in ("good0", "fuse", "compile", *(f"good{i}" for i in range(1, 9)))
)


@pytest.mark.sample("38-3")
@pytest.mark.parametrize(("launches_worth", "least"), [(32, 1), (38, 3), (50, 5), (75, 10)])
def test_where_every_knob_helps_the_time_that_is_there_suffices_for_proof_and_comparison(tune, launches, launches_worth, least):
    """Launches vary by 0.07 %, as on a GPU; those of the compiled path take half as long again."""
    launches.noise = 0.0007
    found = answer(tune("--budget", f"{20 * launches_worth}s", knobs=ALL_GOOD))
    assert found["ended"] == "complete"
    assert found["final"]["verdict"] == "faster"
    assert len(found["kept"]) >= least
    assert launches.spent <= 20 * launches_worth


def test_a_comparison_that_time_cut_short_says_what_is_missing_and_how_to_go_on(tune, launches):
    spent = 20.0 * answer(tune())["launches"]
    launches.words.clear()
    launches.spent = 0.0
    again = ("--resume", "--results", "other")
    done = tune("--budget", f"{spent + 130:.0f}s", *again)
    found = answer(done)
    assert done.exit_code == 3
    assert found["kept"]
    assert 0 < found["final"]["pairs"] < 4
    assert (
        f"missing   the comparison on fresh launches has {found['final']['pairs']} pairs so far and needs at least 4: the same"
        in done.stderr
    )
    assert "does not bear out" not in done.stderr
    done = tune(*again)
    assert done.exit_code == 0
    assert answer(done)["final"]["verdict"] == "faster"


def test_how_to_go_on_names_the_seed_that_was_drawn(playbook, launches, tmp_path):
    (tmp_path / "knobs.yaml").write_text(f"knobs: {{fuse: {{argument: --fuse, {OFF_ON}}}}}\n")
    asked = ("tune", "--knobs", "knobs.yaml", "--results", "results", "--json", "--budget", "100s")
    done = playbook(*asked, "--", "train")
    assert done.exit_code == 3
    seed = done.stderr.partition("the same command with --resume --seed ")[2].split()[0]
    done = playbook(*asked[:-2], "--resume", "--seed", seed, "--", "train")
    assert answer(done)["launches"] + 10 == len(launches.words)  # none is made again
    assert "with --resume" not in done.stderr


def test_a_start_that_does_not_run_is_an_error_until_it_is_mended(tune, launches, monkeypatch):
    asked = {"words": ("train",), "knobs": f"knobs: {{fuse: {{argument: --fuse, {OFF_ON}}}}}\n"}
    start = launches.start
    monkeypatch.setattr("playbook_bench.variants.program.start", lambda program, *rest: start(replace(program, words=["--crash"]), *rest))
    done = tune("--resume", **asked)
    assert done.exit_code == 5
    assert "the start does not run" in done.stderr
    assert "not built" in done.stderr
    monkeypatch.setattr("playbook_bench.variants.program.start", start)
    assert answer(tune("--resume", **asked))["kept"][0]["knob"] == "fuse"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("knobs: {}\n", "at least 1"),
        ("knobs: {a: {argument: --a, values: [1]}}\n", "two different values"),
        ("knobs: {a: {argument: --a, key: b, values: [1, 2]}}\n", "exactly one of"),
        ("knobs: {a: {argument: --a, values: [1, 2], excludes: [b]}}\n", "no other knob"),
        ("knobs: {a: {environment: MY_TOKEN, values: [null, abc]}}\n", "secret"),
        ("knobs: {a: {sets: {x: {}, y: {'a b': 1}}}}\n", "no place"),
        ("knobs: {a: {sets: {x: {}, y: {}}}}\n", "two different values"),
        ('knobs: {"a\\nb": {argument: --a, values: [1, 2]}}\n', "no name of a knob"),
        ('knobs: {a: {argument: --a, values: ["\\0", x]}}\n', "printable"),
        ("knobs: {a: {argument: --a, values: [1, 2]}, b: {argument: --a, values: [1, 3]}}\n", "both set --a"),
        ("knobs: {a: {argument: --a, values: [1, 2], require: [{log: '('}]}}\n", "no regular expression"),
        ("knobs: {a: {argument: --a, values: [1, 2], require: [{counter: steps}]}}\n", "counts nothing by itself"),
        ("knobs: {a: {file: other.yaml, key: b, values: [1, 2]}}\n", "does not name other.yaml"),
        ("knobs: {launch: {argument: --launch, values: [x, y]}}\n", "put today's first"),
    ],
)
def test_what_is_wrong_with_knobs_is_one_message(tune, launches, knobs, said):
    done = tune(knobs=knobs)
    assert done.exit_code == 2
    assert said in done.stderr
    assert launches.words == []


SHELL = """#!/bin/sh
# Whoever launches it sees what it prints; --crash ends it.
exec "$PYTHON" "$SCRIPT" "$@"
"""


def test_a_knob_of_a_file_changes_a_copy_of_the_file_that_the_command_names(tune, launches, tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.yaml").write_text("model: {layers: 2}\n")
    knobs = "knobs:\n" + "".join(f"  {f}: {{file: {f}/run.yaml, key: model.layers, values: [2, 4]}}\n" for f in ("one", "other"))
    tune(knobs=knobs, words=("train", "--model=one/run.yaml", "other/run.yaml", "another/run.yaml"))
    seen = {tuple(words) for words, _ in launches.words}
    assert ("train", "--model=one/run.yaml", "other/run.yaml", "another/run.yaml") in seen
    ((_, model, *rest),) = [words for words in seen if words[1] != "--model=one/run.yaml" and words[2] == "other/run.yaml"]
    assert rest == ["other/run.yaml", "another/run.yaml"]
    assert yaml.safe_load(Path(model.removeprefix("--model=")).read_text()) == {"model": {"layers": 4}}
    assert (tmp_path / "one" / "run.yaml").read_text() == "model: {layers: 2}\n"


def test_knobs_that_set_something_else_are_another_tuning(tune, launches, stopped):
    found = answer(tune("--resume", knobs=KNOBS.replace("--idle5", "--idle-five")))
    assert len(launches.words) == 5 + found["launches"] + 10  # none of the other's is taken for its own


@pytest.mark.full
def test_a_tuning_that_was_killed_beside_its_crash_goes_on_to_the_same_answer(tmp_path):
    """SIGKILL, which leaves no time for anything, once the planted crash is in the journal. The launches are those of a shell script."""
    (tmp_path / "knobs.yaml").write_text("".join(line for line in KNOBS.splitlines(keepends=True) if "idle" not in line))
    (tmp_path / "train.sh").write_text(SHELL)
    told = {"PLANNED_CLOCK": "1", "PYTHON": sys.executable, "SCRIPT": str(SCRIPT)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root())), **told}
    command = [sys.executable, str(CLOCK), "tune", "--knobs", "knobs.yaml", "--results", "results", "--seed", "4", "--json", "--resume"]
    command += ["--", "sh", "train.sh", "--launch", "{run}"]
    first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while first.poll() is None and not any('"outcome": "crash"' in path.read_text() for path in tmp_path.rglob("events.jsonl")):
            time.sleep(0.05)
    finally:
        first.kill()
        assert first.wait() == -signal.SIGKILL
    (journal,) = tmp_path.rglob("events.jsonl")
    made = journal.read_text().splitlines()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    check_planted(json.loads(done.stdout.splitlines()[-1]), idle=0)
    assert journal.read_text().splitlines()[: len(made)] == made  # nothing was launched again


def test_only_ranks_of_our_trainer_are_forked(tune, launches):
    done = tune("--fork")
    assert (done.exit_code, launches.words) == (2, [])
    assert "leave out --fork" in done.stderr
    assert len(done.stderr.splitlines()) == 1
