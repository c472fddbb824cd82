"""Attention over context-parallel ranks, each way of it, against attention over the whole stream in float64."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ranks import SUPPORT, run


def documents(rng: random.Random, length: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, length), rng.choice([0, 1, 2, 3, 8])))
    return [0, *cuts, length]


def cases() -> list[dict[str, Any]]:
    rng = random.Random(5)
    out = []
    for comm in ("allgather", "ring", "ulysses"):
        for cp in (2, 4):
            # One document over everything, and one border exactly on each slice.
            shapes = [[0, 32], list(range(0, 33, 32 // (2 * cp)))] + [documents(rng, 32) for _ in range(10)]
            out += [{"comm": comm, "cp": cp, "borders": b, "kv_heads": rng.choice([1, 2, 4]), "seed": i} for i, b in enumerate(shapes)]
    return out


@pytest.mark.full
def test_context_parallel_attention_equals_attention_over_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = cases()
    monkeypatch.setenv("CASES", json.dumps(wanted))
    results = run([], 4, script=SUPPORT / "ranks" / "context_ranks.py")
    assert [r[0] for r in results] == [0] * 4, results[0][2]
    errors = json.loads(results[0][1])
    assert len(errors) == len(wanted) == 72
    wrong = [(case, e) for case, e in zip(wanted, errors, strict=True) if not e < 1e-12]
    assert not wrong
