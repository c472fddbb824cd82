"""What a checkpoint says about the data stream, and whether a run can go on from it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playbook_trainer.config.tree import TrainerConfig, dump

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


def state_problem(state: Mapping[str, Any], step: int) -> str | None:
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
