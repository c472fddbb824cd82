"""Which layouts a checkpoint of the megatron backend can be resumed with."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from wild import Called

pytest.importorskip("megatron.core")
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader

from playbook.errors import ConfigError, DataError
from playbook.paths import data_root
from playbook_trainer.checkpoint_files import Best
from playbook_trainer.config.tree import TrainerConfig, dump, load
from playbook_trainer.megatron import wrap
from playbook_trainer.megatron.checkpoints import MegatronHeader, MegatronSaver, difference, read_index, reading

pytestmark = pytest.mark.full

FORM = "torch_dist"
READERS = [dcp.FileSystemReader, CachedMetadataFileSystemReader]


def config(**parallel: Any) -> TrainerConfig:
    keys = {f"parallel.{k}": v for k, v in parallel.items()}
    return load(data_root("configs") / "qwen3_moe_tiny.yaml", {"backend": "megatron", **keys})


@pytest.mark.parametrize(
    ("saved", "now", "refused"),
    [(None, 2, None), (2, None, None), (None, 1, "was saved with etp 2 where this run has 1, and this backend resumes with the same ones")],
)
def test_an_etp_that_is_not_set_is_that_of_tp(saved: int | None, now: int | None, refused: str | None) -> None:
    told = dump(config(tp=2, etp=saved))
    header = MegatronHeader(step=2, world_size=4, parallel=told["parallel"], model=told["model"], data={"row": 0}, format=FORM)
    assert difference(header, config(tp=2, etp=now), FORM) == refused


Saver = Callable[..., MegatronSaver]


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    """A saver of one rank, whose tensors are read and written by what a test says."""
    monkeypatch.setattr(wrap, "tops", lambda *_: [])
    monkeypatch.setattr(wrap, "make_state", lambda *_: None)
    monkeypatch.setattr(wrap, "own_steps", lambda *_: None)
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)

    def made(folder: Path, fault: BaseException | None = None) -> MegatronSaver:
        def planted(*_: Any) -> None:
            if fault is not None:
                raise fault

        monkeypatch.setattr(MegatronSaver, "_write", planted)
        monkeypatch.setattr(MegatronSaver, "_load", planted)
        keys = {"backend": "megatron", "checkpoint.dir": str(folder), "megatron.data_parallel": "distributed_optimizer"}
        axes: Any = SimpleNamespace(world=SimpleNamespace(rank=0, size=1))
        return MegatronSaver(load(data_root("configs") / "qwen3_moe_tiny.yaml", keys), axes, [], None)

    return made


@pytest.mark.parametrize(
    "fault",
    [EOFError("Ran out of input"), ValueError("Expecting value: line 1"), pickle.UnpicklingError("cut"), OSError(5, "Input/output error")],
    ids=lambda e: type(e).__name__,
)
def test_files_that_cannot_be_read_are_one_message(fault: BaseException, saver: Saver, tmp_path: Path) -> None:
    assert saver(tmp_path).save(2, {"row": 0}) is None
    with pytest.raises(ConfigError, match=r"step_00000002 cannot be read: \w.*; move it elsewhere"):
        saver(tmp_path, fault).restore()


def test_the_best_checkpoint_stays_beside_the_newest(saver: Saver, tmp_path: Path) -> None:
    one, best = saver(tmp_path), Best(step=2, loss=1.5)
    for step in (2, 4, 6, 8):
        assert one.save(step, {"row": 0}, best) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step_00000002", "step_00000006", "step_00000008"]
    assert (tmp_path / "best").resolve().name == "step_00000002"
    header = saver(tmp_path).restore()
    assert header is not None
    assert header.best == best


@pytest.fixture
def whole(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Saves a tensor, an object and what all ranks have in common, as megatron-core's two formats do; then reads them with a reader."""

    def write(_: MegatronSaver, folder: Path) -> None:
        dcp.save({"a": torch.arange(12.0), "rate": (0.5, None)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        torch.save({"b": torch.arange(12.0)}, folder / "common.pt")

    one = saver(tmp_path)
    monkeypatch.setattr(MegatronSaver, "_write", write)
    assert one.save(2, {"row": 0}) is None

    def read(reader: type) -> Any:
        found: dict[str, Any] = {"a": torch.zeros(12), "rate": None}

        def load(_: MegatronSaver, folder: Path) -> None:
            dcp.load(found, storage_reader=reader(folder), no_dist=True)
            found["b"] = torch.load(folder / "common.pt")["b"]

        monkeypatch.setattr(MegatronSaver, "_load", load)
        # megatron-core 0.19 keeps the index of a folder for as long as the process lives; a run reads one once.
        getattr(reader, "clear_metadata_cache", lambda: None)()
        one.restore()
        return found["a"].tolist(), found["rate"], found["b"].tolist()

    return read


def without_sums(folder: Path) -> None:
    header = json.loads((folder / "checkpoint.json").read_text())
    del header["sha256"], header["files"]
    (folder / "checkpoint.json").write_text(json.dumps(header))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.__name__)
@pytest.mark.parametrize("planted", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_hostile_checkpoint_runs_no_code(planted: str, reader: type, whole: Callable[..., Any], tmp_path: Path) -> None:
    folder, marker = tmp_path / "step_00000002", tmp_path / "executed"
    assert whole(reader)[1] == (0.5, None)
    path, bomb, stretch = folder / planted, Called(os.mkdir, str(marker)), io.BytesIO()
    with path.open("rb") as file:
        index = pickle.load((folder / ".metadata").open("rb"))
        content = file.read()
    if planted == ".metadata":
        index.planner_data = bomb
        path.write_bytes(pickle.dumps(index))
    elif planted == "common.pt":
        torch.save({"b": bomb}, path)
    else:  # the stretch of the file that holds the object
        torch.save(bomb, stretch)
        place = next(place for key, place in index.storage_data.items() if key.fqn == "rate")
        place.offset, place.length = len(content), len(stretch.getvalue())
        path.write_bytes(content + stretch.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    without_sums(folder)  # who writes the one can write the other
    with pytest.raises(ConfigError, match=r"step_00000002 cannot be read: .*; move it elsewhere") as said:
        whole(reader)
    assert not marker.exists()
    assert "mkdir" in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.__name__)
@pytest.mark.parametrize("sums", [True, False])
def test_flipped_bits_are_refused_or_change_nothing(sums: bool, reader: type, whole: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "step_00000002"
    if not sums:  # as older versions wrote it; there the index has no checksum
        without_sums(folder)
    expected = whole(reader)
    rng = random.Random(0)
    names = [p.name for p in folder.iterdir() if p.name != "checkpoint.json"] if sums else [".metadata"]
    passed = set()
    for name in names:
        said = ""
        written = (folder / name).read_bytes()
        for _ in range(200):
            at = rng.randrange(len(written))
            (folder / name).write_bytes(written[:at] + bytes([written[at] ^ 1 << rng.randrange(8)]) + written[at + 1 :])
            try:
                assert whole(reader) == expected or not sums
                passed.add(name)
            except ConfigError as e:
                said += str(e)
        (folder / name).write_bytes(written)
        assert f"bytes of {name} are not as they were written, by their checksum; move it elsewhere" in said or not sums
    assert not sums or passed <= {"__0_0.distcp"}, "in a file of tensors, between what is read"


def test_a_file_that_is_gone_is_noticed(whole: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "step_00000002" / "common.pt").unlink()
    with pytest.raises(ConfigError, match=r"common\.pt is missing; move it elsewhere"):
        whole(dcp.FileSystemReader)


def test_a_byte_that_has_changed_in_the_header_is_noticed(saver: Saver, tmp_path: Path) -> None:
    assert saver(tmp_path).save(2, {"row": 0}) is None
    path = tmp_path / "step_00000002" / "checkpoint.json"
    written = json.loads(path.read_text())
    path.write_text(path.read_text().replace('"row":0', '"row":8'))
    with pytest.raises(ConfigError, match="not as they were written, by their checksum; the checkpoint is damaged"):
        saver(tmp_path).restore()
    del written["sha256"]
    path.write_text(json.dumps(written))
    assert saver(tmp_path).restore() is not None, "one of an older version"


@pytest.mark.parametrize("fault", [torch.cuda.OutOfMemoryError("CUDA out of memory"), dist.DistNetworkError("a peer has gone")])
def test_nobody_is_told_to_remove_a_checkpoint_that_is_not_to_blame(fault: BaseException, saver: Saver, tmp_path: Path) -> None:
    assert saver(tmp_path).save(2, {"row": 0}) is None
    with pytest.raises(type(fault)):
        saver(tmp_path, fault).restore()


def test_a_checkpoint_that_cannot_be_written_is_said_wherever_it_stops(saver: Saver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the checkpoint of step 2 could not be written to .*: Not a directory"):
        saver(tmp_path / "file").save(2, {"row": 0})
    with pytest.raises(DataError, match="as where a disk or a quota is full"):
        saver(tmp_path, RuntimeError("basic_ios::clear: iostream error")).save(2, {"row": 0})
    (tmp_path / "step_00000002" / "of another run").mkdir(parents=True)
    with pytest.raises(DataError, match=r"could not be written to .*: Directory not empty"):
        saver(tmp_path).save(2, {"row": 0})
    with pytest.raises(RuntimeError, match="a fault of another kind"):
        saver(tmp_path, RuntimeError("a fault of another kind")).save(4, {"row": 0})


@pytest.mark.parametrize(("recipe", "streams"), [("tensorwise", False), ("blockwise", None)])
def test_8_bit_weights_with_one_scale_are_not_read_in_pieces(recipe: str, streams: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.19 does, unless it is told: each piece would set the scale of all."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    class Reader:
        def __init__(self, cache_metadata: bool = False, stream_ckpt_dequant: bool = True) -> None:
            self.streams = stream_ckpt_dequant

    keys = {"backend": "megatron", "train.dtype": "bf16", "precision.fp8": recipe, "megatron.fp8_param": True}
    config = load(data_root("configs") / "qwen3_moe_tiny.yaml", keys)
    monkeypatch.setattr(strategies, "TorchDistLoadShardedStrategy", Reader)
    assert getattr(reading(config).get("sharded_strategy"), "streams", None) is streams


def test_an_index_of_a_python_that_pickles_members_by_name_is_read_and_no_other_attribute() -> None:
    """Early releases of Python 3.11 pickle a member of an enumeration by `getattr`."""

    def index(holder: object, name: str) -> bytes:
        return pickle.dumps(dcp.Metadata(state_dict_metadata={}, planner_data=Called(getattr, holder, name)))

    member = MemoryFormat.TORCH_CONTIGUOUS_FORMAT
    assert read_index(index(MemoryFormat, "TORCH_CONTIGUOUS_FORMAT")).planner_data is member
    for holder, name in ((MemoryFormat, "__init__"), (dcp.Metadata, "__init__"), ("text", "format")):
        with pytest.raises(pickle.UnpicklingError, match="no member of an enumeration"):
            read_index(index(holder, name))
