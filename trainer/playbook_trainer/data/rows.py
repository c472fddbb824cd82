"""Row k of a run as documents with known lengths, for each kind of data; images are named here, not yet decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from playbook.errors import ConfigError, DataError
from playbook.paths import data_root
from playbook_trainer.config import DataConfig, ModelConfig, TrainerConfig
from playbook_trainer.data.images import ImageRef
from playbook_trainer.data.plan import Plan
from playbook_trainer.data.text import Corpus, cut, read_documents
from playbook_trainer.data.tokenizer import load_tokenizer
from playbook_trainer.data.vqa import LEAST_VISUAL_TOKENS, Fitted, fit_samples, merge_factor, read_samples

T = TypeVar("T")
Split = Literal["train", "eval"]
HOLD_OUT = 10
"""Every tenth sample or document is held out for evaluation, whether or not the run evaluates."""


@dataclass(frozen=True)
class Document:
    """What attention sees as one text: a packed sample, or a piece of one."""

    tokens: NDArray[np.int64]
    loss_from: int = 1
    """The first token that is a target of the loss; no token can predict the very first."""
    images: list[ImageRef] = field(default_factory=list)


class Rows(Protocol):
    """An endless run of rows."""

    num_shortened: int
    """Samples of one epoch that were scaled or cut to fit a row."""

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`, at most seq_len tokens in all."""
        ...


def make_rows(config: TrainerConfig, split: Split) -> Rows:
    """The rows of one split.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    data, model = config.data, config.model
    if data.kind == "mock":
        # Mock documents are as long as the real ones that the model would read, so only their content and the images are missing.
        real = data.model_copy(update={"kind": "vqa" if model.vision is not None else "text"})
        lengths = _text(model, real, "train")[1] if real.kind == "text" else [s.length for s in _vqa(model, real, "train")]
        return MockRows(lengths, model, data, _seed(config, split))
    if data.kind == "text":
        corpus, lengths = _text(model, data, split)
        return TextRows(corpus, _plan(lengths, config, split))
    fitted = _vqa(model, data, split)
    return VqaRows(fitted, model, _plan([s.length for s in fitted], config, split))


class TextRows:
    """Pieces of text documents; the loss is everywhere."""

    num_shortened = 0

    def __init__(self, corpus: Corpus, plan: Plan) -> None:
        self._corpus, self._plan = corpus, plan

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        pieces = [self._corpus.pieces[i] for i in self._plan.row(k)]
        return [Document(self._corpus.tokens[p.start : p.start + p.length].astype(np.int64)) for p in pieces]


class VqaRows:
    """Images, question, answer; the loss is on the answer and eos."""

    def __init__(self, samples: list[Fitted], model: ModelConfig, plan: Plan) -> None:
        self._samples, self._model, self._plan = samples, model, plan
        self.num_shortened = sum(s.shortened for s in samples)

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        return [self._document(self._samples[i]) for i in self._plan.row(k)]

    def _document(self, sample: Fitted) -> Document:
        model, factor = self._model, merge_factor(self._model)
        ids: list[int | None] = []
        for image in sample.images:
            visual = image.height * image.width // factor**2
            ids += [model.vision_start_token_id, *[model.image_token_id] * visual, model.vision_end_token_id]
        ids += sample.question
        loss_from = max(1, len(ids))
        ids += [*sample.answer, model.eos_token_id]
        return Document(np.asarray(ids, dtype=np.int64), loss_from, sample.images)


class MockRows:
    """Random tokens in rows that are always full. It shows how far such data misleads; it is no substitute for real data."""

    num_shortened = 0

    def __init__(self, lengths: list[int], model: ModelConfig, data: DataConfig, seed: list[int]) -> None:
        self._lengths, self._model, self._data, self._seed = np.asarray(lengths), model, data, seed

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        rng = np.random.default_rng([*self._seed, k])
        total, left = self._data.seq_len, self._data.seq_len
        cuts = []
        while self._data.pack and (n := int(rng.choice(self._lengths))) < left:
            left -= n
            cuts.append(total - left)
        # The special tokens of images have no place in a batch without images.
        special = (self._model.image_token_id, self._model.vision_start_token_id, self._model.vision_end_token_id)
        above = min([i for i in special if i is not None], default=self._model.vocab_size)
        tokens = rng.integers(0, above, size=total, dtype=np.int64)
        return [Document(part) for part in np.split(tokens, cuts)]


def _plan(lengths: list[int], config: TrainerConfig, split: Split) -> Plan:
    data = config.data
    return Plan(lengths, data.seq_len, pack=data.pack, buffer=data.pack_buffer, seed=_seed(config, split))


def _seed(config: TrainerConfig, split: Split) -> list[int]:
    return [config.seed, ("train", "eval").index(split)]


def _text(model: ModelConfig, data: DataConfig, split: Split) -> tuple[Corpus, list[int]]:
    path = Path(data.path) if data.path is not None else data_root("assets") / "text"
    tokenizer = load_tokenizer(data.tokenizer, model)
    documents = _held(read_documents(path), split, path)
    corpus = cut(documents, tokenizer, model.eos_token_id, data.seq_len)
    if model.image_token_id is not None and bool((corpus.tokens == model.image_token_id).any()):
        raise DataError(
            f"{path}: the tokenizer turns text into model.image_token_id {model.image_token_id}; take the model's own tokenizer"
        )
    return corpus, [p.length for p in corpus.pieces]


def _vqa(model: ModelConfig, data: DataConfig, split: Split) -> list[Fitted]:
    _check_vision(model, data)
    path = Path(data.path) if data.path is not None else data_root("assets") / "vqa"
    tokenizer = load_tokenizer(data.tokenizer, model)
    samples = _held(read_samples(path), split, path)
    fitted = fit_samples(samples, tokenizer, model, data)
    for sample, fit in zip(samples, fitted, strict=True):
        if model.image_token_id in fit.question or model.image_token_id in fit.answer:
            raise DataError(
                f"{sample.place}: the text contains model.image_token_id {model.image_token_id}; take the model's own tokenizer"
            )
    return fitted


def _held(items: list[T], split: Split, path: Path) -> list[T]:
    """The split's share: every tenth item is for evaluation; of fewer than ten, the last."""
    last = len(items) - 1
    held = {i for i in range(len(items)) if i % HOLD_OUT == HOLD_OUT - 1} or ({last} if last > 0 else set())
    chosen = [item for i, item in enumerate(items) if (i in held) == (split == "eval")]
    if not chosen:
        raise DataError(
            f"{path}: {len(items)} samples or documents leave none for '{split}'; expected at least 2, so that one can be held out"
        )
    return chosen


def _check_vision(model: ModelConfig, data: DataConfig) -> None:
    if model.vision is None:
        raise ConfigError(f"data.kind is vqa, but model {model.name} has no vision tower; take a vision-language model or data.kind=text")
    if model.vision_start_token_id is None or model.vision_end_token_id is None:
        raise ConfigError("data.kind is vqa: the model needs vision_start_token_id and vision_end_token_id")
    if model.vision.in_channels != 3:
        raise ConfigError(f"images have 3 channels, model.vision.in_channels is {model.vision.in_channels}")
    factor = merge_factor(model)
    size, least = data.fixed_image_size, LEAST_VISUAL_TOKENS
    if data.images == "fixed":
        if len(size) != 2 or any(side <= 0 or side % factor for side in size):
            raise ConfigError(f"data.fixed_image_size is {size}; expected height and width, each a multiple of {factor} pixels")
        least = size[0] * size[1] // factor**2
    elif data.max_image_pixels < least * factor**2:
        raise ConfigError(f"data.max_image_pixels is {data.max_image_pixels}; one image needs at least {least * factor**2}")
    if data.seq_len < least + 4:  # vision_start, vision_end, one answer token, eos
        raise ConfigError(f"data.seq_len is {data.seq_len}; one image with its answer needs at least {least + 4} tokens")
