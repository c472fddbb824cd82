"""Where tokens and patches are: M-RoPE positions of a document, and the indices the vision tower reads. numpy only, for data workers.

A grid is (frames, rows, columns) of one image, in patches. Merge order is the order of patches in which each merge x merge block, joined
into one visual token by the merger, is contiguous. Suffixes: n tokens of a document, P patches, I frames (images have one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from playbook.errors import DataError

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class VisionIndex:
    """Everything about the images of a micro-batch, apart from their pixels, that the vision tower needs."""

    cu_seqlens: NDArray[np.int32]
    """[I + 1], patch offsets of the frames; attention stays inside a frame."""
    max_seqlen: int
    """Patches of the largest frame."""
    rotary: NDArray[np.int64]
    """[P, 2], row and column of each patch, in merge order."""
    pos_index: NDArray[np.int64]
    """[4, P], the four neighbours of each patch in the learned position grid."""
    pos_weight: NDArray[np.float32]
    """[4, P], their bilinear weights."""


def mrope_positions(tokens: NDArray[np.int64], image_token_id: int, grids: Sequence[Grid], merge: int) -> NDArray[np.int64]:
    """Time, height and width positions of one document: text counts on, an image takes a block.

    A text token has the same position on all three axes. The visual tokens of an image share the start that the text has reached and add
    frame, row and column; text goes on after the longer side of the image.

    Shapes: tokens (n,); returns (3, n).

    Raises:
        DataError: the image tokens do not match the grids one after the other.

    Source: Qwen2-VL, section 2.1 (arXiv 2409.12191); Qwen3-VL keeps it for images.
    """
    is_image = np.asarray(tokens) == image_token_id
    out = np.empty((3, len(is_image)), dtype=np.int64)
    done = start = 0  # tokens written; next position
    for number, grid in enumerate(grids):
        frames, rows, cols = _merged(grid, merge)
        size = frames * rows * cols
        text = int(np.argmax(is_image[done:])) if is_image[done:].any() else len(is_image) - done
        first, last = done + text, done + text + size
        found = int(is_image[first:last].sum())
        if found != size:
            raise DataError(
                f"image {number} of the document has {found} image tokens in a row, its grid {grid} needs {size}; "
                "cut documents between images, never inside one"
            )
        out[:, done:first] = start + np.arange(text)
        start += text
        out[:, first:last] = start + np.indices((frames, rows, cols)).reshape(3, size)
        start += max(rows, cols)
        done = last
    if is_image[done:].any():
        raise DataError(f"the document has {int(is_image[done:].sum())} image tokens more than its {len(grids)} grids account for")
    out[:, done:] = start + np.arange(len(is_image) - done)
    return out


def vision_index(grids: Sequence[Grid], merge: int, grid_per_side: int) -> VisionIndex:
    """Segments, rotary coordinates and position-grid neighbours of all patches of the images.

    `grid_per_side` is the side of the square learned position grid (the root of num_position_embeddings); it is stretched over each image
    so that the corners meet.

    Raises:
        DataError: a grid is empty or not a multiple of `merge`.
    """
    lengths = [rows * cols for frames, rows, cols in grids for _ in range(frames)]
    rotary = [np.tile(_merge_order(grid, merge), (grid[0], 1)) for grid in grids]
    neighbours = [_bilinear(grid, coords, grid_per_side) for grid, coords in zip(grids, rotary, strict=True)]
    return VisionIndex(
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        max_seqlen=max(lengths, default=0),
        rotary=np.concatenate([np.empty((0, 2), np.int64), *rotary]),
        pos_index=np.concatenate([np.empty((4, 0), np.int64), *(index for index, _ in neighbours)], axis=1),
        pos_weight=np.concatenate([np.empty((4, 0), np.float32), *(weight for _, weight in neighbours)], axis=1),
    )


def _merged(grid: Grid, merge: int) -> Grid:
    """The grid in visual tokens."""
    frames, rows, cols = grid
    if min(grid) <= 0 or rows % merge or cols % merge:
        raise DataError(f"image grid {grid} must be positive, with rows and columns in multiples of {merge}; resize the image")
    return frames, rows // merge, cols // merge


def _merge_order(grid: Grid, merge: int) -> NDArray[np.int64]:
    """Row and column of each patch of one frame, in merge order: (rows * cols, 2)."""
    _, rows, cols = _merged(grid, merge)
    coords = np.indices((grid[1], grid[2]), dtype=np.int64).reshape(2, rows, merge, cols, merge)
    return coords.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def _bilinear(grid: Grid, coords: NDArray[np.int64], side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Flat indices and weights (each (4, P)) of the learned positions around each patch."""
    (top, bottom, down), (left, right, across) = (_stretch(coords[:, axis], grid[1 + axis], side) for axis in (0, 1))
    index = np.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right])
    weight = np.stack([(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across])
    return index, weight


def _stretch(place: NDArray[np.int64], size: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The learned positions before and after each place on an axis of `size`, and how far along between them it lies."""
    exact = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    before = exact.astype(np.int64)
    return before, np.minimum(before + 1, side - 1), exact - before.astype(np.float32)
