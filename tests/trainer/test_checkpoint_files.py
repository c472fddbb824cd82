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
    return {"model.a": Pieces((4, 3), torch.float32, lambda: [((0, 0), values[:1]), ((1, 0), values[1:])])}


def written(folder):
    """The folder of a checkpoint."""
    header = Header(step=7, world_size=1, parallel={}, model={"eps": 1e-6}, data={"row": 0})
    dcp.save(pieces(), storage_writer=Writer(folder, header, keep=1), planner=SavePlanner(), no_dist=True)
    return folder / "step_00000007"


def read(folder):
    found = pieces(fill=-1.0)
    dcp.load(found, storage_reader=Reader(folder, read_index(folder)), planner=LoadPlanner(), no_dist=True)
    assert torch.equal(torch.cat([t for _, t in found["model.a"].pieces]), torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize("fills_its_argument", [True, False])
def test_what_is_written_is_read_back(tmp_path, monkeypatch, fills_its_argument):
    finish = FileSystemWriter.finish
    if not fills_its_argument:  # as torch 2.11 does: it completes a copy
        monkeypatch.setattr(FileSystemWriter, "finish", lambda self, metadata, results: finish(self, copy.copy(metadata), results))
    read(written(tmp_path))


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    folder = written(tmp_path)
    moved = folder.rename(folder.with_name("step_00000009"))
    with pytest.raises(ConfigError, match="is of step 7, and its folder of another"):
        read_index(moved)


def test_a_byte_that_has_changed_in_the_index_is_noticed(tmp_path):
    path = written(tmp_path) / "checkpoint.json"
    whole = path.read_bytes()
    read_index(path.parent)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(ConfigError):
            read_index(path.parent)
    older = json.loads(whole)
    del older["sha256"]
    path.write_text(json.dumps(older))
    assert read_index(path.parent).step == 7


def test_an_index_that_leaves_a_part_of_a_tensor_out_is_refused(tmp_path):
    path = written(tmp_path) / "checkpoint.json"
    index = json.loads(path.read_text())
    del index["sha256"], index["tensors"]["model.a"]["pieces"][1]
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="has pieces for 3 of its 12 values"):
        read_index(path.parent)


def test_flipped_bits_in_a_file_of_tensors_are_refused_or_change_nothing(tmp_path):
    path = written(tmp_path) / "__0_0.distcp"
    whole, rng = path.read_bytes(), random.Random(0)
    said = []
    for _ in range(200):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        try:
            read(path.parent)
        except dcp.CheckpointException as e:
            said.append(str(e))
    assert len(said) > 50
    assert any("not as they were written" in each for each in said)
