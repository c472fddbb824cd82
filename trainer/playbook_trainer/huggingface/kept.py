"""What an export keeps of the folder that its weights came from: all of config.json, the tokenizer, templates and processors, and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playbook_trainer.config.huggingface.parts import for_transformers_4, read_json
from playbook_trainer.config.tree import TrainerConfig

CONFIG = "config.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja"),
)
_COMPANIONS = (*_TOKENIZER, "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files beside the weights that transformers reads."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Kept:
    """What goes into an exported folder beside what the model's own configuration says."""

    settings: Mapping[str, Any] | None = None
    """The source's config.json, which has been found to describe this model; None where the weights were drawn."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy, by name."""

    def config_json(self, own: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """The config.json to write: the source's, or our `own`, with the precision of the weights beside it."""
        settings = dict(self.settings if self.settings is not None else own)
        if isinstance(settings.get("text_config"), dict):
            settings["text_config"] = for_transformers_4(settings["text_config"])
        else:
            settings = for_transformers_4(settings)
        for name, part in settings.items():
            if name in ("text_config", "vision_config") and isinstance(part, dict):
                settings[name] = part | {key: dtype for key in _DTYPE_KEYS if key in part}
        return {**settings, **{key: dtype for key in _DTYPE_KEYS if key in settings}, "dtype": dtype}


def kept(config: TrainerConfig) -> Kept:
    """What an export of this run keeps: of the folder in `init.weights`, else of the one in which `data.tokenizer` lies."""
    if config.init.weights is not None:
        source = Path(config.init.weights)
        return Kept(read_json(source / CONFIG), _there(source, _COMPANIONS))
    if config.data.tokenizer != "byte":
        tokenizer = Path(config.data.tokenizer)
        return Kept(files=_there(tokenizer.parent, _TOKENIZER) | {"tokenizer.json": tokenizer})
    return Kept()


def _there(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}
