"""How long steps last, told from what each rank saw, and the sums of a step, which travel as one tensor."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from late_ranks import LATE_S
from ranks import SUPPORT, run, steps

from playbook_trainer.observe.metrics import lengths
from playbook_trainer.observe.totals import StepTotals


def test_steps_add_up_to_the_time_that_passed() -> None:
    """Ranks that take turns at being late: the longest of their own lengths would count each delay twice."""
    own = [[1.0, 1.4, 1.0, 1.4], [1.4, 1.0, 1.4, 1.0]]
    ends = [max(e) for e in zip(*(itertools.accumulate(rank) for rank in own), strict=True)]
    assert lengths(0.0, ends) == pytest.approx([1.4, 1.0, 1.4, 1.0])
    assert sum(max(each) for each in zip(*own, strict=True)) == pytest.approx(5.6)


def test_windows_go_on_where_the_last_one_ended() -> None:
    """Written down in windows of any size, the lengths are the same."""
    random.seed(0)
    own = [[random.uniform(0.1, 0.3) for _ in range(12)] for _ in range(4)]
    ends = [max(e) for e in zip(*(itertools.accumulate(rank) for rank in own), strict=True)]
    whole = lengths(0.0, ends)
    assert all(seconds > 0 for seconds in whole)
    for size in (1, 3, 4):
        parts, began = [], 0.0
        for start in range(0, 12, size):
            parts += lengths(began, ends[start : start + size])
            began = ends[start + size - 1]
        assert parts == pytest.approx(whole)


def test_one_rank_sees_its_own_lengths() -> None:
    assert lengths(2.0, [2.5, 3.5]) == pytest.approx([0.5, 1.0])


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


CPU = torch.device("cpu")


def test_what_is_packed_is_unpacked_under_the_same_names() -> None:
    given = StepTotals(**{name: float(i) for i, name in enumerate(StepTotals._fields, start=2)})
    packed = given._replace(loss=torch.tensor(3.0), squared_grad_norm=torch.tensor(2.0)).pack(CPU)
    assert packed.dtype == torch.float64
    assert StepTotals.unpack(packed).read() == given


def test_two_ranks_add_up_in_every_field() -> None:
    one, two = StepTotals(9.0, 1.0, images=2.0), StepTotals(16.0, 3.0, stop_requested=1.0)
    both = StepTotals.unpack(one.pack(CPU) + two.pack(CPU))
    assert both.grad_norm == 5.0
    assert both.read() == StepTotals(25.0, 4.0, stop_requested=1.0, images=2.0)


def test_a_loss_or_norm_that_is_no_number_is_seen_and_counts_are_not_asked() -> None:
    for field in ("loss", "squared_grad_norm"):
        assert not StepTotals.unpack(StepTotals(1.0, 1.0)._replace(**{field: math.inf}).pack(CPU)).is_finite()
    assert StepTotals.unpack(StepTotals(1.0, 1.0).pack(CPU)).is_finite()
