"""Row k of a run as documents with known lengths, for each kind of data; images are named here, not yet decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.tree import DataConfig, ModelConfig, TrainerConfig
from playbook_trainer.data.chat_template import ChatTemplate
from playbook_trainer.data.document import Document
from playbook_trainer.data.images import BadImage
from playbook_trainer.data.packing import Lane, LaneState, Packing
from playbook_trainer.data.sources.chat import Conversation
from playbook_trainer.data.sources.registry import Text, open_chat, open_text, open_vqa
from playbook_trainer.data.sources.streams import Flat, Items, Sharded, Split
from playbook_trainer.data.sources.vqa import LEAST_VISUAL_TOKENS, Sample, TooLong, fit, fit_images, merge_factor
from playbook_trainer.data.tokenizer import FileTokenizer, load_tokenizer

T = TypeVar("T")

_MOCK_LENGTHS = 1000
"""Real samples whose lengths mock rows draw from."""
_CHECKED, _CHECKED_TOKENS = 256, 1_000_000
"""Samples that are read before a run starts, to find out whether the data fits, and tokens after which no more are read: long ones take seconds."""
_MOST_LOST = 10_000
"""Samples in a row that may be left out; where as many are, data and configuration do not fit each other."""


class Lost(NamedTuple):
    """A sample that is left out."""

    counter: str
    """`samples_dropped` (too long) or `samples_bad` (not readable as a sample)."""
    why: str
    """Its place, and what is wrong with it."""


class Rows(Protocol):
    """An endless run of rows. Asking in rising order is cheap; going back in a lane starts it anew."""

    extent: int
    """What the order is an order of: samples, or shards where they come in shards; 0 where rows are drawn from none."""

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`, at most seq_len tokens in all."""
        ...

    def lost(self) -> list[Lost]:
        """The samples that were left out in making the last row that was asked for."""
        ...

    def state(self, k: int) -> LaneState:
        """Where the lane of row `k`, the last row asked of it, stands; empty where rows need no state."""
        ...


def make_rows(config: TrainerConfig, split: Split, states: Mapping[int, LaneState] | None = None) -> Rows:
    """The rows of one split; `states`, by lane, let them go on without planning what came before.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    if config.data.kind == "mock":
        return MockRows(_mock_lengths(config), config.model, config.data, _seed(config, split))
    return _lane_rows(config, split, states or {})


def count_steps(config: TrainerConfig, epochs: float) -> int:
    """Steps after which every sample of the training data has been in a row `epochs` times, whatever else has been by then.

    Reads all samples but no image; rows are packed as in the run.
    """
    rows = _lane_rows(config, "train", {})
    return max(1, *(rows.count(number, epochs) for number in range(config.train.global_batch_size)))


def _lane_rows(config: TrainerConfig, split: Split, states: Mapping[int, LaneState]) -> LaneRows[Any]:
    data, model = _data_of(config, split), config.model
    if data.kind == "text":
        return LaneRows(open_text(data, model), text_documents(model, data), config, split, states)
    if data.kind == "chat":
        return LaneRows(open_chat(data), _chat_documents(model, data), config, split, states)
    return LaneRows(open_vqa(data), _vqa_documents(model, data), config, split, states)


def _data_of(config: TrainerConfig, split: Split) -> DataConfig:
    """Where the samples of a split are."""
    own = split == "eval" and config.eval.path is not None
    return config.data.model_copy(update={"path": config.eval.path}) if own else config.data


def check_data(config: TrainerConfig, splits: Sequence[Split]) -> None:
    """Read the first samples, whatever split they belong to, and make sure that each split has some.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    for split in splits:
        try:
            make_rows(config, split)
            if split == "train" or config.eval.path is not None:
                _check_first(_data_of(config, split), config.model)
        except DataError as e:
            if split == "train" or config.eval.path is None:
                raise
            raise DataError(str(e).replace("data.path", "eval.path")) from e


def _check_first(data: DataConfig, model: ModelConfig) -> None:
    if data.kind == "text":
        _read_first(open_text(data, model), text_documents(model, data), data)
    elif data.kind == "chat":
        _read_first(open_chat(data), _chat_documents(model, data), data)
    elif data.kind == "vqa":
        _read_first(open_vqa(data), _vqa_documents(model, data), data)


def _read_first(data: Flat[T] | Sharded[T], documents: Callable[[T], list[Document]], config: DataConfig) -> None:
    items, reader, read, tokens = data.head(), _Reader(documents, config), 0, 0
    while read < min(_CHECKED, len(items)) and tokens < _CHECKED_TOKENS:
        tokens += sum(len(document.tokens) for document in reader.read(items, read))
        read += 1
    if len(reader.lost) == read > 0:
        raise DataError(_none_left(reader.lost))


def _none_left(lost: Sequence[Lost]) -> str:
    return (
        f"the data has {len(lost)} samples in a row of which none can be used, first {lost[0].why}; raise data.seq_len or "
        "data.max_images_per_sample, set data.on_long_sample: cut, or mend the data"
    )


class _Reader(Generic[T]):
    """Documents of samples under the policies for those that are bad or too long; remembers which ones it left out."""

    def __init__(self, documents: Callable[[T], list[Document]], data: DataConfig) -> None:
        self._documents, self._skip = documents, data.on_bad_sample == "skip"
        self.lost: list[Lost] = []
        self._in_vain: list[Lost] = []

    def read(self, items: Items[T], i: int) -> list[Document]:
        """The documents of item `i`; none where it is left out.

        Raises:
            DataError: it is bad and the policy is to fail, or too many in a row are left out.
        """
        try:
            found = self._documents(items[i])
        except BadImage:  # which data.on_bad_image is about
            raise
        except TooLong as e:
            lost = Lost("samples_dropped", str(e))
        except DataError as e:
            if not self._skip:
                raise
            lost = Lost("samples_bad", str(e))
        else:
            self._in_vain.clear()
            return found
        self.lost.append(lost)
        self._in_vain.append(lost)
        if len(self._in_vain) == _MOST_LOST:
            raise DataError(_none_left(self._in_vain))
        return []


class LaneRows(Generic[T]):
    """Rows dealt to as many lanes as a step has rows; only the lanes that are asked for do any work."""

    def __init__(
        self,
        data: Flat[T] | Sharded[T],
        documents: Callable[[T], list[Document]],
        config: TrainerConfig,
        split: Split,
        states: Mapping[int, LaneState],
    ) -> None:
        self._lanes_in_all = config.train.global_batch_size
        self._stream = data.stream("all" if config.eval.path is not None else split, self._lanes_in_all)
        self._reader, self._states = _Reader(documents, config.data), states
        self.extent = self._stream.extent
        self._packing = Packing(config.data.seq_len, config.data.pack_buffer if config.data.pack else 0)
        self._seed = _seed(config, split)
        self._lanes: dict[int, Lane[T, Document]] = {}

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        wanted, number = divmod(k, self._lanes_in_all)
        lane = self._lanes.get(number)
        if lane is None or lane.rows > wanted:
            lane = self._lanes[number] = self._begin(number, wanted)
        while lane.rows < wanted:
            lane.row()
        self._reader.lost.clear()  # other workers, which make those rows, tell what is left out of them
        return lane.row()

    def lost(self) -> list[Lost]:
        """The samples that were left out in making the last row."""
        return list(self._reader.lost)

    def state(self, k: int) -> LaneState:
        """Where the lane of row `k` stands."""
        return self._lanes[k % self._lanes_in_all].state()

    def count(self, number: int, epochs: float) -> int:
        """Rows of a lane until its samples have been in one `epochs` times."""
        lane, chunks = self._begin(number, 0), epochs * self._stream.num_chunks
        while number < chunks and not lane.is_past(chunks):
            lane.row()
            self._reader.lost.clear()
        return lane.rows

    def _begin(self, number: int, wanted: int) -> Lane[T, Document]:
        state = self._states.get(number)
        return Lane(
            self._stream,
            self._reader.read,
            self._packing,
            number=number,
            lanes=self._lanes_in_all,
            seed=self._seed,
            state=state if state is not None and state[0] <= wanted else None,
        )


class MockRows:
    """Random tokens in rows that are always full. It shows how far such data misleads; it is no substitute for real data."""

    extent = 0

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

    def lost(self) -> list[Lost]:
        """No sample is read."""
        return []

    def state(self, k: int) -> LaneState:
        """Each row is a function of its number alone."""
        return []


def text_documents(model: ModelConfig, data: DataConfig) -> Callable[[Text], list[Document]]:
    """Tokenize a text, end it with eos and cut it into pieces of seq_len; the last piece is shorter. The loss is everywhere."""
    tokenizer = load_tokenizer(data.tokenizer, model, prepared=True)

    def documents(text: Text) -> list[Document]:
        tokens = np.append(np.asarray(tokenizer.encode(text) if isinstance(text, str) else text, dtype=np.int64), model.eos_token_id)
        if model.image_token_id is not None and bool((tokens == model.image_token_id).any()):
            raise DataError(
                f"data.path {data.path}: the tokenizer turns text into model.image_token_id {model.image_token_id}; "
                "take the model's own tokenizer"
            )
        return [Document(tokens[at : at + data.seq_len]) for at in range(0, len(tokens), data.seq_len)]

    return documents


def _vqa_documents(model: ModelConfig, data: DataConfig) -> Callable[[Sample], list[Document]]:
    """Images, question, answer as one document; the loss is on the answer and eos.

    Raises:
        ConfigError: the model, or the sizes in the configuration, cannot take images.
    """
    _check_vision(model, data)
    tokenizer, factor = load_tokenizer(data.tokenizer, model), merge_factor(model)

    def documents(sample: Sample) -> list[Document]:
        fitted = fit(sample, tokenizer, model, data)
        ids: list[int | None] = []
        for image in fitted.images:
            visual = image.height * image.width // factor**2
            ids += [model.vision_start_token_id, *[model.image_token_id] * visual, model.vision_end_token_id]
        ids += fitted.question
        loss_from = max(1, len(ids))
        ids += [*fitted.answer, model.eos_token_id]
        return [Document(np.asarray(ids, dtype=np.int64), loss_from, fitted.images, fitted.shortened)]

    return documents


def _chat_documents(model: ModelConfig, data: DataConfig) -> Callable[[Conversation], list[Document]]:
    """A conversation by its template as one document; the loss is on what the assistant says. One that does not fit a row is left out, never cut.

    Raises:
        ConfigError: no tokenizer with a chat template, or the model, or the sizes in the configuration, cannot take images.
    """
    if data.tokenizer == "byte":
        raise ConfigError(
            "data.kind is chat: set data.tokenizer to the tokenizer.json of a chat model, beside which its chat template lies"
        )
    if model.vision is not None:
        _check_vision(model, data)
    template, tokenizer = ChatTemplate(Path(data.tokenizer)), FileTokenizer(Path(data.tokenizer), model.vocab_size, prepared=True)

    def documents(conversation: Conversation) -> list[Document]:
        place, files = conversation.place, conversation.images
        text, spans = template.render(conversation.messages, place)
        found, starts = tokenizer.encode_with_places(text)
        ids, at = np.asarray(found, dtype=np.int64), np.asarray(starts)
        taught = np.any([(a <= at) & (at < b) for a, b in spans], axis=0)
        marks = ids == model.image_token_id if model.image_token_id is not None else np.zeros(len(ids), dtype=bool)
        if int(marks.sum()) != len(files) or (files and model.vision is None):
            raise DataError(
                f"{place}: {len(files)} images, and the chat template of data.tokenizer makes {int(marks.sum())} image tokens of them"
            )
        images, scaled = fit_images(place, files, len(ids) - len(files), model, data) if files else ([], False)
        if len(ids) > data.seq_len:
            raise TooLong(f"{place}: {len(ids)} tokens, and data.seq_len is {data.seq_len}")
        repeats = np.ones(len(ids), dtype=np.int64)
        if images:
            repeats[marks] = [image.height * image.width // merge_factor(model) ** 2 for image in images]
        return [Document(np.repeat(ids, repeats), 1, images, scaled, taught=np.repeat(taught & ~marks, repeats))]

    return documents


def _mock_lengths(config: TrainerConfig) -> list[int]:
    """Lengths of real documents that the model would read, so that only their content and the images are missing."""
    model = config.model
    real = config.model_copy(update={"data": config.data.model_copy(update={"kind": "vqa" if model.vision is not None else "text"})})
    if real.data.kind == "text":
        return _lengths(open_text(real.data, model), text_documents(model, real.data), real.data)
    return _lengths(open_vqa(real.data), _vqa_documents(model, real.data), real.data)


def _lengths(data: Flat[T] | Sharded[T], documents: Callable[[T], list[Document]], config: DataConfig) -> list[int]:
    items, reader = data.head(), _Reader(documents, config)
    pieces = (d for i in range(min(_MOCK_LENGTHS, len(items))) for d in reader.read(items, i))
    return [len(d) for d in islice(pieces, _MOCK_LENGTHS)]


def _seed(config: TrainerConfig, split: Split) -> list[int]:
    return [config.seed, ("train", "eval").index(split)]


def _check_vision(model: ModelConfig, data: DataConfig) -> None:
    if model.vision is None:
        raise ConfigError(
            f"data.kind is {data.kind}, but model {model.name} has no vision tower; take a vision-language model or data.kind=text"
        )
    if model.vision_start_token_id is None or model.vision_end_token_id is None:
        raise ConfigError(f"data.kind is {data.kind}: the model needs vision_start_token_id and vision_end_token_id")
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
