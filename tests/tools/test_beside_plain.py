"""The comparison of `auto` with switches set by hand and with the plain path: its words are legal, and a second call goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import beside_plain
import pytest
from ranks import ROOT, environment

from playbook_trainer.config import checks, tree


@pytest.mark.parametrize("name", beside_plain.SETTINGS)
@pytest.mark.parametrize("side", beside_plain.SIDES)
def test_every_side_of_every_setting_is_legal_on_one_gpu(name: str, side: str) -> None:
    words = beside_plain.words(side, beside_plain.SETTINGS[name], 60, [], gpu=True, packed_cudnn=True)
    config = tree.load(ROOT / words[0], tree.parse_overrides(words[1:]))
    checks.check(config, 1)
    assert (config.train.steps, config.train.warmup_steps, config.train.receipt) == (60, 10, False)


def test_sides_differ_in_switches_alone() -> None:
    setting = beside_plain.SETTINGS["images-moe"]
    auto, best, off = (
        tree.dump(tree.load(ROOT / w[0], tree.parse_overrides(w[1:])))
        for w in (beside_plain.words(s, setting, 60, [], gpu=True, packed_cudnn=True) for s in beside_plain.SIDES)
    )
    switches = {key.split(".")[0] for key in beside_plain.PLAIN}
    assert {k for k in auto if auto[k] != off[k] or auto[k] != best[k]} <= switches
    assert best["train"]["fused_loss"]
    assert best["moe"]["fused_router"]
    assert not off["train"]["fused_loss"]
    assert all(side["optimizer"]["moments_dtype"] == "fp32" for side in (auto, best, off))


def test_losses_are_compared_step_by_step_and_never_where_one_is_missing() -> None:
    assert beside_plain.apart([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert beside_plain.apart([1.0, None], [1.0, 2.0]) is None
    assert beside_plain.apart([1.0], [1.0, 2.0]) is None


CALL = ("--rehearse", "--only", "tiny-text", "--steps", "3", "data.seq_len=64", "--sides", "auto", "off")


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / beside_plain.FILE).read_text().splitlines()]


@pytest.mark.full
@pytest.mark.timeout(4000)
def test_a_rehearsal_trains_both_sides(tmp_path: Path) -> None:
    command = [sys.executable, "tools/beside_plain.py", "--out", str(tmp_path), *CALL]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(r["side"], r["outcome"]) for r in kept(tmp_path)] == [("auto", "ok"), ("off", "ok")], done.stdout
    assert "losses at most 0.00e+00 apart over 3 steps" in done.stdout
    assert all(r["first_step_s"] > r["start_up_s"] > 0 and len(r["losses"]) == 3 for r in kept(tmp_path))


def test_each_launch_is_written_down_and_a_second_call_goes_on_where_it_was_cut(tmp_path: Path, monkeypatch, capsys) -> None:
    figures = {"wall_s": 1.0, "tokens_per_s_per_gpu": 1.0, "step_s": 1.0, "peak_memory_bytes": 1, "first_step_s": 1.0, "recompiles": 0}
    monkeypatch.setattr(beside_plain, "run", lambda *_: {"outcome": "ok", "losses": [1.0], **figures})
    monkeypatch.setattr(beside_plain.fork_server, "import_all", lambda backend: True)

    def call(*words: str) -> int:
        return beside_plain.main(["--out", str(tmp_path), *words, *CALL])

    assert call("--budget", "0") == beside_plain.LEFT_OUT
    assert call() == 0
    began = kept(tmp_path)
    assert [(r["side"], r["outcome"]) for r in began] == [("auto", "ok"), ("off", "ok")]
    assert call() == 0
    assert kept(tmp_path) == began
    with pytest.raises(SystemExit):
        call("--again-not-known")
    assert "unrecognized arguments" in capsys.readouterr().err
    assert call("parallel.tp=2") == 0
    assert kept(tmp_path)[-1]["outcome"] == "refused"
    assert "tp" in kept(tmp_path)[-1]["message"]
