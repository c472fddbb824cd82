"""Checkpoints, signals and utilisation on GPUs."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run, start, steps, summary, tensors, trained

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
WORDS = [
    "train.warmup_steps=1",
    "train.dtype=bf16",
    "model.head_dim=64",
    "model.hidden_size=128",
    "moe.experts=grouped",
    "train.receipt=false",
]

SAVE_AGAIN = """
import sys
from pathlib import Path
from playbook_trainer import loop; from playbook_trainer.torch import optimizer
from playbook_trainer.torch.checkpoint import Checkpointer
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer import axes as layout; from playbook_trainer.torch import build as setup
first, second = (load(Path(sys.argv[1]), parse_overrides([*sys.argv[3:], f"checkpoint.dir={d}"])) for d in sys.argv[2].split(":"))
device = loop.start(first, 0, 1)
axes = layout.build(1, 0, first.parallel)
model = setup.build(first, axes, device)
parts = optimizer.shards(model, axes)
optim = optimizer.make(parts, first.optimizer)
index = Checkpointer(first, axes, model, parts, optim, optimizer.Frozen(model)).restore()
saver = Checkpointer(second, axes, model, parts, optim, optimizer.Frozen(model))
assert saver.restore() is None
assert saver.save(index.step, index.data) is None
saver.wait()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_checkpoint_restored_and_saved_again_is_the_same(moments: str, tmp_path: Path) -> None:
    """FSDP on one GPU, asynchronous, through pinned memory: every weight and moment to the last bit."""
    words = [*WORDS, "train.steps=3", f"optimizer.moments_dtype={moments}"]
    saved, again = tmp_path / "saved", tmp_path / "again"
    trained(tmp_path / "out", 1, TEXT, *words, f"checkpoint.dir={saved}", "checkpoint.every=3")
    code, out, err = run([SAVE_AGAIN, TEXT, f"{saved}:{again}", *words], command=[sys.executable, "-c"])[0]
    assert code == 0, out + err
    first, second = (tensors(tmp_path / name / "step_00000003") for name in ("saved", "again"))
    print(f"{len(first)} tensors, {sum(map(len, first.values())) / 2**20:.1f} MiB")
    assert first == second


@pytest.mark.gpu
def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path: Path) -> None:
    words = [TEXT, *WORDS, "train.steps=6", "optimizer.schedule=constant"]
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=3", "checkpoint.keep=1"]
    whole = steps(trained(tmp_path / "whole", 1, *words))[3:]
    trained(tmp_path / "first", 1, *words, "train.steps=3", *saving)
    resumed = steps(trained(tmp_path / "second", 1, *words, *saving))
    print([(a["loss"], b["loss"], a["grad_norm"], b["grad_norm"]) for a, b in zip(resumed, whole, strict=True)])
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole], rel=5e-3)
    assert [r["useful_tokens"] for r in resumed] == [r["useful_tokens"] for r in whole]


def signalled(words: list[str], ranks: int, folder: Path) -> list[tuple[int, str]]:
    """Start ranks, send SIGTERM to the last once two steps are written, and wait for all."""
    processes: Any = start([*words, f"output={folder}"], ranks)
    try:
        deadline = time.monotonic() + 90
        while not (folder / "metrics.jsonl").is_file() or len((folder / "metrics.jsonl").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.02)
        processes[-1].send_signal(signal.SIGTERM)
        texts = [p.communicate(timeout=60) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, text[1]) for p, text in zip(processes, texts, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("log_every", [1, 4])
def test_a_signal_saves_and_ends(log_every: int, tmp_path: Path) -> None:
    words = [TEXT, *WORDS, "train.steps=20000", f"train.log_every={log_every}", f"checkpoint.dir={tmp_path / 'saved'}"]
    ended = signalled(words, 1, tmp_path / "out")
    assert ended[0][0] == 5, ended[0][1]
    last = steps(tmp_path / "out")[-1]["step"]
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [".lock", f"step_{last:08d}"]


@pytest.mark.multigpu
def test_a_signal_to_one_of_two_ends_both(tmp_path: Path) -> None:
    words = [TEXT, *WORDS, "train.steps=20000", "train.log_every=4", "parallel.ep=2", f"checkpoint.dir={tmp_path / 'saved'}"]
    ended = signalled(words, 2, tmp_path / "out")
    assert [code for code, _ in ended] == [5, 5], ended[0][1] + ended[1][1]
    assert len([p.name for p in (tmp_path / "saved").iterdir() if p.name != ".lock"]) == 1


@pytest.mark.gpu
def test_steps_that_are_not_finite_are_skipped(tmp_path: Path) -> None:
    words = ["train.on_nan=skip", "train.steps=30", "optimizer.lr=1e30", "optimizer.warmup_steps=0"]
    assert run([TEXT, *WORDS, *words, f"output={tmp_path}"])[0][0] == 3
    assert [bool(r.get("skipped")) for r in steps(tmp_path)] == [False] + [True] * 10


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_utilisation_names_its_peak(recompute: str, tmp_path: Path) -> None:
    sizes = ["data.seq_len=4096", "train.micro_batch_size=2", "train.global_batch_size=2", "train.steps=12", "train.warmup_steps=4"]
    words = [
        "model=qwen3_0_6b",
        "train.dtype=bf16",
        "train.log_every=4",
        f"train.recompute={recompute}",
        "train.straggler_every=10",
        *sizes,
    ]
    found = summary(trained(tmp_path, 1, "trainer/configs/qwen3_tiny.yaml", *words, "train.receipt=false"))["flops"]
    print(
        json.dumps({k: found[k] for k in ("peak", "mfu", "hfu", "flops_per_step")}), [r["ranks"] for r in steps(tmp_path) if "ranks" in r]
    )
    assert found["peak"] is not None, "the peak of this GPU is not in playbook/planner/flops.py"
    assert 0.02 < found["mfu"] <= found["hfu"] < 1
    if recompute == "full":
        assert 1.15 < found["hfu"] / found["mfu"] < 1.5
