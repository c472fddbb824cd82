"""Rows weighted in their experts' activation, in place of their outputs, compute the same, and their outputs need not be kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run, steps, summary

COMMON = ["trainer/configs/qwen3_moe_tiny.yaml", "train.steps=5", "train.warmup_steps=1"]


def trained(folder: Path, ranks: int, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    results = run([*COMMON, *words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return steps(folder), summary(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("plain"), 1)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, []),
        (1, ["train.recompute=selective", "train.recompute_modules=[moe_act,layernorm]"]),
        (2, ["parallel.ep=2"]),
        (2, ["parallel.ep=2", "moe.dispatcher=allgather"]),
        (2, ["parallel.tp=2", "parallel.etp=1", "parallel.ep=2"]),
    ],
    ids=["local", "recomputed", "alltoall", "allgather", "folded"],
)
@pytest.mark.full
def test_weights_in_the_activation_change_nothing_but_rounding(ranks: int, words: list[str], plain: Any, tmp_path: Path) -> None:
    rows, _ = trained(tmp_path, ranks, *words, "moe.apply_probs_on=activation")
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in plain[0]], rel=1e-5)
    assert [r["grad_norm"] for r in rows] == pytest.approx([r["grad_norm"] for r in plain[0]], rel=1e-4)


@pytest.mark.full
def test_outputs_of_experts_are_no_longer_kept(tmp_path: Path) -> None:
    again = ["train.recompute=selective", "train.recompute_modules=[moe_act]", "train.steps=2"]
    found = [
        trained(tmp_path / w, 1, *again, f"moe.apply_probs_on={w}")[1]["metrics"]["saved_activation_bytes_per_rank"]
        for w in ("activation", "output")
    ]
    print(found)
    assert found[0] < 0.95 * found[1]
