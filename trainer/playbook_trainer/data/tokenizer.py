"""What comes beside a model's weights. Text to token ids: bytes by default, or any `tokenizer.json`; special ids always come from the
model's configuration. The image processor: the sizes that it brings images to are read, and what is done otherwise here is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.huggingface import read_json
from playbook_trainer.config.sections import VisionConfig
from playbook_trainer.config.tree import ModelConfig, TrainerConfig

_NUM_BYTES = 256
_BYTE_VOCABULARY = 1024
"""No model of bytes and special tokens has more ids."""


_LINE = re.compile(r"\n(?=\S)")
_BLOCK = 2**20
"""Characters that are tokenized at once: a token takes some hundred bytes while it is."""


class ByteTokenizer:
    """One token per UTF-8 byte, ids 0 to 255; the special tokens of the model lie above."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_long(self, text: str) -> NDArray[Any]:
        """The bytes of `text`."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


class FileTokenizer:
    """A Hugging Face `tokenizer.json`.

    In `prepared` text, what spells a special token is that token. Elsewhere it is plain text, so that a question cannot forge one.
    """

    def __init__(self, path: Path, vocab_size: int, *, prepared: bool = False) -> None:
        """Read `path`; a `prepared` text (by a chat template) may name special tokens, any other has none."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as e:
            raise ConfigError(f"data.tokenizer is {path}, which needs the package 'tokenizers': pip install tokenizers") from e
        try:
            if not path.is_file():
                raise DataError(f"data.tokenizer: no file {path}; expected 'byte' or the path of a tokenizer.json")
            self._backend = Backend.from_file(str(path))
        except DataError:
            raise
        except Exception as e:  # the library raises bare Exception for every broken file
            raise DataError(f"{path} is no tokenizer.json that the 'tokenizers' library can read: {e}") from e
        self.path, self.settings = path, _settings(path.parent / "tokenizer_config.json")
        self._check_settings()
        self._backend.encode_special_tokens = not prepared
        self._backend.no_truncation()
        self._backend.no_padding()
        largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise ConfigError(
                f"{path} has token ids up to {largest}, the model's vocab_size is {vocab_size}; "
                f"take the model's own tokenizer, or set model.vocab_size to at least {largest + 1}"
            )

    def _check_settings(self) -> None:
        """Refuse what the files beside it add to the tokenizer: transformers makes other tokens of the same text then."""
        folder, added = self.path.parent, {token.content for token in self._backend.get_added_tokens_decoder().values()}
        named = [*_named(self.settings), *_named(_settings(folder / "special_tokens_map.json")), *_settings(folder / "added_tokens.json")]
        spaced = re.search(r'"add_prefix_space":\s*true', self._backend.to_str()) is not None
        wrong = [f"token {name!r}, which is none of its added_tokens" for name in dict.fromkeys(named) if name not in added]
        wrong += ["split_special_tokens"] if self.settings.get("split_special_tokens") else []
        wrong += ["add_prefix_space"] if self.settings.get("add_prefix_space") and not spaced else []
        if wrong:
            raise ConfigError(
                f"{self.path}: the files beside it ask for {'; '.join(wrong[:3])}; take the tokenizer as it was saved, or make them agree"
            )

    def refuse_frames(self) -> None:
        """Refuse a tokenizer that puts tokens around every text: here a text begins without, and ends with the model's eos_token_id.

        Raises:
            ConfigError: its settings or its post_processor say so.
        """
        additions = [key for key in ("add_bos_token", "add_eos_token") if self.settings.get(key)]
        if self._backend.num_special_tokens_to_add(False):
            additions.append("a post_processor with special tokens")
        if additions:
            raise ConfigError(
                f"{self.path} asks for {' and '.join(additions)}, and texts get none but the end here (transformers 4 and 5 differ in it): "
                "say false in a copy"
            )

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of `text`, and the character offset at which each begins."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), [start for start, _ in encoding.offsets]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any special token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_long(self, text: str) -> NDArray[Any]:
        """The ids of `text` of any length: one of more than a million characters is tokenized in blocks that end with a line."""
        return np.concatenate([np.asarray(self.encode(text[a:b]), dtype=np.uint32) for a, b in pairwise(_borders(text))])


Tokenizer = ByteTokenizer | FileTokenizer
"""Turns text into token ids."""


def _borders(text: str) -> list[int]:
    """Where blocks begin and end: before a line that begins with no space, else before a word, else anywhere."""
    borders = [0]
    while (start := borders[-1]) + _BLOCK < len(text):
        window = text[start + 1 : start + _BLOCK]
        line = max((match.end() for match in _LINE.finditer(window)), default=0)
        borders.append(start + 1 + (line or max(0, window.rfind(" ")) or len(window)))
    return [*borders, len(text)]


def load_tokenizer(name: str, model: ModelConfig, *, prepared: bool = False) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; in `prepared` text, special tokens are tokens.

    Raises:
        DataError: no such file, or it is not a tokenizer.
        ConfigError: its ids, or the model's special ids, do not fit the model's vocabulary.
    """
    _check_special(model, first_free_id=_NUM_BYTES if name == "byte" else 0)
    if name == "byte":
        return ByteTokenizer()
    tokenizer = FileTokenizer(Path(name), model.vocab_size, prepared=prepared)
    tokenizer.refuse_frames()
    return tokenizer


def _settings(path: Path) -> dict[str, Any]:
    """One of the files beside a tokenizer.json; empty where it is not there."""
    return read_json(path) if path.is_file() else {}


def _named(settings: dict[str, Any]) -> list[str]:
    """The special tokens that such a file names, each of which transformers adds to the tokenizer."""
    groups = [settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")]
    each: list[Any] = [value for key, value in settings.items() if key.endswith("_token") and not key.startswith("add_")]
    for group in (*groups, settings.get("added_tokens_decoder")):
        each += group.values() if isinstance(group, dict) else group if isinstance(group, list) else []
    texts = [value.get("content") if isinstance(value, dict) else value for value in each]
    return [text for text in texts if isinstance(text, str)]


def refuse_bytes(config: TrainerConfig) -> None:
    """Refuse to train weights on bytes that know text by the ids of another tokenizer: the loss would fall, and the model be lost.

    Raises:
        ConfigError: `init.weights` has a tokenizer, or more ids than bytes, and `data.tokenizer` is byte.
    """
    data, weights = config.data, config.init.weights
    if weights is None or data.kind == "mock" or data.source == "generated":
        return
    weights_tokenizer = Path(weights) / "tokenizer.json"
    if data.tokenizer != "byte":
        if weights_tokenizer.is_file() and not _same(weights_tokenizer, Path(data.tokenizer)):
            raise ConfigError(
                f"data.tokenizer {data.tokenizer} is another than the one that the weights in {weights} know text by: set data.tokenizer: "
                f"{weights_tokenizer}"
            )
        return
    if weights_tokenizer.is_file():
        raise ConfigError(
            f"data.tokenizer is byte, and the weights in {weights} know text by the ids of their own: set data.tokenizer: "
            f"{weights_tokenizer}"
        )
    if config.model.vocab_size > _BYTE_VOCABULARY:
        raise ConfigError(
            f"data.tokenizer is byte, and the weights in {weights} have {config.model.vocab_size} ids, which are not of bytes: "
            "set data.tokenizer to the tokenizer.json that was published with them"
        )


def _same(one: Path, other: Path) -> bool:
    """Whether two files of tokenizers hold the same, however they are written; one that is not there is refused elsewhere."""
    try:
        first, second = one.read_bytes(), other.read_bytes()
        return first == second or json.loads(first) == json.loads(second)
    except OSError:
        return True
    except (ValueError, RecursionError):
        return False


def _check_special(model: ModelConfig, first_free_id: int) -> None:
    """Refuse special tokens of the model beyond its vocabulary, below `first_free_id`, or equal to the image token."""
    # Padding bears no loss and is attended to by nothing but padding, so its id may be any; the others must be unlike text.
    special = {"eos_token_id": (model.eos_token_id, first_free_id), "pad_token_id": (model.pad_token_id, 0)}
    special |= {
        key: (token_id, first_free_id)
        for key in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
        if (token_id := getattr(model, key)) is not None
    }
    text_ids = {key: token_id for key, (token_id, _) in special.items() if key not in ("image_token_id", "pad_token_id")}
    if clashing := [key for key, token_id in text_ids.items() if token_id == model.image_token_id]:
        raise ConfigError(
            f"model.{clashing[0]} and model.image_token_id are both {model.image_token_id}, so one would pass for an image; change one"
        )
    for key, (token_id, lowest_id) in special.items():
        if not lowest_id <= token_id < model.vocab_size:
            why = f"; ids below {lowest_id} are bytes" if token_id < lowest_id else ""
            raise ConfigError(
                f"model.{key} is {token_id}; expected {lowest_id} to {model.vocab_size - 1} (model.vocab_size is {model.vocab_size}){why}"
            )


_FILES = ("processor_config.json", "preprocessor_config.json")
"""Where transformers looks: first in that of all processors, as transformers 5 saves it, then in that of images alone."""
_FIXED: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_pad": False,
    "do_center_crop": False,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""What is done to every image, by transformers' name; `resample` 3 is bicubic."""
_TOWER = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
_SIZES = ("size", "min_pixels", "max_pixels")
WITHOUT_EFFECT = frozenset(
    {
        *("image_processor_type", "processor_class", "feature_extractor_type", "auto_map", "transformers_version", "_processor_class"),
        *("data_format", "input_data_format", "device", "return_tensors", "disable_grouping", "default_to_square", "image_seq_length"),
        *("crop_size", "pad_size", "size_divisor", "do_sample_frames"),  # of steps that are not taken
    }
)
"""Keys that change no pixel: names of classes, and the form in which arrays are handed on."""


_Pixels = tuple[int | None, int | None]
"""Between how many pixels images are brought; None where the processor does not say."""


def pixels_of(folder: Path, vision: VisionConfig) -> _Pixels:
    """The bounds by the image processor in `folder`; none where there is no such file.

    Raises:
        ConfigError: it treats images otherwise than this trainer does, or has a key that is not known here.
    """
    for name in _FILES:
        path = folder / name
        settings = read_json(path) if path.is_file() else {}
        if name == _FILES[0]:
            settings = settings.get("image_processor") or {}
        if settings:
            return _read(settings, path, vision)
    return None, None


def _read(settings: Mapping[str, Any], path: Path, vision: VisionConfig) -> _Pixels:
    """The bounds of image sizes, in pixels; refuses settings that prepare images otherwise than training does."""
    expected = dict(_FIXED) | {theirs: getattr(vision, ours) for theirs, ours in _TOWER.items()}
    stated = {key: value for key, value in settings.items() if value is not None}
    different = [
        f"{key} {stated[key]!r}, here {value!r}" for key, value in expected.items() if key in stated and not _alike(stated[key], value)
    ]
    if unknown := sorted(set(stated) - set(expected) - set(_SIZES) - WITHOUT_EFFECT):
        different.append(f"{', '.join(unknown)}, which this trainer does not know")
    size = stated.get("size", {})
    if not isinstance(size, dict) or set(size) - {"shortest_edge", "longest_edge"}:
        different.append(f"size {size!r}, here shortest_edge and longest_edge in pixels of the whole image")
        size = {}
    bounds = stated.get("min_pixels", size.get("shortest_edge")), stated.get("max_pixels", size.get("longest_edge"))
    if odd := [bound for bound in bounds if bound is not None and (not isinstance(bound, int) or bound < 1)]:
        different.append(f"size of {odd[0]!r} pixels, here a whole number")
    if different:
        raise ConfigError(f"{path} prepares images otherwise than training does: {'; '.join(different)}; train with the model's own file")
    return bounds


def _alike(value: Any, expected: Any) -> bool:
    try:
        return bool(abs(value - expected) < 1e-6) if isinstance(expected, float) else bool(value == expected)
    except TypeError:
        return False
