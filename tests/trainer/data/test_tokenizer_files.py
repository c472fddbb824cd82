"""Every key of the files of a tokenizer: a text becomes the tokens that transformers makes of it, or the key's value is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import VL, chat_tokenizer, config
from tokenizers import Tokenizer, processors

from playbook.errors import ConfigError
from playbook_trainer.data.rows import text_documents

TEXT = "A b<|im_end|> c  d.\n\nHello  <|pad|>?"
NEW = {"content": "Hello", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
CHANGES: dict[str, Any] = {
    "add_bos_token": True, "add_eos_token": True, "add_prefix_space": True, "split_special_tokens": True, "do_lower_case": True,
    "bos_token": "<|im_start|>", "eos_token": "Hello", "pad_token": NEW, "unk_token": "Hello", "image_token": "Hello",
    "mask_token": None, "additional_special_tokens": ["Hello"], "extra_special_tokens": ["Hello"],
    "added_tokens_decoder": {"300": NEW}, "model_specific_special_tokens": {"boi_token": "Hello"},
    "clean_up_tokenization_spaces": True, "model_max_length": 5, "errors": "ignore", "padding_side": "left",
    "truncation_side": "left", "legacy": False, "tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ x }}",
    "model_input_names": ["input_ids"], "sp_model_kwargs": {}, "use_default_system_prompt": True, "name_or_path": "x",
    "special_tokens_map_file": "x", "processor_class": "Qwen3VLProcessor", "backend": "tokenizers", "is_local": False,
    "local_files_only": True, "fix_mistral_regex": False, "surprise": 1, "max_length": 3, "truncation": True, "stride": 1,
}  # fmt: skip
"""Another value for each key that published files have or transformers 5 writes. Sources: tokenizer_config.json of Qwen3-0.6B, Qwen3-VL-30B-A3B-Instruct and DeepSeek-V3."""


def ours(folder: Path) -> list[int]:
    given = config(VL, data__tokenizer=str(folder / "tokenizer.json"), data__seq_len=16)
    pieces = text_documents(given.model.model_copy(update={"image_token_id": None}), given.data)(TEXT)
    tokens: list[int] = np.concatenate([piece.tokens for piece in pieces]).tolist()
    assert tokens[-1] == given.model.eos_token_id
    return tokens[:-1]


def theirs(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])


@pytest.mark.parametrize("key", ["none", *CHANGES])
def test_a_text_has_the_tokens_of_transformers_whatever_a_key_says_or_it_is_refused(key: str, tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({key: CHANGES[key]} if key != "none" else {})))
    try:
        tokens = ours(tmp_path)
    except ConfigError as e:
        refused = str(e)
        assert key in refused or "token 'Hello', which is none of its added_tokens" in refused
        return
    assert tokens == theirs(tmp_path)
    assert 256 in tokens, "what spells a special token is one"


@pytest.mark.parametrize(
    "part", ["version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]
)
def test_every_part_of_the_tokenizer_is_read_as_transformers_reads_it_or_refused(part: str, tmp_path: Path) -> None:
    made = Tokenizer.from_file(str(chat_tokenizer(tmp_path)))
    if part == "truncation":
        made.enable_truncation(3)
    elif part == "padding":
        made.enable_padding(length=99)
    elif part == "post_processor":
        made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 261)])
    made.save(str(tmp_path / "tokenizer.json"))
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    other: dict[str, Any] = {
        "normalizer": {"type": "Lowercase"},
        "added_tokens": whole["added_tokens"] + [{**NEW, "id": 262}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
        "decoder": None,
        "model": whole["model"] | {"merges": [["H", "e"]], "vocab": whole["model"]["vocab"] | {"He": 300}},
    }
    whole[part] = other.get(part, whole[part])
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    if part == "post_processor":
        with pytest.raises(ConfigError, match="a post_processor with special tokens"):
            ours(tmp_path)
    else:
        assert ours(tmp_path) == theirs(tmp_path)


def test_tokens_of_older_files_must_be_those_of_the_tokenizer(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    for name, content in (("special_tokens_map.json", {"pad_token": NEW}), ("added_tokens.json", {"Hello": 262})):
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="token 'Hello', which is none of its added_tokens"):
            ours(tmp_path)
        (tmp_path / name).unlink()
