"""Checkpoints of the megatron backend: tensors as megatron-core writes them, in folders that are named once they are complete.

    <dir>/step_00000020/checkpoint.json     step, data position, model and layout; plain JSON
                        *.distcp ...        `torch_dist`: megatron's distributed checkpoint;
                                            `fsdp_dtensor`: torch's, of Megatron-FSDP's shards
    <dir>/.writing-00000040/                being written

Training waits until everything is written. A run resumes on another number of data-parallel ranks, but with the same tensor, pipeline and
expert parallelism: that is what the optimizer's own format allows. megatron-core and torch read tensors by an index that is a pickle; see
`pickles` for how it is read here. What Transformer Engine keeps beside 8-bit weights it opens by itself, without such care.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import inspect
import io
import pathlib
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from playbook.errors import ConfigError, DataError
from playbook_trainer.axes import Axes
from playbook_trainer.checkpoint_files import (
    INDEX,
    Best,
    Header,
    as_written,
    cause,
    clear_leftovers,
    is_full,
    newest,
    not_finite,
    publish,
    read_header,
    sealed,
    write_durably,
    writing_folder,
)
from playbook_trainer.config.tree import TrainerConfig, dump
from playbook_trainer.megatron import wrap
from playbook_trainer.megatron.weights import unwrapped

_FIXED = ("tp", "pp", "vpp", "ep", "etp", "pipeline_layout")
"""Degrees that a checkpoint can only be resumed with."""
_UNREADABLE = (OSError, dcp.CheckpointException, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile)
"""What readers raise on files that are missing, cut or altered."""


class MegatronHeader(Header):
    """The content of checkpoint.json."""

    schema_: Literal["megatron-checkpoint/1"] = Field(default="megatron-checkpoint/1", alias="schema")
    format: Literal["torch_dist", "fsdp_dtensor"]
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every file but those of tensors, which keep checksums of their own; checkpoints of older versions have none."""


class MegatronSaver:
    """Saves and restores one run's model and optimizer."""

    writing = behind = False

    def __init__(self, config: TrainerConfig, axes: Axes, chunks: list[Any], optim: Any) -> None:
        self._config, self._axes, self._chunks, self._optim = config, axes, chunks, optim
        self._named = {f"model{i if len(chunks) > 1 else ''}": chunk for i, chunk in enumerate(chunks)}
        self._root = Path(str(config.checkpoint.dir))
        self._format: Literal["torch_dist", "fsdp_dtensor"]
        self._format = "fsdp_dtensor" if config.megatron.data_parallel == "megatron_fsdp" else "torch_dist"
        self.latest: int | None = None

    def restore(self) -> MegatronHeader | None:
        """Load the newest complete checkpoint into this rank's parts; None where there is none.

        Raises:
            ConfigError: the checkpoint is of another model, layout or backend, or there is one that must not be continued.
        """
        folder = newest(self._config.checkpoint, self._axes.world.rank, self._axes.world.size)
        if folder is None:
            return None
        header = read_header(folder, MegatronHeader, "checkpoint of the megatron backend")
        if problem := difference(header, self._config, self._format):
            raise ConfigError(f"{folder} {problem}. Choose another checkpoint.dir")
        from megatron.core.dist_checkpointing.core import CheckpointingException

        try:
            wrap.make_state(self._optim)
            with checked(folder, header.files):
                self._load(folder)
        except (torch.cuda.OutOfMemoryError, dist.DistError):
            raise  # the folder may be as good as ever
        except (*_UNREADABLE, CheckpointingException) as e:
            raise ConfigError(f"{folder} cannot be read: {cause(e)}; move it elsewhere to go on from an older checkpoint") from e
        self.latest = header.step
        return header

    def save(self, step: int, data: dict[str, Any], best: Best | None = None) -> str | None:
        """Write a checkpoint of this moment; nothing is written where a weight or a moment of any rank is not finite,
        whose name is returned.

        Raises:
            DataError: it could not be written.
        """
        gather_parameters(self._config, self._chunks)
        if bad := not_finite(wrap.tops(self._chunks, self._optim), self._axes.world.size):
            return bad
        folder = writing_folder(self._root, step)
        with _written(step, folder):
            if self._axes.world.rank == 0:
                clear_leftovers(self._root)
                folder.mkdir(parents=True)
        dist.barrier()
        with _written(step, folder):
            self._write(folder)
        dist.barrier()
        with _written(step, folder):
            if self._axes.world.rank == 0:
                self._finish(folder, step, data, best)
        self.latest = step
        return None

    def wait(self) -> None:
        """Do nothing: saving has finished when `save` returns."""

    def _state(self, *, loading: bool) -> dict[str, Any]:
        """What megatron-core saves: the model's chunks and the optimizer, as it names them."""
        kind = "fsdp_dtensor" if self._format == "fsdp_dtensor" else "dp_reshardable"
        about = {
            "distrib_optim_sharding_type": kind,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": self._axes.dp_cp.group,
        }
        if self._format == "fsdp_dtensor":
            state = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in self._named.items()}
        else:
            state = {name: unwrapped(chunk).sharded_state_dict(metadata=about) for name, chunk in self._named.items()}
        state["optimizer"] = self._optim.sharded_state_dict(state, is_loading=loading, metadata=about)
        return state

    def _write(self, folder: Path) -> None:
        state = self._state(loading=False)
        if self._format == "torch_dist":
            from megatron.core import dist_checkpointing

            dist_checkpointing.save(state, str(folder))
            _end_helper()
        else:
            dcp.save(_prepared(state, self._chunks[0]), storage_writer=dcp.FileSystemWriter(folder))

    @torch.no_grad()
    def _load(self, folder: Path) -> None:
        """Read the folder into the chunks and the optimizer of this rank."""
        state = self._state(loading=True)
        if self._format == "torch_dist":
            from megatron.core import dist_checkpointing

            state = dist_checkpointing.load(state, str(folder), **reading(self._config))
        else:
            # Read into the memory of these tensors, under the names that they have on disk.
            dcp.load(
                _prepared(state, self._chunks[0]),
                storage_reader=dcp.FileSystemReader(folder),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
            )
        for name, chunk in self._named.items():
            if self._format == "fsdp_dtensor":
                install(chunk, state[name])
            else:
                unwrapped(chunk).load_state_dict(state[name])
        wrap.own_settings(state["optimizer"], self._optim)
        self._optim.load_state_dict(state["optimizer"])
        wrap.own_steps(self._optim)

    def _finish(self, folder: Path, step: int, data: dict[str, Any], best: Best | None) -> None:
        settings = dump(self._config)
        header = MegatronHeader(
            step=step,
            world_size=self._axes.world.size,
            parallel=settings["parallel"],
            model=settings["model"],
            data=data,
            best=best,
            format=self._format,
            files=hashes(folder),
        )
        write_durably(folder / INDEX, sealed(header.model_dump_json(by_alias=True).encode()))
        publish(folder, self._root, header, self._config.checkpoint.keep)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but those of tensors, by name."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix != ".distcp")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@contextmanager
def checked(folder: Path, files: Mapping[str, str]) -> Iterator[None]:
    """Inside this block, what torch's reader hands out of files of tensors is as it was written, megatron-core's reader is one, too, and
    torch reads the index and objects without running code.

    Raises:
        ValueError, zipfile.BadZipFile: the state that all ranks have in common, or the index, is not as it was written.
    """
    digests = hashes(folder)
    for name in files:
        if digests.get(name) != files[name]:
            raise ValueError(
                f"bytes of {name} are not as they were written, by their checksum" if name in digests else f"{name} is missing"
            )
    for common in folder.glob("*.pt"):
        with common.open("rb") as file:
            as_written(file, common.name)
    plain = dcp.FileSystemReader._slice_file
    reader: Any = dcp.FileSystemReader

    def slice_file(self: Any, file: Any, place: Any) -> Any:
        part = io.BytesIO(plain(self, file, place).read(place.length))
        # An object that a module keeps beside its tensors may be something else than an archive; it is read as ever.
        return as_written(part, place.relative_path) if part.getvalue().startswith(b"PK") else part

    reader._slice_file = slice_file
    try:
        with restricted():
            yield
    finally:
        reader._slice_file = plain


@contextmanager
def _written(step: int, folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, dcp.CheckpointException, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not is_full(str(e)):
            raise
        raise DataError(f"the checkpoint of step {step} could not be written to {folder}: {cause(e)}") from e


def gather_parameters(config: TrainerConfig, chunks: list[Any]) -> None:
    """Wait for what the update has sent to other ranks only when the next forward pass would need it."""
    if config.megatron.data_parallel == "distributed_optimizer" and config.megatron.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def reading(config: TrainerConfig) -> dict[str, Any]:
    """How megatron-core is told to read: 8-bit weights with one scale each by way of whole 16-bit ones.

    From 0.19 on it would fill them piece by piece, gate and up halves apart, and each piece would set the scale of all.
    Source: Megatron-LM, `megatron/training/arguments.py` (stream_ckpt_dequant).
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    reader = strategies.TorchDistLoadShardedStrategy
    one_scale = config.megatron.fp8_param and config.precision.fp8 == "tensorwise"
    if not one_scale or "stream_ckpt_dequant" not in inspect.signature(reader).parameters:
        return {}
    return {"sharded_strategy": reader(stream_ckpt_dequant=False)}


def _end_helper() -> None:
    """End the process that megatron-core's writer starts and keeps: it would outlive a rank that leaves at once."""
    writer: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    queue = getattr(writer, "_results_queue", None)
    if queue is not None:
        queue._manager.shutdown()
        writer._results_queue = None


def _prepared(state: dict[str, Any], chunk: Any) -> dict[str, Any]:
    """Megatron-FSDP's shards under names that are the same on every layout, and with their uneven borders written down.

    Source: Megatron-LM, `megatron/training/checkpointing.py` (preprocess_fsdp_dtensor_state_dict).
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer.fsdp_dtensor_checkpoint import (
        handle_experts_in_state_dict,
        handle_fp8_extra_state_case,
        handle_swiglu_in_state_dict,
    )

    out = dict(state)
    handle_fp8_extra_state_case(out["model"])
    # The model's names are looked up one wrapper further out than the optimizer's: megatron-core counts on a module for 16 bits between
    # Megatron-FSDP and the model, and there is none here.
    out["model"], _ = handle_swiglu_in_state_dict(chunk, out["model"], None)
    _, out["optimizer"] = handle_swiglu_in_state_dict(chunk.module, {}, out["optimizer"])
    experts = getattr(chunk.config, "num_moe_experts", None)
    if experts:
        out["model"] = handle_experts_in_state_dict(out["model"], experts)
    preprocess_state_dict_for_uneven_dtensor(out)
    return out


def install(chunk: Any, state: dict[str, Any]) -> None:
    """Take over what has been read into Megatron-FSDP's shards, and renew the weights of the model that are made from them.

    Loading by its inner wrapper, whose names these are: the outer one would put a name before them that is not there, and drop them all.

    Raises:
        KeyError: tensors are missing, or are not the model's.
    """
    missing, unexpected = chunk.module.load_state_dict(state, strict=False)
    if wrong := [name for name in (*missing, *unexpected) if not name.endswith("_extra_state")]:
        raise KeyError(f"the model's {', '.join(wrong[:3])} is not among its tensors, or not the model's")


def difference(header: MegatronHeader, config: TrainerConfig, form: str) -> str | None:
    """Why a checkpoint cannot be continued by this configuration, if it cannot."""
    settings = dump(config)
    other = [k for k in settings["model"] if k != "name" and k in header.model and header.model[k] != settings["model"][k]]
    if other:
        differences = ", ".join(f"{k} {header.model[k]} where this run has {settings['model'][k]}" for k in other[:3])
        return f"is a checkpoint of another model: {differences}"
    if header.format != form:
        return f"has the format {header.format}, and megatron.data_parallel {config.megatron.data_parallel} reads {form}"
    before, now = _degrees(header.parallel), _degrees(settings["parallel"])
    moved = [k for k in _FIXED if before[k] != now[k]]
    if moved:
        differences = ", ".join(f"{k} {before[k]} where this run has {now[k]}" for k in moved)
        return f"was saved with {differences}, and this backend resumes with the same ones"
    return None


def _degrees(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees that a checkpoint keeps; an etp that is not set is that of tp."""
    degrees = {k: parallel.get(k) for k in _FIXED}
    return degrees | {"etp": degrees["etp"] or degrees["tp"]}


# Reading the pickles of a checkpoint of megatron-core without running code.
# torch's index of a distributed checkpoint, `.metadata`, is a pickle that torch opens with `pickle.load`; objects beside tensors are read
# with `torch.load(weights_only=False)`. Both could run any program, so inside `restricted` both may name nothing but what such a
# checkpoint consists of.

_PARTS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
"""Modules whose data classes and enumerations an index consists of."""
_FUNCTIONS = (("torch.serialization", "_get_layout"), ("torch", "Size"), ("collections", "OrderedDict"))


class IndexUnpickler(pickle.Unpickler):
    """Reads an index of torch's; a name that no index holds is an error, and nothing is called."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if an index may hold it.

        Raises:
            pickle.UnpicklingError: it is none of what an index consists of.
        """
        if (module, name) in _FUNCTIONS or module in _PARTS or module == "torch":
            member = getattr(importlib.import_module(module), name, None)
            if (module, name) in _FUNCTIONS or isinstance(member, torch.dtype) or (module in _PARTS and _is_data(member)):
                return member
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return pathlib.PurePosixPath  # a path that is only a name
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


def _member(holder: Any, name: str) -> Any:
    """What `getattr` may do in an index: early releases of Python 3.11 and 3.12 write a member of an enumeration so."""
    if not (isinstance(holder, type) and issubclass(holder, enum.Enum) and name in holder.__members__):
        raise pickle.UnpicklingError(f"it names an attribute '{name}' of {holder!r}, which is no member of an enumeration")
    return holder[name]


def _is_data(member: Any) -> bool:
    return isinstance(member, type) and (is_dataclass(member) or issubclass(member, enum.Enum))


def read_index(content: bytes) -> Any:
    """Torch's index of a distributed checkpoint.

    Raises:
        pickle.UnpicklingError: it is none, or names what no index holds.
    """
    try:
        index = IndexUnpickler(io.BytesIO(content)).load()
    except Exception as e:  # bytes that were altered make the unpickler raise nearly anything
        raise pickle.UnpicklingError(f".metadata is no index of a checkpoint: {str(e) or type(e).__name__}") from e
    if not isinstance(index, dcp.Metadata):
        raise pickle.UnpicklingError(f".metadata is no index of a checkpoint, but {type(index).__name__}")
    return index


def _read_metadata(reader: Any, *_: Any, **__: Any) -> dcp.Metadata:
    """As `FileSystemReader.read_metadata` of torch, but for how the pickle is opened."""
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, ".metadata"), "rb") as file:
        index: dcp.Metadata = read_index(file.read())
    index.storage_meta = index.storage_meta or StorageMeta()
    index.storage_meta.load_id = reader.load_id
    return index


@contextmanager
def restricted() -> Iterator[None]:
    """Inside this block torch's readers of distributed checkpoints, and `torch.load`, run no code that a file names."""
    reader: Any = dcp.FileSystemReader
    library: Any = torch
    metadata, load = reader.read_metadata, torch.load
    reader.read_metadata = _read_metadata
    library.load = lambda *args, **how: load(*args, **{**how, "weights_only": True})
    try:
        with torch.serialization.safe_globals(_safe()):
            yield
    finally:
        reader.read_metadata, library.load = metadata, load


def _safe() -> list[Any]:
    """Classes that megatron-core itself takes for safe; versions before it had such a list kept none of its own in checkpoints."""
    try:
        from megatron.core.safe_globals import SAFE_GLOBALS
    except ImportError:
        return [io.BytesIO]
    return [*SAFE_GLOBALS]
