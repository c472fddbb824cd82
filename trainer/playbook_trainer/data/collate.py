"""Rows laid end to end as one micro-batch; this is where images are decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from playbook_trainer.config.tree import DataConfig, ModelConfig, VisionConfig
from playbook_trainer.data.batch import IGNORE, Batch, VisionBatch
from playbook_trainer.data.document import Document
from playbook_trainer.data.image_decoder import ImageDecoder
from playbook_trainer.data.images import ImageRef, patches_into
from playbook_trainer.data.positions import mrope_positions, vision_index


def collate(rows: Sequence[Sequence[Document]], model: ModelConfig, data: DataConfig, decoder: ImageDecoder | None = None) -> Batch:
    """The micro-batch of `rows`; with `data.pad` each row is filled up to seq_len by a document of padding.

    Raises:
        DataError: an image cannot be decoded, and `data.on_bad_image` is fail.
    """
    documents: list[Document] = []
    real: list[bool] = []
    useful = pairs = 0
    for row in rows:
        length = sum(len(d.tokens) for d in row)
        documents += row
        real += [True] * len(row)
        useful += length
        pairs += sum(len(d.tokens) ** 2 for d in row)
        if missing := _padded_length(length, data) - length:
            padding = np.full(missing, model.pad_token_id, dtype=np.int64)
            documents.append(Document(padding, loss_from=len(padding)))
            real.append(False)
    lengths = [len(d.tokens) for d in documents]
    images = [image for d in documents for image in d.images]
    vision, sound = None, [True] * len(images)
    if images and model.vision:
        vision, sound = _vision(images, np.flatnonzero(_visual(documents, model)), model.vision, decoder or ImageDecoder(data))
    ends = np.cumsum([0, *(len(d.images) for d in documents)])
    # A sample whose image is missing must not teach its answer.
    labels = np.concatenate([_labels(d, all(sound[a:b])) for d, a, b in zip(documents, ends[:-1], ends[1:], strict=True)])
    return Batch(
        tokens_N=torch.from_numpy(np.concatenate([d.tokens for d in documents])),
        labels_N=torch.from_numpy(labels),
        positions=torch.from_numpy(np.concatenate([_positions(d, model) for d in documents], axis=-1)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max_seqlen=max(lengths),
        num_useful=useful,
        num_loss=int((labels != IGNORE).sum()),
        num_images=len(images),
        num_pairs=pairs,
        real_N=torch.from_numpy(np.repeat(real, lengths)) if model.num_experts and not all(real) else None,
        vision=vision,
    )


def _padded_length(length: int, data: DataConfig) -> int:
    """The length to which a row of `length` tokens is filled up."""
    if data.pad:
        return data.seq_len
    multiple = data.pad_to_multiple or 1
    return -(-length // multiple) * multiple


def _labels(document: Document, sound: bool) -> NDArray[np.int64]:
    """Each place's next token, where that is a target of the loss; the last place has no next token."""
    labels = np.full(len(document.tokens), IGNORE, dtype=np.int64)
    start = document.loss_from
    if sound:
        labels[start - 1 : -1] = document.tokens[start:]
        if document.taught is not None:
            labels[:-1][~document.taught[1:]] = IGNORE
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
    """The images of the micro-batch, and for each whether it is sound."""
    grids = [image.grid(vision.patch_size) for image in images]
    index = vision_index(grids, vision.spatial_merge_size, math.isqrt(vision.num_position_embeddings))
    ends = index.cu_seqlens
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = np.empty((int(ends[-1]), values), dtype=np.float32)
    sound = []
    for image, start, end in zip(images, ends[:-1], ends[1:], strict=True):
        pixels, is_sound = decoder.pixels(image)
        patches_into(patches[start:end], pixels, vision)
        sound.append(is_sound)
    batch = VisionBatch(
        pixels_PC=torch.from_numpy(patches),
        cu_seqlens=torch.from_numpy(index.cu_seqlens),
        max_seqlen=index.max_seqlen,
        rotary_P2=torch.from_numpy(index.rotary),
        pos_index_4P=torch.from_numpy(index.pos_index),
        pos_weight_4P=torch.from_numpy(index.pos_weight),
        visual_index_V=torch.from_numpy(visual_index),
    )
    return batch, sound
