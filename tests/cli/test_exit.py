"""How a command ends where it cannot end as it should: no accident has the code of a verdict, and none leaves a traceback for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import refused, run

from playbook.paths import repo_root, sources
from playbook_app.cli.app import READER_LEFT, run_command
from playbook_app.cli.commands import train

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}
TINY = str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml")
PLAYBOOK = (sys.executable, "-m", "playbook")


@pytest.mark.parametrize("words", [["cards", "list"], ["cards", "list", "--json"], ["confirm", "long-context-cp-sizing/L2"]])
@pytest.mark.sample("words0")
def test_a_reader_that_left_is_neither_confirmed_nor_refuted(tmp_path, words):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*PLAYBOOK, *words], env=ENV, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, timeout=600)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (READER_LEFT, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_message(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PLAYBOOK, "cards", "list"], env=ENV, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_closed_streams_are_no_fault(tmp_path):
    done = subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "-", *PLAYBOOK, "cards", "show", "nope"], env=ENV, cwd=tmp_path, timeout=600)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (RuntimeError("boom"), 5, "fault of playbook"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "x"), 2, "x cannot"),
    ],
)
def test_no_accident_has_the_code_of_a_verdict(capsys, fault, code, says):
    def app(*words, **options):
        raise fault

    assert run_command(app, []) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["confirm", "--job", "7"], "--job has no meaning with --launcher local"),
        (["confirm", "vlm-real-data/V3", "--nodes", "2"], "--nodes has no meaning"),
        (["confirm", "vlm-real-data/V3", "--no-wait", "--print"], "--print, --no-wait has no meaning"),
        (["confirm", "vlm-real-data/V3", "--launcher", "srun", "--nodes", "2"], "--nodes has no meaning with --launcher srun"),
        (["train", TINY, "--ranks-per-node", "2"], "--ranks-per-node has no meaning"),
        (["train", TINY, "--gpus", "4"], "--gpus is part of a dry run"),
        (["train", TINY, "output=/dev/null"], "output /dev/null cannot be written"),
        (["confirm", "vlm-real-data/V3", "--profile", "cpuu"], "profile 'cpuu' is neither cpu nor of the form h200x4"),
        (["bench", "trace", "vlm-packing", "--profile", "h9x1"], "has no profile 'h9x1'; it has cpu"),
        (["bench", "aa", "cp-gpu-floor"], "launches nothing"),
        (["config", "export", "/dev/zero", "--to", "torchtitan"], "is too large; at most 2000000 bytes"),
        (["evidence", "show", "/dev/zero"], "is too large; at most 64000000 bytes"),
        (["evidence", "show", "/dev/null"], "is no evidence record: it is no readable record"),
        (["site", "build", "--out", "/dev/null/x"], "cannot be read or written: Not a directory"),
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(capsys, elsewhere, words, says):
    assert says in refused(capsys, *words)
    assert list(elsewhere.iterdir()) == []


def test_the_number_of_ranks_of_torchrun_is_no_dry_run(capsys, elsewhere, monkeypatch):
    """torchrun sets WORLD_SIZE, from which `--gpus` of a dry run takes its default."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "train.warmup_steps" in refused(capsys, "train", TINY, "train.steps=1", listed=True)


def test_a_fault_of_the_trainer_keeps_the_trainers_code(capsys, elsewhere, monkeypatch):
    def fails(words):
        raise RuntimeError("boom")

    monkeypatch.setattr(train, "run_trainer", fails)
    code, _, err = run(capsys, "train", TINY)
    assert code == 1  # 5 would say that a checkpoint was saved, and a loop would go on from it
    assert "boom" in err
