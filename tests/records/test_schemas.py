"""The exported schemas: equal to the models, valid as schemas, and of the same mind as the models about what ships."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from playbook import schemas, yaml_files
from playbook.paths import data_root
from playbook_app.cli.commands.schemas import schema_models
from playbook_trainer.config import recipes

FOLDERS = {"card": "cards", "case": "cases", "trainer": "configs"}


def exported(name):
    return json.loads((data_root("schemas") / f"{name}.schema.json").read_text(encoding="utf-8"))


def test_the_exported_files_do_not_differ_from_the_models():
    assert schemas.drift(data_root("schemas"), schema_models()) == []


def test_drift_names_what_is_missing_changed_and_left_over(tmp_path):
    models = schema_models()
    schemas.write(tmp_path, models)
    (tmp_path / "card.schema.json").unlink()
    (tmp_path / "case.schema.json").write_text("{}\n", encoding="utf-8")
    (tmp_path / "old.schema.json").write_text("{}\n", encoding="utf-8")
    assert schemas.drift(tmp_path, models) == [
        "card.schema.json: is missing",
        "case.schema.json: differs from the models",
        "old.schema.json: no model has this name",
    ]


def test_there_is_one_schema_for_each_kind_of_file():
    assert set(schema_models()) == {"card", "case", "cluster", "evidence", "hardware", "knobs", "machine", "run", "trainer"}


@pytest.mark.parametrize("name", sorted(schema_models()))
def test_a_schema_is_valid_and_closed(name):
    schema = exported(name)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_that_ships_fits_its_schema_and_names_it(name):
    validator, prefix = Draft202012Validator(exported(name)), "# yaml-language-server: $schema="
    folder = data_root(FOLDERS[name])
    paths = [p for p in (*sorted(folder.glob("*.yaml")), *sorted(folder.glob("recipes/*.yaml"))) if p.name != recipes.INDEX]
    assert paths
    assert [(path.name, e.message) for path in paths for e in validator.iter_errors(yaml_files.read(path)[0])] == []
    for path in paths:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(prefix), path.name
        assert (path.parent / first.removeprefix(prefix)).resolve() == (data_root("schemas") / f"{name}.schema.json").resolve()
