"""Documents, what rows are made of, and rows laid end to end as one micro-batch; this is where images are decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from playbook.errors import DataError
from playbook_trainer.config.tree import DataConfig, ModelConfig, VisionConfig
from playbook_trainer.data.batch import IGNORE, Batch, VisionBatch
from playbook_trainer.data.images import ImageDecoder, ImageRef, patches_into


@dataclass(frozen=True)
class Document:
    """What attention sees as one text: a packed sample, or a piece of one."""

    tokens: NDArray[np.int64]
    loss_from: int = 1
    """The first token that is a target of the loss; no token can predict the very first."""
    images: list[ImageRef] = field(default_factory=list)
    shortened: bool = False
    """Images of the sample were scaled down or left out, or its answer was cut, to fit a row."""
    is_target: NDArray[np.bool_] | None = None
    """Which tokens are targets, where not all from loss_from on are."""

    def __len__(self) -> int:
        return len(self.tokens)


def collate(rows: Sequence[Sequence[Document]], model: ModelConfig, data: DataConfig, decoder: ImageDecoder | None = None) -> Batch:
    """Packs `rows` (documents per row) into one micro-batch.

    Each row is filled with a padding document to seq_len (`data.pad`) or to a multiple of `data.pad_to_multiple`.
    A document with an image that cannot be decoded gets no labels.

    Raises:
        DataError: an image cannot be decoded, and `data.on_bad_image` is fail; or a document's image tokens do not match its images.
    """
    documents: list[Document] = []
    is_real: list[bool] = []
    num_useful = num_pairs = 0
    for row in rows:
        length = sum(len(d.tokens) for d in row)
        documents += row
        is_real += [True] * len(row)
        num_useful += length
        num_pairs += sum(len(d.tokens) ** 2 for d in row)
        if num_padding := _padded_length(length, data) - length:
            padding = np.full(num_padding, model.pad_token_id, dtype=np.int64)
            documents.append(Document(padding, loss_from=len(padding)))
            is_real.append(False)
    lengths = [len(d.tokens) for d in documents]
    images = [image for d in documents for image in d.images]
    vision, is_decoded = None, [True] * len(images)
    if images and model.vision:
        vision, is_decoded = _vision(images, np.flatnonzero(_visual(documents, model)), model.vision, decoder or ImageDecoder(data))
    image_offsets = np.cumsum([0, *(len(d.images) for d in documents)])
    # A sample whose image is missing must not teach its answer.
    labels = np.concatenate(
        [_labels(d, all(is_decoded[start:end])) for d, start, end in zip(documents, image_offsets[:-1], image_offsets[1:], strict=True)]
    )
    return Batch(
        tokens_N=torch.from_numpy(np.concatenate([d.tokens for d in documents])),
        labels_N=torch.from_numpy(labels),
        positions=torch.from_numpy(np.concatenate([_positions(d, model) for d in documents], axis=-1)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max_seqlen=max(lengths),
        num_useful=num_useful,
        num_loss=int((labels != IGNORE).sum()),
        num_images=len(images),
        num_pairs=num_pairs,
        real_N=torch.from_numpy(np.repeat(is_real, lengths)) if model.num_experts and not all(is_real) else None,
        vision=vision,
    )


def _padded_length(length: int, data: DataConfig) -> int:
    """The length to which a row of `length` tokens is filled up."""
    if data.pad:
        return data.seq_len
    multiple = data.pad_to_multiple or 1
    return -(-length // multiple) * multiple


def _labels(document: Document, is_decoded: bool) -> NDArray[np.int64]:
    """For each token the next one, where that is a target of the loss; the last has none."""
    labels = np.full(len(document.tokens), IGNORE, dtype=np.int64)
    start = document.loss_from
    if is_decoded:
        labels[start - 1 : -1] = document.tokens[start:]
        if document.is_target is not None:
            labels[:-1][~document.is_target[1:]] = IGNORE
    return labels


def _positions(document: Document, model: ModelConfig) -> NDArray[np.int64]:
    n = len(document.tokens)
    if model.mrope_section is None:
        return np.arange(n, dtype=np.int64)
    if not document.images or model.vision is None or model.image_token_id is None:
        return np.tile(np.arange(n, dtype=np.int64), (3, 1))
    grids = [image.grid(model.vision.patch_size) for image in document.images]
    return mrope_positions(document.tokens, model.image_token_id, grids, model.vision.spatial_merge_size)


def _visual(documents: Sequence[Document], model: ModelConfig) -> NDArray[np.bool_]:
    # Looked for only in documents with images: padding may share its id with anything.
    return np.concatenate([(d.tokens == model.image_token_id) & bool(d.images) for d in documents])


def _vision(
    images: Sequence[ImageRef], visual_index: NDArray[np.int64], vision: VisionConfig, decoder: ImageDecoder
) -> tuple[VisionBatch, list[bool]]:
    """The images of the micro-batch, and for each whether it was decoded."""
    grids = [image.grid(vision.patch_size) for image in images]
    index = vision_index(grids, vision.spatial_merge_size, math.isqrt(vision.num_position_embeddings))
    patch_offsets = index["cu_seqlens"].tolist()
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = np.empty((patch_offsets[-1], values), dtype=np.float32)
    is_decoded = []
    for image, start, end in zip(images, patch_offsets[:-1], patch_offsets[1:], strict=True):
        pixels, succeeded = decoder.pixels(image)
        patches_into(patches[start:end], pixels, vision)
        is_decoded.append(succeeded)
    return VisionBatch(pixels_PC=torch.from_numpy(patches), visual_index_V=torch.from_numpy(visual_index), **index), is_decoded


# Where tokens and patches are: M-RoPE positions of a document, and the indices the vision tower reads.
# A grid is (frames, rows, columns) of one image, in patches. Merge order is the order of patches in which each merge x merge block,
# joined into one visual token by the merger, is contiguous. Suffixes: n tokens of a document, P patches, I frames (images have one).

Grid = tuple[int, int, int]


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
        count = int(is_image[first:last].sum())
        if count != size:
            raise DataError(
                f"image {number} of the document has {count} image tokens in a row, its grid {grid} needs {size}; "
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


def vision_index(grids: Sequence[Grid], merge: int, grid_per_side: int) -> dict[str, Any]:
    """Segments, rotary coordinates and position-grid neighbours of all patches of the images, as `VisionBatch` names them.

    `grid_per_side` is the side of the square learned position grid (the root of num_position_embeddings); it is stretched over each image
    so that the corners meet.

    Raises:
        DataError: a grid is empty or not a multiple of `merge`.
    """
    lengths = [rows * cols for frames, rows, cols in grids for _ in range(frames)]
    rotary = [np.tile(_merge_order(grid, merge), (grid[0], 1)) for grid in grids]
    neighbours = [_bilinear(grid, coords, grid_per_side) for grid, coords in zip(grids, rotary, strict=True)]
    arrays = {
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
        "rotary_P2": np.concatenate([np.empty((0, 2), np.int64), *rotary]),
        "pos_index_4P": np.concatenate([np.empty((4, 0), np.int64), *(index for index, _ in neighbours)], axis=1),
        "pos_weight_4P": np.concatenate([np.empty((4, 0), np.float32), *(weight for _, weight in neighbours)], axis=1),
    }
    return {"max_seqlen": max(lengths, default=0), **{name: torch.from_numpy(array) for name, array in arrays.items()}}


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


def _stretch(coordinates: NDArray[np.int64], size: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The learned positions before and after each coordinate on an axis of `size`, and how far along between them it lies."""
    exact = coordinates.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    before = exact.astype(np.int64)
    return before, np.minimum(before + 1, side - 1), exact - before.astype(np.float32)
