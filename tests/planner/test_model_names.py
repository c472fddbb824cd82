"""Published models by the names of their repositories, counted against what publishers say."""

from __future__ import annotations

import re

import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner import models, parameters
from playbook.planner.models import MODELS, fields_of, find, named
from playbook.yaml_files import read

TABLE = read(data_root("tables") / "models.yaml")[0]
ROWS = TABLE["models"]

# Billions of parameters, as model cards and technical reports say them; of a model with a vision tower, the tower counts.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B": 1.544, "Qwen/Qwen2.5-3B": 3.086, "Qwen/Qwen2.5-7B": 7.616, "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B-Instruct": 32.76, "Qwen/Qwen2.5-72B": 72.71, "Qwen/Qwen2.5-Coder-7B": 7.616, "Qwen/Qwen2.5-VL-7B-Instruct": 8.292,
    "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-4B": 4.022, "Qwen/Qwen3-8B": 8.191, "Qwen/Qwen3-14B": 14.77, "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53, "Qwen/Qwen3-235B-A22B": 235.1, "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.2, "Qwen/Qwen3-VL-4B-Instruct": 4.438,
    "Qwen/Qwen3-VL-8B-Instruct": 8.767, "Qwen/Qwen3-VL-32B-Instruct": 33.36, "Qwen/Qwen1.5-MoE-A2.7B": 14.32,
    "meta-llama/Llama-2-7b-hf": 6.738, "meta-llama/Llama-2-13b-hf": 13.02, "meta-llama/Llama-2-70b-chat-hf": 68.98, "huggyllama/llama-7b": 6.738,
    "huggyllama/llama-30b": 32.53, "meta-llama/Meta-Llama-3-8B": 8.03, "meta-llama/Llama-3.1-8B-Instruct": 8.03, "meta-llama/Llama-3.1-405B": 405.9,
    "meta-llama/Llama-3.2-1B": 1.236, "meta-llama/Llama-3.2-3B-Instruct": 3.213, "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    "codellama/CodeLlama-34b-hf": 33.74, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1, "mistralai/Mistral-7B-v0.1": 7.242,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.248, "mistralai/Mistral-Nemo-Instruct-2407": 12.25, "mistralai/Mistral-Large-Instruct-2407": 122.6,
    "mistralai/Mixtral-8x7B-v0.1": 46.7, "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.6, "google/gemma-2b": 2.506, "google/gemma-7b": 8.538,
    "google/gemma-2-2b-it": 2.614, "google/gemma-2-9b": 9.242, "google/gemma-2-27b": 27.23, "google/gemma-3-1b-it": 1.0,
    "microsoft/phi-1_5": 1.418, "microsoft/phi-2": 2.78, "microsoft/Phi-3-mini-4k-instruct": 3.821, "microsoft/Phi-3.5-MoE-instruct": 41.87,
    "microsoft/phi-4": 14.66, "microsoft/Phi-4-mini-instruct": 3.836, "allenai/OLMo-7B-hf": 6.888, "allenai/OLMo-2-1124-7B": 7.299,
    "allenai/OLMo-2-1124-13B-Instruct": 13.72, "allenai/OLMo-2-0325-32B": 32.23, "tiiuae/falcon-7b": 6.922, "tiiuae/falcon-40b-instruct": 41.3,
    "facebook/opt-125m": 0.1252, "facebook/opt-1.3b": 1.316, "facebook/opt-6.7b": 6.658, "openai-community/gpt2": 0.1244, "gpt2-xl": 1.558,
    "EleutherAI/pythia-160m": 0.1623, "EleutherAI/pythia-1.4b": 1.415, "EleutherAI/pythia-12b": 11.85, "bigscience/bloom-560m": 0.5592,
    "bigscience/bloom-7b1": 7.069, "deepseek-ai/DeepSeek-V2": 235.7, "deepseek-ai/DeepSeek-V2-Lite-Chat": 15.71, "deepseek-ai/deepseek-moe-16b-base": 16.38,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32.76, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03, "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.8, "moonshotai/Kimi-K2-Instruct": 1026.0, "HuggingFaceTB/SmolLM2-135M": 0.1345, "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "HuggingFaceTB/SmolLM3-3B": 3.075, "internlm/internlm2_5-7b-chat": 7.738, "internlm/internlm3-8b-instruct": 8.804, "THUDM/glm-4-9b-chat-hf": 9.4,
    "stabilityai/stablelm-3b-4e1t": 2.795, "stabilityai/stablelm-2-1_6b": 1.645, "CohereForAI/c4ai-command-r-v01": 34.98, "bigcode/starcoder2-7b": 7.174,
    "MiniMaxAI/MiniMax-M2": 228.7,
}  # fmt: skip


def test_a_hundred_published_models_have_names() -> None:
    assert len([row for row in ROWS.values() if "hub" in row]) >= 100


def test_a_repository_has_the_parameters_that_its_card_says() -> None:
    counted = {hub: parameters.total(find(hub)) / 1e9 for hub in PUBLISHED}
    assert counted == pytest.approx(PUBLISHED, rel=1e-3)


def test_every_row_is_read_and_its_size_is_the_one_in_its_name() -> None:
    for model, row in ROWS.items():
        assert "hub" in row or row["source"].startswith("https://"), model
        assert row.get("source", "https://") in TABLE["sources"] or row.get("source", "https://").startswith("https://"), model
        count = parameters.total(MODELS[model]) / 1e9
        hub = re.sub(r"(?<=[0-9])_(?=[0-9])", ".", row.get("hub", "").lower())
        size = re.search(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)([bm])([0-9]?)(?![a-z0-9])", hub)
        if size and not re.search("scout", model):  # a name that says how many parameters a token meets
            said = float(size[1] + (f".{size[3]}" if size[3] else "")) / (1 if size[2] == "b" else 1000)
            assert 0.85 < count / said < 1.35, model


def test_a_row_is_found_by_its_repository() -> None:
    assert [model for model, row in ROWS.items() if MODELS[named(row.get("hub", model))] != MODELS[model]] == []


def test_a_preset_of_the_trainer_goes_before_a_row_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    number, preset = len(MODELS), data_root("configs") / "models" / "qwen3_8b.yaml"
    monkeypatch.setattr(models, "_files", lambda: {"llama3_8b": preset, "qwen3_8b": preset})
    monkeypatch.setattr(models, "_shipped", models._shipped.__wrapped__)  # nothing that was read before
    assert MODELS["llama3_8b"] == MODELS["qwen3_8b"]
    assert len(MODELS) == len([*MODELS]) < number


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "qwen2_5_7b"),
        ("qwen2.5-7b", "qwen2_5_7b"),
        ("Qwen/QwQ-32B", "qwen2_5_32b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek_v3"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_scout"),
        ("google/gemma-3-27b-it", "gemma3_27b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral_7b_v0_2"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_4b"),
        ("microsoft/Phi-4-reasoning", "phi_4"),
        ("facebook/opt-13b", "opt_13b"),
        ("facebook/opt-1.3b", "opt_1_3b"),
        ("OPT13B", ""),  # two models are spelled so
    ],
)
def test_what_tuned_and_quantised_weights_add_to_a_name_is_left_out(name: str, model: str) -> None:
    assert named(name) == model


@pytest.mark.parametrize(
    ("name", "near"),
    [("lama3_8b", "llama3_8b"), ("qwen3_9b", "qwen3_8b"), ("Qwen/Qwen25-7", "qwen2_5_7b"), ("mistralai/Mixtrall-8x7B", "mixtral_8x7b")],
)
def test_a_misspelled_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        find(name)


def test_fields_of_a_row_are_those_of_a_configuration() -> None:
    assert fields_of("Qwen/Qwen2.5-7B")["model_type"] == "qwen2"
    assert not {"hub", "source"} & fields_of("qwen2_5_7b").keys()
