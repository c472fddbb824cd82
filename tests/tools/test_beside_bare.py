"""The comparison of the megatron backend with megatron-core by itself, on a CPU: both sides train the same model, and a second call goes on."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import SUPPORT, environment

pytest.importorskip("megatron.core")

import bare_megatron
import beside_bare
from beside_bare import pairs

from playbook.errors import ConfigError
from playbook_trainer.config import checks, tree
from playbook_trainer.config import megatron_checks as megatron

pytestmark = pytest.mark.full

TINY = [
    "model=qwen3_moe_tiny",
    "data.seq_len=64",
    "train.dtype=fp32",
    "moe.router_dtype=bf16",
    "optimizer.moments_dtype=fp32",
    "megatron.precision_aware_optimizer=false",
    "megatron.grad_reduce_dtype=fp32",
    "train.steps=5",
    "train.warmup_steps=2",
]


def compare(folder: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """What a call says, and the rows that it leaves."""
    command = [sys.executable, str(SUPPORT / "megatron" / "bare_ranks.py"), str(folder), "2", *TINY, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [json.loads(line) for line in (folder / beside_bare.FILE).read_text().splitlines()]


@pytest.mark.timeout(3000)
def test_both_sides_train(tmp_path: Path) -> None:
    said, rows = compare(tmp_path, "--pairs", "1")
    assert [(r["side"], r["outcome"]) for r in rows] == [("bare", "ok"), ("ours", "ok")], said
    # As likely any token as another, on both sides: the first loss is the logarithm of the vocabulary.
    expected = math.log(
        tree.load(Path(beside_bare.words(beside_bare.SETTINGS["all-to-all"], [], 2)[0]), tree.parse_overrides(TINY)).model.vocab_size
    )
    assert all(r["losses"][0] == pytest.approx(expected, rel=0.2) and len(r["losses"]) == 5 for r in rows)
    assert all(r["tokens_per_s_per_gpu"] > 0 for r in rows)
    assert [p["ok"] for p in rows[1]["proof"]] == [True]


def test_a_second_call_adds_what_is_missing_and_other_words_are_another_comparison(tmp_path: Path, monkeypatch, capsys) -> None:
    launches = itertools.count(1)

    def planted(side: str, arguments: list[str], *_: Any) -> dict[str, Any]:
        if side == "bare" and "train.recompute=full" in arguments:
            return {"wall_s": 1.0, "outcome": "failed", "message": "not told: train.recompute"}
        return {"wall_s": 1.0, "outcome": "ok", "tokens_per_s_per_gpu": float(next(launches))}

    def called(*words: str) -> list[tuple[int, str, float | None]]:
        assert beside_bare.main(["--only", "all-to-all", "--out", str(tmp_path), *words]) == 0
        rows = [json.loads(line) for line in (tmp_path / beside_bare.FILE).read_text().splitlines()]
        return [(r["pair"], r["side"], r.get("tokens_per_s_per_gpu")) for r in rows]

    monkeypatch.setattr(beside_bare, "run", planted)
    monkeypatch.setattr(beside_bare.detect, "device_ids", lambda machine: ["0", "1"])
    monkeypatch.setattr(beside_bare.fork_server, "import_all", lambda backend: True)
    assert called("--pairs", "1") == [(0, "bare", 1), (0, "ours", 2)]
    assert called("--pairs", "2") == [(0, "bare", 1), (0, "ours", 2), (1, "ours", 3), (1, "bare", 4)]
    assert "2 pairs" in capsys.readouterr().out
    assert called("--pairs", "1", "--again") == [(0, "bare", 5), (0, "ours", 6), (1, "ours", 3), (1, "bare", 4)]
    assert called("--pairs", "1", "train.recompute=full")[4:] == [(0, "bare", None), (0, "ours", 7)]


@pytest.mark.parametrize("setting", beside_bare.SETTINGS)
def test_every_setting_is_a_legal_configuration_that_the_bare_side_can_say(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "installed", lambda module: True)
    words = beside_bare.words(beside_bare.SETTINGS[setting], [], 4)
    resolved = tree.load(Path(words[0]), tree.parse_overrides(words[1:]))
    checks.check(resolved, 4)
    bare_megatron.refuse(resolved)
    assert resolved.train.global_batch_size == 4 * resolved.train.micro_batch_size


@pytest.mark.parametrize(
    "word",
    [
        "megatron.data_parallel=megatron_fsdp",
        "megatron.overlap_grad_reduce=false",
        "optimizer.schedule=cosine",
        "parallel.pp=2",
        "train.cuda_graphs=[attn]",
        "train.attention=flash",
        "precision.fp8=blockwise",
        "data.pack=true",
        "moe.dispatcher=deepep",
        "moe.capacity_factor=1.5",
        "model.shared_expert_ffn_size=768",
        "offload.optimizer=true",
    ],
)
def test_the_bare_side_refuses_what_it_would_leave_out(word: str) -> None:
    words = beside_bare.words(beside_bare.SETTINGS["all-to-all"], [word], 4)
    with pytest.raises(ConfigError, match=word.split("=")[0].replace(".", r"\.")):
        bare_megatron.refuse(tree.load(Path(words[0]), tree.parse_overrides(words[1:])))


def test_the_ratio_is_of_whole_pairs() -> None:
    def row(pair: int, side: str, speed: float, outcome: str = "ok") -> dict[str, Any]:
        return {"pair": pair, "side": side, "outcome": outcome, "tokens_per_s_per_gpu": speed}

    rows = [row(0, "bare", 100.0), row(0, "ours", 98.0), row(1, "ours", 100.0), row(1, "bare", 100.0), row(2, "bare", 1.0)]
    assert pairs(rows) == [(100.0, 98.0), (100.0, 100.0)]
    assert pairs([*rows, row(2, "ours", 5.0, "failed")]) == pairs(rows)
    assert beside_bare.summary([(1.0, 0.98), (1.0, 1.0)]).startswith("0.990 [0.8")
    assert beside_bare.summary([(1.0, 0.98)]) == "0.980 (one pair)"
