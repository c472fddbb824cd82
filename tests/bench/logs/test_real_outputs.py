"""What the real packages wrote: short outputs kept beside the tests, and, in the full suite, made anew by the installed versions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from playbook.errors import LogError
from playbook.paths import repo_root
from playbook_bench.logs import StepLog, read

KEPT = repo_root() / "tests/fixtures/logs"
TARGETS = repo_root() / ".venv" / "targets"
SCRIPTS = repo_root() / "tests/support/examples"
STEPS = 6


def steps_of(log: StepLog) -> list[int]:
    return [s.step for s in log.steps]


def test_the_state_that_the_trainer_saved_holds_times_and_tokens() -> None:
    log = read(KEPT / "trainer_state.json", steps=STEPS)
    assert (log.adapter, log.clock, steps_of(log)) == ("hf", "differences", [2, 3, 4, 5, 6])
    assert {s.tokens for s in log.steps} == {128}
    assert log.steps[0].loss == pytest.approx(4.664, abs=1e-3)


def test_what_the_trainer_printed_is_read_among_its_progress_bars() -> None:
    text = (KEPT / "hf_console.txt").read_text()
    log = read(text, steps=STEPS, arrivals=[0.1 * i for i in range(text.count("\n") + 1)])
    assert (log.adapter, log.clock, steps_of(log)) == ("hf", "arrival", [2, 3, 4, 5, 6])
    assert {s.tokens for s in log.steps} == {128}
    with pytest.raises(LogError, match="include_num_input_tokens_seen"):
        read(text, steps=STEPS)


def test_lightnings_table_is_read_with_its_own_time_and_with_the_monitors() -> None:
    own, monitor = read(KEPT / "lightning.csv", steps=STEPS), read(KEPT / "lightning_monitor.csv", steps=STEPS)
    assert (own.clock, steps_of(own)) == ("logged", [0, 1, 2, 3, 4, 5])
    assert (monitor.clock, steps_of(monitor)) == ("differences", [1, 2, 3, 4, 5])
    assert monitor.steps[0].seconds == pytest.approx(0.0385165 - 0.0296239, abs=1e-6)
    assert [s.loss for s in own.steps][1:] == [s.loss for s in monitor.steps]
    assert monitor.steps[0].samples is None


def run(script: str, *arguments: str, folder: Path, package: str = "", steps: int = STEPS) -> tuple[str, list[float]]:
    """What a script printed, and when each line came; `package` is one that is unpacked and not installed."""
    if package and not (TARGETS / package).is_dir():
        pytest.fail(f"{TARGETS / package} is missing; run `make targets`")
    words = [sys.executable, str(SCRIPTS / script), "--steps", str(steps), *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({"PYTHONPATH": str(TARGETS / package)} if package else {})
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = [(line, time.monotonic()) for line in process.stdout]
    assert process.returncode == 0
    return "".join(line for line, _ in lines), [at for _, at in lines]


def events_are_read(folder: Path, steps: list[int]) -> None:
    log = read(next(folder.rglob("events.out.tfevents.*")), steps=STEPS)
    assert (log.adapter, log.every, steps_of(log)) == ("tensorboard", 2, steps)
    assert all(s.seconds > 0 and s.loss is not None for s in log.steps)


@pytest.mark.full
def test_the_installed_trainer_writes_what_is_read(tmp_path: Path) -> None:
    text, arrivals = run("train_hugging_face.py", "--collate-ms", "200", "--logging-steps", "2", "--tensorboard", folder=tmp_path)
    printed, saved = read(text, "hf", steps=STEPS, arrivals=arrivals), read(tmp_path / "hf-run", steps=STEPS)
    events_are_read(tmp_path, [4, 6])
    assert [(s.step, s.tokens) for s in printed.steps] == [(s.step, s.tokens) for s in saved.steps]
    assert [s.loss for s in printed.steps] == pytest.approx([s.loss for s in saved.steps], rel=1e-3)
    # Two clocks of the same steps, each of which holds a sleep of 200 ms: one unit, however late a busy machine reads a line.
    assert 0.1 < sum(s.seconds for s in printed.steps) / sum(s.seconds for s in saved.steps) < 10
    assert min(s.seconds for s in saved.steps) > 0.19


@pytest.mark.full
def test_the_installed_lightning_writes_what_is_read(tmp_path: Path) -> None:
    run("train_lightning.py", "--monitor", "--tensorboard", folder=tmp_path)
    log = read(tmp_path / "lightning-run" / "metrics.csv", steps=STEPS)
    events_are_read(tmp_path, [3, 5])  # without a step time the first has none
    assert (log.adapter, log.clock, steps_of(log)[-1]) == ("lightning", "differences", STEPS - 1)
    assert all(s.seconds > 0 and s.loss is not None for s in log.steps)


@pytest.mark.full
def test_trl_writes_what_is_read(tmp_path: Path) -> None:
    """Its totals of tokens, in the file and on the console, which has neither steps nor time."""
    text, arrivals = run("train_trl.py", folder=tmp_path, package="trl", steps=12)
    saved = read(tmp_path / "trl-run", running=True)
    assert (saved.adapter, saved.clock, saved.every, steps_of(saved)) == ("hf", "mean", 2, [4, 6, 8, 10, 12])
    assert {s.tokens for s in saved.steps} == {42}  # two samples of 20 words and an end
    printed = read(text, steps=12, arrivals=arrivals)
    assert (printed.adapter, printed.clock, printed.every, steps_of(printed)) == ("hf", "arrival", 2, [4, 6, 8, 10, 12])
    assert [(s.tokens, s.step) for s in printed.steps] == [(s.tokens, s.step) for s in saved.steps]
    assert [s.loss for s in printed.steps] == pytest.approx([s.loss for s in saved.steps], rel=1e-3)


@pytest.mark.full
def test_torchtitan_writes_what_is_read(tmp_path: Path) -> None:
    text, _ = run("train_torchtitan.py", folder=tmp_path, package="torchtitan-0.3.0", steps=12)
    printed, events = read(text, steps=12), read(next(tmp_path.rglob("events.out.tfevents.*")), steps=12)
    assert (printed.adapter, printed.clock, printed.every, steps_of(printed)) == ("torchtitan", "differences", 2, [2, 4, 6, 8, 10, 12])
    assert (events.adapter, events.clock, events.every, steps_of(events)) == ("tensorboard", "logged", 2, [1, 2, 4, 6, 8, 10, 12])
    assert [s.loss for s in printed.steps] == pytest.approx([s.loss for s in events.steps][1:], abs=1e-5)
    for log in (printed, events):
        # Two clocks of the same sleeps: one unit, however late a busy machine writes a line.
        assert all(0.1 < s.tokens_per_s_per_gpu * s.seconds / 4096 < 10 for s in log.steps if s.tokens_per_s_per_gpu)
        assert {s.memory_bytes for s in log.steps} <= {9 * 2**30, 9.5 * 2**30}


def written(folder: Path, tags: tuple[str, ...] = ("train/loss", "train/step_time")) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(1, 6):
            for tag in tags:
                writer.add_scalar(tag, 1 / (step + 1), step, walltime=1000 + step / 4)
            writer.add_scalar("eval/loss", 9.0, step)
    return next(folder.glob("events.out.tfevents.*"))


def test_tensorboards_events_are_read_by_their_scalars_or_their_moments(tmp_path: Path) -> None:
    log = read(written(tmp_path / "timed"), steps=5)
    assert (log.adapter, log.clock, steps_of(log)) == ("tensorboard", "logged", [1, 2, 3, 4, 5])
    assert [s.seconds for s in log.steps] == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])
    written(tmp_path / "untimed", tags=("train/loss",))
    log = read(tmp_path / "untimed", steps=5)
    assert (log.clock, [s.seconds for s in log.steps]) == ("differences", pytest.approx([0.25] * 4))


def test_tags_at_different_steps_are_those_of_validations_and_of_the_runs_end(tmp_path: Path) -> None:
    """As transformers and Lightning write them: the epoch at each validation too, totals twice, the mean loss once at the end."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 21):
            named: list[tuple[str, float]] = []
            if step % 2 == 0:
                named += [("train/loss", 2 + 1 / step), ("train/grad_norm", 1.5), ("train/num_input_tokens_seen", 4096 * step)]
            if step % 3 == 0:
                named += [("eval/loss", 9.0), ("val_loss", 9.0), ("train/num_input_tokens_seen", 4096 * step)]
            if step == 20:
                named += [("train/train_loss", 5.0), ("train/train_runtime", 5.0), ("train/total_flos", 1e12)]
            for tag, value in [*named, *([("epoch", 0), ("train/epoch", step / 20)] if named else [])]:
                writer.add_scalar(tag, value, step, walltime=1000 + step / 4)
    log = read(tmp_path, steps=20)
    assert (log.every, log.clock, steps_of(log)) == (2, "differences", list(range(4, 21, 2)))
    assert [s.seconds for s in log.steps] == pytest.approx([0.25] * 9)
    assert [s.loss for s in log.steps] == pytest.approx([2 + 1 / n for n in range(4, 21, 2)])
    assert {s.tokens for s in log.steps} == {4096}


def test_damaged_events_are_errors(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[:-7], whole[:200] + b"\xff" + whole[201:], whole + b"more", b"text\n"):
        path.write_bytes(damaged)
        with pytest.raises(LogError, match=r"damaged|cannot be read"):
            read(path, steps=5)
