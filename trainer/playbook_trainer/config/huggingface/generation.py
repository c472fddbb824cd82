"""How weights are used once they are trained, as far as rows must be like it: where an answer ends, and how many positions there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook_trainer.config.huggingface.parts import read_json, text_of
from playbook_trainer.config.model import ModelConfig


def end_of(folder: Path, end: Any) -> Any:
    """The token that ends an answer: `end`, by config.json, at which generation_config.json must stop; where there is none, the first one there."""
    stops = _stops(folder)
    if end is None and not stops:
        raise ConfigError(
            f"{folder}: neither config.json nor generation_config.json has eos_token_id, with which every text and answer ends: add it"
        )
    if end is not None and stops and end not in stops:
        raise ConfigError(
            f"{folder}: config.json ends answers with {end!r}, and generation_config.json ends answers with {stops}: make them agree"
        )
    return stops[0] if end is None else end


def check_rows(config: ModelConfig, folder: Path, seq_len: int) -> None:
    """Refuse rows that may hold longer samples than the weights in `folder` know positions, or that end otherwise than what they generate.

    Raises:
        ConfigError: `seq_len` is beyond max_position_embeddings, or the model's eos_token_id is none of the folder's.
    """
    settings = read_json(folder / "config.json")
    text = text_of(settings)
    most = text.get("max_position_embeddings")
    if isinstance(most, int) and seq_len > most:
        raise ConfigError(
            f"data.seq_len is {seq_len}, and the weights in {folder} are of {most} positions: lower it, or write rope_scaling and "
            "max_position_embeddings for longer samples into their config.json"
        )
    stops = _stops(folder) or _listed({**text, **settings}.get("eos_token_id"))
    if stops and config.eos_token_id not in stops:
        raise ConfigError(
            f"model.eos_token_id is {config.eos_token_id}, and the weights in {folder} end what they say with {stops}: set one of them"
        )


def _stops(folder: Path) -> list[Any]:
    """Tokens at which generation stops, by generation_config.json."""
    file = folder / "generation_config.json"
    return _listed(read_json(file).get("eos_token_id")) if file.is_file() else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
