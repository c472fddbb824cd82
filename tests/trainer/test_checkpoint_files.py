"""The index of a checkpoint does not depend on what a version of torch.distributed.checkpoint leaves in its own metadata."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from playbook.errors import ConfigError
from playbook_trainer.checkpoint_files import Header, LoadPlanner, Reader, SavePlanner, Writer, read_index
from playbook_trainer.torch.checkpoint import Pieces

pytestmark = pytest.mark.filterwarnings("ignore")


def pieces(fill=None):
    values = torch.arange(12.0).reshape(4, 3) if fill is None else torch.full((4, 3), fill)
    return {"model.a": Pieces((4, 3), torch.float32, [((0, 0), values[:1]), ((1, 0), values[1:])])}


def saved(root):
    header = Header(
        step=7, world_size=1, parallel={}, model={"eps": 1e-6}, data={"row": 14, "rows_per_step": 2, "lanes": {"0": [7, 0, 0, 0]}}
    )
    dcp.save(pieces(), storage_writer=Writer(root, header, keep=1), planner=SavePlanner(), no_dist=True)
    return root / "step_00000007"


def loaded(folder):
    found = pieces(fill=-1.0)
    dcp.load(found, storage_reader=Reader(folder, read_index(folder)), planner=LoadPlanner(), no_dist=True)
    return torch.cat([t for _, t in found["model.a"].pieces])


@pytest.mark.parametrize("fills_its_argument", [True, False])
def test_what_is_written_is_read_back(tmp_path, monkeypatch, fills_its_argument):
    finish = FileSystemWriter.finish
    if not fills_its_argument:  # as torch 2.11 does: it completes a copy
        monkeypatch.setattr(FileSystemWriter, "finish", lambda self, metadata, results: finish(self, copy.copy(metadata), results))
    assert torch.equal(loaded(saved(tmp_path)), torch.arange(12.0).reshape(4, 3))


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    moved = saved(tmp_path).rename(tmp_path / "step_00000009")
    with pytest.raises(ConfigError, match="is of step 7, and its folder of another"):
        read_index(moved)


def test_a_byte_that_has_changed_in_the_index_is_noticed(tmp_path):
    path = saved(tmp_path) / "checkpoint.json"
    written = path.read_bytes()
    read_index(path.parent)
    for at in range(len(written)):
        path.write_bytes(written[:at] + bytes([written[at] ^ 1 << at % 8]) + written[at + 1 :])
        with pytest.raises(ConfigError):
            read_index(path.parent)
    older = json.loads(written)
    del older["sha256"]
    path.write_text(json.dumps(older))
    assert read_index(path.parent).step == 7


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: i["tensors"]["model.a"]["pieces"].pop(), "has pieces for 3 of its 12 values"),
        (lambda i: i["tensors"]["model.a"]["pieces"][0].update(file="../../x.distcp"), "file"),
        (lambda i: i["tensors"]["model.a"]["pieces"][0].update(offsets=[4, 0]), "stick out"),
        (lambda i: i["tensors"]["model.a"].update(dtype="object"), "dtype"),
        (lambda i: i.update(schema="checkpoint/9"), "schema"),
        (lambda i: i["data"].update(row=True), "'row' must be a whole number of at least 0, found True"),
        (lambda i: i["data"].update(row=99999999999999999999), "'row' must be a whole number"),
        (lambda i: i["data"].update(row=10**12), "'row' must be step x rows_per_step = 7 x 2, found 1000000000000"),
        (lambda i: i["data"].update(lanes={"0": [0, 0, 0, 0]}), "'lanes' of 0 must hold the 7 rows made"),
        (lambda i: i["data"].update(lanes={"0": [7, 0, 0]}), "places of three numbers"),
        (lambda i: i["data"].update(lanes={"x": [7, 0, 0, 0]}), "expected numbers below rows_per_step 2"),
        (lambda i: i["data"].update(stream=7), "must be mappings"),
    ],
)
def test_a_damaged_index_is_refused(change, expected, tmp_path):
    path = saved(tmp_path) / "checkpoint.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=expected):
        read_index(path.parent)


def test_a_byte_that_has_changed_in_a_tensor_is_noticed(tmp_path):
    path = saved(tmp_path) / "__0_0.distcp"
    written, values = path.read_bytes(), torch.arange(3.0, 12.0).numpy().tobytes()
    assert values in written
    path.write_bytes(written.replace(values, values[:-2] + b"\x11" + values[-1:]))
    with pytest.raises(dcp.CheckpointException, match="not as they were written"):
        loaded(path.parent)


def test_flipped_bits_in_a_file_of_tensors_are_refused_or_change_nothing(tmp_path):
    path = saved(tmp_path) / "__0_0.distcp"
    written, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(200):
        at = rng.randrange(len(written))
        path.write_bytes(written[:at] + bytes([written[at] ^ 1 << rng.randrange(8)]) + written[at + 1 :])
        try:
            found = loaded(path.parent)
        except dcp.CheckpointException:
            refused += 1
        else:
            assert torch.equal(found, torch.arange(12.0).reshape(4, 3))
    assert refused > 50
