"""Reference pages made from tables that other parts own: metrics, commands, the trainer's configuration."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from playbook.site.text import block, code, front_matter, plain, table, text


@dataclass(frozen=True)
class Command:
    """One command of the command line."""

    name: str
    summary: str
    usage: str
    options: list[tuple[str, str]] = field(default_factory=list)
    """Each option or argument as written, and what it does."""


def metrics_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The metrics that a claim may name."""
    cells = [
        [
            code(r["name"]),
            text(r["unit"]),
            text(r["better"]),
            "exact" if r["deterministic"] else "measured",
            text(r["help"]),
            "yes" if r["per_step"] else "",
        ]
        for r in rows
    ]
    intro = (
        "A claim names one of these. Exact metrics need one pair and no statistics; measured ones are compared over launches. "
        "A metric per step means nothing where the variants do different work in a step."
    )
    head = ["Metric", "Unit", "Better", "Kind", "Meaning", "Per step"]
    return "\n\n".join([front_matter("Metrics", search="boost: 0.3"), "# Metrics", intro, table(head, cells)]) + "\n"


def commands_page(commands: Sequence[Command]) -> str:
    """Every command with its options."""
    parts = [
        front_matter("Commands", search="boost: 0.3"),
        "# Commands",
        "Every command answers `--help`. The exit codes are in [Exit codes](../guide/exit-codes.md).",
    ]
    for c in commands:
        parts += [f"## {text(c.name)}", text(c.summary), block(c.usage, "text")]
        if c.options:
            parts.append(table(["Argument or option", "Meaning"], [[code(o), text(h)] for o, h in c.options]))
    return "\n\n".join(parts) + "\n"


def configuration_page(schema: Mapping[str, Any], docs: Mapping[tuple[str, str], str]) -> str:
    """Every key of the trainer's configuration, from its JSON Schema and the comments beside the fields."""
    definitions = schema.get("$defs", {})
    parts = [
        front_matter("Trainer configuration", search="boost: 0.3"),
        "# Trainer configuration",
        "One YAML tree. Unknown keys are errors; `key.path=value` on the command line replaces a value. "
        "`model` may also be the name of a file in `trainer/configs/models/`.",
    ]
    rows: list[list[str]] = []
    for name, value in schema.get("properties", {}).items():
        inner = _target(value, definitions)
        if inner is None:
            rows.append(_row(name, value, definitions, docs.get((str(schema.get("title")), name), "")))
    parts.append(table(["Key", "Type", "Default", "Meaning"], rows))
    for name, value in schema.get("properties", {}).items():
        inner = _target(value, definitions)
        if inner is not None:
            parts += [f"## {text(name)}", text(definitions[inner].get("description", ""))]
            parts.append(table(["Key", "Type", "Default", "Meaning"], list(_section(name, inner, definitions, docs))))
    return "\n\n".join(parts) + "\n"


def _section(prefix: str, name: str, definitions: Mapping[str, Any], docs: Mapping[tuple[str, str], str]) -> Iterator[list[str]]:
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


def _row(key: str, value: Mapping[str, Any], definitions: Mapping[str, Any], doc: str) -> list[str]:
    default = code(plain(value["default"])) if "default" in value else ""
    return [code(key), text(_type(value)), default, text(value.get("description") or doc)]


def _type(value: Mapping[str, Any]) -> str:
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
