"""The image processor beside published weights: the sizes that it brings images to are read, and what is done otherwise here is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from playbook.errors import ConfigError
from playbook_trainer.config.huggingface import read_json
from playbook_trainer.config.model import VisionConfig

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


class Pixels(NamedTuple):
    """Between how many pixels images are brought; None where the processor does not say."""

    least: int | None
    most: int | None


def pixels_of(folder: Path, vision: VisionConfig) -> Pixels:
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
    return Pixels(None, None)


def _read(settings: Mapping[str, Any], path: Path, vision: VisionConfig) -> Pixels:
    """The bounds of image sizes, in pixels; refuses settings that prepare images otherwise than training does."""
    expected = dict(_FIXED) | {theirs: getattr(vision, ours) for theirs, ours in _TOWER.items()}
    stated = {key: value for key, value in settings.items() if value is not None}
    different = [
        f"{key} {stated[key]!r}, here {value!r}" for key, value in expected.items() if key in stated and not _same(stated[key], value)
    ]
    if unknown := sorted(set(stated) - set(expected) - set(_SIZES) - WITHOUT_EFFECT):
        different.append(f"{', '.join(unknown)}, which this trainer does not know")
    size = stated.get("size", {})
    if not isinstance(size, dict) or set(size) - {"shortest_edge", "longest_edge"}:
        different.append(f"size {size!r}, here shortest_edge and longest_edge in pixels of the whole image")
        size = {}
    bounds = [stated.get("min_pixels", size.get("shortest_edge")), stated.get("max_pixels", size.get("longest_edge"))]
    if odd := [bound for bound in bounds if bound is not None and (not isinstance(bound, int) or bound < 1)]:
        different.append(f"size of {odd[0]!r} pixels, here a whole number")
    if different:
        raise ConfigError(f"{path} prepares images otherwise than training does: {'; '.join(different)}; train with the model's own file")
    return Pixels(*bounds)


def _same(value: Any, expected: Any) -> bool:
    try:
        return bool(abs(value - expected) < 1e-6) if isinstance(expected, float) else bool(value == expected)
    except TypeError:
        return False
