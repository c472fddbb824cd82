"""Weights to and from the files of Hugging Face transformers: safetensors only, no pickle.

`names` holds the table between the two layouts, `config` the `config.json`; here are the files. What comes from a folder is hostile
until checked: an index may only name files beside it, and names, shapes and types are compared before any tensor is read.
"""

from __future__ import annotations

import json
import math
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.huggingface import check_config, for_transformers_4, hf_config, read_json
from playbook_trainer.config.tree import ModelConfig, TrainerConfig
from playbook_trainer.huggingface.names import HEAD, InMemory, Rule, Shape, Source, rules, whole

__all__ = [
    "Files",
    "Writer",
    "check_folder",
    "export_dtypes",
    "from_hf",
    "hf_config",
    "load_safetensors",
    "nbytes",
    "open_folder",
    "refuse_to_overwrite",
    "refuse_unwritable",
    "rules",
    "save_safetensors",
    "to_hf",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9
SHOWN = 3
"""Names listed for each kind of mismatch; a wrong preset would otherwise print thousands."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights that are read."""


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors (views where possible) of a whole, unsharded state.

    Raises:
        ConfigError: tensors are missing, left over or of another shape than the model's.
    """
    table = rules(config)
    _check({rule.ours: [rule.shape] for rule in table}, {name: tuple(t.shape) for name, t in state.items()}, "the model's state")
    return {name: t for rule in table for name, t in zip(rule.theirs, rule.split(state[rule.ours]), strict=True)}


def from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state from a checkpoint's tensors.

    Raises:
        ConfigError: tensors are missing, left over or of another shape than the model's.
    """
    return _state(config, InMemory(tensors))


def load_safetensors(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Our whole state from a folder with `model.safetensors`, or with shards and their index. For models that fit in memory.

    Raises:
        ConfigError: no such files, an unreadable file, an index that does not fit, or tensors or a `config.json` that do not fit the model.
    """
    if (folder / CONFIG).is_file():
        check_config(config, folder / CONFIG)
    with ExitStack() as stack:
        return _state(config, Files(folder, stack))


def check_folder(config: ModelConfig, folder: Path) -> None:
    """Find out whether a folder holds this model, from its headers alone.

    Raises:
        ConfigError: it does not, in one message.
    """
    with ExitStack() as stack:
        open_folder(config, folder, stack)


def open_folder(config: ModelConfig, folder: Path, stack: ExitStack) -> Files:
    """The checkpoint's files, compared with the model, to be read in parts until `stack` closes.

    Raises:
        ConfigError: the folder does not hold this model, in one message.
    """
    try:
        has_config = (folder / CONFIG).is_file()
    except OSError as e:  # a folder that may not be looked into
        raise ConfigError(f"{folder} cannot be read: {e.strerror or e}; check the path and its permissions") from e
    if not has_config:
        raise ConfigError(
            f"{folder} has no {CONFIG}; expected a folder as transformers saves it: {CONFIG} and {SINGLE}, or shards with {INDEX}"
        )
    check_config(config, folder / CONFIG)
    files = Files(folder, stack)
    _check_tensors(config, files)
    odd = [f"{name} {kind}" for name, kind in files.dtypes.items() if kind not in DTYPES]
    if odd:
        raise ConfigError(f"{folder} holds weights in a type that is not read: {', '.join(odd[:SHOWN])}; expected {', '.join(DTYPES)}")
    return files


def _check_tensors(config: ModelConfig, source: Source) -> None:
    """Refuse a checkpoint with missing, unknown or misshapen tensors.

    Checkpoints of models with tied embeddings may hold the output layer a second time; transformers ignores it.

    Raises:
        ConfigError: tensors are missing, left over or of another shape than the model's.
    """
    expected = {piece.name: piece.accepted() for rule in rules(config) for piece in rule.pieces}
    shapes = {name: shape for name, shape in source.shapes.items() if not (config.tie_word_embeddings and name == HEAD)}
    _check(expected, shapes, f"the checkpoint for {config.name}")


def save_safetensors(config: ModelConfig, state: Mapping[str, Tensor], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a whole, unsharded state as transformers stores it: one file, or shards and their index, and `config.json`.

    Raises:
        ConfigError: the folder already holds weights, or the state does not fit the model.
        DataError: it could not be written.
    """
    tensors = to_hf(config, state)
    with Writer(config, folder, {name: t.nbytes for name, t in tensors.items()}, max_shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


class Writer:
    """Writes a checkpoint tensor by tensor; no more than one shard is in memory, and files appear in the folder once all are written.

    Raises:
        ConfigError: the folder already holds weights.
        DataError: it could not be written.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        nbytes: Mapping[str, int],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        source: SourceFiles | None = None,
    ) -> None:
        """Divide tensors of `nbytes` each into shards of at most `max_shard_bytes`; `source` says what else goes into the folder."""
        refuse_to_overwrite(folder)
        self._config, self._folder, self._nbytes, self._source = config, folder, nbytes, source or SourceFiles()
        self._bytes_of: Counter[torch.dtype] = Counter()
        shards = _shards(nbytes, max_shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        self._file = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        self._last = {shard[-1] for shard in shards}
        self._held: dict[str, Tensor] = {}
        self._writing = folder / ".writing"

    def __enter__(self) -> Writer:
        shutil.rmtree(self._writing, ignore_errors=True)
        with _written(self._folder):
            self._writing.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor. Tensors come in the order of the sizes that were given."""
        # A copy of its own for each tensor: safetensors refuses views that share memory.
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes_of[tensor.dtype] += tensor.nbytes
        if name in self._last:
            with _written(self._folder):
                save_file(self._held, self._writing / self._file[name], metadata={"format": "pt"})
            self._held = {}

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with _written(self._folder):
                    self._finish()
        finally:
            shutil.rmtree(self._writing, ignore_errors=True)

    def _finish(self) -> None:
        for name, path in self._source.files.items():
            shutil.copyfile(path, self._writing / name)
        most = self._bytes_of.most_common(1)[0][0]  # biases of a router may be in another precision
        settings = self._source.config_json(hf_config(self._config), str(most).removeprefix("torch."))
        (self._writing / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if len(self._last) > 1:
            index = {"metadata": {"total_size": sum(self._nbytes.values())}, "weight_map": self._file}
            (self._writing / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        # By name, so the index last: without it, no reader takes shards for a whole.
        for path in sorted(self._writing.iterdir()):
            path.replace(self._folder / path.name)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as e:
        raise DataError(f"{folder}: the weights could not be written: {e}; make room, or choose another folder") from e


def refuse_to_overwrite(folder: Path) -> None:
    """Refuse a folder with weights: an old file beside new shards would be read in their place.

    Raises:
        ConfigError: there are some.
    """
    try:
        old, other = sorted(p.name for p in folder.glob("*.safetensors*")), not stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return  # it is gone now, or was between two looks: rank 0 makes it and removes it again to find out whether it may
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written: {e.strerror or e}; choose another folder") from e
    if old:
        raise ConfigError(f"{folder} already holds weights ({old[0]}); choose an empty folder")
    if other:
        raise ConfigError(f"{folder} is a file; choose an empty folder")


def refuse_unwritable(folder: Path, key: str = "checkpoint.export") -> None:
    """Refuse a folder, named by a key, that cannot be made and written, and leave nothing behind:
    after training it would be too late to find out.

    Raises:
        ConfigError: it cannot.
    """
    created: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.is_dir():
                path.mkdir()
                created.append(path)
        created.append(Path(tempfile.mkdtemp(prefix=".writable-", dir=folder)))
    except OSError as e:
        raise ConfigError(f"{key} {folder} cannot be written: {e.strerror or e}; choose another folder") from e
    finally:
        for path in reversed(created):
            with suppress(OSError):  # something else is in it by now
                path.rmdir()


class Files:
    """The tensors of a folder by name, read in parts when asked for; what was read is counted."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Open every shard until `stack` closes, and note the shape and the type of each tensor."""
        shard_of = _weight_map(folder)
        names = sorted(set(shard_of.values())) if shard_of is not None else [SINGLE]
        if absent := [name for name in names if not (folder / name).is_file()]:
            pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
            hint = f"; {pickles[0]} is a pickle, which can run code and is never read: convert it to safetensors" if pickles else ""
            raise ConfigError(f"{folder} lacks {', '.join(absent[:SHOWN])}; expected {SINGLE}, or {INDEX} with all its shards{hint}")
        self._folder = folder
        self.bytes_read = self.largest_read = 0
        shapes: dict[str, Shape] = {}
        self.shapes: Mapping[str, Shape] = shapes
        self.dtypes: dict[str, str] = {}
        self._file: dict[str, Any] = {}
        for name in names:
            try:
                handle = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder / name} is no readable safetensors file ({error}); fetch it again") from error
            for key in handle.keys():  # noqa: SIM118  a handle is no mapping
                if shard_of is None or shard_of.get(key) == name:
                    header = handle.get_slice(key)
                    shapes[key], self.dtypes[key] = tuple(header.get_shape()), header.get_dtype()
                    self._file[key] = handle
        if misplaced := [key for key in shard_of or {} if key not in self._file]:
            raise ConfigError(f"{folder / INDEX} places {misplaced[0]} (and {len(misplaced) - 1} others) in files that do not hold them")

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, and of the file no more than that.

        Raises:
            ConfigError: a value of it is not finite; training would end on NaN and not say where it came from.
        """
        part: Tensor = self._file[name].get_slice(name)[where]
        if not bool(part.isfinite().all()):
            raise ConfigError(
                f"{self._folder}: tensor {name} holds values that are not finite; these weights are damaged, fetch them again"
            )
        self.bytes_read += part.nbytes
        self.largest_read = max(self.largest_read, part.nbytes)
        return part


def _state(config: ModelConfig, source: Source) -> dict[str, Tensor]:
    _check_tensors(config, source)
    return {rule.ours: rule.read(source, whole(rule.shape)) for rule in rules(config)}


def export_dtypes(config: TrainerConfig, table: Sequence[Rule], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The precision of each of our tensors in an export, by `checkpoint.export_dtype`; `dtype` is the one that they are in.
    Biases of routers stay float32.
    """
    choice, source_dtypes = config.checkpoint.export_dtype, {}
    if choice == "source":
        with ExitStack() as stack:
            source_dtypes = {name: DTYPES[kind] for name, kind in Files(Path(str(config.init.weights)), stack).dtypes.items()}
    default = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(choice, dtype)
    usual = {rule.ours: torch.float32 if rule.ours.endswith("router.bias") else default for rule in table}
    return {rule.ours: source_dtypes.get(next(iter(rule.theirs)), usual[rule.ours]) for rule in table}


def nbytes(table: Sequence[Rule], dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """The checkpoint's tensors with their bytes, in the order of the table; `dtypes` by our names."""
    return {name: math.prod(shape) * dtypes[rule.ours].itemsize for rule in table for name, shape in rule.theirs.items()}


def _check(expected: Mapping[str, Sequence[Shape]], actual: Mapping[str, Shape], what: str) -> None:
    """Refuse anything but exactly the expected names and shapes, with one message for all that is wrong."""
    problems = {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [name for name in actual if name not in expected],
        "of another shape": [
            f"{name} {actual[name]}, expected {' or '.join(map(str, dict.fromkeys(shapes)))}"
            for name, shapes in expected.items()
            if name in actual and actual[name] not in shapes
        ],
    }
    wrong = [
        f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for kind, names in problems.items()
        if names
    ]
    if wrong:
        raise ConfigError(
            f"{what} does not fit the model's configuration: tensors {', '.join(wrong)}; compare model.* with the checkpoint's config.json"
        )


def _shards(nbytes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut so that no shard but a single large tensor exceeds `limit` bytes."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in nbytes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Which file holds which tensor, or None without an index.

    An index comes from elsewhere, so it may only name files right in its own folder. Symbolic links are followed: download caches use them.
    Where a single file lies beside an index, transformers reads the single file.
    """
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():
        return None
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ConfigError(f"{path} has no weight_map of tensor names to file names; fetch it again")
    for name in where.values():
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{path} points to '{name}'; expected the name of a .safetensors file in the same folder")
    return where


# What an export keeps of the folder that its weights came from: all of config.json, the tokenizer, templates and processors, and
# precision.

CONFIG = "config.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja"),
)
_COMPANIONS = (*_TOKENIZER, "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files beside the weights that transformers reads."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class SourceFiles:
    """What goes into an exported folder beside what the model's own configuration says."""

    settings: Mapping[str, Any] | None = None
    """The source's config.json, which has been found to describe this model; None where the weights were drawn."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy, by name."""

    def config_json(self, ours: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """The config.json to write: the source's, or `ours`, with the precision of the weights beside it."""
        settings = dict(self.settings if self.settings is not None else ours)
        if isinstance(settings.get("text_config"), dict):
            settings["text_config"] = for_transformers_4(settings["text_config"])
        else:
            settings = for_transformers_4(settings)
        for name, part in settings.items():
            if name in ("text_config", "vision_config") and isinstance(part, dict):
                settings[name] = part | {key: dtype for key in _DTYPE_KEYS if key in part}
        return {**settings, **{key: dtype for key in _DTYPE_KEYS if key in settings}, "dtype": dtype}


def source_files(config: TrainerConfig) -> SourceFiles:
    """What an export of this run keeps: of the folder in `init.weights`, else of the one in which `data.tokenizer` lies."""
    if config.init.weights is not None:
        source = Path(config.init.weights)
        return SourceFiles(read_json(source / CONFIG), _existing(source, _COMPANIONS))
    if config.data.tokenizer != "byte":
        tokenizer = Path(config.data.tokenizer)
        return SourceFiles(files=_existing(tokenizer.parent, _TOKENIZER) | {"tokenizer.json": tokenizer})
    return SourceFiles()


def _existing(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}
