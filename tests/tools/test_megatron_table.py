"""The runner behind the tables of the megatron backend, on rows that a CPU can run; and every shipped row is a legal configuration."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import megatron_table
import pytest
from megatron_rows import CONFIG, TABLES, Row, rows

from playbook.paths import repo_root
from playbook.records.case import Rule
from playbook_trainer.config import checks, tree
from playbook_trainer.config import megatron_checks as megatron

TINY = {
    "backend": "torch",
    "megatron.grouped_gemm": "cublas",
    "model": "qwen3_moe_tiny",
    "data.seq_len": 64,
    "train.dtype": "fp32",
    "train.device": "cpu",
    "train.steps": 4,
    "train.warmup_steps": 2,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
}


def test_every_row_is_a_legal_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "installed", lambda module: True)
    for row in rows():
        resolved = tree.load(repo_root() / CONFIG, tree.parse_overrides(megatron_table.words(row, Path("out"))[1:]))
        assert resolved.backend == "megatron", row
        checks.check(resolved, row.gpus)


def test_rows_are_told_apart_by_their_names() -> None:
    keys = [megatron_table.key_of(r) for r in rows()]
    assert len(keys) == len(set(keys))
    settings = [json.dumps([r.table, r.overrides], sort_keys=True) for r in rows()]
    assert len(settings) == len(set(settings)), "two rows run the same"
    assert {r.table for r in rows()} == set(TABLES)


@pytest.mark.full
def test_a_row_that_runs_a_row_that_is_refused_and_one_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root())
    proof = (Rule(collective="all_to_all", group="ep"), Rule(collective="all_gather", group="tp"))
    todo = [
        Row("two", "good", "g", {**TINY}, proof),
        Row("one", "refused", "g", {**TINY, "parallel.tp": 3}),
    ]
    slow = Row("one", "slow", "g", {**TINY, "train.steps": 100_000, "train.log_every": 1000})
    found: list[dict[str, Any]] = []
    for some, limit in ((todo, 1200), ([slow], 8)):
        megatron_table.run(some, devices=["0", "1"], deadline=time.monotonic() + 3000, limit_s=limit, fork=False, done=found.append)
    by = {r["name"]: r for r in found}
    assert by["good"]["outcome"] == "ok"
    assert len(by["good"]["losses"]) == 4
    assert by["good"]["tokens_per_s_per_gpu"] > 0
    assert [p["ok"] for p in by["good"]["proof"]] == [True, False]
    assert by["refused"]["outcome"] == "refused"
    assert by["refused"]["message"].startswith("error: ")
    assert by["slow"]["outcome"] == "hang"
    assert "/" not in by["refused"]["message"].replace("...", "")
    json.dumps(found)
