"""Text from Hugging Face `datasets`: a folder written by save_to_disk, or a data set by name where the hub can be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.sources.streams import Flat
from playbook_trainer.data.sources.text import text_of


def hub_text(path: str, subset: str | None, key: str) -> Flat[str]:
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
        found: Any = datasets.load_from_disk(path) if Path(path).is_dir() else datasets.load_dataset(path, subset, split="train")
    except Exception as e:  # the library raises its own, the hub's and the network's errors
        raise DataError(
            f"data.path: {path} is neither a folder written by save_to_disk nor a data set that can be reached: "
            f"{(str(e).splitlines() or [type(e).__name__])[0]}"
        ) from e
    if isinstance(found, dict):
        if "train" not in found:
            raise DataError(f"data.path: {path} has the splits {', '.join(map(str, found))}; expected one named train")
        found = found["train"]
    if key not in found.column_names:
        raise DataError(f"data.path: {path} has the columns {', '.join(found.column_names)}; data.text_key is '{key}': name one of them")
    return Flat(_Column(found.select_columns([key]), key, path), path)


class _Column:
    def __init__(self, table: Any, key: str, name: str) -> None:
        self._table, self._key, self._name = table, key, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> str:
        return text_of(f"{self._name}, row {i}", self._table[i][self._key], self._key)


def looks_like_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
