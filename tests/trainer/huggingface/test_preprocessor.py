"""The image processor beside published weights: images get the pixels that transformers gives them, or are refused; no key is passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
from data_sets import VL, config, encoded, samples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from playbook.errors import ConfigError
from playbook_trainer.data.images import ImageDecoder, patches_into, target_size
from playbook_trainer.data.rows import make_rows
from playbook_trainer.data.tokenizer import WITHOUT_EFFECT, pixels_of

theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""Source: Qwen/Qwen3-VL-30B-A3B-Instruct, preprocessor_config.json."""
EVERY = theirs.Qwen2VLImageProcessorPil(**PUBLISHED).to_dict() | PUBLISHED | {"min_pixels": 65536, "max_pixels": 16777216}
TOWER = parity.tiny(VL).vision


def folder(path: Path, settings: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(settings, default=list))
    return path


@settings(max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([28, 32]), st.integers(4000, 70_000), st.integers(70_000, 2_000_000))
def test_sizes_are_those_of_transformers(height: int, width: int, factor: int, least: int, most: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    size = target_size(height, width, factor, most, least)
    expected = theirs.smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
    # Of a long strip, transformers makes more pixels than it may.
    assert size == expected or math.prod(expected) > most >= math.prod(size)


@pytest.mark.parametrize("kind", ["image", "all processors", "old names"])
def test_small_images_are_enlarged_as_at_inference(kind: str, tmp_path: Path) -> None:
    """224 x 224 pixels are 64 tokens, and each patch has the values that transformers makes."""
    settings: dict[str, Any] = PUBLISHED | {"patch_size": TOWER.patch_size, "merge_size": TOWER.spatial_merge_size}
    given_: dict[str, Any] = settings
    if kind == "old names":
        given_ = {k: v for k, v in settings.items() if k != "size"} | {"min_pixels": 65536, "max_pixels": 16777216}
    name = "processor_config.json" if kind == "all processors" else "preprocessor_config.json"
    weights = folder(tmp_path / "w", {"image_processor": given_, "processor_class": "x"} if kind == "all processors" else given_, name)
    pictures = [
        np.random.default_rng(n).integers(0, 256, (*size, 3), dtype=np.uint8) for n, size in enumerate([(224, 224), (40, 90), (300, 301)])
    ]
    images = {f"{n}.png": encoded(Image.fromarray(pixels), "PNG") for n, pixels in enumerate(pictures)}
    data = samples(tmp_path / "data", [{"images": [name], "question": "q", "answer": "a"} for name in images], images)
    words: dict[str, Any] = {"data__path": str(data), "data__max_image_pixels": 2**20, "data__seq_len": 512, "data__pack": False}
    words |= {"eval__path": str(data), "eval__every": 1, "train__global_batch_size": 1, "init__weights": str(weights)}
    rows, processor = make_rows(config(VL, **words), "train"), theirs.Qwen2VLImageProcessorPil(**settings)
    decoder, tokens = ImageDecoder(config(VL, **words).data), {}
    for k in range(3):
        (document,) = rows.row(k)
        (image,) = document.images
        n = int(Path(str(image.file)).stem)
        expected = processor(Image.fromarray(pictures[n]), return_tensors="np")
        pixels, _ = decoder.pixels(image)
        patches = np.empty_like(expected["pixel_values"], dtype=np.float32)
        patches_into(patches, pixels, TOWER)
        np.testing.assert_allclose(patches, expected["pixel_values"], atol=1e-5)
        tokens[n] = image.height * image.width // 1024
    assert tokens[0] == 64
    small = make_rows(config(VL, **words, data__min_image_pixels=0), "train")
    assert min(d.images[0].height * d.images[0].width for k in range(3) for d in small.row(k)) < 65536


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value
    return f"{value}x" if isinstance(value, str) else [2 * each for each in value]


@pytest.mark.parametrize("key", sorted({*EVERY, *WITHOUT_EFFECT, "surprise"}))
def test_every_key_is_read_or_refused_or_changes_no_pixel(key: str, tmp_path: Path) -> None:
    value = {"shortest_edge": 4096, "longest_edge": 2**22} if key == "size" else changed(EVERY.get(key, "some text"))
    settings = PUBLISHED | {key: value}
    tower = TOWER.model_copy(update={"patch_size": 16, "spatial_merge_size": 2})
    assert pixels_of(folder(tmp_path, PUBLISHED), tower) == (65536, 16777216)
    try:
        bounds = pixels_of(folder(tmp_path, settings), tower)
    except ConfigError:
        return
    if key in ("size", "min_pixels", "max_pixels"):
        assert bounds != (65536, 16777216)
        return
    assert key in WITHOUT_EFFECT
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))
    try:
        processor = theirs.Qwen2VLImageProcessorPil(**settings)
        made = processor(picture, return_tensors="np")["pixel_values"]
    except (TypeError, ValueError):
        return  # no value of this key
    np.testing.assert_array_equal(made, theirs.Qwen2VLImageProcessorPil(**PUBLISHED)(picture, return_tensors="np")["pixel_values"])


def test_more_pixels_than_the_processor_takes_are_refused(tmp_path: Path) -> None:
    settings = PUBLISHED | {
        "patch_size": TOWER.patch_size,
        "merge_size": TOWER.spatial_merge_size,
        "size": {"shortest_edge": 1024, "longest_edge": 4096},
    }
    with pytest.raises(ConfigError, match=r"takes no more than 4096"):
        make_rows(config(VL, init__weights=str(folder(tmp_path, settings)), data__path=None), "train")
