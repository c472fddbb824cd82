"""Ranks that take turns at being late: the steps of a run add up to the time that they took."""

from __future__ import annotations

from pathlib import Path

import pytest
from late_ranks import LATE_S
from ranks import SUPPORT, run, steps

COUNT = 6


@pytest.mark.full
def test_steps_of_late_ranks_add_up(tmp_path: Path) -> None:
    words = ["trainer/configs/qwen3_moe_tiny.yaml", f"train.steps={2 + COUNT}", "train.warmup_steps=2", "train.log_every=3"]
    words += ["train.global_batch_size=2", "data.seq_len=64", "train.receipt=false", f"output={tmp_path}"]
    ended = run(words, 2, script=SUPPORT / "ranks" / "late_ranks.py")
    assert [code for code, _, _ in ended] == [0, 0], ended
    took = max(float(out.rsplit("took ", 1)[1]) for _, out, _ in ended)
    timed = [s["seconds"] for s in steps(tmp_path) if s["timed"]]
    assert len(timed) == COUNT
    assert took > COUNT * LATE_S, "the delays were not planted"
    # The longest of the ranks' own lengths would hold each delay twice.
    assert sum(timed) == pytest.approx(took, abs=COUNT * LATE_S / 2)
