"""The exported schemas are the door: they refuse the same files as the models, shown on shipped files with one value changed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from playbook import schemas, yaml_files
from playbook.cards.model import Card
from playbook.errors import FileError
from playbook.paths import data_root, repo_root
from playbook.records.case import Case
from playbook.records.evidence import Evidence
from playbook_bench.launch.slurm import Cluster
from playbook_bench.run import store

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


@settings(max_examples=600)
@given(st.data())
def test_schema_and_model_refuse_the_same_files(draw):
    model, data = draw.draw(st.sampled_from(FILES))
    where = draw.draw(st.sampled_from(places(data)))
    changed = mutated(data, where, draw.draw(st.sampled_from(["replace", "remove", "add"])), draw.draw(ODD))
    refused = schemas.check(changed, model.SCHEMA)
    assert bool(refused) == model_refuses(model, changed), (where, refused)


@pytest.mark.parametrize(("model", "data"), FILES)
def test_files_that_ship_pass(model, data):
    assert schemas.check(data, model.SCHEMA) == []


def test_what_the_schema_alone_refuses_is_a_finding_at_its_place(monkeypatch):
    """Were the two to differ, the stricter one decides."""
    monkeypatch.setattr(schemas, "check", lambda *_: [schemas.Refusal(("time",), "is refused")])
    data, marks = yaml_files.parse("nodes: 1\ntime: 2h\n", "cluster.yaml")
    with pytest.raises(FileError, match=r"cluster\.yaml:2:1: 'time': is refused"):
        yaml_files.validate(data, marks, Cluster, "cluster.yaml")


def test_a_record_comes_through_the_door_before_it_is_replayed_or_accepted(tmp_path, monkeypatch):
    path = next((repo_root() / "bench/results/cpu").glob("*.json"))
    monkeypatch.setattr(schemas, "check", lambda *_: [schemas.Refusal(("measured", "plan"), "is refused")])
    with pytest.raises(Exception, match=r"measured\.plan: is refused"):
        store.load(path)
