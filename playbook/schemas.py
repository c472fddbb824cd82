"""JSON Schema (2020-12) of every file that people write or read, exported from the typed models.

Editors use the files for completion and hover text. They refuse what the models refuse. The command line passes the models in, so that
this module needs to know neither the harness nor the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SUFFIX = ".schema.json"


def schema(name: str, model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one kind of file."""
    out = model.model_json_schema(mode="validation")
    if name == "trainer":
        _accept_presets(out)
    _close(out)
    return {"$schema": _DIALECT, "$id": f"{name}{_SUFFIX}", **out}


def _close(node: Any) -> None:
    """Refuse keys of another pattern than the model's; pydantic's own schema lets them through."""
    if isinstance(node, dict):
        if len(patterns := node.pop("patternProperties", {})) == 1:
            (keys, values) = next(iter(patterns.items()))
            node |= {"propertyNames": {"pattern": keys}, "additionalProperties": values}
        node = list(node.values())
    for part in node if isinstance(node, list) else ():
        _close(part)


def render(models: Mapping[str, type[BaseModel]]) -> dict[str, str]:
    """File name to content, for every model."""
    return {f"{name}{_SUFFIX}": json.dumps(schema(name, model), indent=2, ensure_ascii=False) + "\n" for name, model in models.items()}


def write(folder: Path, models: Mapping[str, type[BaseModel]]) -> list[Path]:
    """Write every schema; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / name: text for name, text in render(models).items()}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


def drift(folder: Path, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """How the files differ from the models, one line per file; an empty list means that they agree."""
    rendered = render(models)
    have = {p.name: p.read_text(encoding="utf-8") for p in sorted(folder.glob(f"*{_SUFFIX}"))} if folder.is_dir() else {}
    lines = [f"{name}: is missing" for name in rendered if name not in have]
    lines += [f"{name}: differs from the models" for name in rendered if name in have and have[name] != rendered[name]]
    return lines + [f"{name}: no model has this name" for name in have if name not in rendered]


def _accept_presets(out: dict[str, Any]) -> None:
    """A configuration file may name a model, or a preset with some fields replaced; the resolved tree has all fields."""
    model = out["$defs"]["ModelConfig"]
    model["properties"] = {"preset": {"type": "string", "description": "A file in trainer/configs/models/."}, **model["properties"]}
    for part in ("ModelConfig", "VisionConfig"):
        out["$defs"][part].pop("required", None)
    out["properties"]["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelConfig"}]}
