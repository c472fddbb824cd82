"""What `playbook config export` prints, against Megatron-Bridge's dataclasses as `make targets` unpacks them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook_trainer.config import recipes
from playbook_trainer.config.tree import load
from playbook_trainer.export.render import Exported, export
from playbook_trainer.export.sheet import RELEASES, Setting, Target
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


def exported(target: Target) -> Iterator[Exported]:
    for path in FILES:
        for words in WORDS:
            try:
                yield export(load(path, words), target)
            except PlaybookError:
                continue  # a key that this file's model does not have


def check(target: Target, has: Any) -> None:
    """Every setting is a field there."""
    seen: set[str] = set()
    for each in exported(target):
        for setting in each.settings:
            assert has(setting), (target, setting)
            seen.add(f"{setting.section}.{setting.field}")
        assert f"# fields as in {RELEASES[target]}" in each.text()
    assert len(seen) > 40


@pytest.mark.full
def test_megatron_bridge_has_every_field() -> None:
    sections = bridge.fields_of("ConfigContainer")
    providers = ("GPTModelProvider", "MLAModelProvider", "Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")

    def has(setting: Setting) -> bool:
        if not setting.section:
            return setting.field in sections
        named = ast.unparse(sections[setting.section]).removeprefix("Optional[").rstrip("]").split(" | ")
        return any(setting.field in bridge.fields_of(cls) for cls in (providers if setting.section == "model" else named))

    check("megatron-bridge", has)
