"""The JSON files of a published folder, and the parts of a `config.json`, whichever version of transformers wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: the file is missing or holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch it again")
    return found


def part_of(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under `key`; an empty one where there is none."""
    part = settings.get(key)
    return part if isinstance(part, dict) else {}


def text_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part about the text model; transformers 5.24 saves the number of experts under a new name."""
    text = dict(part_of(settings, "text_config") or settings)
    if "num_local_experts" in text and "n_routed_experts" not in text:
        text.setdefault("num_experts", text["num_local_experts"])
    return text


def for_transformers_4(text: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's part with what transformers 4 looks for where transformers 5 has written it elsewhere alone."""
    part, rope = text_of(text), part_of(text, "rope_parameters")
    if rope and part.get("rope_theta") is None:
        stretch = {key: value for key, value in rope.items() if key != "rope_theta"}
        plain = stretch.get("rope_type", "default") == "default" and set(stretch) <= {"rope_type"}
        part |= {"rope_theta": rope.get("rope_theta"), "rope_scaling": part.get("rope_scaling") or (None if plain else stretch)}
    return part
