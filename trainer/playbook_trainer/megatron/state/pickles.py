"""Reading the pickles of a checkpoint of megatron-core without running code.

torch's index of a distributed checkpoint, `.metadata`, is a pickle that torch opens with `pickle.load`; objects beside tensors are read with
`torch.load(weights_only=False)`. Both could run any program, so inside `restricted` both may name nothing but what such a checkpoint consists of.
"""

from __future__ import annotations

import enum
import importlib
import io
import pathlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

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
            found = getattr(importlib.import_module(module), name, None)
            if (module, name) in _FUNCTIONS or isinstance(found, torch.dtype) or (module in _PARTS and _is_data(found)):
                return found
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


def _is_data(found: Any) -> bool:
    return isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum))


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
