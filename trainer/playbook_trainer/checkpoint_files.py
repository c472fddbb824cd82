"""The files of a checkpoint: tensors as torch.distributed.checkpoint writes them, and an index of our own that is plain JSON.

    <dir>/step_00000020/checkpoint.json     step, data position, model, and where each piece of each tensor lies
                        __0_0.distcp ...    one file per rank
                        .metadata           the library's own index, for other tools; a pickle, which nothing here ever opens
    <dir>/.writing-00000040/                being written; it gets its final name once every rank has written everything

Reading cannot run code: the index is JSON, and the tensors are read with weights_only. What the index says about the data stream decides
whether a run can go on from it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import torch
import torch.distributed as dist
import yaml
from pydantic import Field, ValidationError, model_validator
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from playbook import files
from playbook.errors import ConfigError
from playbook.yaml_files import Strict
from playbook_trainer.config.tree import CheckpointConfig, TrainerConfig, dump

_KEYS = ("kind", "path", "source", "subset", "text_key", "tokenizer", "seq_len", "pack")
_OTHER = "set {key} back, or choose another checkpoint.dir to start anew"


def identity(config: TrainerConfig) -> dict[str, Any]:
    """The configuration keys, with their values, that decide which documents are read and in which order.

    Sizes of images and of the packing buffer are not among it: with others, every place in the stream still means the same sample.
    """
    data = dump(config)["data"]
    keys = {"seed": config.seed} | {f"data.{key}": data[key] for key in _KEYS}
    if config.data.path is not None:
        keys["data.path"] = Path(config.data.path).name  # the same data may lie on another file system by now
    keys["eval.path"] = "set" if config.eval.path is not None else None  # with it, no training sample is held out
    keys["train.epochs"] = "set" if config.train.epochs is not None else None  # with it, rows are planned over whole epochs
    if config.data.source == "generated":
        del keys["data.path"]  # a cache of what is made
        keys |= {f"data.generated.{key}": value for key, value in data["generated"].items()}
    return keys


def other_stream(state: Mapping[str, Any], config: TrainerConfig) -> str | None:
    """Why the stream that a checkpoint has read is not the one of this configuration, if so; what it does not say is not compared."""
    saved, current = state.get("stream", {}), identity(config)
    if saved:  # from before there was that key
        saved = {"eval.path": None, "train.epochs": None, **saved}
    for key in current:
        if key not in saved or saved[key] == current[key]:
            continue
        if key == "data.source" and "auto" in (saved[key], current[key]):
            continue  # whatever it finds at the path
        return f"the checkpoint's data stream has {key} {_shown(saved[key])}, this run has {_shown(current[key])}; {_OTHER.format(key=key)}"
    return None


def _state_problem(state: Mapping[str, Any], step: int) -> str | None:
    """What is wrong with the loader's state of a checkpoint after `step` steps, if anything."""
    row, each, lanes = state.get("row"), state.get("rows_per_step"), state.get("lanes", {})
    if not _count(row):
        return f"'row' must be a whole number of at least 0, found {row!r}"
    if each is None:
        return None  # saved by a version that said no more
    if not _count(each) or row != step * each:
        return f"'row' must be step x rows_per_step = {step} x {each!r}, found {row}"
    if not isinstance(lanes, dict) or not isinstance(state.get("stream", {}), dict):
        return "'lanes' and 'stream' must be mappings"
    for number, lane in lanes.items():
        if not number.isascii() or not number.isdigit() or int(number) >= each:
            return f"'lanes' has {number!r}; expected numbers below rows_per_step {each}"
        if not isinstance(lane, list) or not all(map(_count, lane)) or len(lane) % 3 != 1 or len(lane) < 4 or lane[0] != step:
            return f"'lanes' of {number} must hold the {step} rows made and places of three numbers"
    return None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


INDEX = "checkpoint.json"
_FINISHED = ".finished"
"""In a folder of checkpoints, the resolved configuration of the run that has come to its end there."""
_FULL = ("unexpected pos", "iostream error")
"""What torch's writer of archives says where a disk is full."""
_BEST = "best"
"""In a folder of checkpoints, a link to the one with the lowest evaluation loss."""
_NOT_PLAIN = "Weights only load failed"
_SEAL = b',"sha256":"'
_NAME = re.compile(r"step_(\d{8})\Z")
_H = TypeVar("_H", bound="Header")
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)}


class Piece(Strict):
    """A box of a tensor, and the stretch of a file that holds it."""

    offsets: list[int]
    sizes: list[int]
    file: str = Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")
    start: int = Field(ge=0)
    length: int = Field(ge=0)


class Stored(Strict):
    """A whole tensor."""

    dtype: Literal["float32", "bfloat16", "float16", "float64", "int64"]
    shape: list[int]
    pieces: list[Piece]

    def problem(self) -> str:
        """The first inconsistency of the entry, or an empty string."""
        volume = 0
        for p in self.pieces:
            if not len(p.offsets) == len(p.sizes) == len(self.shape):
                return "has pieces of another number of dimensions"
            if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(p.offsets, p.sizes, self.shape, strict=True)):
                return "has pieces that stick out of it"
            volume += math.prod(p.sizes)
        return "" if volume == math.prod(self.shape) else f"has pieces for {volume} of its {math.prod(self.shape)} values"


class Best(Strict):
    """The evaluation with the lowest loss so far."""

    step: int = Field(ge=0)
    loss: float


class Header(Strict):
    """Metadata of a checkpoint: everything but its tensors."""

    step: int = Field(ge=0)
    world_size: int = Field(gt=0)
    parallel: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    """The loader's state; its `row` is the first row of the next step."""
    best: Best | None = None
    """With `checkpoint.keep_best`, of the evaluations up to this step."""
    sha256: str | None = Field(default=None, exclude=True)
    """Of the bytes before it, as `sealed` writes them; checkpoints of older versions have none."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Header:
        if problem := _state_problem(self.data, self.step):
            raise ValueError(f"data: {problem}")
        return self


class Index(Header):
    """The content of checkpoint.json."""

    schema_: Literal["checkpoint/1"] = Field(default="checkpoint/1", alias="schema")
    tensors: dict[str, Stored]


def sealed(content: bytes) -> bytes:
    """A JSON object with the checksum of its bytes as its last field."""
    return content[:-1] + _SEAL + hashlib.sha256(content[:-1]).hexdigest().encode() + b'"}'


def read_header(folder: Path, kind: type[_H], name: str) -> _H:
    """The `checkpoint.json` of a folder as a `kind`, which messages call `name`.

    Raises:
        ConfigError: it is missing, is none of that kind, or is not as it was written, by its checksum.
    """
    path = folder / INDEX
    try:
        content = path.read_bytes()
        header = kind.model_validate_json(content)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}; give a folder that this trainer has written") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = "".join(f"{x}." for x in first["loc"])[:-1]
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"{path} is no {name}: {problem}; {e.error_count()} such problems; choose another checkpoint.dir") from e
    if header.sha256 is not None and hashlib.sha256(content.rpartition(_SEAL)[0]).hexdigest() != header.sha256:
        raise ConfigError(
            f"bytes of {folder / INDEX} are not as they were written, by their checksum; the checkpoint is damaged, "
            f"remove {folder} to go on from an older one"
        )
    return header


def complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if _NAME.match(p.name)) if root.is_dir() else []


def newest(checkpoint: CheckpointConfig, rank: int, world: int) -> Path | None:
    """The newest complete checkpoint, which rank 0 looks for; None where there is none.

    Raises:
        ConfigError: the directory cannot be made, is a checkpoint itself, or holds one that must not be continued.
    """
    folders: list[Path | None] = [None]
    if rank == 0 and checkpoint.dir:
        root = Path(checkpoint.dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"checkpoint.dir {root} cannot be written: {e.strerror or e}; choose another folder") from e
        if (root / INDEX).is_file():
            # Nothing would be found in it, and the run would begin anew without a word.
            raise ConfigError(f"checkpoint.dir {root} is itself a checkpoint; set it to the folder of all of them, {root.resolve().parent}")
        folders = [None, *complete(root)][-1:]
    if world > 1:
        # A shared file system may show the ranks different states of the folder.
        dist.broadcast_object_list(folders)
    if folders[0] is not None and not checkpoint.resume:
        raise ConfigError(f"{folders[0]} exists, and checkpoint.resume is false; choose another checkpoint.dir, or remove it")
    return folders[0]


def hold(root: Path, last_step: int | None) -> None:
    """Keep other runs out of the folder of checkpoints until this process ends, unless it holds `last_step` and this run will save nothing.

    Raises:
        ConfigError: another run holds it.
    """
    saved = complete(root)
    if last_step is not None and saved and int(saved[-1].name.removeprefix("step_")) >= last_step:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        who = files.take(root)
    except OSError:
        return  # no checkpoint can be saved in it either
    if who:
        raise ConfigError(
            f"checkpoint.dir {root} is in use by {who}, and two runs would mix their checkpoints; wait until that has ended, or choose "
            f"another folder (if its machine has died, remove {root / files.LOCK})"
        )


def is_finished(config: TrainerConfig) -> bool:
    """Whether a run of this very configuration has come to its end, by the mark that it has left in the folder of checkpoints,
    and these are still there.

    All ranks see that folder, so all agree.
    """
    if not config.checkpoint.dir or not config.checkpoint.resume:
        return False
    root = Path(config.checkpoint.dir)
    try:
        return (root / _FINISHED).read_text(encoding="utf-8") == _mark(config) and bool(complete(root) or not config.checkpoint.every)
    except (OSError, ValueError):
        return False


def mark_finished(config: TrainerConfig) -> None:
    """Leave word that a run of this configuration needs not be run again: a job that is queued anew after its end has nothing to do."""
    if config.checkpoint.dir and Path(config.checkpoint.dir).is_dir() and not config.profile.traced:
        with suppress(OSError):  # the job would look at its checkpoints again, no more
            files.replace(Path(config.checkpoint.dir) / _FINISHED, _mark(config))


def _mark(config: TrainerConfig) -> str:
    settings = dump(config)
    if config.train.epochs is not None:
        del settings["train"]["steps"]  # which the data says
    return yaml.safe_dump(settings, sort_keys=False)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        ConfigError: it is missing, or not what this version writes.
    """
    path, index = folder / INDEX, read_header(folder, Index, "index of a checkpoint")
    if folder.name.startswith("step_") and folder.name.removeprefix("step_").lstrip("0") != str(index.step or ""):
        raise ConfigError(f"{path} is of step {index.step}, and its folder of another; it was altered or moved, remove {folder}")
    for name, stored in index.tensors.items():
        if problem := stored.problem():
            raise ConfigError(f"{path}: tensor '{name}' {problem}; the checkpoint is damaged, remove {folder} to go on from an older one")
    return index


class SavePlanner(DefaultSavePlanner):
    """Finds pieces where the library's planner finds tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The memory of one piece."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds pieces where the library's planner finds tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As the library's, which would look for tensors here and drop everything else."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        """The memory of one piece."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def as_written(archive: IO[bytes], name: str) -> IO[bytes]:
    """What torch.save has written, at its beginning: it keeps a checksum of each part, at which torch.load never looks.

    Raises:
        ValueError: bytes are not as they were written.
        zipfile.BadZipFile: it is none of torch.save's archives.
    """
    with zipfile.ZipFile(archive) as parts:
        if parts.testzip() is not None:
            raise ValueError(f"bytes of {name} are not as they were written, by their checksum")
    archive.seek(0)
    return archive


class Reader(FileSystemReader):
    """Reads by our index; the library's own reader would open `.metadata`, a pickle."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self._index = index

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """As the library's, of bytes that are as they were written."""
        return as_written(io.BytesIO(super()._slice_file(file, sinfo).read(sinfo.length)), sinfo.relative_path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The library's view of the index."""
        tensors, storage = {}, {}
        for name, stored in self._index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=_DTYPES[stored.dtype]), torch.Size(stored.shape), chunks)
            for p in stored.pieces:
                storage[MetadataIndex(name, torch.Size(p.offsets))] = _StorageInfo(p.file, p.start, p.length)
        return Metadata(state_dict_metadata=tensors, storage_data=storage, storage_meta=StorageMeta())


class Writer(FileSystemWriter):
    """Writes into a folder with a provisional name; `finish`, which one rank calls once all have written, names it."""

    def __init__(self, root: Path, header: Header, keep: int) -> None:
        super().__init__(writing_folder(root, header.step))
        self._root, self._header, self._keep = root, header, keep

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write both indices, give the folder its name, and remove what is older than `keep`."""
        super().finish(metadata, results)
        folder = Path(self.path)
        # Where things lie is taken from the results: not every version of the library writes it into this `metadata`.
        places = {result.index: result.storage_data for rank in results for result in rank}
        write_durably(folder / INDEX, _index_json(self._header, metadata, places))
        publish(folder, self._root, self._header, self._keep)


def not_finite(numbers: Sequence[tuple[str, Tensor]], world: int) -> str | None:
    """The first name, of any rank, whose number is not finite; `numbers` has a number for each tensor, finite where all its values are."""
    device = (
        "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    )  # an offloaded state is on the host, and NCCL is not
    bad = ~torch.stack([number.float().to(device) for _, number in numbers] or [torch.zeros((), device=device)]).isfinite()
    anywhere = bad.any().int()
    if world > 1:
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere:
        return None
    names = [next((name for (name, _), is_bad in zip(numbers, bad.tolist(), strict=False) if is_bad), None)]
    if world > 1:
        names = names * world
        dist.all_gather_object(names, names[dist.get_rank()])
    return next(name for name in names if name is not None)


def publish(folder: Path, root: Path, header: Header, keep: int) -> None:
    """Give a folder in which everything is written its name, and remove checkpoints that are neither among the newest `keep` nor the
    best.
    """
    folder.rename(_named(root, header.step))
    if header.best is not None:
        link = root / f".{_BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(_named(root, header.best.step).name)
        link.replace(root / _BEST)
    _sync_folder(root)
    for old in complete(root)[:-keep]:
        if header.best is not None and old == _named(root, header.best.step):
            continue
        # Renamed first: half a folder must never pass for a checkpoint.
        gone = root / f".removing-{old.name}"
        with suppress(OSError):
            old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _named(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def writing_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return root / f".writing-{step:08d}"


def clear_leftovers(root: Path) -> None:
    """Remove what killed runs have left unfinished."""
    for pattern in (".writing-*", ".removing-*"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _index_json(header: Header, metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> bytes:
    """The checkpoint's `checkpoint.json`: the header, and of each tensor the type, the shape, and the file,
    start and length in bytes of each piece.
    """
    tensors: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        pieces = []
        for chunk in stored.chunks:
            info = places[MetadataIndex(name, chunk.offsets)]
            pieces.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": info.relative_path,
                    "start": info.offset,
                    "length": info.length,
                }
            )
        tensors[name] = {"dtype": str(stored.properties.dtype).removeprefix("torch."), "shape": list(stored.size), "pieces": pieces}
    index = {"schema": "checkpoint/1", **header.model_dump(mode="json"), "tensors": tensors}
    return sealed(json.dumps(index, separators=(",", ":")).encode())


def is_full(text: str) -> bool:
    """Whether an error is that of torch's writer of archives that could not go on, which does not say why."""
    return any(phrase in text for phrase in _FULL)


def cause(e: BaseException) -> str:
    """What went wrong with files, in one line; of several ranks, the first one's own error."""
    failures = e.failures if isinstance(e, dcp.CheckpointException) else {}
    rank, (first, _) = sorted(failures.items())[0] if failures else (None, (e, None))
    text = str((getattr(first, "strerror", None) if rank is None else None) or first).strip() or type(first).__name__
    line = text.splitlines()[0]
    if text.startswith(_NOT_PLAIN):
        # torch goes on with the advice to open it all the same.
        named = re.search(r"GLOBAL (\S+)", text)
        line = f"an object in it is none that a checkpoint holds{f' ({named[1]})' if named else ''}, and was not opened"
    if is_full(text):
        line = f"a file could not be written to its end, as where a disk or a quota is full ({line})"
    return line if rank is None else f"rank {rank}: {line}"


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it survives a crash of the machine."""
    files.replace(path, content)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
