"""What goes wrong around a run ends it with one line and the documented code, and takes nothing with it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import parity
import pytest
import torch
from forking import Forks
from ranks import steps, summary

from playbook_bench.launch import outcome
from playbook_trainer.huggingface import weights

TEXT, VISION = "trainer/configs/qwen3_moe_tiny.yaml", "trainer/configs/qwen3_vl_tiny.yaml"
DENSE = "trainer/configs/qwen3_tiny.yaml"
QUICK = ["train.receipt=false", "train.warmup_steps=1", "train.steps=4", "data.seq_len=64", "model.num_layers=1", "data.num_workers=0"]


def said(forks: Forks, rank: int) -> list[str]:
    """The lines of a rank, without those of torch's own network code."""
    return [line for line in forks.text(rank).splitlines() if not line.startswith("[")]


def test_foreign_lines_in_the_metrics_are_named(forks: Forks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [TEXT, *QUICK, f"output={out}", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    assert forks.run(words) == [0], forks.text(0)
    with (out / "metrics.jsonl").open("a") as f:
        f.write("[1, 2]\n")
    held = (out / "metrics.jsonl").read_bytes()
    assert forks.run([*words, "train.steps=6"]) == [2]
    assert said(forks, 0)[-1].startswith(f"error: {out}/metrics.jsonl:5: no line of a run's metrics ('[1, 2]'); take it out")
    assert "Traceback" not in forks.text(0)
    assert (out / "metrics.jsonl").read_bytes() == held


KILLED_WORKER = """
import multiprocessing, os, signal
from playbook_trainer.torch import engine
real, calls = engine.forward_backward, []
def planted(*args):
    calls.append(1)
    if len(calls) == 3:
        [os.kill(p.pid, signal.SIGKILL) for p in multiprocessing.active_children()]
    return real(*args)
engine.forward_backward = planted
"""
NO_MEMORY = """
import torch
from playbook_trainer.torch import engine
engine.forward_backward = lambda *args: torch.empty(2**55)
"""


@pytest.mark.parametrize(
    ("plant", "more", "code", "expected", "ended"),
    [
        (KILLED_WORKER, ["data.num_workers=1"], 1, "error: a data worker died: ", "crash"),
        (NO_MEMORY, [], 4, "rank 0: out of memory: ", "oom"),
    ],
    ids=["killed worker", "no memory"],
)
def test_one_line_and_the_documented_code(
    plant: str, more: list[str], code: int, expected: str, ended: str, forks: Forks, tmp_path: Path
) -> None:
    """The harness took a killed worker for a run that does not fit, since the message guessed at the host's memory."""
    assert forks.run([TEXT, *QUICK, "train.steps=40", *more, f"output={tmp_path}"], 1, plant) == [code]
    lines = [line for line in said(forks, 0) if not line.startswith(("step ", "auto on "))]
    assert len(lines) == 1
    assert lines[0].startswith(expected)
    (tmp_path / "log").write_text(lines[0])
    assert outcome.judge([outcome.Ended(0, code, tmp_path / "log")], tmp_path, 0.0, 1.0).outcome == ended


def test_a_port_in_use_is_said(forks: Forks, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        codes = forks.run([TEXT, *QUICK, f"output={tmp_path}"], 2, "import os; os.environ['RANK'] == '1' and os._exit(9)", port)
    assert codes == [2, 9]
    assert said(forks, 0)[-1].startswith(f"error: rank 0 cannot listen at MASTER_ADDR 127.0.0.1, port {port} (the address is in use)")
    assert "Traceback" not in forks.text(0)


IMPATIENT = "import os; from playbook_trainer import join; join._SAY_S, join._GIVE_UP_S = 0.5, 1.0; os.environ['RANK'] == '{absent}' and os._exit(9)"


@pytest.mark.parametrize(
    ("absent", "there", "expected"), [(1, 0, "no word from rank 1 of 2 in "), (0, 1, "no answer from rank 0 at 127.0.0.1:")]
)
def test_an_absent_peer_is_named(absent: int, there: int, expected: str, forks: Forks, tmp_path: Path) -> None:
    codes = forks.run([TEXT, *QUICK, f"output={tmp_path}"], 2, IMPATIENT.format(absent=absent))
    assert (codes[absent], codes[there]) == (9, 1)
    lines = said(forks, there)
    assert lines[0].startswith(f"rank {there}: {expected}")
    assert lines[-1].startswith("error: " if there == 0 else f"rank {there}: error: ")
    assert "look at its log" in lines[-1]
    assert "Traceback" not in "".join(lines)


VANISHED = """import os, pathlib
def look(folder, pattern, real=pathlib.Path.glob):
    if folder.name == "export" and os.environ["RANK"] == "1":
        raise FileNotFoundError(2, "rank 0 has removed it again", str(folder))
    return real(folder, pattern)
pathlib.Path.glob = look"""


def test_a_folder_that_rank_0_tries_and_removes_stops_no_other_rank(forks: Forks, tmp_path: Path) -> None:
    """Rank 1 refused now and then what rank 0 had made and removed under its eyes, and said nothing."""
    words = [TEXT, *QUICK, f"output={tmp_path / 'out'}", f"checkpoint.export={tmp_path / 'export'}"]
    assert forks.run(words, 2, VANISHED) == [0, 0], forks.text(0) + forks.text(1)
    assert (tmp_path / "export" / weights.SINGLE).is_file()


def test_weights_that_are_not_finite_name_their_tensor(forks: Forks, tmp_path: Path) -> None:
    folder, name = tmp_path / "given", "model.layers.1.mlp.down_proj.weight"
    parity.written(parity.tiny("qwen3_tiny"), folder)
    parity.rewrite(folder, lambda tensors: tensors[name][3, 5].fill_(torch.nan))
    words = [DENSE, "train.receipt=false", f"init.weights={folder}", f"output={tmp_path / 'out'}"]
    assert forks.run(words) == [2]
    assert f"{folder}: tensor {name} holds values that are not finite" in forks.text(0).splitlines()[-1]


def test_an_output_that_is_used_again_keeps_what_it_held(forks: Forks, tmp_path: Path) -> None:
    words, out = [TEXT, *QUICK, f"output={tmp_path / 'out'}"], tmp_path / "out"
    held = []
    for n in (0, 1, 2):
        assert forks.run([*words, f"seed={n}"]) == [0], forks.text(0)
        held.append((out / "metrics.jsonl").read_bytes())
        assert [(out / f"earlier-{i + 1}" / "metrics.jsonl").read_bytes() for i in range(n)] == held[:n]
    assert f"output {out} held the files of an earlier run; they are in {out / 'earlier-2'} now" in forks.text(0)
    assert [r["step"] for r in steps(out)] == [1, 2, 3, 4]


def test_a_finished_command_that_is_queued_again_ends_well_and_changes_nothing(forks: Forks, tmp_path: Path) -> None:
    out, export = tmp_path / "out", tmp_path / "export"
    words = [TEXT, *QUICK, f"output={out}", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2", f"checkpoint.export={export}"]
    assert forks.run(words) == [0], forks.text(0)
    held = {p: p.read_bytes() for folder in (out, export) for p in folder.iterdir() if p.is_file()}
    assert forks.run(words) == [0], forks.text(0)
    assert forks.text(0).splitlines()[-1].startswith("finished before, says checkpoint.dir")
    assert {p: p.read_bytes() for folder in (out, export) for p in folder.iterdir() if p.is_file()} == held
    assert forks.run([*words[:-1], "train.steps=6"]) == [0], forks.text(0)
    assert [r["step"] for r in steps(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_cycles_that_steps_leave_are_collected(forks: Forks, tmp_path: Path) -> None:
    """Python's own collection is off while steps are timed. A planted cycle of 2 MB a step would grow memory by half."""
    plant = "import torch; run = torch.Tensor.backward; torch.Tensor.backward = lambda t, *a, **k: (loop := [bytearray(1 << 21)], loop.append(loop), run(t, *a, **k))[2]"
    words = [TEXT, *QUICK, "train.steps=60", "train.log_every=10", f"output={tmp_path}"]
    assert forks.run(words, 1, plant) == [0], forks.text(0)
    peak = {r["step"]: r["peak_memory_bytes"] for r in steps(tmp_path)}
    assert peak[60] < 1.05 * peak[30]


@pytest.mark.full
def test_evaluation_holds_one_batch_at_a_time(forks: Forks, tmp_path: Path) -> None:
    """Images have one size: where it varies, the allocator of the CPU keeps what the largest batch so far took."""
    peaks = []
    for batches in (10, 200):
        rows = ["data.images=fixed", "data.fixed_image_size=[128, 128]", "data.seq_len=64", "data.pack=false", "data.num_workers=0"]
        one = ["train.steps=1", "train.global_batch_size=1", "train.micro_batch_size=1", "train.warmup_steps=0", "optimizer.warmup_steps=0"]
        words = [VISION, *rows, *one, "train.receipt=false", "eval.every=1", f"eval.batches={batches}"]
        plant = "import resource, os, atexit; end = os._exit; os._exit = lambda c: (print('peak', resource.getrusage(0).ru_maxrss, flush=True), end(c))"
        assert forks.run([*words, f"output={tmp_path / str(batches)}"], 1, plant) == [0], forks.text(0)
        peaks.append(int(forks.text(0).rpartition("peak ")[2]))
    assert peaks[1] < 1.05 * peaks[0]
    assert summary(tmp_path / "200")["eval"][0]["loss"] > 0
    assert json.loads((tmp_path / "200" / "metrics.jsonl").read_text())["eval_loss"] == summary(tmp_path / "200")["eval"][0]["loss"]
