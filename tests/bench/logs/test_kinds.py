"""Logs as people have them: late, unfinished, sparse, with totals, with other clocks. Each kind with the right value."""

from __future__ import annotations

import json
import re
from pathlib import Path

import log_excerpts as logs
import pytest

from playbook.errors import LogError
from playbook_bench.logs import NoAdapter, read


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


def printed(every: int, bars: bool, closing: str) -> str:
    """What the Trainer prints at `logging_steps=every`, eight lines, 0.5 s a step."""
    out = []
    for i, x in enumerate(logs.LOSSES, 1):
        out.append(f"{{'loss': '{x:.4g}', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '{i * every / 40:.4g}'}}\n")
        n = i * every
        out += [f"\r {n}%|#         | {n}/{8 * every} [00:{n // 2:02}<00:01,  1.9it/s]\r  \r"] if bars else []
    return "".join(out) + f"{{'train_runtime': '{4 * every}', 'train_loss': '2.3', {closing}'epoch': '1'}}\n"


@pytest.mark.parametrize("kind", ["bar", "closing line"])
def test_a_printed_line_reaches_as_far_as_bar_or_closing_line_say(kind: str) -> None:
    text = printed(5, kind == "bar", "'train_steps_per_second': '2', ")
    log = read(text, arrivals=[2.5 * i for i in range(10)])
    assert (log.every, [s.step for s in log.steps]) == (5, list(range(10, 41, 5)))
    assert [s.seconds for s in log.steps] == pytest.approx([0.5] * 7)
    assert any("each line covers 5 steps" in caveat for caveat in log.caveats)


def test_a_progress_bar_is_a_clock_for_who_asks_how_fast_a_run_was() -> None:
    text = printed(5, bars=True, closing="")
    with pytest.raises(LogError, match="include_num_input_tokens_seen"):
        read(text)
    log = read(text.partition("{'train_runtime'")[0], running=True)
    assert [s.seconds for s in log.steps] == pytest.approx([0.5] * 6, rel=0.05)


def test_a_closing_line_that_leaves_the_interval_open_asks_for_the_steps() -> None:
    with pytest.raises(LogError, match="closing line tells of about 400 steps"):
        read(printed(50, False, "'train_steps_per_second': '2', "), arrivals=[25.0 * i for i in range(10)])


def rows(*values: dict[str, object]) -> str:
    return "".join(json.dumps({"loss": 2.0} | value) + "\n" for value in values)


def test_running_totals_are_tokens_of_a_step_by_their_growth() -> None:
    """TRL's `num_tokens` by its name, any figure that grows on each of many lines by that."""
    for name in ("num_tokens", "tokens", "tokens_total"):
        log = read(rows(*({"step": i, "seconds": 0.5, name: 4096 * i} for i in range(1, 11))))
        assert {s.tokens for s in log.steps} - {None} == {4096}
    log = read(rows(*({"step": i, "seconds": 0.5, "tokens": 4000 + i % 3} for i in range(1, 11))))
    assert {s.tokens for s in log.steps} == {4000, 4001, 4002}
    pattern = r"regex:s=(?P<step>\d+) t=(?P<ms_total>\d+) n=(?P<tokens_total>\d+)"
    log = read("".join(f"s={i} t={500 * i} n={4096 * i}\n" for i in range(1, 9)), pattern)
    assert {(s.seconds, s.tokens) for s in log.steps} == {(0.5, 4096)}


def test_a_line_of_which_some_steps_were_skipped_made_updates() -> None:
    def text(skipped: int) -> str:
        return logs.megatron(every=10).replace("skipped iterations:   0", f"skipped iterations: {skipped:3}", 2)

    log = read(text(8), steps=80)
    assert [s.skipped for s in log.steps] == [False] * 8
    assert any("16 of 80 steps made no update" in caveat for caveat in log.caveats)
    log = read(text(10), steps=80)
    assert [s.skipped for s in log.steps] == [True] * 2 + [False] * 6
    log = read(logs.megatron(skipped=tuple(range(1, 9))), steps=8)
    assert any("no step made an update" in caveat for caveat in log.caveats)


def test_a_shorter_last_interval_is_none_that_is_missing() -> None:
    log = read(rows(*({"step": n, "elapsed": 0.5 * n} for n in (10, 20, 30, 40, 45))))
    assert (log.every, [s.step for s in log.steps]) == (10, [20, 30, 40, 45])
    assert {s.seconds for s in log.steps} == {0.5}
    with pytest.raises(LogError, match="every 5 is logged; steps are missing"):
        read(rows(*({"step": n, "elapsed": 0.5 * n} for n in (10, 20, 25, 35, 45))))


@pytest.mark.parametrize("name", ["timestamp", "time", "ts"])
@pytest.mark.parametrize(
    "form", ["2026-02-24T10:00:{:06.3f}Z", "2026-02-24 10:00:{:06.3f}", "2026-02-24T10:00:{:06.3f}+01:00", "2026-02-24 10:00:{:06.3f},"]
)
def test_dates_are_a_clock(name: str, form: str) -> None:
    text = rows(*({"step": i, name: form.format(at).rstrip(",")} for i, at in enumerate(logs.moments(), 1)))
    assert [s.seconds for s in read(text).steps] == pytest.approx(logs.SECONDS[1:], abs=1e-3)


def test_a_number_under_a_name_of_many_meanings_is_no_clock() -> None:
    with pytest.raises(LogError, match="expected the seconds of a step as well"):
        read(rows(*({"step": i, "time": 0.5 * i} for i in range(1, 9))))


@pytest.mark.parametrize(
    "row", [{"val_loss": 2.2, "elapsed": 1.2}, {"eval/loss": 2.2, "elapsed": 1.2}, {"split": "val", "loss": 2.2, "elapsed": 1.2}]
)
def test_a_line_of_a_validation_is_none_of_a_step(row: dict[str, object]) -> None:
    train = [{"step": i, "elapsed": at, "loss": x} for i, (at, x) in enumerate(zip(logs.moments(), logs.LOSSES, strict=True), 1)]
    text = "".join(json.dumps(each) + "\n" for each in [*train[:4], {"step": 4} | row, *train[4:]])
    assert [s.loss for s in read(text, steps=8).steps] == list(logs.LOSSES[1:])


OTHERS = {
    "deepspeed": (logs.deepspeed(), "differences", 1, 1e-6, {"memory_bytes": {38.5 * 2**30}, "loss": {None}}),
    "olmo-core": (logs.olmo_core(), None, 1, 1e-6, {"tokens": {4096}, "tokens_per_s_per_gpu": {8192}, "grad_norm": {1.5}}),
    "verl": (logs.verl(), None, 0, 1e-6, {"tokens": {4096}, "grad_norm": {1.5}, "memory_bytes": {38.5 * 2**30}, "loss": {None}}),
    # A history of W&B, which counts the trainer's steps and passes over validations.
    "lightning": (logs.wandb(), "differences", 1, 1e-4, {}),
}


@pytest.mark.parametrize("adapter", OTHERS)
def test_lines_of_other_trainers_are_read_with_their_figures(adapter: str) -> None:
    text, clock, begin, within, figures = OTHERS[adapter]
    log = read(text)
    assert (log.adapter, [s.step for s in log.steps]) == (adapter, list(range(1 + begin, 9)))
    assert clock is None or log.clock == clock
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[begin:], abs=within)
    if "loss" not in figures:
        assert [s.loss for s in log.steps] == list(logs.LOSSES[begin:])
    assert {name: {getattr(s, name) for s in log.steps} for name in figures} == figures


UNKNOWN = {
    "milliseconds": "[12:00:0{i}] Update {n}/200 | train loss: {x} | took 512.{i} ms | lr 1e-4\n",
    "seconds": "epoch 0 it {n} loss={x} (0.51{i} s/it)\n",
    "named seconds": "it={n} loss={x} step_s=0.51{i}\n",
    "a total": "step:{n}/1750 val_loss:{x} train_time:{total}ms step_avg:999.9ms\n",
    "a percentage": "Epoch 0: {n}%|x | {n}/200 [00:0{i}<00:10, loss={x}, eta 7s, 0.51{i} s/it]\n",
    "dates": "[2024-04-24 10:00:{at},100] [INFO] [trainer.py:96] step={n}, skipped=0, loss={x}, lr=[4e-05]\n",
    "other words for it": "step {n} | loss: {x} | lr 1e-4 | dt: 51{i}.00ms | tok/sec: 8192.55\n",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_pattern_is_proposed_that_reads_the_log(kind: str) -> None:
    text = (
        "starting\n"
        + "".join(UNKNOWN[kind].format(i=i, n=10 * i, x=x, total=5100 * i, at=10 + 5 * i) for i, x in enumerate(logs.LOSSES[:4], 1))
        + "done\n"
    )
    with pytest.raises(NoAdapter) as caught:
        read(text)
    assert caught.value.pattern in str(caught.value)
    log = read(text, caught.value.pattern)
    begin = int(log.clock == "differences")
    assert [s.step for s in log.steps] == [10, 20, 30, 40][begin:]
    assert [s.loss for s in log.steps] == (list(logs.LOSSES[begin:4]) if kind != "a total" else [None] * 3)
    assert [s.seconds for s in log.steps] == pytest.approx([0.51] * (4 - begin), abs=0.011)


@pytest.mark.parametrize("text", ["hello\n" * 9, "loss 2.0\n" * 9, "a 1\nb 2\nc 3\nd 4\n"])
def test_no_pattern_is_proposed_where_no_line_tells_of_steps(text: str) -> None:
    with pytest.raises(NoAdapter, match="JSON lines with step") as caught:
        read(text)
    assert caught.value.pattern == ""


def test_a_log_without_time_is_read_for_the_rest_and_says_what_ab_lacks() -> None:
    text = rows(*({"step": i, "memory_bytes": 4e10, "tokens_per_s_per_gpu": 9000} for i in range(1, 9)))
    with pytest.raises(LogError, match="expected the seconds of a step"):
        read(text)
    log = read(text, running=True)
    assert (log.clock, {s.tokens_per_s_per_gpu for s in log.steps}) == ("none", {9000})
    assert any("no time of a step, which `playbook ab` needs" in caveat for caveat in log.caveats)


def factory(losses: tuple[float, ...] = logs.LOSSES, scale: float = 1.0) -> str:
    """LLaMA-Factory's `trainer_log.jsonl`."""
    pairs = enumerate(zip(logs.moments(), losses, strict=True), 1)
    end = json.dumps(
        {"current_steps": 8, "total_steps": 8, "epoch": 1.0, "percentage": 100.0, "elapsed_time": "0:00:04", "remaining_time": "0:00:00"}
    )
    return (
        "".join(json.dumps({"current_steps": i, "total_steps": 8, "loss": x, "elapsed": scale * at}) + "\n" for i, (at, x) in pairs)
        + end
        + "\n"
    )


@pytest.mark.parametrize("place", ["trainer_state.json", "checkpoint-8/trainer_state.json"])
def test_a_file_beside_a_log_without_time_gives_its_seconds(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(logs.trainer_state(timed=False))
    assert read(path, running=True).clock == "mean"
    (tmp_path / "notes.txt").write_text("nothing\n")
    (tmp_path / "trainer_log.jsonl").write_text(factory())
    log = read(path, running=True)
    assert (log.adapter, log.clock, [s.step for s in log.steps]) == ("hf", "differences", list(range(2, 9)))
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[1:])
    assert any("seconds are those of 'trainer_log.jsonl'" in caveat for caveat in log.caveats)
    with pytest.raises(LogError, match="expected the seconds of a step"):  # a launch's file may lie beside an earlier launch's
        read(path)


@pytest.mark.parametrize(
    "files", [{"trainer_log.jsonl": factory((*logs.LOSSES[:-1], 2.2))}, {"trainer_log.jsonl": factory(), "log.jsonl": factory(scale=2)}]
)
def test_a_file_of_another_run_gives_no_seconds(tmp_path: Path, files: dict[str, str]) -> None:
    """It has other losses, or there are two that disagree."""
    for name, text in {"trainer_state.json": logs.trainer_state(timed=False), **files}.items():
        (tmp_path / name).write_text(text)
    assert read(tmp_path / "trainer_state.json", running=True).clock == "mean"


def test_a_table_without_seconds_has_those_of_the_events_below_it(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{i},{x}\n" for i, x in enumerate(logs.LOSSES, 1)))
    with SummaryWriter(str(tmp_path / "runs" / "one")) as writer:
        for i, (at, x) in enumerate(zip(logs.moments(), logs.LOSSES, strict=True), 1):
            writer.add_scalar("train/loss", x, i, walltime=at)
    assert [s.seconds for s in read(tmp_path / "metrics.csv", running=True).steps] == pytest.approx(logs.SECONDS[1:], abs=1e-4)


def test_nemos_lines_are_read_from_step_0_to_the_number_that_they_name() -> None:
    log = read(logs.nemo())
    assert (log.adapter, [s.step for s in log.steps]) == ("nemo", list(range(8)))
    assert [s.seconds for s in log.steps] == list(logs.SECONDS)
    assert [s.loss for s in log.steps] == list(logs.LOSSES)
    assert {(s.samples, s.memory_bytes, s.flops_per_s) for s in log.steps} == {(128, 115792977920, 1.249e15)}
    with pytest.raises(LogError, match="ends at step 7"):
        read(logs.nemo().replace("/7 |", "/99 |"))


def test_a_chart_of_wandb_is_read_where_it_is_of_one_run() -> None:
    head = '"Relative Time (Process)","one - train/loss","one - train/loss__MIN","one - train/loss__MAX","one - _step"'
    rows = [f"{at},{x},{x - 1},{x + 1},{i}" for i, (at, x) in enumerate(zip(logs.moments(), logs.LOSSES, strict=True), 1)]
    text = "\n".join([head, *rows]) + "\n"
    log = read(text)
    assert [s.loss for s in log.steps] == list(logs.LOSSES[1:])
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[1:])
    with pytest.raises(LogError, match="expected the table of one run"):
        read(text.replace("one - train/loss__MIN", "two - train/loss"))


def test_of_several_runs_in_a_file_the_last_is_read_where_the_run_may_go_on() -> None:
    first = rows(*({"step": i, "seconds": 9.0} for i in range(1, 41)))
    resumed = rows(*({"step": i, "seconds": 0.5} for i in range(31, 51)))
    with pytest.raises(LogError, match="step 31 on line 41 comes after step 40"):
        read(first + resumed)
    log = read(first + resumed, running=True)
    assert ([s.step for s in log.steps], {s.seconds for s in log.steps}) == (list(range(31, 51)), {0.5})
    assert any("steps begin again 1 time," in caveat and "from line 41 on" in caveat for caveat in log.caveats)
    for damaged in (rows(*({"step": i // 2, "seconds": 0.5, "loss": 2 + i} for i in range(2, 42))), first + resumed[: len(resumed) // 4]):
        with pytest.raises(LogError, match=r"logged twice|comes after step"):
            read(damaged, running=True)


def test_a_finished_run_without_times_has_the_mean_of_its_closing_line_for_who_asks_how_fast_it_was() -> None:
    log = read(logs.trainer_state(timed=False), running=True)
    assert (log.clock, {s.seconds for s in log.steps}) == ("mean", {4.5 / 8})
    assert any("mean of the whole run, by its closing line" in caveat for caveat in log.caveats)
    log = read(printed(5, False, "'train_steps_per_second': '2', "), running=True)
    assert (log.clock, log.every, [round(s.seconds, 9) for s in log.steps]) == ("mean", 5, [0.5] * 7)


def test_a_bar_on_the_line_of_the_next_dictionary_is_of_the_step_before() -> None:
    text = printed(5, bars=True, closing="").replace("\r  \r", "")
    assert text.count("it/s]{") == 8
    log = read(text, arrivals=[2.5 * i for i in range(10)])
    assert (log.every, [s.step for s in log.steps]) == (5, list(range(10, 41, 5)))


def test_a_dictionary_over_several_lines_is_one() -> None:
    text = logs.printed_blocks()
    log = read(text, arrivals=[0.5 * i for i in range(text.count("\n") + 1)])
    assert (log.adapter, [s.step for s in log.steps]) == ("hf", list(range(2, 9)))
    assert [s.loss for s in log.steps] == list(logs.LOSSES[1:])
    assert {s.tokens for s in log.steps} == {logs.TOKENS}
    rows = [json.loads(line) for line in logs.json_lines().splitlines()[1:-1]]
    log = read("".join(f"{json.dumps(row, indent=2)}\n" for row in rows), steps=8)
    assert (log.adapter, [s.seconds for s in log.steps]) == ("jsonl", list(logs.SECONDS))


@pytest.mark.parametrize("epochs", [False, True])
def test_blocks_of_composer_are_read_with_hours_rates_and_tokens(epochs: bool) -> None:
    log = read(logs.composer(epochs), steps=8)
    assert (log.adapter, log.clock, [s.step for s in log.steps]) == ("composer", "differences", list(range(2, 9)))
    assert [s.seconds for s in log.steps] == pytest.approx([100 * s for s in logs.SECONDS[1:]], abs=0.5)  # 0.0001 h are 0.36 s
    assert [s.loss for s in log.steps] == list(logs.LOSSES[1:])
    assert {s.tokens for s in log.steps} == {logs.TOKENS}
    last = log.steps[-1]
    assert (last.tokens_per_s, last.tokens_per_s_per_gpu, last.memory_bytes) == (131072, 16384, pytest.approx(4.0643e9))
    assert log.steps[0].tokens_per_s is None


def test_a_clock_of_hours_with_four_decimals_is_too_coarse_for_steps_of_a_second() -> None:
    rows = [{"step": i, "loss": 2.0, "time/train": round(i * 0.5 / 3600, 4)} for i in range(1, 101)]
    log = read("".join(json.dumps(row) + "\n" for row in rows), running=True)
    assert {round(s.seconds, 2) for s in log.steps} == {0.5}
    assert any("steps of 0.36 s" in caveat for caveat in log.caveats)


def test_steps_that_begin_again_with_each_epoch_are_counted_on() -> None:
    log = read(logs.mmengine())
    assert (log.adapter, log.every, [s.step for s in log.steps]) == ("mmengine", 50, list(range(50, 401, 50)))
    assert [s.seconds for s in log.steps] == list(logs.SECONDS)
    assert any("begin again with each of 2 epochs" in caveat for caveat in log.caveats)
    log = read(logs.timm())
    assert (log.adapter, log.every, [s.step for s in log.steps]) == ("timm", 50, [0, 50, 100, 119, 120, 170, 220, 239])
    assert [s.loss for s in log.steps] == pytest.approx(logs.LOSSES, abs=0.005)
    rows = [{"mode": "train", "epoch": e, "iter": 50 * i, "loss": 2.0, "time": 0.5, "data_time": 0.01} for e in (1, 2) for i in (1, 2, 3)]
    log = read("".join(json.dumps(row) + "\n" for row in rows))
    assert ([s.step for s in log.steps], {s.seconds for s in log.steps}) == ([50, 100, 150, 200, 250, 300], {0.5})
    del rows[1]
    with pytest.raises(LogError, match="comes after step"):
        read("".join(json.dumps(row) + "\n" for row in rows))


def test_lines_of_micro_batches_add_up_to_steps() -> None:
    with pytest.raises(NoAdapter) as caught:
        read(logs.micro_batches())
    for pattern in (caught.value.pattern, logs.MICRO_PATTERN):
        log = read(logs.micro_batches(), pattern)
        assert [s.step for s in log.steps] == list(range(1, 8))
        expected = [(a + 3 * b) / 4 for a, b in zip(logs.SECONDS, logs.SECONDS[1:], strict=False)]  # an update has the number of the next
        assert [s.seconds for s in log.steps] == pytest.approx(expected)
        assert any("each step has 4 lines, of its micro-batches" in caveat for caveat in log.caveats)
    rows = [{"step": i // 4, "micro_step": i % 4, "loss": 2.0 + i % 4, "seconds": 0.125, "tokens": 1024} for i in range(4, 40)]
    log = read("".join(json.dumps(row) + "\n" for row in rows), steps=9)
    assert {(s.seconds, s.tokens, s.loss) for s in log.steps} == {(0.5, 4096, 3.5)}
    with pytest.raises(LogError, match="need a counter of them"):
        read("".join(json.dumps(row | {"micro_step": 0}) + "\n" for row in rows))


def test_lines_of_several_ranks_are_one_where_they_say_the_same() -> None:
    text = re.sub(r"(.*step: .*\n)", r"\1\1\1\1", logs.torchtitan(colours=False))
    with pytest.raises(LogError, match="logged twice"):
        read(text)
    log = read(text, running=True)
    assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[1:], abs=1e-6)
    assert any("logged 4 times, by several ranks" in caveat for caveat in log.caveats)


def test_a_rate_without_times_is_a_rate_alone() -> None:
    with pytest.raises(LogError, match="expected the seconds of a step"):
        read(logs.torchtune())
    log = read(logs.torchtune(), running=True)
    assert (log.adapter, log.clock, [s.step for s in log.steps]) == ("torchtune", "none", list(range(2, 9)))
    assert [s.tokens_per_s_per_gpu for s in log.steps] == pytest.approx([logs.TOKENS / s for s in logs.SECONDS[1:]], rel=1e-4)
    assert {s.memory_bytes for s in log.steps} == {14.25 * 2**30}
    old = "".join(f"[2022-11-07 01:55:0{i},500] [INFO] [timer.py:180:stop] 0/{i}, SamplesPerSec=25.5\n" for i in range(1, 9))
    assert {s.seconds for s in read(old, steps=8).steps} == {1.0}


def test_figures_with_a_suffix_are_thousands_millions_and_more() -> None:
    log = read(logs.nanotron(), steps=8)
    last = log.steps[-1]
    assert (last.tokens_per_s, last.tokens_per_s_per_gpu, last.memory_bytes, last.samples) == pytest.approx((2.09e6, 26200, 52.1e9, 512))
    assert [s.seconds for s in log.steps] == list(logs.SECONDS[1:])
    assert [s.tokens for s in log.steps] == pytest.approx([1.05e6] * 7)  # from totals of three digits: the mean of all
    pattern = r"regex:s=(?P<step>\d+) t=(?P<ms_total>[\d.K]+) rate=(?P<tokens_per_s>[\d.KM]+)"
    log = read("".join(f"s={i} t={0.5 * i}K rate=1.5M\n" for i in range(1, 9)), pattern)
    assert {(s.seconds, s.tokens_per_s) for s in log.steps} == {(0.5, 1.5e6)}


def test_torchtitans_lines_of_2024_have_their_own_time_or_their_stamps() -> None:
    """`iter` until April, words per second (`wps`) and no loss norm until October."""
    for rest, clock in (
        ("iter: {s:.4f}  data: 0.0431  lr: 0.00026667", "logged"),
        ("memory: 33.73GiB(42.59%)  wps: 2,050  mfu: 17.66%", "differences"),
    ):
        text = ""
        for i, (at, s, x) in enumerate(zip(logs.moments(), logs.SECONDS, logs.LOSSES, strict=True), 1):
            text += f"[rank0]:2024-04-24 10:00:{logs.stamp(at)} - root - INFO - step: {i:2}  loss: {x:7.4f}  {rest.format(s=s)}\n"
        log = read(text, steps=8)
        assert (log.adapter, log.clock) == ("torchtitan", clock)
        assert [s.seconds for s in log.steps] == pytest.approx(logs.SECONDS[clock != "logged" :], abs=1e-6)
