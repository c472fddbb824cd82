"""Plans as DeepSpeed's JSON: every key is one of the pinned release, the batch is what it checks, and what it cannot say is refused."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playbook.errors import ConfigError
from playbook.planner.choice.space import held
from playbook.planner.hardware import machine
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import Plan, parse
from playbook.planner.runs.predict import Prediction, predict
from playbook.planner.runs.table import read_runs
from playbook.planner.time.step import step_time
from playbook_trainer.export.plans import TARGETS, launchable

KEYS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures" / "deepspeed_keys.json").read_text(encoding="utf-8"))
"""By section, the keys that its classes and constants have; `source` says where."""
BASE = "gpus=8 backend=torch compiled=false loss=torch"
PLANS = [
    f"{BASE} sharding=ddp grad_bytes=2 gbs=64 mbs=2", f"{BASE} sharding=zero1 grad_bytes=4 gbs=64", f"{BASE} sharding=zero2 gbs=32 optimizer_offload=100",
    f"{BASE} sharding=zero3 gbs=32 recompute=full", f"{BASE} sharding=zero3 gbs=32 lora=16 lora_targets=q,v", f"{BASE} gpus=16 sharding=zero2 gbs=32 lora=8",
]  # fmt: skip


def plan_of(words: str) -> Plan:
    return parse("llama3_8b", {w.partition("=")[0]: w for w in words.split()}.values())


def sections(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        yield before, key
        inner = f"{before}.{key}".strip(".")
        if isinstance(value, dict) and inner in KEYS:
            yield from sections(value, inner)


@pytest.mark.parametrize("words", PLANS)
def test_every_key_is_one_of_the_release_and_the_batch_adds_up(words: str) -> None:
    plan = plan_of(words)
    found = launchable(plan, "deepspeed", "h100")
    assert found.release in f"deepspeed {KEYS['source'].split()[1].rstrip(':')}"
    config = json.loads(found.files["ds_config.json"])
    for section, key in sections(config):
        assert key in KEYS[section], (section, key)
    assert {section for section, _ in sections(config)} >= {"", "zero_optimization", "bf16", "data_types", "optimizer"}
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.gpus
    o = plan.options
    assert config["zero_optimization"]["stage"] == {"none": 0}.get(o.sharding, int(o.sharding[-1:]) if o.sharding[-1:].isdigit() else 0)
    assert ("offload_optimizer" in config["zero_optimization"]) == bool(o.optimizer_offload)
    ast.parse(found.files["train.py"])
    assert ("get_peft_model" in found.files["train.py"]) == bool(o.lora)
    assert ("gradient_checkpointing_enable" in found.files["train.py"]) == bool(o.recompute)
    assert json.loads(found.files["model.json"])["num_hidden_layers"] == 32


@pytest.mark.parametrize("words", PLANS[2:])
def test_the_row_beside_a_script_is_predicted_as_the_plan_is(words: str, tmp_path: Path) -> None:
    plan, path = plan_of(words), tmp_path / "run.csv"
    path.write_text(launchable(plan, "deepspeed", "h100").files["run.csv"], encoding="utf-8")
    found = predict(read_runs(path)[0][0])
    assert isinstance(found, Prediction), found
    assert found.tokens_per_s_per_gpu == pytest.approx(step_time(plan, machine("h100")).tokens_per_s_per_gpu.value)
    assert found.memory_bytes == pytest.approx(held(plan))


def test_adapters_stand_beside_the_matrices_that_the_plan_names() -> None:
    assert "r=16, target_modules=['q_proj', 'v_proj']" in launchable(plan_of(PLANS[4]), "deepspeed", "h100").files["train.py"]
    assert "'gate_proj', 'up_proj', 'down_proj'" in launchable(plan_of(PLANS[5]), "deepspeed", "h100").files["train.py"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("gpus=8 backend=torch gbs=64", "compiled is true; it has false"),
        (f"{BASE} sharding=fsdp gbs=64", "sharding is fsdp2; it has none or zero1 or zero2 or zero3"),
        (f"{BASE} sharding=zero2 gbs=64 cp=2", "cp is 2; it is exported with data parallelism alone"),
        (f"{BASE} sharding=zero1 gbs=64 tp=2", "tp is 2"),
        (f"{BASE} sharding=zero2 gbs=64 lora=8 base=nf4", "base is nf4; it has none"),
        ("gpus=8 gbs=64", "the plan is for backend megatron"),
    ],
)
def test_what_it_has_no_words_for_is_refused(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launchable(plan_of(words), "deepspeed", "h100")


def test_frameworks_that_take_its_file_are_exported_as_it_is_and_others_are_listed() -> None:
    assert {f.exports_as for f in FRAMEWORKS.values()} <= TARGETS.keys()
    assert launchable(plan_of(PLANS[3]), "llamafactory", "h100").files == launchable(plan_of(PLANS[3]), "deepspeed", "h100").files
    with pytest.raises(ConfigError, match=r"expected one of megatron-lm, .*; or nemo \(as megatron-bridge\), swift \(as deepspeed\)"):
        launchable(plan_of(PLANS[3]), "colossal", "h100")
