"""A wrong row of the table of GPUs ends in one message that names row and field; every shipped row passes, and none of its figures is idle."""

from __future__ import annotations

import copy

import pytest
import yaml

from playbook.errors import FileError
from playbook.paths import repo_root
from playbook.planner.time.cluster import read_gpus

TABLE = repo_root() / "playbook" / "clusters" / "gpus.yaml"
SHIPPED = read_gpus(TABLE)
WRONG = {
    "bf16_tflops": (-1, 0, "fast", True, 1e9), "memory_gib": (0, "80 GB", None, 1e6), "host_speed": (0, 100), "domain": (0, 1.5, -8),
    "nic_gb_s": ("400G", 0), "bf16_reached": (0, 80.3, 1.01), "link_gb_s": (0, []), "memory_gb_s": (0, {}), "fp8_reached": (2,),
    "board_w": (1,), "stragglers": (-0.1, 7), "node": (0, 0.5), "fp8_tflops": (0,), "transferred": (-0.1, 8),
    "rings": ({2: [33]}, {1: [33, 270]}, {"two": [33, 270]}, {2: [33, 0]}, [33, 270]),
    "large": ({"bf16": 0.5}, {"bf16": 50, "fp8": 0.5, "attention": 0.8}, 0.5),
}  # fmt: skip


def message(tmp_path, name, row):
    """What a table that has this row alone is answered with."""
    path = tmp_path / "gpus.yaml"
    path.write_text(yaml.safe_dump({"sources": SHIPPED["sources"], "gpus": {name: row}}, sort_keys=False), encoding="utf-8")
    with pytest.raises(FileError) as refused:
        read_gpus(path)
    (line,) = str(refused.value).splitlines()
    return line


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_a_row_is_refused_by_its_name_and_field_where_a_figure_is_wrong(tmp_path, name):
    for field in SHIPPED["gpus"][name]:
        if field != "names":
            row = copy.deepcopy(SHIPPED["gpus"][name])
            row[field] = [WRONG[field][0], row[field][1]]
            assert f"gpus.{name}.{field}: " in message(tmp_path, name, row)
            row[field] = [SHIPPED["gpus"][name][field][0], "nobody"]
            assert f"gpus.{name}.{field}: source 'nobody' is not among the table's sources" in message(tmp_path, name, row)


@pytest.mark.parametrize("field", WRONG)
def test_every_figure_has_bounds_and_a_kind(tmp_path, field):
    for value in WRONG[field]:
        found = message(tmp_path, "new", {**SHIPPED["gpus"]["b200"], field: [value, "kin"]})
        assert f"gpus.new.{field}: " in found
        assert "expected" in found


def test_what_is_missing_misspelt_or_no_pair_is_named_with_its_line(tmp_path):
    whole = SHIPPED["gpus"]["h100"]
    for field in ("bf16_tflops", "memory_gib", "memory_gb_s", "link_gb_s", "domain", "nic_gb_s", "bf16_reached", "host_speed"):
        found = message(tmp_path, "new", {k: v for k, v in whole.items() if k != field})
        assert f"gpus.new: has no {field}; add {field}: [value, source]" in found
    assert "gpus.new.memory_gb: is no figure of a GPU; did you mean 'memory_gib'?" in message(
        tmp_path, "new", {**whole, "memory_gb": [80, "kin"]}
    )
    assert "gpus.new.domain: expected [value, source], found 8" in message(tmp_path, "new", {**whole, "domain": 8})
    assert "gpus.new.names: expected a list of names" in message(tmp_path, "new", {**whole, "names": "H100"})
    found = message(tmp_path, "new", {**whole, "domain": [0, "hopper"]})
    path, line, *_ = found.split(":")
    assert (tmp_path / "gpus.yaml").read_text(encoding="utf-8").splitlines()[int(line) - 1].strip() == "domain:"
    assert path.endswith("gpus.yaml")
