"""Plans exported to Accelerate: its own parser reads the same layout back, transformers builds the model, and the script trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from playbook.errors import ConfigError
from playbook.paths import repo_root
from playbook.planner import parameters
from playbook.planner.plan import Plan, parse
from playbook_trainer.export.launch import STEPS, Launchable
from playbook_trainer.export.plan_accelerate import launchable
from tests.support.targets.apart import answers
from tests.support.targets.plans import planned, searched

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
SCRIPT = repo_root() / "tests" / "support" / "targets" / "accelerate.py"
PLANS = [
    "llama3_8b gpus=8 mbs=2 gbs=32 recompute=full",
    "llama3_8b gpus=16 cp=4 gbs=32 loss=compiled sharding=optimizer",
    "qwen3_8b gpus=8 gbs=16 layers=4",
    "qwen3_30b_a3b gpus=8 gbs=64 layers=3",
    "mixtral_8x7b gpus=8 gbs=8 layers=2",
    "gpt_oss_20b gpus=8 gbs=8 layers=4",
]


def read_back(exports: Sequence[Launchable]) -> list[dict[str, Any]]:
    return answers(SCRIPT, [{"files": dict(e.files), "command": list(e.command)} for e in exports])


def expected(plan: Plan) -> dict[str, Any]:
    """The layout as Accelerate should say it, worked out from the plan alone."""
    return {
        "dp_shard": plan.gpus // plan.cp, "dp_replicate": 1, "cp": plan.cp, "tp": 1, "processes": plan.gpus, "nodes": -(-plan.gpus // 8), "version": 2,
        "reshard": plan.options.sharding == "fsdp2", "recompute": plan.options.recompute == ("full",), "precision": "bf16", "layers": plan.shape.layers,
        "microbatch": plan.mbs, "microbatches": plan.microbatches, "seq_len": plan.seq_len,
    }  # fmt: skip


@pytest.mark.full
def test_accelerate_reads_the_same_layout_back_and_accepts_what_the_search_finds() -> None:
    """All in one process, since transformers takes seconds to import."""
    fixed = [("tp=1", "pp=1", "ep=1", "etp=1", *more) for more in ((), ("cp=2",), ("recompute=full",), ("recompute=",))]
    found = [*islice(searched(42, (1, 2, 8, 16, 64), fixed, launchable), 15)]
    assert len({plan.model for plan in found}) > 3
    plans = [*map(planned, PLANS), *found]
    for plan, answer in zip(plans, read_back([launchable(plan, "h100") for plan in plans]), strict=True):
        assert "refused" not in answer, (plan.model, answer)
        assert answer.pop("parameters") == pytest.approx(parameters.total(plan.shape), rel=1e-3), plan.model
        assert answer == expected(plan), plan


@pytest.mark.full
def test_the_script_trains_and_its_log_is_read(tmp_path: Path) -> None:
    """Accelerate has FSDP2 on no CPU, so one process trains without it."""
    export = launchable(planned("qwen3_tiny gpus=1 seq_len=64 mbs=2 gbs=4"), "h100")
    for name, text in export.files.items():
        (tmp_path / name).write_text(text.replace(f"= {STEPS}, ", "= 3, "), encoding="utf-8")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tokens"] for row in rows] == [256] * 3
    assert rows[-1]["loss"] < rows[0]["loss"] + 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama3_8b gpus=8 tp=2", "add --fix tp=1"),
        ("qwen3_30b_a3b gpus=8 ep=8", "add --fix ep=1"),
        ("llama3_8b gpus=8 sharding=none", "sharding is none; it has fsdp2 or optimizer"),
        ("llama3_8b gpus=8 recompute=selective", "it has none or full"),
        ("deepseek_v3 gpus=8", "predicts 1 more tokens"),
        ("qwen3_vl_8b gpus=8", "not what a published configuration"),
        ("glm_5 gpus=8", "not what a published configuration"),
        ("gpt_oss_20b gpus=8 cp=2", "add --fix cp=1"),
    ],
)
def test_what_accelerate_cannot_express_is_refused_with_what_it_has(text: str, words: str) -> None:
    model, *settings = text.split()
    with pytest.raises(ConfigError, match=r"accelerate 1\.15\.0 cannot express this plan") as refused:
        launchable(parse(model, ["backend=torch", *settings]), "h100")
    assert words in str(refused.value)
