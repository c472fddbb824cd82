"""Logs as people have them: late, unfinished, sparse, with totals, with other clocks. Each kind with the right value."""

from __future__ import annotations

import json
import re

import log_excerpts as logs
import pytest

from playbook.errors import LogError
from playbook_bench.logs import read


def after(text: str, steps: int, pattern: str) -> str:
    """The text with each step so much later."""
    return re.sub(pattern, lambda m: f"{m[1]}{int(m[2]) + steps}", text)


LATE = {
    "megatron": after(logs.megatron(), 84, r"(iteration +)(\d+)(?=/ )").replace("/       8", "/      92"),
    "torchtitan": after(logs.torchtitan(colours=False), 42, r"((?<!validate )step: +)(\d+)"),
    "nanogpt": logs.nanogpt(first=1631),
}


@pytest.mark.parametrize(("kind", "first"), [("megatron", 85), ("torchtitan", 44), ("nanogpt", 1631)])
def test_a_log_that_begins_late_is_read_and_says_so(kind: str, first: int) -> None:
    for steps in (None, 8):
        log = read(LATE[kind], steps=steps)
        assert log.steps[0].step == first
        assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[int(kind == "torchtitan") :], abs=1e-6)
        assert any("begins at step" in caveat for caveat in log.caveats)


def test_a_late_log_that_names_its_length_shows_an_early_end() -> None:
    with pytest.raises(LogError, match="ends at step 92"):
        read(LATE["megatron"].replace("/      92", "/     500"))


@pytest.mark.parametrize(
    "text", [logs.trainer_console().partition("{'train_runtime'")[0], logs.trainer_state().replace('"max_steps": 8', '"max_steps": 500')]
)
def test_an_unfinished_log_is_read_where_the_run_may_go_on(text: str) -> None:
    arrivals = [0.5 * i for i in range(text.count("\n") + 1)] if "log_history" not in text else None
    with pytest.raises(LogError, match="ended early"):
        read(text, arrivals=arrivals)
    log = read(text, arrivals=arrivals, running=True)
    assert [s.loss for s in log.steps] == pytest.approx(logs.LOSSES[1:], rel=1e-3)
    assert any("goes on, or ended early" in caveat for caveat in log.caveats)


def test_ms_swifts_lines_are_read_with_their_memory() -> None:
    log = read(logs.swift(), running=True)
    assert (log.adapter, log.clock) == ("jsonl", "differences")
    assert [s.step for s in log.steps] == list(range(2, 9))
    assert {s.memory_bytes for s in log.steps} == {20.5 * 2**30}
    assert [s.seconds for s in log.steps] == pytest.approx([0.5] * 7)
    assert any("whole seconds" in caveat for caveat in log.caveats)
    arrivals = [10 + at for at in logs.moments()] + [20.0] * 4
    assert [s.seconds for s in read(logs.swift(), arrivals=arrivals).steps] == pytest.approx(logs.SECONDS[1:])


def test_ms_swifts_older_lines_hold_a_mean_speed_since_the_start() -> None:
    assert [s.seconds for s in read(logs.swift(old=True)).steps] == pytest.approx(logs.SECONDS[1:], abs=1e-4)


def test_what_ms_swift_prints_is_read() -> None:
    rows = [json.loads(line) for line in logs.swift().splitlines()[:-1]]
    end = [row for row in rows if "train_runtime" in row]
    text = "".join(f"{row}\n" for row in [*(r for r in rows if "train_runtime" not in r), *end])
    log = read(text, running=True)
    assert (log.adapter, [s.step for s in log.steps]) == ("hf", list(range(2, 9)))
    assert {s.memory_bytes for s in log.steps} == {20.5 * 2**30}


@pytest.mark.parametrize(
    ("written", "seconds"), [("0:01:05", 65), ("1 day, 0:00:05", 86405), ("1m 5s", 65), ("1h 0m 5s", 3605), ("1d 1s", 86401)]
)
def test_durations_are_seconds(written: str, seconds: int) -> None:
    rows = [{"current_steps": i, "total_steps": 2, "loss": 2.0, "elapsed_time": at} for i, at in ((1, "0:00:00"), (2, written))]
    assert read("".join(json.dumps(row) + "\n" for row in rows)).steps[0].seconds == seconds
