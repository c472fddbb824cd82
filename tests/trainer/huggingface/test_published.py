"""`model: FOLDER` reads the config.json of a published model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest

from playbook.errors import ConfigError, FileError
from playbook_trainer.config.huggingface import fields_of, hf_config
from playbook_trainer.config.sections import ModelConfig, YarnConfig
from playbook_trainer.config.tree import load, model_names
from playbook_trainer.huggingface.weights import SourceFiles

CONFIG = Path("trainer/configs/qwen3_tiny.yaml")


def folder(path: Path, model: ModelConfig, **more: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(model) | more))
    return path


STRETCHED = parity.deepseek(yarn=YarnConfig(factor=4, original_seq_len=64))


@pytest.mark.parametrize("model", [*map(parity.preset, model_names()), STRETCHED], ids=lambda model: model.name)
def test_a_model_is_read_back_from_its_config_json(model: ModelConfig, tmp_path: Path) -> None:
    assert ModelConfig(name=model.name, **fields_of(folder(tmp_path, model) / "config.json")) == model


def test_a_configuration_names_a_folder_in_place_of_a_preset(tmp_path: Path) -> None:
    model = parity.tiny("qwen3_vl_moe_tiny")
    given = folder(tmp_path / "Tiny-VL", model, eos_token_id=[256, 7], max_window_layers=28)
    for name in (given, given / "config.json"):
        found = load(CONFIG, {"model": str(name)}).model
        assert found == model.model_copy(update={"name": "Tiny-VL"})
    assert load(CONFIG, {"model": str(given), "model.num_layers": 2}).model.num_layers == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "llama"}, r"is of model_type 'llama'; this trainer trains qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe, deepseek_v3"),
        ({"model_type": None}, "is of model_type .None."),
        ({"attention_bias": True}, "attention_bias True, here False"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"hidden_size": "many"}, "hidden_size: Input should be a valid integer"),
        ({"hidden_size": None}, "hidden_size: Field required"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1, here 0"),
        ({"eos_token_id": None}, "neither config.json nor generation_config.json has eos_token_id"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "has no rope_theta"),
        ({"use_sliding_window": True}, "use_sliding_window True, here False"),
    ],
)
def test_what_this_trainer_does_not_train_is_refused(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    given = folder(tmp_path / "m", parity.tiny("qwen3_tiny"), **change)
    with pytest.raises((ConfigError, FileError), match=expected):
        load(CONFIG, {"model": str(given)})


def test_names_of_transformers_5_are_read_and_kept_readable_for_transformers_4(tmp_path: Path) -> None:
    model = parity.tiny("qwen3_moe_tiny")
    given = folder(tmp_path / "m", model)
    settings = json.loads((given / "config.json").read_text())
    settings["num_local_experts"] = settings.pop("num_experts")
    del settings["rope_theta"], settings["rope_scaling"]
    (given / "config.json").write_text(json.dumps(settings))
    assert ModelConfig(name=model.name, **fields_of(given / "config.json")) == model
    kept = SourceFiles(settings).config_json({}, "float32")
    assert (kept["num_experts"], kept["rope_theta"], kept["rope_scaling"]) == (model.num_experts, model.rope_theta, None)


@pytest.mark.parametrize(("theta", "refused"), [(10_000.0, False), (500.0, True)])
def test_a_tower_that_turns_otherwise_is_refused(theta: float, refused: bool, tmp_path: Path) -> None:
    model = parity.tiny("qwen3_vl_tiny")
    tower = hf_config(model)["vision_config"] | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    with pytest.raises(ConfigError, match=r"vision_config\.rope_parameters\.rope_theta 500") if refused else nullcontext():
        fields_of(folder(tmp_path, model, vision_config=tower) / "config.json")
