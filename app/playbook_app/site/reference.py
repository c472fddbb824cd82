"""Pages made from tables that other parts own: metrics, commands, the trainer's configuration, and parity: what the trainer's numbers were
compared with, and how far apart they were.

The rows of parity come from the tests themselves, which write them where the environment variable PLAYBOOK_PARITY names a folder
(`make parity`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playbook.errors import FileError, Finding
from playbook_app.site import curves
from playbook_app.site.pages import markdown, render
from playbook_app.site.text import code, plain


@dataclass(frozen=True)
class CommandHelp:
    """One command of the command line."""

    name: str
    summary: str
    usage: str
    options: list[tuple[str, str]] = field(default_factory=list)
    """Each option or argument as written, and what it does."""


def configuration_page(schema: Mapping[str, Any], docs: Mapping[tuple[str, str], str]) -> str:
    """Every key of the trainer's configuration, from its JSON Schema and the comments beside the fields."""
    definitions = schema.get("$defs", {})
    alone: list[list[Any]] = []
    sections: list[dict[str, Any]] = [{"name": "", "rows": alone}]
    for name, value in schema.get("properties", {}).items():
        inner = _target(value, definitions)
        if inner is None:
            alone.append(_row(name, value, definitions, docs.get((str(schema.get("title")), name), "")))
        else:
            rows = list(_section(name, inner, definitions, docs))
            sections.append({"name": name, "meaning": definitions[inner].get("description", ""), "rows": rows})
    return render("configuration.md", sections=sections)


def _section(prefix: str, name: str, definitions: Mapping[str, Any], docs: Mapping[tuple[str, str], str]) -> Iterator[list[Any]]:
    for key, value in definitions[name].get("properties", {}).items():
        inner = _target(value, definitions)
        if inner is not None and inner != name:
            yield from _section(f"{prefix}.{key}", inner, definitions, docs)
        else:
            yield _row(f"{prefix}.{key}", value, definitions, docs.get((name, key), ""))


def _target(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str | None:
    """The definition that a property refers to, alone or beside null."""
    for option in [value, *value.get("anyOf", []), *value.get("allOf", [])]:
        name = str(option.get("$ref", "")).removeprefix("#/$defs/")
        if name in definitions and "properties" in definitions[name]:
            return name
    return None


def _row(key: str, value: Mapping[str, Any], definitions: Mapping[str, Any], doc: str) -> list[Any]:
    default = plain(value.get("default", ""))
    default = markdown(code(default)) if default else ""
    return [key, _type(value), default, value.get("description") or doc]


def _type(value: Mapping[str, Any]) -> str:
    """The type of a value in words, from its JSON Schema."""
    if "enum" in value:
        return " or ".join(map(str, value["enum"]))
    if "anyOf" in value:
        return " or ".join(_type(v) for v in value["anyOf"])
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}))}"
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
        "object": "mapping",
    }
    low = (
        f" above {value['exclusiveMinimum']}" if "exclusiveMinimum" in value else f" from {value['minimum']}" if "minimum" in value else ""
    )
    return names.get(str(value.get("type")), "any") + low


def field_docs(source: str) -> dict[tuple[str, str], str]:
    """The text below each field of each class in a module: (class, field) to text."""
    out = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for item, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr):
                    value = following.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        out[node.name, item.target.id] = value.value
    return out


MODELS = "models.jsonl"
LAYOUTS = ("layouts.jsonl", "layouts-nccl.jsonl")
"""Over gloo, as `make parity` writes them on any machine; over NCCL, from the tests marked `multigpu` on a machine that has the GPUs."""
CURVES = "vl-curves.jsonl"

MEGATRON = ("megatron.jsonl", "megatron-gpu.jsonl")
"""On the CPU, as `make parity` writes them; on a GPU, from the tests marked `gpu`."""


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file, one JSON object per line.

    Raises:
        FileError: a line that is no object, or that lacks one of the wanted keys.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], start=1):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise FileError([Finding(str(path), number, 1, f"is no JSON ({e}); write it anew with `make parity`")]) from e
        if not isinstance(row, dict) or any(key not in row for key in keys):
            raise FileError([Finding(str(path), number, 1, f"expected an object with {', '.join(keys)}; write it anew with `make parity`")])
        rows.append(row)
    return rows


def parity_page(folder: Path) -> str:
    """The page, from the rows below `folder`.

    Raises:
        FileError: rows of another shape.
    """
    of_layouts = ("layout", "ranks", "steps", "loss", "grad_norm", "torch", "backend")
    of_megatron = (
        "model", "against", "ranks", "kernels", "device", "dtype", "logits", "loss", "gradients", "tolerance", "megatron_core", "torch",
    )  # fmt: skip
    layouts = [row for name in LAYOUTS for row in read_rows(folder / name, of_layouts)]
    return render(
        "parity.md",
        models=read_rows(folder / MODELS, ("model", "batch", "logits", "loss", "gradients", "worst", "torch", "transformers")),
        layouts=sorted(layouts, key=lambda r: (r["backend"] != "gloo", r["layout"])),
        megatron=[row for name in MEGATRON for row in read_rows(folder / name, of_megatron)],
        curves=markdown("\n".join(curves.section(read_rows(folder / CURVES, curves.WANTED)))),
    )
