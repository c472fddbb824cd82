"""Models by name and by file: this repository's presets, published `config.json` files, and those of a user, all read as a `Shape`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.shapes import DEEPEST, LARGEST, LinearAttention, Mamba, Mla, Shape, Vision
from playbook.yaml_files import did_you_mean, read

_HUB = "https://huggingface.co/"
_SUFFIXES = (".json", ".yaml", ".yml")
_NEEDED = (
    "num_layers hidden_size vocab_size num_heads num_kv_heads head_dim ffn_size num_experts top_k expert_ffn_size first_dense_layers"
    " shared_expert_ffn_size qk_norm tie_word_embeddings mtp_layers"
)
"""Fields of a preset that make a shape; multi-head latent attention and a vision tower have more, as `trainer/configs/models/` shows."""

Config = Mapping[str, Any]


class Models(Mapping[str, Shape]):
    """Shapes by name. A name is that of a file, and a file is read when its model is asked for."""

    def __getitem__(self, name: str) -> Shape:
        files = _files()
        if name not in files:
            raise KeyError(name)
        return _shipped(name)

    def __contains__(self, name: object) -> bool:
        return name in _files()

    def __iter__(self) -> Iterator[str]:
        return iter(_files())

    def __len__(self) -> int:
        return len(_files())


MODELS: Mapping[str, Shape] = Models()
"""The trainer's presets (`trainer/configs/models/*.yaml`), and published models that it does not train (`playbook/_tables/models/*.json`)."""


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
    """The file that describes a model: the one at a path, there or not, or the `config.json` of the folder at it; None for any other path."""
    if path.suffix in _SUFFIXES:
        return path
    with suppress(OSError):  # a name too long for a file
        if (path / "config.json").is_file():
            return path / "config.json"
    return None


def not_known(model: str) -> str:
    """That no preset has a name: the nearest one, or all of them."""
    names = ", ".join(MODELS)
    return f"model '{model[:80]}' is not known{did_you_mean(model[:80], MODELS) or f'; expected one of {names}'}"


def named(model: str) -> str:
    """The preset of a name as publishers spell it, such as Qwen3-30B-A3B or Qwen/Qwen3-30B-A3B-Instruct-2507; empty where none has it."""
    if model in MODELS:
        return model
    return next((n for n in (_row(word).get("model", _spelled().get(word, "")) for word in _names(model)) if n), "")


def published(name: str) -> Shape:
    """The shape of a model by its name in a table of runs, with the depths of prediction that those runs train.

    Raises:
        ConfigError: no preset has it; models without a public configuration have none.
    """
    row = next((row for row in map(_row, _names(name)) if row), {})
    shape = find(name)
    return replace(shape, mtp=row["mtp"]) if "mtp" in row else shape


def _names(model: str) -> tuple[str, ...]:
    """A model's name without its publisher, and without what tuned weights add, in letters and digits."""
    repository = _REPOSITORY.fullmatch(model[:200])
    word = _plain(repository["name"] if repository else model)
    return tuple(re.sub("_", "", w) for w in (word, _TUNED.sub("", word)))


def _row(word: str) -> Mapping[str, Any]:
    return _published().get(word, {})


@cache
def _spelled() -> dict[str, str]:
    return {name.replace("_", ""): name for name in _files()}


_REPOSITORY = re.compile(r"[\w.-]{1,100}/(?:Meta-)?(?P<name>[\w-][\w.-]{1,100})(?<!\.json)(?<!\.yaml)(?<!\.yml)", re.ASCII)
"""A repository of the Hugging Face hub."""
_TUNED = re.compile(r"(?:_(?:instruct|base|chat|it|hf|thinking|[0-9]{4}|v0_[0-9]))+\Z")
"""What a repository's name adds to its model's: tuned weights have the same shape."""


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]+", "_", name[:200].lower()).strip("_")


@cache
def _published() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = read(data_root("tables") / "published_models.yaml")[0]
    return {name.replace("_", ""): row for name, row in table.items()}


def fields_of(name: str) -> Config:
    """The published fields of a model known by name, as its file here has them; none for another name."""
    known = named(name)
    return read(_files()[known])[0] if known else {}


def from_file(path: Path) -> Shape:
    """The shape that a `config.json` of Hugging Face or a YAML preset describes.

    Raises:
        ConfigError: a kind of model that is not known, or a field that is missing or not a count.
        FileError: the file cannot be read.
    """
    data, _ = read(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of fields, found {type(data).__name__}")
    try:
        return from_huggingface(data, str(path)) if "model_type" in data else from_preset(data, str(path))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


@cache
def _files() -> dict[str, Path]:
    folders = (data_root("configs") / "models", data_root("tables") / "models")
    return {path.stem: path for path in sorted((p for f in folders for p in f.iterdir() if p.suffix in _SUFFIXES), key=lambda p: p.stem)}


@cache
def _shipped(name: str) -> Shape:
    path = _files()[name]
    data, _ = read(path)
    if "model_type" in data:
        return from_huggingface(data, data.get("_source") or f"{_HUB}{data['_name_or_path']}/blob/main/config.json")
    with path.open(encoding="utf-8") as f:
        link = re.search(r"https://\S+", f.readline())
    return from_preset(data, link[0] if link else f"trainer/configs/models/{path.name}")


def from_preset(fields: Config, source: str) -> Shape:
    """The shape of a model section of the trainer's configuration; fields left out have the section's defaults.

    Raises:
        ConfigError: a field is missing or not a count.
    """
    c = _Fields(fields)
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
    c = _Fields(fields)
    values = c.count("in_channels", default=3) * c.count("temporal_patch_size", default=2) * c.count("patch_size", default=16) ** 2
    return Vision(
        c.count("depth"), c.count("hidden_size"), c.count("ffn_size"), c.count("num_position_embeddings", default=2304), values,
        c.count("spatial_merge_size", default=2), len(fields.get("deepstack_layers", [])),
    )  # fmt: skip


def from_huggingface(config: Config, source: str) -> Shape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        ConfigError: its `model_type` is not known, or a field is missing, not a count, or describes what a shape cannot say.
    Source: Hugging Face transformers, `models/<model_type>/configuration_<model_type>.py` (fields and their defaults).
    """
    kind = config.get("model_type")
    if isinstance(config.get("text_config"), Mapping):
        config = {
            "tie_word_embeddings": config.get("tie_word_embeddings"),
            "vision_config": config.get("vision_config"),
            **config["text_config"],
        }
        kind = config.get("model_type", kind)
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ConfigError(
            f"model_type '{str(kind)[:40]}' is not known{did_you_mean(str(kind)[:40], FAMILIES)}; another model takes a YAML file with the fields"
            f" {', '.join(_NEEDED.split())}"
        )
    c = _Fields(config)
    heads, hidden = c.count("num_attention_heads", "n_head", "n_heads"), c.count("hidden_size", "n_embd", "d_model")
    layers = c.count("num_hidden_layers", "n_layer", "n_layers")
    counts: dict[str, Any] = {
        "layers": layers,
        "heads": heads,
        "kv_heads": c.count("num_key_value_heads", default=heads),
        "experts": 0,
        "source": source,
        "hidden": hidden,
        "vocab": c.count("vocab_size"),
        "head_dim": c.count("head_dim", default=hidden // max(heads, 1)),
        "ffn": c.count("intermediate_size", "n_inner", default=4 * hidden),
        "dense_layers": layers,
        "tied": c.flag("tie_word_embeddings"),
        "vision": _tower(config["vision_config"]) if isinstance(config.get("vision_config"), Mapping) else None,
    }
    return c.checked(Shape(**counts | family(c)))


class _Fields:
    """Fields of a configuration, asked for by one of several names; what is missing is told at once."""

    def __init__(self, fields: Config) -> None:
        self.fields = fields
        self.missing: list[str] = []

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number; null counts as absent."""
        value = next((self.fields[n] for n in names if self.fields.get(n) is not None), default)
        if value is None:
            self.missing.append(names[0])
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ConfigError(f"{names[0]} is {str(value)[:40]}; expected a whole number from 0 to {LARGEST}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A switch; null counts as absent."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {str(value)[:40]}; expected true or false")
        return default if value is None else value

    def refuse(self, name: str, *plain: Any) -> None:
        """Refuse a field with another value than these, or none: a shape has no word for it."""
        value = self.fields.get(name)
        if value is not None and value not in plain:
            raise ConfigError(f"{name} {str(value)[:60]} is not expressible; expected {plain[0]}")

    def checked(self, shape: Shape) -> Shape:
        """The shape, if nothing was missing and no count that divides is zero."""
        if self.missing:
            raise ConfigError(f"{', '.join(self.missing)} missing; add {'it' if len(self.missing) == 1 else 'them'}")
        low = [k for k in ("layers", "heads", "kv_heads", "hidden", "vocab", "head_dim") if getattr(shape, k) < 1]
        if low or shape.layers > DEEPEST:
            raise ConfigError(f"{', '.join(low) or 'layers'} out of range; expected 1 or more, and at most {DEEPEST} layers")
        if shape.experts and not 0 < shape.top_k <= shape.experts:
            raise ConfigError(f"{shape.top_k} of {shape.experts} experts for each token; expected 1 to {shape.experts}")
        return shape


def _llama(c: _Fields) -> dict[str, Any]:
    return {"attention_bias": c.flag("attention_bias"), "output_bias": c.flag("attention_bias"), "mlp_bias": c.flag("mlp_bias")}


def _mistral(c: _Fields) -> dict[str, Any]:
    return {"window": c.count("sliding_window", default=0), "window_every": 0}


def _mixtral(c: _Fields) -> dict[str, Any]:
    c.refuse("sliding_window")
    return _routed(c, "num_local_experts", "intermediate_size")


def _qwen2(c: _Fields) -> dict[str, Any]:
    c.refuse("use_sliding_window", False)
    return {"attention_bias": True}


def _qwen2_moe(c: _Fields) -> dict[str, Any]:
    return _qwen2(c) | _routed(c, "num_experts", "moe_intermediate_size") | _shared_gate(c)


def _qwen3(c: _Fields) -> dict[str, Any]:
    c.refuse("use_sliding_window", False)
    return {"qk_norm": True, "attention_bias": c.flag("attention_bias"), "output_bias": c.flag("attention_bias")}


def _qwen3_moe(c: _Fields) -> dict[str, Any]:
    return _qwen3(c) | _routed(c, "num_experts", "moe_intermediate_size")


def _qwen3_next(c: _Fields) -> dict[str, Any]:
    linear = LinearAttention(
        c.count("linear_num_key_heads"), c.count("linear_num_value_heads"), c.count("linear_key_head_dim"),
        c.count("linear_conv_kernel_dim", default=4), c.count("full_attention_interval", default=4),
    )  # fmt: skip
    c.refuse("linear_value_head_dim", linear.head_dim)
    extra = {"attention_gate": True, "linear": linear, "mtp": c.count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0)}
    return _qwen3_moe(c) | _shared_gate(c) | extra


def _gemma(c: _Fields) -> dict[str, Any]:
    return {"tied": True, "head_dim": c.count("head_dim", default=256)}


def _gemma2(c: _Fields) -> dict[str, Any]:
    return _gemma(c) | {"norms": 4, "window": c.count("sliding_window", default=4096)}


def _gemma3(c: _Fields) -> dict[str, Any]:
    kinds = c.fields.get("layer_types")
    every = kinds.index("full_attention") + 1 if isinstance(kinds, list) and "full_attention" in kinds else 6
    return _gemma2(c) | {"qk_norm": True, "window_every": c.count("sliding_window_pattern", "_sliding_window_pattern", default=every)}


def _gpt2(c: _Fields) -> dict[str, Any]:
    biases = {"attention_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True}
    return {**biases, "gated": False, "tied": c.flag("tie_word_embeddings", default=True), "positions": c.count("n_positions")}


def _mpt(c: _Fields) -> dict[str, Any]:
    attention = c.fields.get("attn_config")
    alibi = isinstance(attention, Mapping) and attention.get("alibi") is True
    learned = c.flag("learned_pos_emb", default=True) and not alibi
    hidden = c.count("d_model")
    return {
        "gated": False, "tied": c.flag("tie_word_embeddings", default=True), "ffn": c.count("expansion_ratio", default=4) * hidden,
        "positions": c.count("max_seq_len") if learned else 0,
    }  # fmt: skip


_BLOCKS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def _nemotron_h(c: _Fields) -> dict[str, Any]:
    kinds = c.fields.get("layers_block_type")
    found = c.fields.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        found = "".join(_BLOCKS.get(str(kind), "?") for kind in kinds)
    blocks = found[:DEEPEST] if isinstance(found, str) else ""
    layers = c.count("num_hidden_layers", default=len(blocks))
    if not blocks or set(blocks) - set(_BLOCKS.values()) or len(blocks) != layers:
        raise ConfigError(
            f"hybrid_override_pattern is {str(found)[:60]}; expected a letter for each of {layers} layers: M Mamba, * attention, E experts, - MLP"
        )
    mamba = Mamba(
        c.count("mamba_num_heads"),
        c.count("mamba_head_dim"),
        c.count("n_groups"),
        c.count("ssm_state_size"),
        c.count("conv_kernel", default=4),
    )
    shared = {"blocks": blocks, "layers": layers, "mamba": mamba, "gated": False, "ffn": c.count("intermediate_size", default=0)}
    if "E" not in blocks:
        return shared
    return shared | {
        "experts": c.count("n_routed_experts"), "top_k": c.count("num_experts_per_tok"), "expert_ffn": c.count("moe_intermediate_size"),
        "shared_ffn": c.count("moe_shared_expert_intermediate_size", default=0), "latent": c.count("moe_latent_size", default=0),
        "mtp": c.count("num_nextn_predict_layers", default=0), "dense_layers": 0,
    }  # fmt: skip


def _deepseek(c: _Fields) -> dict[str, Any]:
    c.refuse("moe_layer_freq", 1)
    mla = Mla(*(c.count(k, default=0) for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")))
    heads = c.count("num_attention_heads")
    return {**_sigmoid_routed(c), "kv_heads": heads, "head_dim": mla.nope_dim + mla.rope_dim, "mla": mla}


def _glm4_moe(c: _Fields) -> dict[str, Any]:
    return {**_sigmoid_routed(c), "attention_bias": c.flag("attention_bias"), "qk_norm": c.flag("use_qk_norm")}


def _gpt_oss(c: _Fields) -> dict[str, Any]:
    biased = c.flag("attention_bias", default=True)
    return _routed(c, "num_local_experts", "intermediate_size") | {
        "attention_bias": biased, "output_bias": biased, "expert_bias": True, "sinks": True, "window": c.count("sliding_window", default=0),
    }  # fmt: skip


def _routed(c: _Fields, experts: str, width: str) -> dict[str, Any]:
    """Experts in every layer."""
    c.refuse("mlp_only_layers", [])
    c.refuse("decoder_sparse_step", 1)
    return {
        "experts": c.count(experts, "num_local_experts"),
        "top_k": c.count("num_experts_per_tok"),
        "expert_ffn": c.count(width),
        "dense_layers": 0,
        "ffn": 0,
    }


def _sigmoid_routed(c: _Fields) -> dict[str, Any]:
    """Experts as DeepSeek-V3 has them: some dense layers first, shared experts beside the routed ones, depths of prediction."""
    width = c.count("moe_intermediate_size")
    return _routed(c, "n_routed_experts", "moe_intermediate_size") | {
        "dense_layers": c.count("first_k_dense_replace", default=0), "ffn": c.count("intermediate_size"),
        "shared_ffn": c.count("n_shared_experts", default=0) * width, "mtp": c.count("num_nextn_predict_layers", default=0),
    }  # fmt: skip


def _shared_gate(c: _Fields) -> dict[str, Any]:
    return {"shared_ffn": c.count("shared_expert_intermediate_size", default=0), "shared_gate": True}


def _tower(config: Config) -> Vision:
    """The vision tower of Qwen3-VL."""
    c = _Fields(config)
    values = c.count("in_channels", default=3) * c.count("temporal_patch_size", default=2) * c.count("patch_size", default=16) ** 2
    deepstack = config.get("deepstack_visual_indexes", [8, 16, 24])
    return Vision(
        c.count("depth"), c.count("hidden_size"), c.count("intermediate_size"), c.count("num_position_embeddings", default=2304), values,
        c.count("spatial_merge_size", default=2), len(deepstack) if isinstance(deepstack, list) else 0,
    )  # fmt: skip


FAMILIES: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _deepseek,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_vl_text": _qwen3,
}
"""What each `model_type` adds to the fields that all have."""
