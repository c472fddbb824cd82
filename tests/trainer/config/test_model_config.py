"""Models that contradict themselves are refused with the field at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from playbook.errors import ConfigError, FileError
from playbook.paths import data_root
from playbook.yaml_files import read
from playbook_trainer.config.tree import ModelConfig, load, parse_overrides

LARGE = data_root("configs") / "qwen3_30b_a3b_24l_megatron.yaml"
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

REFUSED = {
    "ranks-without-mla": ({"attention": "gqa"}, r"q_lora_rank, kv_lora_rank.* belong to attention: mla"),
    "yarn-without-mla": (
        {**dict.fromkeys(MLA, 0), "attention": "gqa", "yarn": {"factor": 4, "original_seq_len": 64}},
        r"yarn belong to attention: mla",
    ),
    "no-rank": ({"kv_lora_rank": 0}, r"attention mla needs kv_lora_rank > 0"),
    "head-dim": ({"head_dim": 16}, r"head_dim 16 must be qk_nope_head_dim \+ qk_rope_head_dim = 24"),
    "kv-heads": ({"num_kv_heads": 2}, r"set num_kv_heads to 4, found 2"),
    "all-dense": ({"first_dense_layers": 4}, r"leaves none of 4 layers with experts"),
    "no-width": ({"ffn_size": 0}, r"first_dense_layers needs ffn_size > 0"),
    "half-grouped": ({"router_group_top_k": 0}, r"go together"),
    "too-few-groups": ({"router_group_top_k": 1, "top_k": 5}, r"leave no top_k 5"),
    "bias-of-softmax": ({"router_score": "softmax"}, r"router_bias needs router_score: sigmoid"),
    "no-experts": ({"num_experts": 0, "top_k": 0, "expert_ffn_size": 0, "router_bias": False}, r"needs a model with experts"),
    "no-query-compression": ({"q_lora_rank": 0}, None),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_the_field_at_fault_is_named(rule: str) -> None:
    changes, says = REFUSED[rule]
    fields: dict[str, Any] = {**read(data_root("configs") / "models" / "deepseek_v3_tiny.yaml")[0], **changes}
    if says is None:
        assert ModelConfig(name=rule, **fields)
        return
    with pytest.raises(ValidationError, match=says):
        ModelConfig(name=rule, **fields)


@pytest.mark.parametrize("sections", ["[8]", "[4, 4]", "[9, 1, -2]", "[2, 2, 2, 2]"])
def test_rotary_sections_are_three_counts(sections: str) -> None:
    with pytest.raises(ConfigError, match="must be three counts, of time, height and width"):
        load(LARGE, parse_overrides(["model=qwen3_vl_tiny", f"model.mrope_section={sections}"]))


@pytest.mark.parametrize("text", ["data: {seq_len: 64}\n", "model:\n"])
def test_a_file_without_a_model_is_told_which_there_are(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(FileError, match=r"f.yaml:1:1: 'model' is missing; add one of: .*qwen3_tiny"):
        load(tmp_path / "f.yaml", {})


def test_a_word_that_is_none_of_a_few_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match="'gpu'; did you mean 'cpu'\\? There are auto, cpu, cuda"):
        load(LARGE, {"train.device": "gpu"})


def test_a_field_of_a_section_leaves_the_rest_of_the_preset_s() -> None:
    plain = load(LARGE, {"model": "deepseek_v3"}).model.yarn
    assert plain is not None
    assert load(LARGE, {"model": "deepseek_v3", "model.yarn.factor": 64}).model.yarn == plain.model_copy(update={"factor": 64})
    assert load(LARGE, {"model": "deepseek_v3", "model.yarn": None}).model.yarn is None
    with pytest.raises(ConfigError, match="original_seq_len"):
        load(LARGE, {"model": "deepseek_v3_tiny", "model.yarn.factor": 64})


def test_an_override_in_quotes_is_text() -> None:
    words = ["data.path='2024'", 'tracker.name="null"', "data.subset=2014a", "train.steps=7", "data.text_key=it's", "checkpoint.dir=null"]
    given = parse_overrides(words)
    assert given == {
        "data.path": "2024",
        "tracker.name": "null",
        "data.subset": "2014a",
        "train.steps": 7,
        "data.text_key": "it's",
        "checkpoint.dir": None,
    }
    assert load(data_root("configs") / "qwen3_tiny.yaml", given).data.path == "2024"


def test_no_override_is_lost_to_one_of_its_section() -> None:
    words = ["model.num_layers=2", "model=qwen3_8b", "data.seq_len=64", "data={kind: text, pack: false}"]
    config = load(data_root("configs") / "qwen3_tiny.yaml", parse_overrides(words))
    assert (config.model.name, config.model.num_layers) == ("qwen3_8b", 2)
    assert (config.data.seq_len, config.data.pack) == (64, False)


def test_a_configuration_that_cannot_be_looked_at_is_named() -> None:
    with pytest.raises(FileError, match="a:1:1: cannot be read"):
        load(Path("a" * 5000))
