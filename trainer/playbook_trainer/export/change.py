"""A change of a few keys in the words of other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.export import torchtitan
from playbook_trainer.export.render import export, flags, overrides
from playbook_trainer.export.sheet import Sheet, Target, leaves

_BASES: Mapping[Target, str] = {
    "megatron-lm": "qwen3_30b_a3b_24l_megatron.yaml",
    "megatron-bridge": "qwen3_30b_a3b_24l_megatron.yaml",
    "torchtitan": "qwen3_30b_a3b_24l.yaml",
}
"""What is changed, for each trainer: the shipped configuration of its backend."""


def change(keys: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings of each trainer that say the keys; a trainer that has no words for one of them is left out.

    The backend is no setting elsewhere. Keys whose value is no value of the configuration, such as `higher`, say nothing. One that is a switch and has a reason in place of
    its value counts as on.
    """
    found: dict[str, list[str]] = {target: _said(keys, target, data_root("configs") / base) for target, base in _BASES.items()}
    return {target: lines for target, lines in found.items() if lines}


def _said(keys: Mapping[str, Any], target: Target, base: Path) -> list[str]:
    usual = dict(leaves(load(base).model_dump(mode="json")))
    keys = {k: v for k, v in keys.items() if k != "backend"}
    known = {k: True if isinstance(usual.get(k), bool) and isinstance(v, str) else v for k, v in keys.items() if k in usual}
    stated = known if _config(base, known) else {k: v for k, v in known.items() if _config(base, {k: v})}
    config = _config(base, stated)
    if not stated or config is None:
        return []
    settings = [s for s in export(config, target).settings if set(s.keys) & set(stated)]
    if not set(stated) <= {k for s in settings for k in s.keys}:
        return []
    sheet = Sheet(config, target)
    sheet.settings = settings
    if target == "megatron-lm":
        return [line for line in flags(sheet) if line != "--group-query-attention"]
    if target == "megatron-bridge":
        return overrides(sheet)
    return [torchtitan.words(s) for s in settings]


def _config(base: Path, keys: Mapping[str, Any]) -> TrainerConfig | None:
    """The base with the keys; how checkpoints are saved means something only where there is a folder for them."""
    saves = {"checkpoint.dir": "checkpoints"} if any(k.startswith("checkpoint.") for k in keys) else {}
    try:
        return load(base, {**saves, **keys})
    except PlaybookError:
        return None
