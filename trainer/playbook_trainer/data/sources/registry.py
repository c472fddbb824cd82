"""Which data set a configuration names, and in which layout it lies there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from playbook.errors import ConfigError, DataError
from playbook.paths import data_root
from playbook_trainer.config.tree import DataConfig, ModelConfig
from playbook_trainer.data.sources.chat import Conversation, conversations
from playbook_trainer.data.sources.generated import GeneratedText, GeneratedVqa, pool_folder
from playbook_trainer.data.sources.shards import tar_samples, text_groups, vqa_groups
from playbook_trainer.data.sources.streams import Flat, Mapped, Sharded, files_in, text_items, text_of
from playbook_trainer.data.sources.vqa import Sample, VqaV2, folder_samples, looks_like_vqav2

# Text from Hugging Face `datasets`: a folder written by save_to_disk, or a data set by name where the hub can be reached.


def _hub_text(path: str, subset: str | None, key: str) -> Flat[str]:
    """The documents in column `key`, memory-mapped.

    Raises:
        ConfigError: the package is missing.
        DataError: no such data set, or no such column.
    """
    try:
        import datasets
    except ImportError as e:
        raise ConfigError("data.source is huggingface, which needs the package 'datasets': pip install datasets") from e
    try:
        data_set: Any = datasets.load_from_disk(path) if Path(path).is_dir() else datasets.load_dataset(path, subset, split="train")
    except Exception as e:  # the library raises its own, the hub's and the network's errors
        raise DataError(
            f"data.path: {path} is neither a folder written by save_to_disk nor a data set that can be reached: "
            f"{(str(e).splitlines() or [type(e).__name__])[0]}"
        ) from e
    if isinstance(data_set, dict):
        if "train" not in data_set:
            raise DataError(f"data.path: {path} has the splits {', '.join(map(str, data_set))}; expected one named train")
        data_set = data_set["train"]
    if key not in data_set.column_names:
        raise DataError(f"data.path: {path} has the columns {', '.join(data_set.column_names)}; data.text_key is '{key}': name one of them")
    table = data_set.select_columns([key])
    return Flat(Mapped(lambda i: text_of((f"{path}, row {i}", table[i]), key), range(len(table))), path)


Text = str | NDArray[np.int64]
"""A document: its text, or tokens made without one."""
_TextData = Flat[Text] | Sharded[Text]


def open_text(data: DataConfig, model: ModelConfig) -> _TextData:
    """The documents that `data` names.

    Raises:
        DataError: nothing readable there.
        ConfigError: a layout that text does not have, or a missing package.
    """
    path = Path(data.path) if data.path is not None else data_root("assets") / "text"
    with _reachable(path):
        layout = data.source if data.source != "auto" else _text_layout(path)
        _refuse_subset(data, layout)
        if layout == "files":
            return Flat(text_items(path, data.text_key), str(path))
        if layout == "parquet":
            return text_groups(_files(path, (".parquet",)), data.text_key, str(path))
        if layout == "huggingface":
            if data.path is None:
                raise ConfigError("data.source is huggingface: set data.path to a folder written by save_to_disk, or to a data set's name")
            return _hub_text(data.path, data.subset, data.text_key)
        if layout == "generated":
            return Flat(GeneratedText(data.generated, _text_ids(model)), "generated text")
        raise ConfigError(f"data.source {layout} holds images; with data.kind text take files, parquet, huggingface or generated")


def open_vqa(data: DataConfig) -> Flat[Sample] | Sharded[Sample]:
    """The image-question-answer samples that `data` names.

    Raises:
        DataError: nothing readable there.
        ConfigError: a layout that such samples do not have, or a missing package.
    """
    path = Path(data.path) if data.path is not None else data_root("assets") / "vqa"
    with _reachable(path):
        layout = data.source if data.source != "auto" else _vqa_layout(path)
        _refuse_subset(data, layout)
        if layout == "files":
            return Flat(folder_samples(path), str(path))
        if layout == "vqav2":
            return Flat(VqaV2(path, data.subset), str(path))
        if layout == "webdataset":
            return tar_samples(_files(path, (".tar",)), str(path))
        if layout == "parquet":
            return vqa_groups(_files(path, (".parquet",)), str(path))
        if layout == "generated":
            return Flat(GeneratedVqa(data.generated, pool_folder(data.path)), "generated samples")
        raise ConfigError(f"data.source {layout} holds text; with data.kind vqa take files, vqav2, webdataset, parquet or generated")


def open_chat(data: DataConfig) -> Flat[Conversation]:
    """The conversations that `data` names.

    Raises:
        DataError: nothing readable there.
        ConfigError: no path, or a layout that conversations do not have.
    """
    if data.path is None or data.source not in ("auto", "files"):
        raise ConfigError("data.kind chat reads files: set data.path to a .jsonl or .json file of conversations, and leave data.source out")
    path = Path(data.path)
    with _reachable(path):
        return Flat(conversations(path), str(path))


def _refuse_subset(data: DataConfig, layout: str) -> None:
    """Where there are no subsets, all would be read, or the split train, whatever is asked for."""
    saved = layout == "huggingface" and data.path is not None and Path(data.path).is_dir()
    if data.subset is not None and (saved or layout not in ("vqav2", "huggingface")):
        what = "a folder written by save_to_disk, of which the split train is read" if saved else f"data.source {layout}"
        raise ConfigError(f"data.subset {data.subset} means nothing for {what}: leave it out, and let data.path name what is to be read")


@contextmanager
def _reachable(path: Path) -> Iterator[None]:
    """Say which path it is that may not be looked into, or cannot be."""
    try:
        yield
    except OSError as e:
        raise DataError(f"data.path: {path} cannot be read: {e.strerror or e}; check the path and its permissions") from e


def _text_layout(path: Path) -> str:
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):  # as save_to_disk writes them
        return "huggingface"
    parquet = path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
    if parquet and path.is_dir() and (other := next((p for p in sorted(path.iterdir()) if p.suffix in (".txt", ".jsonl")), None)):
        raise DataError(f"data.path: {path} holds .parquet files, and {other.name} would not be read: set data.source to parquet or files")
    return "parquet" if parquet else "files"


def _vqa_layout(path: Path) -> str:
    if path.suffix in (".tar", ".parquet"):
        return "webdataset" if path.suffix == ".tar" else "parquet"
    if path.is_dir() and not (path / "samples.jsonl").is_file():
        if looks_like_vqav2(path):
            return "vqav2"
        for layout, pattern in (("webdataset", "*.tar"), ("parquet", "*.parquet")):
            if any(path.glob(pattern)):
                return layout
    return "files"


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_dir():
        return files_in(path, suffixes)
    if not path.is_file():
        raise DataError(f"data.path: no file or folder {path}; expected {' or '.join(suffixes)} files")
    return [path]


def _text_ids(model: ModelConfig) -> int:
    """Ids from 0 on that are text: below every special token (padding may have any id)."""
    special = (model.eos_token_id, model.image_token_id, model.vision_start_token_id, model.vision_end_token_id)
    return min((i for i in special if i), default=model.vocab_size)
