"""Parameters and FLOPs of the named models, against what their publishers say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from playbook.errors import ConfigError
from playbook.planner import flops, parameters
from playbook.planner.models import MODELS, find, published

# Billions of parameters: decoder with both embeddings, and those that one token meets.
TOTALS = {
    "qwen3_0_6b": (0.596, 0.596),
    "qwen3_1_7b": (1.7206, 1.7206),
    "qwen3_8b": (8.19, 8.19),
    "qwen3_vl_2b_a300m": (1.8512, 0.3411),
    "qwen3_30b_a3b": (30.53, 3.35),
    "qwen3_235b_a22b": (235.09, 22.19),
    "qwen3_next_80b_a3b": (79.67, 3.88),
    "qwen3_5_35b_a3b": (34.66, 3.46),
    "deepseek_v3": (671.03, 37.55),
    "kimi_k2": (1026.4, 32.86),
    "mixtral_8x7b": (46.70, 12.88),
    "mixtral_8x22b": (140.63, 39.16),
    "gpt_oss_20b": (20.91, 4.19),
    "gpt_oss_120b": (116.83, 5.71),
    "llama3_8b": (8.03, 8.03),
    "llama3_70b": (70.55, 70.55),
    "llama3_405b": (405.85, 405.85),
    "mpt_7b": (6.657, 6.657),
    "moonlight_16b_a3b": (15.96, 2.915),
    "deepseek_v2": (235.74, 21.38),
    "qwen2_57b_a14b": (57.41, 14.25),
    "qwen3_5_397b_a17b": (396.35, 17.35),
    "glm_4_5": (352.8, 33.63),
    "glm_5": (743.18, 41.05),
    "nemotron_3_nano_30b_a3b": (31.578, 3.58),
    "nemotron_3_super_120b_a12b": (120.67, 12.77),
}

# Rows of Megatron Bridge's performance summary, 26.08 and earlier: TFLOP/s per GPU over tokens/s per GPU.
PUBLISHED = [("deepseek_v3", 1635e12 / 6288, 0.001), ("qwen3_30b_a3b", 936e12 / 40706, 0.005)]


def test_a_hybrid_model_computes_what_its_publisher_counts():
    # Megatron Bridge, performance summary 26.06: 84.7 GFLOP per token of 8192 with both depths of prediction.
    assert flops.per_token(MODELS["nemotron_3_super_120b_a12b"], 8192) == pytest.approx(84.7e9, rel=0.01)


def test_published_names_find_their_models_with_the_depths_that_those_runs_train():
    assert published("DeepSeek-V3").mtp == 0
    assert published("DeepSeek-V3+MTP") == MODELS["deepseek_v3"]
    assert published("Llama3.1-8B") == MODELS["llama3_8b"] == find("Llama3-8B")
    assert find("Qwen3-30B-A3B") == MODELS["qwen3_30b_a3b"]
    with pytest.raises(ConfigError, match="not known"):
        published("DeepSeekV4 Flash")


@pytest.mark.parametrize("model", TOTALS)
def test_totals_are_those_of_the_published_models(model):
    total, active = TOTALS[model]
    assert parameters.decoder(MODELS[model]) / 1e9 == pytest.approx(total, rel=5e-4)
    assert parameters.active(MODELS[model]) / 1e9 == pytest.approx(active, rel=5e-3)


def test_multi_token_prediction_and_vision_come_on_top():
    v3 = MODELS["deepseek_v3"]
    assert (parameters.total(v3) - parameters.decoder(v3)) / 1e9 == pytest.approx(11.61, abs=0.01)
    vl, text = MODELS["qwen3_vl_30b_a3b"], MODELS["qwen3_30b_a3b"]
    assert parameters.decoder(vl) == parameters.decoder(text)
    assert parameters.total(vl) / 1e9 == pytest.approx(31.07, abs=0.03)
    assert parameters.total(MODELS["qwen3_vl_2b"]) / 1e9 == pytest.approx(2.1275, abs=5e-4)
    assert parameters.total(MODELS["qwen3_vl_8b"]) / 1e9 == pytest.approx(8.767, abs=5e-3)
    assert parameters.total(MODELS["qwen3_vl_2b_a300m"]) / 1e9 == pytest.approx(1.99, abs=0.02)


@pytest.mark.parametrize(("model", "expected", "within"), PUBLISHED)
def test_flops_per_token_reproduce_published_rates(model, expected, within):
    assert flops.per_token(MODELS[model], 4096) == pytest.approx(expected, rel=within)


# Every matrix that a token meets, as rows x columns, by class: read off the models' configurations, for sequences of 4096.
DEEPSEEK = {
    # Scores over nope and rope dimensions, sums over values; a query meets half of the sequence. The last layer is there once more for MTP.
    "attention": 62 * 128 * (128 + 64 + 128) * 2048,
    "linear": 62 * (
        7168 * 1536 + 1536 * 128 * (128 + 64) + 1536  # queries: down, up, norm
        + 7168 * 512 + 512 * 128 * (128 + 128) + 512 + 7168 * 64  # keys and values: down, up, norm, and the shared rotary key
        + 128 * 128 * 7168
    ) + (2 * 7168) * 7168 + 3 * 7168,
    "mlp": 3 * (3 * 7168 * 18432),
    "experts": (58 + 1) * 3 * 7168 * (8 * 2048 + 2048),
    "router": (58 + 1) * 7168 * 256,
    "head": 2 * 7168 * 129280,
}  # fmt: skip
QWEN3_NEXT = {
    # 12 layers and MTP's have full attention; 36 a convolution of 4 taps over queries, keys and values, and a state of 128 x 128 per head.
    "attention": 13 * 2 * 16 * 256 * 2048 + 36 * (4 * (2 * 16 * 128 + 32 * 128) + 4 * 32 * 128 * 128),
    "linear": 13 * (2048 * (2 * 16 + 2 + 2) * 256 + 16 * 256 * 2048)
    + 36 * (2048 * (16 * 128 + 16 * 128 + 32 * 128 + 32 * 128 + 32 + 32) + 32 * 128 * 2048)
    + (2 * 2048) * 2048 + 3 * 2048,
    "mlp": 0,
    "experts": 49 * 3 * 2048 * (10 * 512 + 512),
    "router": 49 * 2048 * 512,
    "head": 2 * 2048 * 151936,
}  # fmt: skip
LLAMA = {
    "attention": 32 * 2 * 32 * 128 * 2048,
    "linear": 32 * (4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096),
    "mlp": 32 * 3 * 4096 * 14336,
    "experts": 0,
    "router": 0,
    "head": 4096 * 128256,
}


@pytest.mark.parametrize(("model", "products"), [("deepseek_v3", DEEPSEEK), ("qwen3_next_80b_a3b", QWEN3_NEXT), ("llama3_8b", LLAMA)])
def test_flops_are_those_of_every_matrix(model, products):
    assert flops.forward(MODELS[model], 4096) == {name: 2 * n for name, n in products.items()}
    assert flops.per_token(MODELS[model], 4096) == 3 * 2 * sum(n for name, n in products.items() if name != "router")


@pytest.mark.parametrize("seq_len", [127, 128, 129, 4096])
def test_every_other_layer_looks_back_as_far_as_its_window(seq_len):
    """gpt-oss has 24 layers; windows of 128 tokens are on the even ones."""
    met = sum(min(i, 128) for i in range(1, seq_len + 1)) / seq_len if seq_len > 128 else seq_len / 2
    assert flops.forward(MODELS["gpt_oss_20b"], seq_len)["attention"] == pytest.approx(2 * 2 * 64 * 64 * 12 * (met + seq_len / 2))


def test_flops_of_a_vision_tower_are_those_of_every_matrix():
    """Two images of 90 and 63 patches through Qwen3-VL-30B-A3B's tower, but nine patches become one token."""
    tower = replace(MODELS["qwen3_vl_30b_a3b"].vision, merge=3)
    found = flops.vision_forward(tower, 2048, 90 + 63, 90**2 + 63**2)
    blocks = 27 * (153 * (4 * 1152 * 1152 + 2 * 1152 * 4304) + 2 * (90**2 + 63**2) * 1152)
    mergers = (1 + 3) * 17 * (9 * 1152 * 9 * 1152 + 9 * 1152 * 2048)
    assert found == {"patches": 2 * 153 * 1536 * 1152, "vision": 2 * blocks, "projector": 2 * mergers}
