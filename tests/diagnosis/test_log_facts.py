"""What a log states goes before what would be assumed, and no figure is printed that the log contradicts."""

from __future__ import annotations

import json

import pytest
from in_process import document, refused
from log_excerpts import torchtitan

MODEL = ("--model", "qwen3_8b", "--gpu", "h100")
ARGUMENTS = (
    "  global_batch_size ............................... 512\n"
    "  decoder_seq_length .............................. None\n"
    "  seq_length ...................................... 8192\n"
    "  world_size ...................................... 64\n"
)
ITERATION = " iteration {:8}/      20 | elapsed time per iteration (ms): 10000.0 |{} lm loss: 2.0E+00 |\n"
TITAN = (
    "[titan] 2026-02-24 09:59:00,000 - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=1, ep=1\n"
    "[titan] 2026-02-24 09:59:01,000 - root - INFO - Trainer is initialized with local batch size 2, global batch size 16,"
    " gradient accumulation steps 1, sequence length 2048, total steps 8 (warmup 2)\n"
)


def megatron(rates: str = "") -> str:
    return "".join(ITERATION.format(i, rates) for i in range(1, 21))


def titan(head: str = "", tps: str = "8,192", name: str = "tps") -> str:
    return head + torchtitan(colours=False).replace("tps: 7,282", f"{name}: {tps}").replace("tflops: 1,000.52  ", "")


def asked(capsys, tmp_path, text: str, *words: str):
    (tmp_path / "run.log").write_text(text)
    return document(capsys, "diagnose", str(tmp_path / "run.log"), *MODEL, *words)


def test_the_arguments_of_megatron_give_gpus_sequences_and_batch(capsys, tmp_path):
    shown = asked(capsys, tmp_path, ARGUMENTS + megatron())
    assert [shown["setting"][k] for k in ("gpus", "seq_len", "gbs")] == [64, 8192, 512]
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(512 * 8192 / 64 / 10)
    assert shown["measured"]["step_s"] == pytest.approx(10)


def test_the_lines_of_torchtitan_give_gpus_sequences_and_batch(capsys, tmp_path):
    shown = asked(capsys, tmp_path, titan(TITAN))
    assert [shown["setting"][k] for k in ("gpus", "seq_len", "gbs")] == [8, 2048, 16]
    assert shown["measured"]["step_s"] == pytest.approx(0.505, abs=0.02)


@pytest.mark.parametrize("name", ["tps", "wps"])
def test_seconds_of_a_step_are_the_logs_where_it_states_a_rate_as_well(capsys, tmp_path, name):
    """8,192 tokens/s on each of 8 GPUs and half a second a step are eight sequences of 4,096, not the 1,024 that would be assumed."""
    shown = asked(capsys, tmp_path, titan(name=name), "--gpus", "8")
    assert shown["setting"]["gbs"] == 8
    assert shown["measured"]["step_s"] == pytest.approx(0.505, abs=0.02)
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(8192)
    assert not any("four million" in words for words in shown["assumptions"])


def lines(**figures: float) -> str:
    return "".join(json.dumps({"step": i, "seconds": 4.0, **figures}) + "\n" for i in range(1, 21))


@pytest.mark.parametrize(("tps", "each"), [(65536, 8192), (8192, 8192)])
def test_a_rate_is_of_the_job_or_of_a_gpu_as_batch_and_seconds_tell(capsys, tmp_path, tps, each):
    shown = asked(capsys, tmp_path, lines(tps=tps), "--gpus", "8", "--gbs", "64")
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(each)


def test_a_rate_on_one_gpu_is_both(capsys, tmp_path):
    shown = asked(capsys, tmp_path, lines(tps=4096), "--gpus", "1")
    assert (shown["setting"]["gbs"], shown["measured"]["tokens_per_s_per_gpu"]) == (4, pytest.approx(4096))


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (lines(tps=8000), ("--gpus", "8"), "may be of the job or of one GPU; name the batch with --gbs"),
        (lines(tps=30000), ("--gpus", "8", "--gbs", "64"), "neither fits"),
        (ARGUMENTS + megatron(), ("--gpus", "8"), "the log has 64 GPUs, and --gpus is 8; leave --gpus out"),
        (ARGUMENTS + megatron(), ("--seq", "4096"), "sequences of 8192 tokens, and --seq is 4096"),
        (ARGUMENTS + megatron(), ("--layout", "tp=2,gbs=64"), "a global batch of 512 samples, and --gbs is 64"),
        (lines(tokens=262144, tokens_per_s_per_gpu=16384), ("--gpus", "8"), "are those of 4 GPUs, and --gpus is 8"),
        (titan(), ("--gpus", "8", "--gbs", "64"), "steps have 33,096 tokens, and 64 samples of 4096 are 262,144"),
        (titan(tps="100"), ("--gpus", "8"), "which is no sequence of 4096; name its length with --seq"),
        (megatron(" throughput per GPU (TFLOP/s/GPU): 150.0 |"), ("--gpus", "64"), "the log says 150 TFLOP/s on each GPU"),
    ],
)
def test_what_the_log_contradicts_is_a_message_and_no_figure(capsys, tmp_path, text, words, says):
    (tmp_path / "run.log").write_text(text)
    assert says in refused(capsys, "diagnose", str(tmp_path / "run.log"), *MODEL, "--json", *words)


def test_a_logs_own_batch_and_tokens_say_how_long_its_sequences_are(capsys, tmp_path):
    rows = "".join(f"{{'loss': 2.{i}, 'num_input_tokens_seen': {65536 * i}, 'epoch': {i / 10}}}\n" for i in range(1, 10))
    text = f"  Total train batch size (w. parallel, distributed & accumulation) = 64\n{rows}{{'train_runtime': 9, 'train_steps_per_second': 1}}\n"
    shown = asked(capsys, tmp_path, text, "--gpus", "8")
    assert (shown["setting"]["seq_len"], shown["setting"]["gbs"]) == (1024, 64)
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(65536 / 8)


def test_a_pattern_reads_any_log(capsys, tmp_path):
    text = "".join(f"it {i} took 4000ms\n" for i in range(1, 21))
    shown = asked(capsys, tmp_path, text, "--gpus", "8", "--gbs", "64", "--log", r"regex:it (?P<step>\d+) took (?P<ms>\d+)ms")
    assert shown["measured"]["step_s"] == pytest.approx(4)


def test_a_log_without_time_gives_what_it_has(capsys, tmp_path):
    text = "".join(json.dumps({"step": i, "loss": 2.0, "tokens_per_s_per_gpu": 9000}) + "\n" for i in range(1, 21))
    shown = asked(capsys, tmp_path, text, "--gpus", "8", "--gbs", "64")
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(9000)
    assert any("no time of a step, which `playbook ab` needs" in words for words in shown["assumptions"])
    shown = asked(capsys, tmp_path, text.replace("tokens_per_s_per_gpu", "x"), "--gpus", "8", "--gbs", "64")
    assert shown["measured"] is None
    assert "a speed" in shown["confidence"]["unknown"]


def test_an_unknown_log_is_answered_with_a_pattern(capsys, tmp_path):
    (tmp_path / "run.log").write_text("".join(f"it {i} loss=2.{i} (4.{i} s/it)\n" for i in range(1, 9)))
    said = refused(capsys, "diagnose", str(tmp_path / "run.log"), *MODEL, "--gpus", "8", "--json")
    assert "this fits its lines: --log 'regex:" in said
