"""Models by name and by file: this repository's presets, published `config.json` files, and those of a user, all read as a `Shape`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.huggingface import Config, Fields, from_huggingface
from playbook.planner.shapes import Mla, Shape, Vision
from playbook.yaml_files import read, shipped_table

_SUFFIXES = (".json", ".yaml", ".yml")
_OF_HUB = {"model_type", "architectures", "text_config", "num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "n_heads"}
"""Fields of which a Hugging Face configuration has some, and a preset none."""


class Models(Mapping[str, Shape]):
    """Shapes by name, each read when its model is asked for."""

    def __getitem__(self, name: str) -> Shape:
        if name not in self:
            raise KeyError(name)
        return _shipped(name)

    def __contains__(self, name: object) -> bool:
        return name in _files() or name in _table()["models"]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_files(), *_table()["models"]}))

    def __len__(self) -> int:
        return len({*_files(), *_table()["models"]})


MODELS: Mapping[str, Shape] = Models()
"""The trainer's presets (`trainer/configs/models/*.yaml`), and published models that it does not train (`playbook/_tables/models.yaml`).
A preset goes before a row of its name."""


def find(model: str) -> Shape:
    """The shape of a model known by name, or of the file at a path: a Hugging Face `config.json`, or a YAML of the trainer's kind.

    Raises:
        ConfigError: no such model, or a kind of model that is not known.
        FileError: the file cannot be read.
    """
    if named(model):
        return MODELS[named(model)]
    file = file_of(Path(model))
    if file is not None:
        return from_file(file)
    raise ConfigError(f"{not_known(model)}; or give the path of a Hugging Face config.json")


def file_of(path: Path) -> Path | None:
    """The file that describes a model: the one at a path, there or not, or the `config.json` of the folder at it; None for any other
    path.
    """
    if path.suffix in _SUFFIXES:
        return path
    with suppress(OSError):  # a name too long for a file
        if (path / "config.json").is_file():
            return path / "config.json"
    return None


def not_known(model: str) -> str:
    """That no preset has a name: the nearest one, or all of them."""
    return f"model '{model[:80]}' is not known{nearest(model) or '; expected one of ' + ', '.join(MODELS)}"


def nearest(model: str) -> str:
    """The preset whose name is likest to one that is not known, as a question; empty where none is near."""
    near = get_close_matches(_names(model)[-1], _spelled(), n=1, cutoff=_NEAR)
    return f"; did you mean '{_spelled()[near[0]]}'?" if near else ""


def named(model: str) -> str:
    """The preset of a name as publishers spell it, such as Qwen3-30B-A3B or Qwen/Qwen3-30B-A3B-Instruct-2507; empty where none has it."""
    if model in MODELS:
        return model
    return next((n for n in (_published().get(word, {}).get("model", _spelled().get(word, "")) for word in _names(model)) if n), "")


def published(name: str) -> Shape:
    """The shape of a model by its name in a table of runs, with the depths of prediction that those runs train.

    Raises:
        ConfigError: no preset has it; models without a public configuration have none.
    """
    row = next((row for row in map(_published().get, _names(name)) if row), {})
    shape = find(name)
    return replace(shape, mtp=row["mtp"]) if "mtp" in row else shape


def _names(model: str) -> tuple[str, ...]:
    """A model's name without its publisher: all of it, without what tuned weights add, and without a version; then the three without
    underscores.
    """
    repository = _REPOSITORY.fullmatch(model[:200])
    word = _plain(repository["name"] if repository else model)
    tuned = _TUNED.sub("", word)
    words = (word, tuned, _VERSION.sub("", tuned))
    return (*words, *(_flat(w) for w in words))


def _flat(word: str) -> str:
    return word.replace("_", "")


@cache
def _spelled() -> dict[str, str]:
    """Presets by their names and by those of their repositories, with underscores and, where that names one alone, without."""
    hubs = [(word, name) for name, row in _table()["models"].items() if "hub" in row for word in _names(row["hub"])[:2]]
    spelled = {name: name for name in MODELS}
    for word, name in hubs:
        spelled.setdefault(word, name)
    flat: dict[str, set[str]] = {}
    for word, name in spelled.items():
        flat.setdefault(_flat(word), set()).add(name)
    return {word: names.pop() for word, names in flat.items() if len(names) == 1} | spelled


_REPOSITORY = re.compile(r"[\w.-]{1,100}/(?:Meta-)?(?P<name>[\w-][\w.-]{1,100})(?<!\.json)(?<!\.yaml)(?<!\.yml)", re.ASCII)
"""A repository of the Hugging Face hub."""
_TUNED = re.compile(
    r"_(?:instruct|base|chat|it|pt|hf|thinking|sft|dpo|reasoning|preview|unsloth|bnb"
    r"|4bit|8bit|awq|gptq|fp8|bf16|dynamic)(?=_|\Z)|_[0-9]{4}\Z"
)
"""What a repository's name adds to its model's: tuned and quantised weights have the same shape."""
_VERSION = re.compile(r"_v0_[0-9]\Z")
_NEAR = 0.75
"""Least likeness of a name that is offered instead."""


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]+", "_", name[:200].lower()).strip("_")


@cache
def _published() -> dict[str, dict[str, Any]]:
    return {_flat(name): row for name, row in shipped_table("published_models.yaml").items()}


def fields_of(name: str) -> Config:
    """The published fields of a model known by name, as its file here has them; none for another name."""
    preset = named(name)
    if preset in _files():
        fields: Config = read(_files()[preset])[0]
        return fields
    return {k: v for k, v in _table()["models"].get(preset, {}).items() if k not in _OURS}


def from_file(path: Path) -> Shape:
    """The shape that a `config.json` of Hugging Face or a YAML preset describes.

    Raises:
        ConfigError: a field that is missing, not a count, or that no shape can say.
        FileError: the file cannot be read.
    """
    try:
        return from_fields(read(path)[0], str(path))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def from_fields(fields: Any, source: str) -> Shape:
    """The shape that the fields of a `config.json` or of a preset describe.

    Raises:
        ConfigError: no fields; one that is missing, not a count, or that no shape can say.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"expected a mapping of fields, found {type(fields).__name__}")
    return from_huggingface(fields, source) if _OF_HUB & fields.keys() else from_preset(fields, source)


_OURS = ("hub", "source")
"""What a row of the table says beside a model's fields."""


def _table() -> dict[str, dict[str, Any]]:
    return shipped_table("models.yaml")


@cache
def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted((data_root("configs") / "models").iterdir()) if path.suffix in _SUFFIXES}


@cache
def _shipped(name: str) -> Shape:
    path = _files().get(name)
    if path is None:
        row = _table()["models"][name]
        source = row.get("source")
        return from_huggingface(
            fields_of(name), _table()["sources"].get(source, source) or f"https://huggingface.co/{row['hub']}/blob/main/config.json"
        )
    data, _ = read(path)
    with path.open(encoding="utf-8") as f:
        link = re.search(r"https://\S+", f.readline())
    return from_preset(data, link[0] if link else f"trainer/configs/models/{path.name}")


def from_preset(fields: Config, source: str) -> Shape:
    """The shape of a model section of the trainer's configuration; fields left out have the section's defaults.

    Raises:
        ConfigError: a field is missing or not a count.
    """
    c = Fields(fields)
    layers, experts = c.count("num_layers"), c.count("num_experts", default=0)
    mla = None
    if fields.get("attention") == "mla":
        ranks = [c.count(key, default=0) for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        mla = Mla(*ranks)
    tower = fields.get("vision")
    shape = Shape(
        layers, c.count("num_heads"), c.count("num_kv_heads"), experts, source, c.count("hidden_size"), c.count("vocab_size"),
        head_dim=c.count("head_dim"), ffn=c.count("ffn_size", default=0),
        dense_layers=c.count("first_dense_layers", default=0) if experts else layers, top_k=c.count("top_k", default=0),
        expert_ffn=c.count("expert_ffn_size", default=0), shared_ffn=c.count("shared_expert_ffn_size", default=0),
        qk_norm=c.flag("qk_norm", default=True), tied=c.flag("tie_word_embeddings"), mtp=c.count("mtp_layers", default=0), mla=mla,
        vision=_preset_tower(tower) if isinstance(tower, Mapping) else None,
    )  # fmt: skip
    return c.checked(shape)


def _preset_tower(fields: Config) -> Vision:
    c = Fields(fields)
    values = c.count("in_channels", default=3) * c.count("temporal_patch_size", default=2) * c.count("patch_size", default=16) ** 2
    return Vision(
        c.count("depth"), c.count("hidden_size"), c.count("ffn_size"), c.count("num_position_embeddings", default=2304), values,
        c.count("spatial_merge_size", default=2), len(fields.get("deepstack_layers", [])),
    )  # fmt: skip
