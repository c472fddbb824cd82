"""Every key of a published model's files: training reads it, refuses its value, or does not depend on it, as transformers shows. None is passed over."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import transformers

from playbook.errors import ConfigError, FileError
from playbook_trainer.config.huggingface import WITHOUT_EFFECT, check_rows, fields_of, hf_config
from playbook_trainer.config.sections import ModelConfig, YarnConfig

YARN = YarnConfig(factor=4.0, original_seq_len=64, mscale=1.0, mscale_all_dim=1.0)
FAMILIES = {
    "qwen3": (transformers.Qwen3Config, parity.tiny("qwen3_tiny", num_layers=4)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, parity.tiny("qwen3_moe_tiny")),
    "qwen3_vl": (transformers.Qwen3VLConfig, parity.tiny("qwen3_vl_tiny")),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, parity.tiny("qwen3_vl_moe_tiny")),
    "deepseek_v3": (transformers.DeepseekV3Config, parity.deepseek(yarn=YARN.model_dump())),
}
QWEN = {
    "sliding_window": None,
    "max_window_layers": 48,
    "bos_token_id": 5,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}
QWEN_MOE = {**QWEN, "router_aux_loss_coef": 0.001, "output_router_logits": False, "mlp_only_layers": []}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**QWEN, "layer_types": ["full_attention"] * 4},
    "qwen3_moe": QWEN_MOE,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN_MOE,
    "deepseek_v3": {
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "pretraining_tp": 1,
    },
}
"""Keys of the text model that published files have beside what transformers writes. Sources: config.json of Qwen3-0.6B, Qwen3-30B-A3B, Qwen3-VL-30B-A3B-Instruct and
DeepSeek-V3."""
OVERRULED = (("text_config", "tie_word_embeddings"),)
"""Where the top of the file says the same, which transformers reads."""
EVERYWHERE = {"torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "x"}, "quantization_config": None, "surprise": None}


def published(family: str, style: str) -> dict[str, Any]:
    """A file with every key that transformers 5 writes or publishers have written, for the tiny model; `style` is the version that wrote how positions turn."""
    config_class, model = FAMILIES[family]
    ours, every = hf_config(model), config_class().to_dict()
    settings = {**EVERYWHERE, **every, **ours}
    for part in ("text_config", "vision_config"):
        if part in ours:
            settings[part] = {**every[part], **ours[part]}
    text = settings["text_config"] if "text_config" in ours else settings
    text |= {key: value for key, value in PUBLISHED[family].items() if key not in ours.get("text_config", ours)}
    for unlike in ("num_local_experts", "head_dim" if family == "deepseek_v3" else ""):  # of another size than the tiny model
        text.pop(unlike, None)
    for elsewhere in ("rope_parameters",) if style == "4" else ("rope_theta", "rope_scaling"):
        text.pop(elsewhere)
    return settings


def keys(settings: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in settings.items():
        yield (*prefix, key)
        if isinstance(value, dict) and key in ("text_config", "vision_config", "rope_parameters", "rope_scaling"):
            yield from keys(value, (*prefix, key))


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}x"
    return [*value, 3] if isinstance(value, list) else {"0": "a"} if isinstance(value, dict) else 7


def with_change(settings: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    out = copy.deepcopy(dict(settings))
    part = out
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = changed(part[path[-1]])
    return out


def read(settings: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], int | None]:
    """What training takes from the file: the model, and how long rows may be."""
    (folder / "config.json").write_text(json.dumps(settings))
    fields = fields_of(folder / "config.json")
    for rows in (300, 1000, 5000, 100_000):
        try:
            check_rows(ModelConfig(name="x", **fields), folder, rows)
        except ConfigError:
            return fields, rows
    return fields, None


def logits(family: str, settings: Mapping[str, Any]) -> torch.Tensor:
    """What transformers' own model computes from the file, in training, on fixed weights and tokens."""
    known = {k: v for k, v in settings.items() if k not in ("model_type", "auto_map", "quantization_config")}
    config = FAMILIES[family][0].from_dict(known)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, hf_config(FAMILIES[family][1])["architectures"][0])._from_config(config, dtype=torch.float32).train()
    for n, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)) * 0.05
    tokens = torch.arange(1, 25).unsqueeze(0)
    out = model(input_ids=tokens, labels=tokens, return_dict=True)
    return torch.cat([out.logits.detach().flatten(), out.loss.detach().reshape(1)])


def paths(family: str, style: str) -> list[tuple[str, ...]]:
    return [path for path in keys(published(family, style)) if style == "5" or "rope" in path[-1]]


def listed(family: str, path: tuple[str, ...]) -> bool:
    return path[-1] in WITHOUT_EFFECT or path in OVERRULED or (path[-1] == "intermediate_size" and not FAMILIES[family][1].dense_layers)


@pytest.mark.parametrize("style", "45")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_model_is_read_or_refused_or_listed(family: str, style: str, tmp_path: Path) -> None:
    settings = published(family, style)
    before, passed_over = read(settings, tmp_path), []
    for path in paths(family, style):
        with contextlib.suppress(ConfigError, FileError):
            if read(with_change(settings, path), tmp_path) == before and not listed(family, path):
                passed_over.append(path)
    assert passed_over == []


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_listed_as_without_effect_changes_nothing_that_transformers_computes(family: str) -> None:
    settings = published(family, "5")
    before, without = logits(family, settings), [path for path in paths(family, "5") if listed(family, path)]
    assert len(without) > 15
    for path in without:
        if path[-1] not in (
            "dtype",
            "torch_dtype",
            "return_dict",
        ):  # which train.dtype decides; a form of results in which these models fail
            assert torch.equal(logits(family, with_change(settings, path)), before), path


GENERATION = transformers.GenerationConfig().to_dict()


def test_of_what_generation_is_like_the_end_of_an_answer_alone_is_read(tmp_path: Path) -> None:
    settings = {k: v for k, v in published("qwen3", "5").items() if k != "eos_token_id"}
    ends = {}
    for key in ("", *GENERATION):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]} | ({key: 7} if key else {})))
        ends[key] = read(settings, tmp_path)[0]["eos_token_id"]
    assert ends == dict.fromkeys(ends, 9) | {"eos_token_id": 7}


def test_an_end_at_which_generation_does_not_stop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    with pytest.raises(ConfigError, match=r"generation_config.json ends answers with \[5, 7\]"):
        read({**published("qwen3", "5"), "eos_token_id": 9}, tmp_path)
    fields, _ = read({**published("qwen3", "5"), "eos_token_id": 7}, tmp_path)
    check_rows(ModelConfig(name="x", **fields), tmp_path, 300)
    with pytest.raises(ConfigError, match=r"model.eos_token_id is 9, and the weights in .* end what they say with \[5, 7\]"):
        check_rows(ModelConfig(name="x", **{**fields, "eos_token_id": 9}), tmp_path, 300)
    with pytest.raises(ConfigError, match=r"data.seq_len is 4097, and the weights in .* are of 4096 positions"):
        check_rows(ModelConfig(name="x", **fields), tmp_path, 4097)


def test_the_width_of_dense_layers_that_there_are_none_of_is_not_compared(tmp_path: Path) -> None:
    settings = {**published("deepseek_v3", "5"), "first_k_dense_replace": 0, "intermediate_size": 12345}
    fields, _ = read(settings, tmp_path)
    assert (fields["ffn_size"], fields["first_dense_layers"]) == (0, 0)
