"""From an image file to patches: header, target size, decoding, and patches in the order that Qwen3-VL's vision tower reads.

Suffixes: P patches, C values of a patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from playbook.errors import DataError
from playbook_trainer.config import VisionConfig

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_FILE_PIXELS = 64_000_000
"""A file that claims more pixels is refused before it is decoded: a few kilobytes can unfold into gigabytes."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclass(frozen=True)
class ImageRef:
    """An image file and the size, in pixels, to which it is resized."""

    path: Path
    height: int
    width: int

    def grid(self, patch: int) -> tuple[int, int, int]:
        """Frames, rows and columns in patches."""
        return 1, self.height // patch, self.width // patch


def header_size(path: Path) -> tuple[int, int]:
    """Height and width from the file's header; nothing is decoded.

    Raises:
        DataError: no image, or one that claims too many pixels.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            return _checked_size(path, image)
    except _BROKEN as e:
        raise _broken(path, e) from e


def target_size(height: int, width: int, factor: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of `factor` with at most `max_pixels` pixels; the aspect ratio is kept as far as that allows.

    The rounding is that of Hugging Face's Qwen2-VL processor, without its lower bound: small images are not scaled up.
    """
    rows, cols = max(1, round(height / factor)), max(1, round(width / factor))
    most = max(1, max_pixels // (factor * factor))
    if rows * cols > most:
        shrink = math.sqrt(height * width / max_pixels) * factor
        rows, cols = max(1, int(height / shrink)), max(1, int(width / shrink))
        # A very long strip keeps one row (or column), which can still be too much.
        rows, cols = (min(rows, most // cols), cols) if cols == 1 else (rows, min(cols, most // rows))
    return rows * factor, cols * factor


def decode(image: ImageRef) -> NDArray[np.uint8]:
    """The file as RGB, resized: uint8 (height, width, 3).

    Raises:
        DataError: the file is broken or not an image; the message names it.
    """
    try:
        with Image.open(image.path, formats=FORMATS) as file:
            _checked_size(image.path, file)  # again: the file may have changed since the plan was made
            picture = file.convert("RGB").resize((image.width, image.height), Image.Resampling.BICUBIC)
    except _BROKEN as e:
        raise _broken(image.path, e) from e
    return np.asarray(picture)


def patches_into(out_PC: NDArray[np.float32], pixels: NDArray[np.uint8], vision: VisionConfig) -> None:
    """Write the normalised patches (mean 0.5, deviation 0.5) of one image to `out_PC`.

    Patches come block by block: the merge x merge patches that become one visual token lie together. The values of a patch are ordered
    channel, time, row, column; a still image is shown twice in time.

    Shapes: pixels (height, width, 3), both sides multiples of patch * merge; out (P, 3 * temporal_patch * patch * patch), contiguous.
    """
    patch, merge, channels = vision.patch_size, vision.spatial_merge_size, pixels.shape[2]
    height, width = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    blocks = pixels.reshape(height, merge, patch, width, merge, patch, channels).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = out_PC.reshape(-1, channels, vision.temporal_patch_size, patch, patch)
    first = frames[:, :, 0]
    np.multiply(blocks.reshape(first.shape), np.float32(1 / 127.5), out=first)
    first -= 1
    frames[:, :, 1:] = frames[:, :, :1]


def _checked_size(path: Path, image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    if width * height > MAX_FILE_PIXELS:
        raise DataError(f"{path} claims {width} x {height} pixels; at most {MAX_FILE_PIXELS} are decoded. Scale the file down")
    return height, width


def _broken(path: Path, error: BaseException) -> DataError:
    kinds = ", ".join(FORMATS)
    return DataError(f"{path} cannot be decoded as an image ({error}); expected {kinds}. Replace the file or take it out of samples.jsonl")
