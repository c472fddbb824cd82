"""Shapes from files: published configurations of every family, counted against the parameters of the published models, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import document

from playbook.errors import ConfigError
from playbook.planner import flops, memory, parameters
from playbook.planner.huggingface import from_huggingface
from playbook.planner.models import MODELS, find
from playbook.planner.plan import Plan

CONFIGS = Path(__file__).parents[1] / "fixtures" / "models"

# Parameters of the checkpoints, as transformers counts them; GLM's prediction depth comes on top, as the vision tower of Qwen3-VL does.
PUBLISHED = {
    "deepseek_v2_lite": 15_706_484_224,
    "gemma_3_1b": 999_885_952,
    "glm_4_5_air": 106_852_245_504,
    "gpt2": 124_439_808,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_vl_30b_a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.json")))
def test_a_published_configuration_has_the_published_parameters(name: str) -> None:
    assert parameters.decoder(find(str(CONFIGS / f"{name}.json"))) == PUBLISHED[name]


def test_one_configuration_is_one_shape_in_either_spelling() -> None:
    theirs, ours = find(str(CONFIGS / "qwen3_vl_30b_a3b.json")), MODELS["qwen3_vl_30b_a3b"]
    assert parameters.total(theirs) == parameters.total(ours)
    assert flops.forward(theirs, 4096) == flops.forward(ours, 4096)
    assert theirs.vision == ours.vision


def test_a_window_counts_the_keys_that_a_query_meets() -> None:
    gemma = find(str(CONFIGS / "gemma_3_1b.json"))
    heads = 2 * 2 * gemma.heads * gemma.head_dim
    full, windowed = 4, 22  # of 26 layers, every sixth sees everything
    met = 512 - 512 * 511 / (2 * 4096)
    assert flops.forward(gemma, 4096)["attention"] == pytest.approx(heads * (full * 4096 / 2 + windowed * met))


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    assert find(str(tmp_path)) == find(str(tmp_path / "config.json"))


def test_a_preset_beside_the_user_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num_layers: 2\nhidden_size: 64\nvocab_size: 100\nnum_heads: 4\nnum_kv_heads: 2\nhead_dim: 16\nffn_size: 96\n")
    assert parameters.decoder(find(str(path))) == 2 * (64 * 64 * 2 + 2 * 64 * 32 + 2 * 16 + 2 * 64 + 3 * 64 * 96) + 2 * 6400 + 64


def config(name: str, **changes: object) -> dict[str, object]:
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            config("gpt2", model_type="mine"),
            r"'mine' is not known, so that its fields have to say all: tie_word_embeddings .*, gated_mlp .* add them",
        ),
        (config("gpt2", model_type="gpt-2"), r"did you mean gpt2\?"),
        (
            {"model_type": "llama", "num_hidden_layers": 2},
            "num_attention_heads, hidden_size, vocab_size, intermediate_size missing; add them",
        ),
        (config("mistral_7b", num_hidden_layers=0), "layers out of range"),
        (config("mistral_7b", num_hidden_layers=10**6), "layers out of range"),
        (config("mistral_7b", hidden_size="4096"), "hidden_size is 4096; expected a whole number"),
        (config("mistral_7b", hidden_size=-1), "hidden_size is -1"),
        (config("mistral_7b", tie_word_embeddings="no"), "expected true or false"),
        (config("qwen2_5_7b", use_sliding_window=True, max_window_layers=14), "max_window_layers 14 is not expressible; expected 0"),
        (config("deepseek_v2_lite", num_experts_per_tok=65), "65 of 64 experts"),
        (config("deepseek_v2_lite", moe_layer_freq=2), "moe_layer_freq 2 is not expressible"),
    ],
)
def test_what_no_shape_can_say_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_huggingface(given, "here")


@pytest.mark.parametrize("command", ["check", "memory", "traffic"])
def test_every_calculator_takes_a_path(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "gemma_3_1b.json")
    assert document(capsys, "layout", command, "--model", path, "--gpus", "8")["layout"]["model"] == "gemma_3_1b"


def test_an_mlp_without_a_gate_keeps_less() -> None:
    gpt2 = find(str(CONFIGS / "gpt2.json"))
    one = memory.estimate(Plan(gpt2, gpus=2, pp=2))
    kept = 6 * (2 * 4096 * 768 * 4 + 4096 * (2 * 3 * 768 + 2 * 768 + 4 * 12) + 2 * 4096 * 2 * 3072)
    assert one[0].activations == 2 * kept
