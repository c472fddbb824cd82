"""How long steps last, told from what each rank saw."""

from __future__ import annotations

import itertools
import random

import pytest

from playbook_trainer.observe.metrics import lengths


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
