"""Reading YAML that others wrote."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from playbook import yaml_files
from playbook.errors import FileError


class Inner(yaml_files.Strict):
    size: int
    name: str = "x"


class Outer(yaml_files.Strict):
    inner: Inner
    items: list[Inner] = Field(default_factory=list)
    ratio: float = 0.0


def findings(text):
    """What is wrong with a file of this content."""
    try:
        data, marks = yaml_files.parse(text, "f.yaml")
        yaml_files.validate(data, marks, Outer, "f.yaml")
    except FileError as e:
        return [str(f) for f in e.findings]
    return []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("inner: {size: 1}\ninner: {size: 2}\n", "f.yaml:2:1: duplicate key 'inner' (first at line 1)"),
        ("inner:\n  size: 1\n  siez: 2\n", "f.yaml:3:3: unknown key 'siez'; did you mean 'size'?"),
        ("inner: {size: big}\n", "f.yaml:1:9: 'inner.size': input should be a valid integer, found 'big'"),
        ("inner: {size: true}\n", "'inner.size': input should be a valid integer"),
        ("inner: {}\n", "'size' is missing in 'inner'; add it"),
        ("inner: {size: 1}\nitems:\n  - {size: 1}\n  - {size: no}\n", "f.yaml:4:6:"),
        ("- 1\n", "expected a mapping of keys to values, found a list"),
        ("", "found nothing"),
        ("inner: &a {size: 1}\nitems: [*a]\n", "YAML alias"),
        ("inner: !!python/object/apply:os.system [ls]\n", "YAML tag"),
        ("inner: !secret x\n", "YAML tag"),
        ("inner: !!str 5\n", "YAML tag"),
        ("!!str inner: 5\n", "YAML tag"),
        ("? [a]\n: 1\n", "a key must be plain text"),
        ("inner: {size: 1\n", "invalid YAML"),
        ("inner: \x01\n", "invalid YAML"),
    ],
)
def test_each_fault_has_its_place_and_its_message(text, says):
    assert any(says in f for f in findings(text)), findings(text)


def test_every_problem_of_a_file_is_reported_at_once():
    assert len(findings("inner: {size: x, colour: 1}\nratio: y\nextra: 1\n")) == 4


def test_deep_nesting_is_refused_and_does_not_crash():
    assert any("nested" in f for f in findings("a: " + "[" * 500 + "]" * 500))
    assert any("nested" in f for f in findings("a: " + "[" * 100_000))


def test_files_that_cannot_be_read_are_findings(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    (tmp_path / "big.yaml").write_bytes(b"#" * (yaml_files.MAX_BYTES + 1))
    for name, says in (("latin.yaml", "UTF-8"), ("big.yaml", "at most"), ("none.yaml", "cannot be read"), (".", "cannot be read")):
        with pytest.raises(FileError, match=says):
            yaml_files.read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("1e-4", 1e-4),
        ("2026-04", "2026-04"),
        ("010", 10),
        ("~", None),
        ("1_000", 1000),
        ("0x10", "0x10"),
        ("12:30:45", "12:30:45"),
        ("1.5", 1.5),
        ("", None),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    found = yaml_files.parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_a_key_is_text_and_an_entry_has_the_position_of_its_key():
    data, positions = yaml_files.parse("1:\n    x\n", "f")
    assert data == {"1": "x"}
    assert positions["1",] == (1, 1)


@given(st.text(max_size=200))
def test_any_text_parses_or_is_a_finding(text):
    data, marks = None, {(): (1, 1)}
    with contextlib.suppress(FileError):
        data, marks = yaml_files.parse(text, "f")
    assert set(marks) >= {()}
    assert data is None or isinstance(data, dict | list | str | int | float | bool)


@pytest.mark.parametrize("number", [".inf", "-.INF", ".nan", "1e999"])
def test_a_number_that_is_not_finite_is_no_number(number):
    data, marks = yaml_files.parse(f"inner: {{size: 1}}\nratio: {number}\n", "f.yaml")
    with pytest.raises(FileError, match=r"f\.yaml:2:1: 'ratio': input should be a finite number"):
        yaml_files.validate(data, marks, Outer, "f.yaml")
