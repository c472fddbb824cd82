"""What an offline run of Weights & Biases would upload, read from its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration and the history of the one offline run below a folder.

    Raises:
        ValueError: there is none, or more than one.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("offline-run-*/*.wandb")
    config: dict[str, Any] = {}
    history = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
        if record.history.item:
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return {key: value for key, value in config.items() if not key.startswith("_")}, history


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format (blocks of 32 KiB; checksum, length, kind), which follow a header of seven bytes.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
