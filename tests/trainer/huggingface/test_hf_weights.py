"""Checkpoints survive the way out and back bit for bit, transformers reads ours and we read theirs, and broken ones are refused."""

import json
import math
import sys

import parity
import pytest
import torch
from safetensors.torch import save_file

from playbook.errors import ConfigError, DataError
from playbook.planner import parameters
from playbook_trainer.config.sections import YarnConfig, shape_of
from playbook_trainer.config.tree import model_names
from playbook_trainer.huggingface import weights
from playbook_trainer.torch.model.decoder import Decoder

MAKE = {
    "text-moe": lambda: parity.tiny("qwen3_moe_tiny"),
    "text-dense": lambda: parity.dense("qwen3_moe_tiny"),
    "vl-moe": lambda: parity.tiny("qwen3_vl_moe_tiny"),
    "vl-moe-wide-experts": lambda: parity.tiny("qwen3_vl_moe_tiny", expert_ffn_size=80),
    "vl-moe-narrow-experts": lambda: parity.tiny("qwen3_vl_moe_tiny", expert_ffn_size=32),
    "vl-dense": lambda: parity.dense("qwen3_vl_moe_tiny"),
    "text-dense-tied": lambda: parity.tiny("qwen3_tiny"),
    "vl-dense-tied": lambda: parity.tiny("qwen3_vl_tiny"),
    "deepseek": lambda: parity.deepseek(mtp_layers=0),
}
every_kind = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


TEXT = parity.tiny("qwen3_moe_tiny")


@pytest.mark.parametrize("name", model_names())
def test_every_shipped_size_has_rules_for_every_parameter(name):
    """By name and shape where the torch backend has the model, else by number. The bias of a router is no parameter: no gradient moves it."""
    config = parity.preset(name)
    table = {rule.ours: rule.shape for rule in weights.rules(config) if not rule.ours.endswith("router.bias")}
    if config.attention == "mla":
        assert sum(map(math.prod, table.values())) == parameters.total(shape_of(config))
        return
    with torch.device("meta"):
        model = Decoder(config)
    assert table == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_multi_token_prediction_is_one_more_layer_with_copies_of_embedding_and_head():
    config = parity.deepseek()
    state = parity.random_state(config)
    out = weights.to_hf(config, state)
    assert torch.equal(out["model.layers.4.embed_tokens.weight"], out["model.embed_tokens.weight"])
    assert torch.equal(out["model.layers.4.shared_head.head.weight"], out["lm_head.weight"])
    assert torch.equal(out["model.layers.4.self_attn.kv_b_proj.weight"], state["mtp.0.attn.kv_b_proj.weight"])
    torch.testing.assert_close(weights.from_hf(config, out), state, rtol=0, atol=0)


@pytest.mark.parametrize("change", [{"qk_norm": False}, {"router_score": "softmax", "router_bias": False}, {"shared_expert_ffn_size": 0}])
def test_a_model_that_transformers_lacks_is_refused_by_name(change):
    with pytest.raises(ConfigError, match="DeepSeek-V3 has no counterpart of"):
        weights.hf_config(parity.deepseek(**change))


def test_a_folder_of_other_rotary_frequencies_is_refused(tmp_path):
    parity.written(parity.deepseek(mtp_layers=0), tmp_path / "m")
    stretched = parity.deepseek(mtp_layers=0, yarn=YarnConfig(factor=4, original_seq_len=64))
    with pytest.raises(ConfigError, match="rope_type"):
        weights.check_folder(stretched, tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"attention_factor": 1.0, "truncate": True}, None),
        ({"attention_factor": 1.5}, "attention_factor 1.5, here 1.0"),
        ({"truncate": False}, "truncate False, here True"),
        ({"mscale": None, "mscale_all_dim": None}, "mscale_all_dim 0.0, here 1.0 .*attention_factor 1.138629, here 1.0"),
        ({"mscale": 0.5}, "mscale 0.5, here 1.0"),
        ({"factor": "4"}, "factor '4', here 4.0"),
    ],
)
def test_stretched_rotary_frequencies_are_compared_as_transformers_computes_them(change, message, tmp_path):
    """A file need not say all of them, and says more than one model's settings: what it leaves out, transformers fills in."""
    config = parity.deepseek(mtp_layers=0, yarn=YarnConfig(factor=4, original_seq_len=64))
    parity.written(config, tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"] | change
    parity.say(tmp_path, rope_scaling=None, rope_parameters={k: v for k, v in rope.items() if v is not None})
    if message is None:
        weights.check_folder(config, tmp_path)
    else:
        with pytest.raises(ConfigError, match=message):
            weights.check_folder(config, tmp_path)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_out_and_back_is_exact(make, dtype, tmp_path):
    config = make()
    state = {name: t.to(dtype) for name, t in parity.random_state(config).items()}
    torch.testing.assert_close(weights.from_hf(config, weights.to_hf(config, state)), state, rtol=0, atol=0)
    weights.save_safetensors(config, state, tmp_path / "m", max_shard_bytes=100_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    torch.testing.assert_close(weights.load_safetensors(config, tmp_path / "m"), state, rtol=0, atol=0)


@every_kind
def test_we_read_what_transformers_reads_and_writes(make, tmp_path):
    config = make()
    state = parity.written(config, tmp_path / "ours")
    model = parity.theirs(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    assert (tmp_path / "theirs" / weights.INDEX).exists()
    torch.testing.assert_close(weights.load_safetensors(config, tmp_path / "theirs"), state, rtol=0, atol=0)


def test_published_vision_language_layout_has_inputs_before_outputs():
    config = parity.tiny("qwen3_vl_moe_tiny", expert_ffn_size=48)
    state = parity.random_state(config)
    out = weights.to_hf(config, state)
    base = "model.language_model.layers.1.mlp.experts."
    assert out[f"{base}gate_up_proj"].shape == (8, 64, 96)
    assert out[f"{base}down_proj"].shape == (8, 48, 64)
    assert torch.equal(out[f"{base}gate_up_proj"][3, :, :48], state["layers.1.moe.experts.w13"][3, :48].T)
    assert out["model.visual.patch_embed.proj.weight"].shape == (64, 3, 2, 16, 16)


def test_text_layout_keeps_each_expert_apart():
    state = parity.random_state(TEXT)
    out = weights.to_hf(TEXT, state)
    w13 = state["layers.2.moe.experts.w13"]
    assert torch.equal(out["model.layers.2.mlp.experts.5.gate_proj.weight"], w13[5, :64])
    assert torch.equal(out["model.layers.2.mlp.experts.5.up_proj.weight"], w13[5, 64:])
    assert torch.equal(out["model.layers.2.mlp.experts.5.down_proj.weight"], state["layers.2.moe.experts.w2"][5])


def test_one_message_lists_missing_unexpected_and_misshaped_tensors(tmp_path):
    parity.written(TEXT, tmp_path)

    def spoil(tensors):
        del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.0.mlp.extra"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(7, 64)

    parity.rewrite(tmp_path, spoil)
    with pytest.raises(ConfigError) as error:
        weights.load_safetensors(TEXT, tmp_path)
    message = str(error.value)
    assert "1 missing (model.layers.0.mlp.experts.3.up_proj.weight)" in message
    assert "1 unexpected (model.layers.0.mlp.extra)" in message
    assert "1 of another shape (lm_head.weight (7, 64), expected (320, 64))" in message


def test_a_wrong_preset_gives_a_short_message(tmp_path):
    parity.written(TEXT, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r", \.\.\.") as error:
        weights.load_safetensors(TEXT.model_copy(update={"num_layers": 40}), tmp_path)
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)


def test_a_state_that_is_not_the_models_is_refused_on_the_way_out():
    state = parity.random_state(TEXT)
    del state["norm.weight"]
    with pytest.raises(ConfigError, match=r"1 missing \(norm\.weight\)"):
        weights.to_hf(TEXT, state)


OUTSIDE = [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "sub/a.safetensors",
    "..\\a.safetensors",
    "..",
    "",
    "a.bin",
    "C:\\a.safetensors",
]


@pytest.mark.parametrize(("file", "said"), [*((file, "in the same folder") for file in OUTSIDE), (None, r"lm_head\.weight")])
def test_an_index_names_files_of_its_own_folder_that_hold_the_tensor(tmp_path, file, said):
    """None is the file of another tensor."""
    state = parity.written(TEXT, tmp_path / "m", max_shard_bytes=300_000)
    save_file({"lm_head.weight": state["head.weight"]}, tmp_path / "secret.safetensors")
    index = json.loads((tmp_path / "m" / weights.INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"] if file is None else file
    (tmp_path / "m" / weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=said):
        weights.load_safetensors(TEXT, tmp_path / "m")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_unreadable_index_is_refused(tmp_path, content):
    (tmp_path / weights.INDEX).write_text(content)
    with pytest.raises(ConfigError, match="fetch it again"):
        weights.load_safetensors(TEXT, tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        weights.load_safetensors(TEXT, tmp_path)
    (tmp_path / weights.SINGLE).write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        weights.load_safetensors(TEXT, tmp_path)
    parity.written(TEXT, tmp_path / "m", max_shard_bytes=300_000)
    lost = next((tmp_path / "m").glob("model-00002-*"))
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        weights.load_safetensors(TEXT, tmp_path / "m")
    lost.write_bytes((tmp_path / "m" / lost.name.replace("00002", "00001")).read_bytes()[:-100])
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        weights.load_safetensors(TEXT, tmp_path / "m")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"m: the weights could not be written: .*File too large.*make room"):
            parity.written(TEXT, tmp_path / "m", max_shard_bytes=300_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "m").iterdir())
    parity.written(TEXT, tmp_path / "m")


def test_of_a_file_and_shards_the_one_is_read_that_transformers_reads(tmp_path):
    state = parity.written(TEXT, tmp_path / "m")
    other = {name: torch.zeros_like(t) for name, t in state.items()}
    weights.save_safetensors(TEXT, other, tmp_path / "shards", max_shard_bytes=300_000)
    for path in (tmp_path / "shards").glob("*.safetensors*"):
        path.rename(tmp_path / "m" / path.name)
    theirs = parity.theirs(tmp_path / "m").state_dict()["model.norm.weight"]
    assert torch.equal(weights.load_safetensors(TEXT, tmp_path / "m")["norm.weight"], theirs)
    assert torch.equal(theirs, state["norm.weight"])


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("text-moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "_moe_tiny: use_sliding_window True, here"),
        ("text-moe", {"num_experts_per_tok": 4}, "num_experts_per_tok 4, here 2"),
        ("text-moe", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        # Without the key, weights of experts are not normalised.
        ("text-moe", {"norm_topk_prob": None}, r"norm_topk_prob False, here True \(model\.norm_topk_prob\)"),
        ("text-moe", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn', here 'default'"),
        ("text-moe", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear', here 'default'"),
        ("deepseek", {"rope_interleave": False}, "rope_interleave False, here True"),
        ("vl-moe", {"vision_end_token_id": 7}, r"vision_end_token_id 7, here \d+ \(model\.vision_end_token_id\)"),
    ],
)
def test_a_folder_that_transformers_computes_otherwise_is_refused(kind, other, message, tmp_path):
    config = MAKE[kind]()
    parity.written(config, tmp_path)
    parity.say(tmp_path, **other)
    with pytest.raises(ConfigError, match=message):
        weights.load_safetensors(config, tmp_path)


def test_a_deepseek_folder_that_transformers_saved_is_read_without_the_prediction_layers_that_it_only_counts(tmp_path):
    config = MAKE["deepseek"]()
    state = parity.written(config, tmp_path)
    parity.say(tmp_path, num_nextn_predict_layers=1)
    weights.check_folder(config, tmp_path)
    torch.testing.assert_close(weights.load_safetensors(config, tmp_path), state, rtol=0, atol=0)
    parity.written(parity.deepseek(mtp_layers=1), tmp_path / "published")
    with pytest.raises(ConfigError, match=r"unexpected \(model\.layers\.4\."):
        weights.check_folder(config, tmp_path / "published")


def test_a_config_json_of_transformers_4_is_understood(tmp_path):
    state = parity.written(TEXT, tmp_path)
    parity.say(tmp_path, rope_parameters=None, rope_theta=TEXT.rope_theta)
    torch.testing.assert_close(weights.load_safetensors(TEXT, tmp_path), state, rtol=0, atol=0)
    parity.say(tmp_path, rope_theta=5.0)
    with pytest.raises(ConfigError, match="rope_theta"):
        weights.load_safetensors(TEXT, tmp_path)
