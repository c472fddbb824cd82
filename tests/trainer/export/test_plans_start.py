"""Exports of plans, accepted and read back by the code of the trainers that they are for: `make targets` fetches it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest

from playbook.errors import ConfigError
from playbook.paths import repo_root
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook_trainer.export.plan_megatron import lacking
from playbook_trainer.export.plans import TARGETS, launchable
from playbook_trainer.export.sheet import RELEASES
from tests.support.targets import bridge, megatron
from tests.support.targets.checkers import CHECKERS, SOURCE, differences, drawn, exportable
from tests.support.targets.plans import BACKEND

FEW, EACH = 10, 60
"""Random exports of a target; each model is read back by a test of its own."""


@pytest.fixture(autouse=True, scope="module")
def _fetched() -> None:
    for folder in (megatron.FOLDER, bridge.FOLDER):
        if not folder.is_dir():
            pytest.fail(f"{folder} is missing; run `make targets`")


def test_every_target_has_a_checker_that_says_what_it_reads() -> None:
    with_tests_of_their_own = {
        "torchtitan",
        "accelerate",
        "deepspeed",
    }  # test_plan_torchtitan.py, test_plan_accelerate.py, test_plan_deepspeed.py
    assert TARGETS.keys() - with_tests_of_their_own == CHECKERS.keys() == SOURCE.keys() <= BACKEND.keys()


def test_the_fetched_releases_are_those_that_exports_name() -> None:
    for target, folder in {"megatron-lm": megatron.FOLDER, "megatron-bridge": bridge.FOLDER}.items():
        name, version = RELEASES[target].split()
        assert (folder / f"{name.replace('-', '_')}-{version}.dist-info").is_dir()


@pytest.mark.timeout(6000)
@pytest.mark.parametrize(("target", "count"), [("megatron-lm", FEW), ("playbook", FEW), *((target, EACH) for target in CHECKERS)])
@pytest.mark.sample("megatron-lm-10", "playbook-10")
def test_random_plans_are_accepted_and_read_back_to_the_same_layout(target: str, count: int) -> None:
    exports = drawn(target, count, seed=count, refused=[])
    assert len(exports) == count
    assert differences(target, exports) == []


@pytest.mark.full
@pytest.mark.parametrize("target", CHECKERS)
def test_models_cut_in_layers_are_accepted(target: str) -> None:
    cut = {"qwen3_8b": 4, "qwen3_30b_a3b": 3, "deepseek_v3": 5, "mixtral_8x7b": 2, "gpt_oss_20b": 4, "nemotron_3_nano_30b_a3b": 12}
    exports = [*exportable([(parse(name, ["gpus=2", f"layers={n}", "pp=2", "gbs=8"]), "h200") for name, n in cut.items()], target, [])]
    assert len(exports) >= (4 if target == "playbook" else len(cut))
    assert differences(target, exports) == []


@pytest.mark.full
@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge"])
def test_every_model_without_a_tower_is_exported(target: str) -> None:
    refused: list[str] = []
    exports = [*exportable([(parse(name, ["gpus=1"]), "h100") for name in MODELS], target, refused)]
    assert {p.model for p, _, _ in exports} == {name for name, shape in MODELS.items() if not lacking(shape)}
    assert differences(target, exports) == []
    lacks = [words for shape in MODELS.values() if (words := lacking(shape))]
    assert len(refused) == len(lacks)
    assert all(words[0] in told for words, told in zip(lacks, refused, strict=True))


@pytest.mark.full
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("target", CHECKERS)
def test_every_row_of_the_plan_tables_is_accepted_by_each_target_that_can_express_it(target: str) -> None:
    rows = [json.loads(line) for line in (repo_root() / "docs" / "plans.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = [(r["asked"], r["settings"]) for r in rows if r.get("settings")]
    plans = [
        (parse(a["model"], [*words, *([] if any(w.startswith("seq_len=") for w in words) else [f"seq_len={a['seq_len']}"])]), a["hardware"])
        for a, words in asked
    ]
    refused: list[str] = []
    exports = [*exportable(plans, target, refused)]
    assert len(exports) > len(plans) / 3
    assert differences(target, exports) == []


WITHOUT = {
    "num_layers_per_pipeline_rank 10": ["--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank 8"],
    "Number of decoder layers": ["--num-layers", "--num-layers 81"],
    "CUDA_DEVICE_MAX_CONNECTIONS": ["environment", ""],
}
"""What megatron-core says of a good export with one thing made worse."""


def test_a_fault_in_an_export_is_told_by_the_target_itself() -> None:
    plan = parse("llama3_70b", ["gpus=64", "tp=2", "pp=8", "vpp=8", "gbs=64"])
    good = launchable(plan, "megatron-lm", "h100")
    bad = []
    for flag, instead in WITHOUT.values():
        words = list(good.command)
        if flag in words:
            place = words.index(flag)
            words[place : place + 2] = instead.split()
        bad.append((plan, "h100", replace(good, command=tuple(words), environment={} if flag == "environment" else good.environment)))
    found = differences("megatron-lm", bad)
    assert len(found) == len(WITHOUT)
    assert all(says in words for says, words in zip(WITHOUT, found, strict=True)), found


def test_a_field_that_a_class_of_bridge_lacks_is_told() -> None:
    script = launchable(parse("qwen3_8b", ["gpus=2"]), "megatron-bridge", "h100").files["plan_bridge.py"]
    for old, new in {"train_iters=": "train_steps=", "'constant'": "'steady'"}.items():
        assert [*bridge.unknown(ast.parse(script))] == []
        (found,) = bridge.unknown(ast.parse(script.replace(old, new)))
        assert new.strip("='") in found


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("deepseek_v3", "partial(get_gpt_decoder_block_spec, use_transformer_engine=True)"),
        ("qwen3_next_80b_a3b", "get_transformer_block_with_experimental_attention_variant_spec"),
    ],
)
def test_layers_of_several_kinds_have_the_spec_that_makes_them(model: str, spec: str) -> None:
    script = launchable(parse(model, []), "megatron-bridge", "h100").files["plan_bridge.py"]
    assert bridge.arguments(ast.parse(script), "model")["transformer_layer_spec"] == spec
    assert [*bridge.unknown(ast.parse(script))] == []
    assert any("has no" in words for words in bridge.unknown(ast.parse(script.replace("import get_", "import got_"))))


def test_hybridep_is_named_where_it_is_planned() -> None:
    plan = parse("qwen3_30b_a3b", ["gpus=8", "ep=8", "dispatcher=hybridep"])
    words = " ".join(launchable(plan, "megatron-lm", "h100").command)
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep" in words


@pytest.mark.parametrize(
    ("model", "words", "hardware", "says"),
    [
        ("qwen3_vl_8b", [], "h100", "a vision tower"),
        ("qwen3_8b", ["backend=torch"], "h100", "backend torch"),
        ("qwen3_8b", ["fp8=mxfp8"], "h100", "mxfp8 on h100"),
        ("qwen3_8b", ["lora=16"], "h100", "adapters of rank 16"),
        ("qwen3_30b_a3b", ["gpus=8", "ep=8", "dispatcher=flex"], "h100", "name deepep, hybridep or ncclep"),
        ("qwen3_8b", ["sharding=none", "moment_bytes=2"], "h100", "fewer bits"),
    ],
)
def test_what_a_target_cannot_express_ends_with_one_message(model: str, words: list[str], hardware: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as e:
        launchable(parse(model, words), "megatron-lm", hardware)
    assert "\n" not in str(e.value)


def test_what_stopped_started_exports_is_said() -> None:
    """Each of these ended a run on GPUs that the target's parser had accepted."""
    dense = launchable(parse("llama3_8b", ["gpus=2", "layers=4", "gbs=8"]), "megatron-lm", "h200")
    assert "--eval-interval" in dense.command  # its loop divides by it, without a default
    assert "set -euo pipefail" in dense.text()  # the log's reader would hide that the run failed
    biased = launchable(parse("gpt_oss_20b", ["gpus=2", "layers=4", "ep=2", "gbs=8"]), "megatron-lm", "h200")
    assert "--no-bias-dropout-fusion" in biased.command
    assert "--no-bias-dropout-fusion" not in dense.command
