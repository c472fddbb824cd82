"""The neutral value of each configuration key: the one with which the trainer does what it did before the key existed.

Hashes of configurations leave out keys that have their neutral value, so a new key changes no stored hash. `playbook schemas export` writes the default
of a key that is new to the table, and never changes a value there, whatever the key's default becomes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from playbook.paths import data_root
from playbook.yaml_files import models_in
from playbook_trainer.config.tree import TORCH_ONLY, TrainerConfig

FILE = "trainer.neutral.json"
"""Below schemas/. Keys that every model must name, such as `model.hidden_size`, have no line and always count."""


@cache
def neutral() -> Mapping[str, Any]:
    """By dotted key, the value that a hash of a configuration leaves out."""
    found: dict[str, Any] = json.loads((data_root("schemas") / FILE).read_text(encoding="utf-8"))
    return found


def declared(section: type[BaseModel] = TrainerConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of the tree with its field; sections too, each before its keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for inner in models_in(field.annotation):
            yield from declared(inner, f"{prefix}{name}.")


def trainer_keys() -> set[str]:
    """Every dotted key of the trainer's tree, sections included."""
    return {"model.preset", *dict(declared())}


def rendered() -> str:
    """The content of the table for the tree of today: known values as they are, the default of each new key; keys that are gone have no line."""
    defaults = {key: field.get_default(call_default_factory=True) for key, field in declared() if not field.is_required()}
    lines = [f"  {json.dumps(k)}: {json.dumps(neutral().get(k, v))}" for k, v in defaults.items() if not isinstance(v, BaseModel)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def torch_only() -> tuple[str, ...]:
    """Keys that the megatron backend does not read."""
    return tuple(key for key, field in declared() if field.json_schema_extra == TORCH_ONLY)
