"""The comparison of `auto` with switches set by hand and with the plain path: its words are legal, and a second call goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.full
@pytest.mark.timeout(4000)
def test_a_rehearsal_writes_each_launch_down_and_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    def call(*words: str) -> tuple[int, str]:
        command = [sys.executable, "tools/beside_plain.py", "--out", str(tmp_path), "--rehearse", "--only", "tiny-text", "--steps", "3"]
        done = subprocess.run(
            [*command, "data.seq_len=64", *words, "--sides", "auto", "off"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1900, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    assert call("--budget", "0")[0] == beside_plain.LEFT_OUT
    code, said = call()
    assert code == 0, said
    rows = [json.loads(line) for line in (tmp_path / beside_plain.FILE).read_text().splitlines()]
    assert [(r["side"], r["outcome"]) for r in rows] == [("auto", "ok"), ("off", "ok")], said
    assert "losses at most 0.00e+00 apart over 3 steps" in said
    assert all(r["first_step_s"] > r["start_up_s"] > 0 and len(r["losses"]) == 3 for r in rows)
    began = (tmp_path / beside_plain.FILE).read_text()
    assert call()[0] == 0
    assert (tmp_path / beside_plain.FILE).read_text() == began
    refused = call("--again-not-known")[1]
    assert "unrecognized arguments" in refused
    assert call("parallel.tp=2")[0] == 0
    last = [json.loads(line) for line in (tmp_path / beside_plain.FILE).read_text().splitlines()][-1]
    assert last["outcome"] == "refused"
    assert "tp" in last["message"]
