"""From an image file to patches: header, target size, decoding, and patches in the order that Qwen3-VL's vision tower reads.

Suffixes: P patches, C values of a patch.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from playbook.errors import DataError
from playbook_trainer.config.tree import DataConfig, VisionConfig

T = TypeVar("T")

FORMATS = ("JPEG", "PNG", "WEBP")
_MAX_FILE_PIXELS = 64_000_000
"""Unless the configuration says otherwise, a file that claims more pixels is refused before it is decoded."""
MAX_FILE_BYTES = 256 * 2**20
"""No photograph is larger; reading what is would fill the memory of a worker."""
BAD_KINDS = ("missing", "empty", "not_an_image", "too_large", "animated", "undecodable")
"""Why an image is not used. CMYK and 16-bit images are none of these: they are converted."""


_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings a picture upright, by the orientation that the camera noted (EXIF). From 5 on, height and width change places."""


class BadImage(DataError):
    """An image that cannot be used; `kind` is one of BAD_KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ImageFile(Protocol):
    """An image that does not lie in a file of its own; its text is its name in messages, its hash that of the image."""

    def __hash__(self) -> int: ...

    def read(self) -> bytes:
        """The encoded image."""
        ...


@dataclass(frozen=True)
class ImageRef:
    """An encoded image and the size, in pixels, to which it is resized."""

    file: Path | ImageFile
    height: int
    width: int
    bad: str = ""
    """Already known to be unusable, of this kind."""

    def grid(self, patch: int) -> tuple[int, int, int]:
        """Frames, rows and columns in patches."""
        return 1, self.height // patch, self.width // patch


def read_image(file: Path | ImageFile) -> bytes:
    """The encoded bytes.

    Raises:
        BadImage: missing, empty or far too large.
    """
    try:
        if isinstance(file, Path) and file.stat().st_size > MAX_FILE_BYTES:
            raise _bad("too_large", file, f"more than {MAX_FILE_BYTES >> 20} MiB")
        data = file.read_bytes() if isinstance(file, Path) else file.read()
    except OSError as e:
        raise _bad("missing", file, e.strerror or str(e)) from e
    if not data:
        raise _bad("empty", file, "no bytes")
    return data


def header_size(file: Path | ImageFile, max_pixels: int = _MAX_FILE_PIXELS) -> tuple[int, int]:
    """Height and width of the upright picture, from the file's header; nothing is decoded.

    Raises:
        BadImage: no image, or one that claims too many pixels, or more than one picture.
    """

    def upright(picture: Image.Image) -> tuple[int, int]:
        width, height = picture.size
        return (width, height) if _orientation(picture) >= 5 else (height, width)

    return _opened(file, max_pixels, upright)


def target_size(height: int, width: int, multiple: int, max_pixels: int, min_pixels: int = 0) -> tuple[int, int]:
    """Target (height, width) in pixels, each a positive multiple of `multiple`, of at most `max_pixels` (one cell where even that is more).

    All sizes are in pixels, areas in square pixels. A cell is `multiple` x `multiple`. The aspect ratio is kept as far as that allows.
    An image that would have less than `min_pixels` is scaled up to them, and by the rounding to a little more,
    which may be beyond `max_pixels`.
    The rounding is that of Hugging Face's Qwen2-VL processor (smart_resize).
    """
    rows, cols = round(height / multiple), round(width / multiple)
    if rows * cols * multiple * multiple < min_pixels:
        scale_up = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * scale_up / multiple) * multiple, math.ceil(width * scale_up / multiple) * multiple
    rows, cols = max(1, rows), max(1, cols)
    max_cells = max(1, max_pixels // (multiple * multiple))
    if rows * cols > max_cells:
        source_pixels_per_cell = math.sqrt(height * width / max_pixels) * multiple
        rows, cols = max(1, int(height / source_pixels_per_cell)), max(1, int(width / source_pixels_per_cell))
        # A very long strip keeps one row (or column), which can still be too much.
        rows, cols = (min(rows, max_cells // cols), cols) if cols == 1 else (rows, min(cols, max_cells // rows))
    return rows * multiple, cols * multiple


def decode(image: ImageRef, max_pixels: int = _MAX_FILE_PIXELS) -> NDArray[np.uint8]:
    """The file as RGB, upright as transformers loads it, and resized: uint8 (height, width, 3).

    Raises:
        BadImage: the file is broken or not an image; the message names it.
    """

    def resized(picture: Image.Image) -> NDArray[np.uint8]:
        turn = _TURNS.get(_orientation(picture))  # before decoding, which may come upon a later note
        rgb = _rgb(picture) if turn is None else _rgb(picture).transpose(turn)
        return np.asarray(rgb.resize((image.width, image.height), Image.Resampling.BICUBIC))

    return _opened(image.file, max_pixels, resized)


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


def _orientation(picture: Image.Image) -> int:
    """EXIF's orientation, 1 (upright) to 8; 1 where there is none."""
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1  # Pillow would decode the picture to see whether a note follows
    try:
        orientation = picture.getexif().get(_ORIENTATION)
    except Exception:  # a broken note on a sound picture
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TURNS else 1


def _rgb(picture: Image.Image) -> Image.Image:
    """Three channels of 8 bits; of 16-bit grey values the upper 8, which plain conversion would saturate."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")


def _opened(file: Path | ImageFile, max_pixels: int, use: Callable[[Image.Image], T]) -> T:
    """`use` of the opened image, after its header has been checked."""
    try:
        image = _open(file)
    except DataError:  # a BadImage, or a pool that cannot be written
        raise
    except OSError as e:  # Pillow's own error for what it cannot identify is one too, without a number
        kind = "missing" if e.errno is not None else "not_an_image"
        raise _bad(kind, file, e.strerror or str(e)) from e
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise _bad("too_large", file, str(e)) from e
    except Exception as e:  # whatever the decoder makes of hostile bytes is a verdict on the file
        raise _bad("not_an_image", file, str(e)) from e
    with image as opened:
        width, height = opened.size
        if not width * height:
            raise _bad("empty", file, f"it is {width} x {height} pixels")
        if width * height > max_pixels:
            raise _bad("too_large", file, f"it claims {width} x {height} pixels; at most {max_pixels} are decoded")
        # MPO is how cameras append a preview to a JPEG; its first picture is the photograph.
        if getattr(opened, "is_animated", False) and opened.format != "MPO":
            raise _bad("animated", file, "it holds several frames, and video is not supported")
        try:
            return use(opened)
        except Exception as e:
            raise _bad("undecodable", file, str(e)) from e


def _open(file: Path | ImageFile) -> AbstractContextManager[Image.Image]:
    if isinstance(file, Path):
        if not file.stat().st_size:
            raise _bad("empty", file, "no bytes")
        return Image.open(file, formats=FORMATS)
    return Image.open(io.BytesIO(read_image(file)), formats=FORMATS)


def _bad(kind: str, file: Path | ImageFile, why: str) -> BadImage:
    kinds = ", ".join(FORMATS)
    return BadImage(
        kind,
        f"{file} cannot be used as an image ({kind}: {why}); expected {kinds}. Replace it, take its sample out, or set "
        "data.on_bad_image=skip",
    )


# Images to pixels under the policy for bad ones, with a cache; one decoder per worker.

_GREY = 128
"""The value of every pixel of an image that stands in for a bad one."""


class ImageDecoder:
    """Decodes and resizes images, caches them if `data.cache` says so, and counts what it did."""

    def __init__(self, data: DataConfig) -> None:
        self._skip, self._max_pixels = data.on_bad_image == "skip", data.max_source_pixels
        self._room = int(data.cache_gib * 2**30) if data.cache == "memory" else 0
        self._cache: dict[tuple[str, int, int], NDArray[np.uint8]] = {}
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> dict[str, int]:
        """What has been counted since the last call: images decoded, found in the cache, and bad by kind."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def pixels(self, image: ImageRef) -> tuple[NDArray[np.uint8], bool]:
        """The resized image, uint8 (height, width, 3), and whether it is the image itself; a grey one stands in for a bad one.

        Raises:
            BadImage: the image is bad and the policy is to fail.
        """
        cached = self._cache.get(_name(image)) if self._cache else None
        if cached is not None:
            self._counts["images_cached"] += 1
            return cached, True
        bad = image.bad
        if not bad:
            try:
                pixels = decode(image, self._max_pixels)
            except BadImage as e:
                if not self._skip:
                    raise
                bad = e.kind
            else:
                self._counts["images_decoded"] += 1
                if pixels.nbytes <= self._room:
                    self._room -= pixels.nbytes
                    self._cache[_name(image)] = pixels
                return pixels, True
        self._counts[f"bad_images_{bad}"] += 1
        return np.full((image.height, image.width, 3), _GREY, dtype=np.uint8), False


def _name(image: ImageRef) -> tuple[str, int, int]:
    # Not the image itself, which may hold its whole encoded file: a photograph takes ten times the room of its pixels,
    # and would not be counted.
    return str(image.file), image.height, image.width
