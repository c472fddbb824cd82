"""Logs of each trainer, read into steps: the figures, and what a log cannot know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import log_excerpts as logs
import pytest

from playbook.errors import LogError
from playbook_bench.logs import read
from playbook_bench.logs.adapters import ADAPTERS

ALL: dict[str, tuple[Callable[[], str], str | None, str]] = {
    "jsonl": (logs.json_lines, None, "logged"),
    "playbook": (logs.playbook, None, "logged"),
    "megatron": (logs.megatron, None, "logged"),
    "megatron 2020": (logs.megatron_2020, None, "logged"),
    "megatron bridge": (logs.megatron_bridge, None, "logged"),
    "megatron primus": (logs.primus, None, "logged"),
    "torchtitan": (logs.torchtitan, None, "differences"),
    "torchtitan plain": (lambda: logs.torchtitan(colours=False, prefix=""), None, "differences"),
    "hf": (logs.trainer_state, None, "differences"),
    "lightning": (logs.lightning, None, "logged"),
    "lightning monitor": (lambda: logs.lightning(monitor=True), None, "differences"),
    "nanogpt": (logs.nanogpt, None, "logged"),
    "nanogpt modded": (logs.modded_nanogpt, None, "differences"),
    "megatron nanotron": (logs.nanotron, None, "logged"),
    "regex": (logs.own_format, logs.OWN_PATTERN, "logged"),
}


@pytest.mark.parametrize("kind", ALL)
def test_seconds_and_losses_are_those_of_the_log(kind: str) -> None:
    text, adapter, clock = ALL[kind]
    log = read(text(), adapter, steps=8)
    begin = 1 if kind == "megatron nanotron" else int(clock == "differences")  # a total of tokens needs two lines too
    assert log.adapter == kind.split()[0]
    assert (log.clock, log.every) == (clock, 1)
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[begin:], abs=1e-6)
    assert [s.loss for s in log.steps] == pytest.approx(logs.LOSSES[begin:])
    origin = 0 if kind in ("lightning", "lightning monitor", "nanogpt", "regex") else 1
    assert [s.step for s in log.steps] == list(range(origin + begin, origin + 8))


UNKNOWN = {
    "jsonl": {"grad_norm", "memory_bytes", "skipped", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s"},
    "playbook": {"memory_bytes", "skipped", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s"},
    "megatron": {"tokens", "memory_bytes", "tokens_per_s", "tokens_per_s_per_gpu"},
    "torchtitan": {"tokens", "skipped", "samples", "tokens_per_s"},
    "hf": {"memory_bytes", "skipped", "samples", "tokens_per_s_per_gpu", "flops_per_s"},
    "lightning": {"tokens", "grad_norm", "memory_bytes", "skipped", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "flops_per_s"},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_a_log_cannot_know_is_said(kind: str) -> None:
    assert set(read(ALL[kind][0]()).unknown) == UNKNOWN[kind]


def test_figures_come_in_our_units() -> None:
    step = read(logs.megatron()).steps[-1]
    assert (step.samples, step.flops_per_s, step.grad_norm, step.skipped) == (128, pytest.approx(220.4e12), 2.853, False)
    step = read(logs.torchtitan()).steps[-1]
    assert (step.memory_bytes, step.tokens_per_s_per_gpu, step.flops_per_s) == (
        pytest.approx(9.46 * 2**30),
        7282,
        pytest.approx(1000.52e12),
    )
    assert read(logs.trainer_state()).steps[-1].tokens == logs.TOKENS


def test_lines_that_arrive_one_by_one_are_timed_by_their_arrival() -> None:
    text = logs.trainer_console()
    begin = next(i for i, line in enumerate(text.split("\n")) if "'loss'" in line)
    arrivals = [10.0] * begin + [10 + at for at in logs.moments()] + [30.0] * 3
    log = read(text, steps=8, arrivals=arrivals)
    assert log.clock == "arrival"
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[1:])
    assert [s.loss for s in log.steps] == pytest.approx(logs.LOSSES[1:], rel=1e-3)
    assert "arrivals" in log.caveats[0]


@pytest.mark.parametrize(("text", "adapter"), [(logs.trainer_console(), "hf"), (logs.trainer_state(timed=False), "hf")])
def test_a_log_without_times_says_what_would_give_them(text: str, adapter: str) -> None:
    with pytest.raises(LogError, match="include_num_input_tokens_seen"):
        read(text, adapter, steps=8)


@pytest.mark.parametrize("text", [logs.megatron(every=10), logs.torchtitan(every=10)])
def test_lines_that_cover_several_steps_are_averages_and_say_so(text: str) -> None:
    log = read(text, steps=80 if "iteration" in text else 70)
    assert log.every == 10
    assert log.steps[-1].seconds == pytest.approx(logs.SECONDS[-1] / (1 if log.clock == "logged" else 10))
    assert any("each line covers 10 steps" in caveat and "1" in caveat for caveat in log.caveats)


def test_a_skipped_update_is_a_step_without_loss() -> None:
    steps = read(logs.megatron(skipped=(3,))).steps
    assert (steps[2].skipped, steps[2].loss, steps[3].skipped) == (True, None, False)


def test_our_own_skipped_update_is_no_nan_and_a_nan_is() -> None:
    skipped = '"loss": null, "nan": true, "skipped": true'
    log = read(logs.playbook().replace('"loss": 2.3,', f"{skipped},"), steps=8)
    assert (log.steps[3].loss, [s.loss for s in log.steps].count(None)) == (None, 1)
    with pytest.raises(LogError, match="NaN"):
        read(logs.playbook().replace('"loss": 2.3,', '"loss": 2.3, "nan": true,'), steps=8)


def test_what_version_4_of_the_trainer_prints_is_read_too() -> None:
    """Numbers without quotes; a NaN loss is averaged away there, and its gradient norm tells."""
    text = "".join(f"{{'loss': {x}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': {i / 4}}}\n" for i, x in enumerate(logs.LOSSES, 1))
    text += "{'train_runtime': 4.3, 'train_loss': 2.3, 'epoch': 2.0}\n"
    arrivals = [*logs.moments(), 9.0, 9.0]
    assert [s.loss for s in read(text, "hf", steps=8, arrivals=arrivals).steps] == list(logs.LOSSES[1:])
    with pytest.raises(LogError, match="grad_norm nan"):
        read(text.replace("'loss': 2.26, 'grad_norm': 1.5", "'loss': 0.0, 'grad_norm': nan"), "hf", steps=8, arrivals=arrivals)


def without(text: str, fragment: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if fragment not in line)


def twice(text: str, fragment: str) -> str:
    return "".join(line * (1 + (fragment in line)) for line in text.splitlines(keepends=True))


def swapped(text: str, a: str, b: str) -> str:
    rows = text.splitlines(keepends=True)
    i, j = (next(k for k, row in enumerate(rows) if f in row) for f in (a, b))
    rows[i], rows[j] = rows[j], rows[i]
    return "".join(rows)


J, M = logs.json_lines(), logs.megatron()
DAMAGE = {
    "a missing step": (without(J, '"step": 4'), "after step 3 .* comes step 5"),
    "a missing beginning": (without(J, '"step": 1'), "first step logged is 2"),
    "an early end": (without(J, '"step": 8'), "ends at step 7 .* expected 8 steps"),
    "a doubled step": (twice(J, '"step": 4'), "step 4 is logged twice"),
    "steps out of order": (swapped(J, '"step": 4', '"step": 6'), "missing|order|after"),
    "a NaN loss": (J.replace("2.41", "NaN"), "loss nan; expected a finite"),
    "an infinite time": (J.replace("0.52", "Infinity"), "seconds inf"),
    "no time at all": (J.replace("seconds", "kitchens"), "expected the seconds of a step"),
    "a step without loss": (J.replace('"loss": 2.41, ', ""), "line 3 has no loss"),
    "a null loss": (J.replace("2.41", "null"), "line 3 has no loss"),
    "time that stands still": (J.replace("0.52", "0.0"), "expected more than 0"),
    "more steps than planned": (J + '{"step": 9, "seconds": 0.5, "loss": 2.1, "tokens": 4096}\n', "goes on to step 9"),
    "a key twice": (J.replace('"step": 4,', '"step": 4, "step": 4,'), "after step 3"),
    "NaN iterations": (M.replace("nan iterations:   0", "nan iterations:   1", 1), "NaN"),
    "several ranks": (logs.torchtitan() + logs.torchtitan(prefix="[rank1]:"), "comes after step|twice"),
    "nothing at all": ("hello\n", "no adapter knows"),
    "half of a state": (logs.trainer_state()[:-30], "damaged"),
    "two lines of a table": ("step,step_time\n0,0.5\n", "1 lines about steps"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_log_is_an_error_and_never_a_number(kind: str) -> None:
    text, message = DAMAGE[kind]
    with pytest.raises(LogError, match=message):
        read(text, steps=8)


def test_a_log_that_names_its_length_needs_no_telling() -> None:
    with pytest.raises(LogError, match="ends at step 7"):
        read(without(logs.megatron(), "iteration        8/"))
    with pytest.raises(LogError, match="ends at step 80"):
        read(logs.megatron(every=10), steps=90)


def test_a_run_that_goes_on_from_a_checkpoint_is_told_apart_from_a_lost_beginning() -> None:
    text = "".join(f'{{"step": {n}, "seconds": 0.5}}\n' for n in range(101, 111))
    assert [s.step for s in read(text, steps=10).steps] == list(range(101, 111))
    with pytest.raises(LogError, match=r"first step logged is 102 .* expected 10 steps"):
        read(without(text, "101"), steps=10)


def test_an_unknown_adapter_names_the_known_ones() -> None:
    with pytest.raises(LogError, match=", ".join(a.name for a in ADAPTERS)):
        read(J, "nobody")


@pytest.mark.parametrize("pattern", ["regex:(", "regex:took (?P<seconds>.*)", "regex:" + "(?P<step>a)" * 2])
def test_a_pattern_that_cannot_work_is_refused(pattern: str) -> None:
    with pytest.raises(LogError, match="regex"):
        read(J, pattern)


def test_a_pattern_that_runs_away_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playbook_bench.logs.parsers._REGEX_S", 0.2)
    with pytest.raises(LogError, match="repeats inside repeats"):
        read("a" * 5000 + "!\n", r"regex:(?P<step>(a|aa)+)+$")


def test_messages_hold_no_characters_that_act_on_a_terminal() -> None:
    with pytest.raises(LogError) as caught:
        read(J, "\x1b[31mred\x07")
    assert str(caught.value).isprintable()


def test_a_folder_is_read_by_its_one_known_file(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(logs.trainer_state())
    assert read(tmp_path).adapter == "hf"
    (tmp_path / "metrics.csv").write_text(logs.lightning())
    with pytest.raises(LogError, match="holds 2 files"):
        read(tmp_path)
    with pytest.raises(LogError, match="cannot be read"):
        read(tmp_path / "missing")


def test_colours_and_carriage_returns_change_nothing() -> None:
    plain = logs.torchtitan(colours=False)
    assert read(logs.torchtitan()).steps == read(plain).steps == read(plain.replace("\n", "\r\n")).steps
