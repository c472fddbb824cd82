"""State on the host and activations that travel compute what one plain rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run, steps, summary

COMMON = ["trainer/configs/qwen3_moe_tiny.yaml", "train.steps=6", "train.warmup_steps=1"]


def curve(folder: Path, ranks: int, words: list[str]) -> list[dict[str, float]]:
    results = run([*COMMON, *words, f"output={folder}"], ranks)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    return steps(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return curve(tmp_path_factory.mktemp("plain"), 1, [])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, ["offload.optimizer=true"]), (2, ["parallel.ep=2", "offload.optimizer=true", "offload.activations=true"])],
    ids=["one-rank", "ep2"],
)
@pytest.mark.full
def test_offload_equals_one_plain_rank(ranks: int, words: list[str], plain: list[dict[str, float]], tmp_path: Path) -> None:
    rows = curve(tmp_path, ranks, words)
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
    assert [r["grad_norm"] for r in rows] == pytest.approx([r["grad_norm"] for r in plain], rel=1e-4)
    receipt = summary(tmp_path)["receipt"]
    assert (receipt["ranges"].get("offload", 0) > 0) == ("offload.activations=true" in words)


@pytest.mark.full
def test_stages_that_each_send_their_activations_away(tmp_path: Path) -> None:
    kept, sent = (curve(tmp_path / str(on), 2, ["parallel.pp=2", f"offload.activations={str(on).lower()}"]) for on in (False, True))
    assert [(r["loss"], r["grad_norm"]) for r in sent] == [(r["loss"], r["grad_norm"]) for r in kept]
