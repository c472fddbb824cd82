"""Rows laid end to end as one micro-batch; this is where images are decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from playbook_trainer.config import DataConfig, ModelConfig, VisionConfig
from playbook_trainer.data.batch import IGNORE, Batch, VisionBatch
from playbook_trainer.data.images import ImageRef, decode, patches_into
from playbook_trainer.data.rows import Document
from playbook_trainer.models.positions import mrope_positions, vision_index


def collate(rows: Sequence[Sequence[Document]], model: ModelConfig, data: DataConfig) -> Batch:
    """The micro-batch of `rows`; with `data.pad` each row is filled up to seq_len by a document of padding.

    Raises:
        DataError: an image cannot be decoded.
    """
    documents: list[Document] = []
    useful = 0
    for row in rows:
        length = sum(len(d.tokens) for d in row)
        documents += row
        useful += length
        if data.pad and length < data.seq_len:
            padding = np.full(data.seq_len - length, model.pad_token_id, dtype=np.int64)
            documents.append(Document(padding, loss_from=len(padding)))
    lengths = [len(d.tokens) for d in documents]
    tokens = np.concatenate([d.tokens for d in documents])
    labels = np.concatenate([_labels(d) for d in documents])
    positions = np.concatenate([_positions(d, model) for d in documents], axis=-1)
    images = [image for d in documents for image in d.images]
    return Batch(
        tokens_N=torch.from_numpy(tokens),
        labels_N=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max_seqlen=max(lengths),
        num_useful=useful,
        num_loss=int((labels != IGNORE).sum()),
        num_images=len(images),
        vision=_vision(images, np.flatnonzero(_visual(documents, model)), model.vision) if images and model.vision else None,
    )


def _labels(document: Document) -> NDArray[np.int64]:
    """Each place's next token, where that is a target of the loss; the last place has no next token."""
    labels = np.full(len(document.tokens), IGNORE, dtype=np.int64)
    start = document.loss_from
    labels[start - 1 : -1] = document.tokens[start:]
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


def _vision(images: Sequence[ImageRef], visual_index: NDArray[np.int64], vision: VisionConfig) -> VisionBatch:
    grids = [image.grid(vision.patch_size) for image in images]
    index = vision_index(grids, vision.spatial_merge_size, math.isqrt(vision.num_position_embeddings))
    ends = index.cu_seqlens
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.empty((int(ends[-1]), values), dtype=np.float32)
    for image, start, end in zip(images, ends[:-1], ends[1:], strict=True):
        patches_into(pixels[start:end], decode(image), vision)
    return VisionBatch(
        pixels_PC=torch.from_numpy(pixels),
        cu_seqlens=torch.from_numpy(index.cu_seqlens),
        max_seqlen=index.max_seqlen,
        rotary_P2=torch.from_numpy(index.rotary),
        pos_index_4P=torch.from_numpy(index.pos_index),
        pos_weight_4P=torch.from_numpy(index.pos_weight),
        visual_index_V=torch.from_numpy(visual_index),
    )
