"""Switches of memory in whole runs, by layout, against one plain rank: weights in the experts' activation, state on the host, activations that travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_runs import assert_near, difference
from ranks import summary, trained

COMMON = ["trainer/configs/qwen3_moe_tiny.yaml", "train.steps=2", "train.warmup_steps=1", "data.seq_len=128", "seed=0"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"), 1, *COMMON)


PROBS = "moe.apply_probs_on=activation"
AGAIN = ["train.recompute=selective", "train.recompute_modules=[moe_act,layernorm]"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, [PROBS]),
        (2, [PROBS, "parallel.ep=2"]),
        (2, [PROBS, "parallel.ep=2", "moe.dispatcher=allgather"]),
        (2, [PROBS, "parallel.tp=2", "parallel.etp=1", "parallel.ep=2"]),
        (1, ["offload.optimizer=true"]),
        (2, ["parallel.ep=2", "offload.optimizer=true", "offload.activations=true"]),
    ],
    ids=["local", "alltoall", "allgather", "folded", "state-on-the-host", "all-on-the-host"],
)
@pytest.mark.full
def test_a_switch_changes_nothing_but_rounding(ranks: int, words: list[str], plain: Path, tmp_path: Path) -> None:
    assert_near(trained(tmp_path, ranks, *COMMON, *words), plain)
    assert (summary(tmp_path)["receipt"]["ranges"].get("offload", 0) > 0) == ("offload.activations=true" in words)


@pytest.mark.full
def test_outputs_of_experts_that_are_made_again_are_no_longer_kept(plain: Path, tmp_path: Path) -> None:
    found = {}
    for where in ("activation", "output"):
        assert_near(trained(tmp_path / where, 1, *COMMON, *AGAIN, f"moe.apply_probs_on={where}"), plain)
        found[where] = summary(tmp_path / where)["metrics"]["saved_activation_bytes_per_rank"]
    assert found["activation"] < 0.95 * found["output"]


@pytest.mark.full
def test_stages_that_each_send_their_activations_away(tmp_path: Path) -> None:
    kept, sent = (trained(tmp_path / on, 2, *COMMON, "parallel.pp=2", f"offload.activations={on}") for on in ("false", "true"))
    assert difference(sent, kept) == {"loss": 0, "grad_norm": 0, "steps": 2}
