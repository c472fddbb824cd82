"""What `playbook config export` prints, against Megatron-Bridge's dataclasses as `make targets` unpacks them."""

from __future__ import annotations

import ast
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook_trainer.config import recipes
from playbook_trainer.config.tree import load
from playbook_trainer.export.render import export
from playbook_trainer.export.sheet import RELEASES, Setting
from tests.support.targets import bridge

FILES = [*sorted(data_root("configs").glob("*.yaml")), *(recipes.folder() / r.file for r in recipes.index().recipes)]
WORDS: list[dict[str, Any]] = [
    {},
    {
        "checkpoint.dir": "saved",
        "checkpoint.export": "out",
        "tracker.wandb": True,
        "eval.every": 2,
        "profile.kineto": True,
        "backend": "megatron",
    },
    {
        "optimizer.schedule": "wsd",
        "train.deterministic": True,
        "precision.fp8": "tensorwise",
        "backend": "megatron",
        "data.tokenizer": "tokenizer.json",
    },
    {"data.kind": "mock", "train.compile.loss": True, "init.weights": "in", "optimizer.schedule": "linear"},
    {"backend": "megatron", "offload.optimizer": True, "optimizer.moments_dtype": "bf16", "train.cuda_graphs": ["moe_router"]},
]


@pytest.mark.full
def test_megatron_bridge_has_every_field() -> None:
    sections, seen = bridge.fields_of("ConfigContainer"), set[str]()
    providers = ("GPTModelProvider", "MLAModelProvider", "Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")

    def has(setting: Setting) -> bool:
        if not setting.section:
            return setting.field in sections
        named = ast.unparse(sections[setting.section]).removeprefix("Optional[").rstrip("]").split(" | ")
        return any(setting.field in bridge.fields_of(cls) for cls in (providers if setting.section == "model" else named))

    for path, words in product(FILES, WORDS):
        with suppress(PlaybookError):  # a key that this file's model does not have
            found = export(load(path, words), "megatron-bridge")
            assert [s for s in found.settings if not has(s)] == []
            assert f"# fields as in {RELEASES['megatron-bridge']}" in found.text()
            seen |= {f"{s.section}.{s.field}" for s in found.settings}
    assert len(seen) > 40
