"""The exported schemas, by which editors check files, refuse the same files as the models that commands read them by: shown on shipped files with one value changed."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, validators
from pydantic import ValidationError

from playbook import yaml_files
from playbook.cards.model import Card
from playbook.paths import data_root
from playbook.records.case import Case
from playbook.records.evidence import Evidence
from playbook_app.cli.commands.schemas import schema_models
from playbook_bench.launch.slurm import Cluster

CLUSTER = {
    "partition": "gpu",
    "time": "2h",
    "nodes": 2,
    "container": {"image": "i.sqsh", "mounts": ["/data:/data"]},
    "environment": {"NCCL_DEBUG": "INFO"},
    "sbatch": {"reservation": "r"},
}


def record(path) -> Any:
    """A record cut down to two launches of three steps, so that mutations meet other parts too."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for runs in (data["measured"]["runs"], (data["measured"]["aa"] or {}).get("runs", [])):
        del runs[2:]
        for run in runs:
            del run["samples"][3:]
    return data


def files() -> list[tuple[type[Any], Any]]:
    cards = [(Card, yaml_files.read(p)[0]) for p in sorted(data_root("cards").glob("*.yaml"))[::4]]
    cases = [(Case, yaml_files.read(p)[0]) for p in sorted(data_root("cases").glob("*.yaml"))[::12]]
    records = [(Evidence, record(p)) for p in sorted(data_root("results").glob("[ch]*/*.json"))[::12]]
    return [*cards, *cases, (Cluster, CLUSTER), *records]


FILES = files()


@cache
def validator(model: type[Any]) -> Any:
    """Of the exported schema, with numbers and patterns as the models read them: 1.0 is no integer, infinity no number, and `$` is the end."""

    def integer(_: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def number(_: Any, value: Any) -> bool:
        return integer(_, value) or (isinstance(value, float) and math.isfinite(value))

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", wanted), value):
            yield jsonschema.ValidationError(f"{value[:60]!r} does not match {wanted}")

    types = Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": integer, "number": number})
    (name,) = (name for name, exported in schema_models().items() if exported is model)
    text = (data_root("schemas") / f"{name}.schema.json").read_text(encoding="utf-8")
    return validators.extend(Draft202012Validator, {"pattern": pattern}, type_checker=types)(json.loads(text))


def accepts(model: type[Any], data: Any) -> bool:
    return validator(model).is_valid(data)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, -1.5, 1e300, float("inf"), float("nan"), 10**25]),
    st.text(max_size=4),
    st.sampled_from(["a\n", "A1", "a-b", "2026-04", "2026-04\n", "confirmed", ">=", "percent"]),
    st.sampled_from([[], {}, [1], ["a"], [None], {"a": 1}, {"a": {}}, {"value": 1, "unit": "percent"}]),
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


def mutated(data: Any, where: tuple[Any, ...], how: str, value: Any) -> Any:
    """The data with one value replaced or removed, or with one key more."""
    out = copy.deepcopy(data)
    if not where:
        return value if how == "replace" else out
    node = out
    for key in where[:-1]:
        node = node[key]
    if how == "replace":
        node[where[-1]] = value
    elif how == "remove":
        del node[where[-1]]
    elif isinstance(node, dict):
        node["no_such_key"] = value
    return out


def model_refuses(model: type[Any], data: Any) -> bool:
    """Whether the model does, rules aside that no schema can say, such as that ids are unique."""
    try:
        model.model_validate(data)
    except ValidationError as e:
        return any(error["type"] != "value_error" for error in e.errors())
    return False


@settings(max_examples=100)
@given(st.data())
def test_schema_and_model_refuse_the_same_files(draw):
    model, data = draw.draw(st.sampled_from(FILES))
    where = draw.draw(st.sampled_from(places(data)))
    changed = mutated(data, where, draw.draw(st.sampled_from(["replace", "remove", "add"])), draw.draw(ODD))
    assert (not accepts(model, changed)) == model_refuses(model, changed), where
