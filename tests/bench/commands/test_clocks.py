"""The clock of a command's log against clocks that it does not write: launches are real, their seconds planned, and each lie was a certain verdict once."""

import json
import sys
import time
from pathlib import Path

import pytest
from in_process import run

from playbook.errors import LogError
from playbook.records.commands import Steps
from playbook_bench import logs, metrics
from playbook_bench.judge import verdict as judged
from playbook_bench.run import replay
from playbook_bench.variants import program

SCRIPT = str(Path(__file__).with_name("lying_script.py"))
COMMAND = [sys.executable, SCRIPT, "--launch", "{run}"]


@pytest.fixture
def ab(tmp_path, capsys, monkeypatch, planned):
    def ab_(*words):
        monkeypatch.chdir(tmp_path)
        code, out, _ = run(capsys, "ab", "--json", "--seed", "1", *words)
        found = json.loads(out)
        assert replay.replay(Path(found["record"])) == (True, [])
        return code, found["verdict"], found["sentence"]

    return ab_


def test_lines_and_launches_are_timed_as_they_come(tmp_path, monkeypatch):
    """By the machine's own clock: a line has come before somebody hears of it, and what is printed after that comes later."""
    script = """
import json, pathlib, time
for step in range(1, 4):
    print(json.dumps({"step": step, "seconds": 1e-7 + step / 1e10}), flush=True)
    while step == 1 and not pathlib.Path("heard").exists():
        time.sleep(0.01)
time.sleep(0.3)
"""
    heard, arrivals, finish = [], [], program._PrintedOutput.finish

    def on_step(count):
        if count == 1 and not heard:
            heard.append(time.monotonic())
            (tmp_path / "heard").touch()

    monkeypatch.setattr(program._PrintedOutput, "finish", lambda self: (finish(self), arrivals.extend(self.arrivals)))
    began = time.monotonic()
    ended = program.start(program.Program([sys.executable, "-c", script], tmp_path, {}, None, 1, 600.0, Steps(count=3)), tmp_path, on_step)
    assert ended.outcome == "ok", ended.message
    assert began < arrivals[0] <= heard[0] < arrivals[1] <= arrivals[2] < time.monotonic()
    assert 0.3 < ended.wall_s < time.monotonic() - began
    outside = json.loads((tmp_path / "summary.json").read_text())["metrics"]["outside_seconds"]
    assert outside == pytest.approx(ended.wall_s, abs=1e-6)


@pytest.mark.parametrize(
    ("lie", "second"),
    [
        ("halved", "by the arrival of its lines"),
        ("between", "by the arrival of its lines"),
        ("before", "as whole launches"),  # as much time lies outside of all lines
        ("at the end", "as whole launches"),  # no line arrives when its step ends
    ],
)
@pytest.mark.sample("halved-by the arrival of its lines")
def test_a_gain_that_only_the_log_sees_is_no_verdict(ab, lie, second):
    words = [*COMMAND, "--takes", "0.04"]
    code, verdict, sentence = ab("--", *words, "--vs", *words, "--lie", lie)
    assert (code, verdict) == (3, "undecided"), sentence
    assert second in sentence, "the second verdict, with its interval, stands beside that of the log"


@pytest.mark.parametrize(
    ("lie", "takes", "said"),
    [
        ("milliseconds", "0.013", "and the whole launch took"),
        ("thousandth", "0.005", "a thousand times as much"),
        ("rounded", "0.013", "rounds seconds to 0.01 s"),
    ],
)
def test_seconds_that_cannot_be_are_an_error(ab, lie, takes, said):
    code, verdict, sentence = ab("--", *COMMAND, "--takes", "0.0055", "--lie", lie, "--vs", *COMMAND, "--takes", takes, "--lie", lie)
    assert (code, verdict) == (5, "error"), sentence
    assert said in sentence


@pytest.mark.full
def test_a_timer_that_does_not_wait_is_named_where_both_commands_have_it(ab):
    sentence = ab("--pairs", "2", "--", *COMMAND, "--lie", "tenth", "--vs", *COMMAND, "--lie", "tenth", "--steps", "20")[2]
    assert "not vouched for: data, the log's clock" in sentence


@pytest.mark.full
def test_a_count_of_a_command_takes_launches_that_repeat_it(ab):
    """Without a seed a difference of two launches was a certain verdict: faster, or slower, by chance."""
    words = ["--metric", "final_loss", "--margin", "0.1%", "--pairs", "4"]
    _, verdict, sentence = ab(*words, "--", *COMMAND, "--loss", "unseeded", "--vs", *COMMAND, "--loss", "unseeded", "--steps", "20")
    assert verdict == "undecided", sentence
    code, verdict, sentence = ab(*words, "--", *COMMAND, "--loss", "seeded", "--vs", *COMMAND, "--loss", "seeded", "--steps", "20")
    assert (code, verdict) == (0, "equivalent"), sentence


def test_the_end_of_a_log_is_kept_without_its_secrets(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_KEY", "q7w8e9r0t1y2")
    dies = [
        sys.executable,
        "-c",
        "import os; print('db_' + 'pass', 'u8i9o0p1', sep='='); raise SystemExit('401 for ' + os.environ['WANDB_KEY'])",
    ]
    out = run(capsys, "ab", "--json", "--", *dies, "--vs", *dies, "again")[1]
    record = Path(json.loads(out)["record"]).read_text()
    assert "db_pass=[hidden]" in record
    assert "401 for [hidden]" in record
    assert "q7w8e9r0t1y2" not in out + record


def test_a_loss_that_rises_is_not_faster(ab):
    """Its mean is that of a loss that falls."""
    code, verdict, sentence = ab(
        "--", *COMMAND, "--takes", "0.006", "--loss", "falling", "--vs", *COMMAND, "--takes", "0.004", "--loss", "rising"
    )
    assert (code, verdict) == (3, "undecided"), sentence
    assert "loss: the losses end at" in sentence


def told(seconds, every=1):
    """A log of these steps, without arrivals."""
    return logs.read("".join(json.dumps({"step": every * (i + 1), "seconds": s}) + "\n" for i, s in enumerate(seconds)), "jsonl")


@pytest.mark.parametrize(
    ("seconds", "coarse"),
    [
        ([0.01] * 20, True),  # whatever they were
        ([0.01, 0.02] * 10, True),
        ([0.0101 + 1e-6 * i for i in range(20)], False),
        ([1.23, 1.24, 1.22, 1.23] * 5, False),  # to half a percent
        ([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.2, 0.3] * 3, False),  # they vary by more than the rounding, which averages out
    ],
)
def test_the_rounding_of_a_log_is_measured(seconds, coarse):
    log = told(seconds)
    if coarse:
        with pytest.raises(LogError, match="too coarse to compare"):
            program.figures(log, 1, 100.0)
    else:
        assert program.figures(log, 1, 100.0) == {"outside_seconds": pytest.approx(100.0 - sum(seconds))}


def test_time_stamps_share_one_rounding_among_all_steps():
    def stamped(digits, steps):
        lines = (json.dumps({"step": i, "elapsed": round(0.0137 * i, digits)}) for i in range(1, steps + 1))
        return logs.read("\n".join(lines) + "\n", "jsonl")

    assert program.figures(stamped(3, 20), 1, 100.0)
    with pytest.raises(LogError, match="too coarse"):
        program.figures(stamped(1, 200), 1, 100.0)


def test_a_line_of_several_steps_counts_for_all_of_them():
    with pytest.raises(LogError, match="its steps take 19"):
        program.figures(told([1.0 + i / 1e4 for i in range(20)], every=10), 1, 100.0)


def test_no_clock_is_asked_where_none_is_known_or_none_goes_in():
    assert judged.conditions(metrics.get("peak_memory_bytes"), []) == []
