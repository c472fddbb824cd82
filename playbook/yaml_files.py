"""Reading YAML that others wrote: safe, strict, and with every problem placed at file:line:column."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from playbook.errors import FileError, Finding
from playbook.files import read_bytes
from playbook.paths import data_root

MAX_BYTES = 2_000_000
MAX_DEPTH = 40

KeyPath = tuple[str | int, ...]
"""The way to a value: the keys of mappings and the indices of lists."""
M = TypeVar("M", bound=BaseModel)


class Position(NamedTuple):
    """A place in a file, counted from 1."""

    line: int
    column: int


Positions = dict[KeyPath, Position]
"""The position of each value; that of an entry of a mapping is the position of its key."""


class Strict(BaseModel):
    """The base of every record in a file: unknown keys are errors, values are not coerced, numbers are finite, instances do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


# The scalars of YAML 1.2's core schema. PyYAML follows 1.1, where `on` is a boolean, `1e-4` a string and 2026-04 may become a date.
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
# Longer integers are no number that a card or a configuration holds, and converting them takes quadratic time.
_MAX_DIGITS = 30
_MAX_OPENERS = 1500
_DEEP_LINE = re.compile(r"^[ \t?:-]{300}", re.MULTILINE)


def parse_scalar(text: str) -> Any:
    """A plain YAML scalar as a Python value, by YAML 1.2's core schema."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= _MAX_DIGITS and _INT.match(text):
        return int(text.replace("_", ""))
    if len(text) <= _MAX_DIGITS and _FLOAT.match(text):
        return float(text)
    return _SPECIAL.get(text.lower(), text)


def read(path: Path) -> tuple[Any, Positions]:
    """The file's content and the position of each value; for an entry of a mapping, that of its key.

    Keys are text as written: `1: x` has the key "1".

    Raises:
        FileError: unreadable, too large, not YAML, an alias or a tag, a duplicate key, or a key that is a list or a mapping.
    """
    name = str(path)
    try:
        raw = read_bytes(path, MAX_BYTES)
        if len(raw) > MAX_BYTES:  # first: the last character may be cut
            raise FileError([Finding(name, 1, 1, f"is too large; at most {MAX_BYTES} bytes are read")])
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise FileError([Finding(name, 1, 1, f"is not UTF-8 text (byte {e.start}); save it as UTF-8")]) from e
    except (OSError, ValueError) as e:  # a name with a null byte is a ValueError
        raise FileError([Finding(name, 1, 1, f"cannot be read: {getattr(e, 'strerror', None) or e}")]) from e
    return parse(text, name)


@cache
def shipped_table(name: str) -> dict[str, Any]:
    """The content of a table that ships, such as `models.yaml`."""
    content: dict[str, Any] = read(data_root("tables") / name)[0]
    return content


def parse(text: str, name: str) -> tuple[Any, Positions]:
    """As `read`, for text already in memory; `name` stands for the file in messages."""
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise FileError([Finding(name, line, column, f"invalid YAML: {e.problem or e.context}")]) from e
    except yaml.reader.ReaderError as e:
        raise FileError([Finding(name, 1, 1, f"invalid YAML: {e.reason}")]) from e
    except RecursionError as e:
        raise FileError([Finding(name, 1, 1, "is nested too deeply")]) from e
    marks: Positions = {(): Position(1, 1)}
    findings: list[Finding] = []
    data = None if node is None else _plain_value(node, (), marks, findings, name, set())
    if findings:
        raise FileError(findings)
    return data, marks


def written(data: Any, width: int = 120) -> str:
    """Plain data as text of YAML, in its own order: by libyaml where it is built in, which writes the same six times as fast."""
    return str(yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, allow_unicode=True, width=width))


_NO_TAG = ""
"""The tag of each node whose tag is not written out; `parse_scalar` says what a plain scalar is, by other rules than PyYAML's."""


def _loader(name: str) -> Any:
    """A loader of PyYAML that does not ask what each scalar is; None where it is not built in."""
    loader = getattr(yaml, name, None)
    return loader and type("_Loader", (loader,), {"resolve": lambda *_: _NO_TAG})


_FAST, _SAFE = _loader("CSafeLoader"), _loader("SafeLoader")


def _compose(text: str) -> Any:
    """The document's nodes: by libyaml where it is built in and the text is tame, since it is ten times as fast."""
    # libyaml's composer recurses on the C stack; what could nest deeply goes to the other one, which raises instead of crashing.
    tame = text.count("[") + text.count("{") <= _MAX_OPENERS and not _DEEP_LINE.search(text)
    if _FAST is not None and tame:
        try:
            return yaml.compose(text, Loader=_FAST)
        except yaml.YAMLError:
            pass  # the other composer says it in the words that messages are made of
    return yaml.compose(text, Loader=_SAFE)


def _plain_value(node: Node, path: KeyPath, marks: Positions, findings: list[Finding], name: str, node_ids: set[int]) -> Any:
    """The plain value of a YAML node; positions go into `marks` (for an entry of a mapping, that of its key), faults into `findings`.

    `node_ids`: nodes that were read.
    """
    marks.setdefault(path, _position(node))

    def report(message: str, at: Node = node) -> None:
        findings.append(Finding(name, *_position(at), message))

    if len(path) > MAX_DEPTH:
        report(f"is nested more than {MAX_DEPTH} levels deep")
        return None
    if id(node) in node_ids:
        report("uses a YAML alias (*name); write the value out, so that a reader sees it where it is used")
        return None
    node_ids.add(id(node))
    if node.tag != _NO_TAG:
        report(f"uses the YAML tag {node.tag}; only plain values are read")
        return None
    if isinstance(node, ScalarNode):
        return node.value if node.style else parse_scalar(node.value)  # no style: a plain scalar
    if isinstance(node, SequenceNode):
        return [_plain_value(child, (*path, i), marks, findings, name, node_ids) for i, child in enumerate(node.value)]
    assert isinstance(node, MappingNode)
    out: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, ScalarNode):
            report("a key must be plain text", key_node)
            continue
        if key_node.tag != _NO_TAG:
            report(f"uses the YAML tag {key_node.tag}; only plain keys are read", key_node)
            continue
        key = key_node.value
        if key in out:
            first = marks[(*path, key)]
            report(f"duplicate key '{key}' (first at line {first.line}); keep one", key_node)
            continue
        marks[(*path, key)] = _position(key_node)
        out[key] = _plain_value(value_node, (*path, key), marks, findings, name, node_ids)
    return out


def _position(node: Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def load(path: Path, model: type[M]) -> tuple[M, Positions]:
    """The file as a typed record.

    Raises:
        FileError: everything `read` raises, and each field that does not fit `model`.
    """
    data, marks = read(path)
    return validate(data, marks, model, str(path)), marks


def validate(data: Any, marks: Positions, model: type[M], name: str) -> M:
    """`data` as a `model`, or FileError with one finding for each problem, placed by `marks`."""
    if not isinstance(data, Mapping):
        raise FileError([Finding(name, 1, 1, f"expected a mapping of keys to values, found {_kind(data)}")])
    try:
        return model.model_validate(data)
    except ValidationError as e:
        raise FileError([_finding(error, marks, model, name) for error in e.errors(include_url=False)]) from e


def locate(marks: Positions, path: KeyPath) -> Position:
    """The position of `path` (of its key, for an entry of a mapping), or of the nearest value around it."""
    while path not in marks and path:
        path = path[:-1]
    return marks.get(path, Position(1, 1))


def did_you_mean(word: str, options: typing.Iterable[str]) -> str:
    """'; did you mean 'x'?' or the list of options when none is near."""
    options = sorted(set(options))
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; expected one of: {', '.join(options)}" if options and len(options) <= 30 else ""


def _finding(error: Any, marks: Positions, model: type[BaseModel], name: str) -> Finding:
    """A pydantic error as a finding at its place in the file, in the words of the file's author."""
    # A union's branch adds its own name to the location; only what exists in the file names a place.
    where = tuple(part for part in error["loc"])
    clean = tuple(p for i, p in enumerate(where) if where[: i + 1] in marks or i == len(where) - 1)
    line, column = locate(marks, where if where in marks else clean)
    key = str(where[-1]) if where else ""
    kind = error["type"]
    dotted = ".".join(str(p) for p in where)
    if kind == "extra_forbidden":
        message = f"unknown key '{key}'{did_you_mean(key, _fields_at(model, where[:-1]))}"
    elif kind == "missing":
        message = f"'{key}' is missing"
        outer = ".".join(str(p) for p in where[:-1])
        message += f" in '{outer}'; add it" if outer else "; add it"
    elif kind == "literal_error":
        expected = str(error["ctx"]["expected"])
        options = [w[1:-1] if w.startswith("'") else w.lower() for w in re.findall(r"'[^']*'|True|False", expected)]
        hint = did_you_mean(str(error["input"]), options) if options else f"; expected {expected}"
        # The nearest spelling may be far from what was meant: 'gpu' is nearest to 'cpu'.
        choices = f" There are {', '.join(options)}" if hint.endswith("?") else ""
        message = f"'{dotted}' is {error['input']!r}{hint}{choices}"
    else:
        text = error["msg"].removeprefix("Value error, ")
        shown = repr(error["input"])
        input_clause = "" if kind == "value_error" else f", found {shown if len(shown) <= 60 else _kind(error['input'])}"
        message = f"'{dotted}': {text[0].lower()}{text[1:]}{input_clause}" if dotted else text
    return Finding(name, line, column, message)


def _fields_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    models: list[type[BaseModel]] = [model]
    for part in path:
        following: list[type[BaseModel]] = []
        for m in models:
            if isinstance(part, str) and part in m.model_fields:
                following += models_in(m.model_fields[part].annotation)
        models = following or models
    return [field.alias or n for m in models for n, field in m.model_fields.items()]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type has room for."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, list, tuple, dict, typing.Annotated):
        return [m for a in typing.get_args(annotation) for m in models_in(a)]
    return []


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )
