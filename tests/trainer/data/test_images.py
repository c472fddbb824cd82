"""Images: target sizes, patches as Hugging Face makes them, orientation, and the bundle's likeness to COCO. Broken ones are in test_bad_images.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from playbook.paths import data_root
from playbook_trainer.config.tree import VisionConfig
from playbook_trainer.data.images import ImageRef, decode, header_size, patches_into, target_size

# COCO 2017: https://cocodataset.org. val2017.zip has 815,585,330 bytes for 5,000 images.
COCO = {"longer": 640, "shorter": 480, "bytes": 815_585_330 / 5_000}


def patches(pixels: np.ndarray, vision: VisionConfig) -> np.ndarray:
    count = pixels.shape[0] * pixels.shape[1] // vision.patch_size**2
    out = np.full((count, 3 * vision.temporal_patch_size * vision.patch_size**2), np.nan, dtype=np.float32)
    patches_into(out, pixels, vision)
    return out


@pytest.mark.parametrize(("patch", "merge", "height", "width"), [(16, 2, 64, 96), (16, 2, 96, 32), (14, 2, 56, 84), (8, 3, 48, 24)])
def test_patches_equal_hugging_face(patch: int, merge: int, height: int, width: int) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_resize=False
    )
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = processor(Image.fromarray(pixels), return_tensors="np")
    vision = VisionConfig(depth=1, hidden_size=8, num_heads=1, ffn_size=8, patch_size=patch, spatial_merge_size=merge)
    assert expected["image_grid_thw"].tolist() == [list(ImageRef(Path(), height, width).grid(patch))]
    np.testing.assert_allclose(patches(pixels, vision), expected["pixel_values"], atol=1e-6)


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([28, 32]), st.integers(1, 2_000_000))
def test_target_size_is_bounded_and_in_whole_visual_tokens(height: int, width: int, factor: int, most: int) -> None:
    h, w = target_size(height, width, factor, most)
    assert h % factor == w % factor == 0
    assert min(h, w) > 0
    assert h * w <= max(most, factor * factor)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_upright_as_transformers_loads_them(tmp_path: Path, kind: str, orientation: int) -> None:
    image_utils = pytest.importorskip("transformers.image_utils")
    noise = np.random.default_rng(0).integers(0, 256, (40, 72, 3), dtype=np.uint8)
    note = Image.Exif()
    note[0x0112] = orientation
    path = tmp_path / f"image.{kind.lower()}"
    Image.fromarray(noise).save(path, format=kind, exif=note)
    theirs = image_utils.load_image(str(path))
    assert header_size(path) == (theirs.height, theirs.width)
    assert np.array_equal(decode(ImageRef(path, 32, 64)), np.asarray(theirs.resize((64, 32), Image.Resampling.BICUBIC)))


def test_a_broken_note_about_orientation_spoils_no_picture(tmp_path: Path) -> None:
    Image.new("RGB", (72, 40)).save(tmp_path / "image.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 50)
    assert header_size(tmp_path / "image.jpg") == (40, 72)
    assert decode(ImageRef(tmp_path / "image.jpg", 32, 32)).shape == (32, 32, 3)


def test_the_bundle_is_like_coco_within_a_factor_of_two() -> None:
    files = sorted((data_root("assets") / "vqa").glob("*.jpg"))
    sizes = [header_size(path) for path in files]
    found = {
        "longer": statistics.median(max(s) for s in sizes),
        "shorter": statistics.median(min(s) for s in sizes),
        "bytes": statistics.median(path.stat().st_size for path in files),
    }
    assert len(files) >= 20
    assert len(set(sizes)) >= 5, "aspect ratios vary"
    for key, reference in COCO.items():
        assert 0.5 <= found[key] / reference <= 2, key


def test_the_bundle_is_small_and_every_file_has_a_licence() -> None:
    root = data_root("assets")
    assert sum(p.stat().st_size for p in (root / "vqa").iterdir()) < 3_000_000
    assert sum(p.stat().st_size for p in (root / "text").iterdir()) < 1_200_000
    licences = (root / "LICENSES.md").read_text(encoding="utf-8")
    for path in (root / "vqa").glob("*.jpg"):
        assert f"`{path.stem.split('_')[0]}_*`" in licences, path.name
