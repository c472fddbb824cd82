"""Row k of a run as documents with known lengths, for each kind of data; images are named here, not yet decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.tree import DataConfig, ModelConfig, TrainerConfig
from playbook_trainer.data.collate import Document
from playbook_trainer.data.packing import EpochPlan, EpochRows, Lane, LaneState, Lost, Packing, Pieces, Reader, measured, none_left, pieces
from playbook_trainer.data.sources.chat import ChatTemplate, Conversation
from playbook_trainer.data.sources.registry import Text, open_chat, open_text, open_vqa
from playbook_trainer.data.sources.streams import HOLD_OUT, Flat, Part, Sharded, Split
from playbook_trainer.data.sources.vqa import LEAST_VISUAL_TOKENS, Sample, TooLong, fit, fit_images, merge_factor
from playbook_trainer.data.tokenizer import FileTokenizer, load_tokenizer, pixels_of

T = TypeVar("T")

_MOCK_LENGTHS = 1000
"""Real samples whose lengths mock rows draw from."""
_CHECKED, _CHECKED_TOKENS = 256, 1_000_000
"""Samples that are read before a run starts, to find out whether the data fits, and tokens after which no more are read:
long ones take seconds."""


def make_rows(config: TrainerConfig, split: Split, states: Mapping[int, LaneState] | None = None) -> Rows:
    """The rows of one split; `states`, by lane, let them go on without planning what came before.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    if config.data.kind == "mock":
        return MockRows(_mock_lengths(config), config.model, config.data, _seed(config, split))
    data = _data_of(config, split)
    samples, documents = _samples(data, config.model, config.train.global_batch_size)
    if split == "train" and config.train.epochs is not None:
        stream, reader = samples.stream(_part(config, split), config.train.global_batch_size), Reader(documents, data)
        return EpochRows(lambda: epoch_plan(config), stream, reader, config.train.global_batch_size)
    return LaneRows(samples, documents, config, split, states or {})


def count_steps(config: TrainerConfig, epochs: float) -> int:
    """Steps whose rows hold every sample of the training data `epochs` times. Reads all samples but no image;
    rows are packed as in the run.
    """
    return max(1, -(-epoch_plan(config).count(epochs) // config.train.global_batch_size))


def epoch_plan(config: TrainerConfig) -> EpochPlan:
    """The plan of the training data's epochs, made once for the same data."""
    read = {"seed", "model", "data", "eval", "init"}
    return _epoch_plan(config.model_dump_json(include=read), config.train.global_batch_size, _stamp(config.data.path))


@lru_cache(maxsize=1)
def _epoch_plan(settings: str, lanes: int, _stamp: tuple[object, ...]) -> EpochPlan:
    config = TrainerConfig.model_validate_json(settings)
    samples, documents = _samples(_data_of(config, "train"), config.model, lanes)
    sizes = measured(samples.stream(_part(config, "train"), lanes), Reader(documents, config.data))
    return EpochPlan(sizes, _packing(config.data), lanes, _seed(config, "train"))


def _stamp(path: str | None) -> tuple[object, ...]:
    """What changes where the files of a data set do."""
    root = Path(path or "")
    try:
        files = sorted(root.iterdir()) if root.is_dir() else [root]
        return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)
    except (OSError, ValueError):  # which reading it will say
        return ()


def _samples(data: DataConfig, model: ModelConfig, lanes: int) -> tuple[Flat[Any] | Sharded[Any], Callable[[Any], Sequence[Document]]]:
    """The samples that `data` names, and what makes documents of one. Of few texts, each piece is a sample,
    so that every lane has its own.
    """
    if data.kind == "chat":
        return open_chat(data), _chat_documents(model, data)
    if data.kind == "vqa":
        return open_vqa(data), _vqa_documents(model, data)
    return _texts(data.model_dump_json(), model.model_dump_json(), lanes, _stamp(data.path))


@lru_cache(maxsize=4)
def _texts(
    data_json: str, model_json: str, lanes: int, _stamp: tuple[object, ...]
) -> tuple[Flat[Any] | Sharded[Any], Callable[[Any], Sequence[Document]]]:
    data, model = DataConfig.model_validate_json(data_json), ModelConfig.model_validate_json(model_json)
    texts, documents = open_text(data, model), text_documents(model, data)
    few = texts.fewer_than(max(HOLD_OUT, lanes))
    return (texts, documents) if few is None else (pieces(few, documents), lambda piece: [piece])


def _part(config: TrainerConfig, split: Split) -> Part:
    return "all" if config.eval.path is not None else split


def _packing(data: DataConfig) -> Packing:
    return Packing(data.seq_len, data.pack_buffer if data.pack else 0)


def _data_of(config: TrainerConfig, split: Split) -> DataConfig:
    """Where the samples of a split are, and the bounds of image sizes."""
    separate = split == "eval" and config.eval.path is not None
    path = config.eval.path if separate else config.data.path
    return config.data.model_copy(update={"path": path, "min_image_pixels": _least_pixels(config)})


def _least_pixels(config: TrainerConfig) -> int | None:
    """Pixels below which images are scaled up, by the configuration or by the image processor beside the weights."""
    data, weights, vision = config.data, config.init.weights, config.model.vision
    if weights is None or vision is None or data.kind not in ("vqa", "chat"):
        return data.min_image_pixels
    least, most = pixels_of(Path(weights), vision)
    if most is not None and data.images == "variable" and data.max_image_pixels > most:
        raise ConfigError(
            f"data.max_image_pixels is {data.max_image_pixels}, and the image processor in {weights} takes no more than {most}"
        )
    return least if data.min_image_pixels is None else data.min_image_pixels


def check_data(config: TrainerConfig, splits: Sequence[Split]) -> None:
    """Read the first samples, whatever split they belong to, and make sure that each split has some.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    for split in splits:
        try:
            make_rows(config, split)
            if config.data.kind != "mock" and (split == "train" or config.eval.path is not None):
                data = _data_of(config, split)
                _read_first(*_samples(data, config.model, 1), data)
        except DataError as e:
            if split == "train" or config.eval.path is None:
                raise
            raise DataError(str(e).replace("data.path", "eval.path")) from e


def _read_first(data: Flat[T] | Sharded[T], documents: Callable[[T], Sequence[Document]], config: DataConfig) -> None:
    items, reader, read, tokens = data.head(), Reader(documents, config), 0, 0
    while read < min(_CHECKED, len(items)) and tokens < _CHECKED_TOKENS:
        tokens += sum(len(document.tokens) for document in reader.read(items, read))
        read += 1
    if len(reader.lost) == read > 0:
        raise DataError(none_left(reader.lost))


class LaneRows(Generic[T]):
    """Rows dealt to as many lanes as a step has rows; only the lanes that are asked for do any work."""

    def __init__(
        self,
        data: Flat[T] | Sharded[T],
        documents: Callable[[T], Sequence[Document]],
        config: TrainerConfig,
        split: Split,
        states: Mapping[int, LaneState],
    ) -> None:
        """Rows of a split of `data`, whose samples `documents` turns into documents; `states` say where lanes go on, by number."""
        self._lanes_in_all = config.train.global_batch_size
        self._stream = data.stream(_part(config, split), self._lanes_in_all)
        self._reader, self._states = Reader(documents, config.data), states
        self.extent = self._stream.extent
        self._packing = _packing(config.data)
        self._seed = _seed(config, split)
        self._lanes: dict[int, Lane[T, Document]] = {}

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        lane_row, number = divmod(k, self._lanes_in_all)
        lane = self._lanes.get(number)
        if lane is None or lane.rows > lane_row:
            state = self._states.get(number)
            lane = self._lanes[number] = Lane(
                self._stream,
                self._reader.read,
                self._packing,
                number=number,
                lanes=self._lanes_in_all,
                seed=self._seed,
                state=state if state is not None and state[0] <= lane_row else None,
            )
        while lane.rows < lane_row:
            lane.row()
        self._reader.lost.clear()  # other workers, which make those rows, tell what is left out of them
        return lane.row()

    def lost(self) -> list[Lost]:
        """The samples that were left out in making the last row."""
        return list(self._reader.lost)

    def state(self, k: int) -> LaneState:
        """Where the lane of row `k` stands."""
        return self._lanes[k % self._lanes_in_all].state()


class MockRows:
    """Random tokens in rows that are always full. It shows how far such data misleads; it is no substitute for real data."""

    extent = 0

    def __init__(self, lengths: list[int], model: ModelConfig, data: DataConfig, seed: list[int]) -> None:
        self._lengths, self._model, self._data, self._seed = np.asarray(lengths), model, data, seed

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        rng = np.random.default_rng([*self._seed, k])
        total, room = self._data.seq_len, self._data.seq_len
        cuts = []
        while self._data.pack and (n := int(rng.choice(self._lengths))) < room:
            room -= n
            cuts.append(total - room)
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


Rows = LaneRows[Any] | EpochRows[Any] | MockRows
"""An endless run of rows. Asking in rising order is cheap; going back in a lane starts it anew. `row(k)` has at most seq_len tokens,
`lost()` is what was left out in making the last row, `state(k)` where the lane of row k, the last asked of it, stands; empty where rows
need none. `extent` is what the order is an order of: samples, or shards where they come in shards; 0 where rows are drawn from none.
"""


def text_documents(model: ModelConfig, data: DataConfig) -> Callable[[Text], Pieces]:
    """Tokenize a text, end it with eos and cut it into pieces of seq_len; the last piece is shorter. The loss is everywhere."""
    tokenizer = load_tokenizer(data.tokenizer, model, prepared=True)

    def documents(text: Text) -> Pieces:
        ids = tokenizer.encode_long(text) if isinstance(text, str) else text
        if model.image_token_id is not None and bool((ids == model.image_token_id).any()):
            raise DataError(
                f"data.path {data.path}: the tokenizer turns text into model.image_token_id {model.image_token_id}; "
                "take the model's own tokenizer"
            )
        narrow = np.min_scalar_type(model.vocab_size)
        return Pieces(np.concatenate([ids.astype(narrow), np.asarray([model.eos_token_id], dtype=narrow)]), data.seq_len)

    return documents


def _vqa_documents(model: ModelConfig, data: DataConfig) -> Callable[[Sample], list[Document]]:
    """Images, question, answer as one document; the loss is on the answer and eos.

    Raises:
        ConfigError: the model, or the sizes in the configuration, cannot take images.
    """
    _check_vision(model, data)
    tokenizer = load_tokenizer(data.tokenizer, model)

    def documents(sample: Sample) -> list[Document]:
        return [fit(sample, tokenizer, model, data)]

    return documents


def _chat_documents(model: ModelConfig, data: DataConfig) -> Callable[[Conversation], list[Document]]:
    """A conversation by its template as one document; the loss is on what the assistant says.
    One that does not fit a row is left out, never cut.

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
        """One document; its loss targets are the tokens that begin inside the assistant's character spans,
        and each image token is repeated once per visual token.

        Raises:
            DataError: image tokens and images differ in number.
            TooLong: over data.seq_len, or over data.max_images_per_sample.
        """
        label, files = conversation.place, conversation.images
        text, spans = template.render(conversation.messages, label, conversation.tools)
        encoded, offsets = tokenizer.encode_with_offsets(text)
        ids, char_starts = np.asarray(encoded, dtype=np.int64), np.asarray(offsets)
        is_target = np.any([(start <= char_starts) & (char_starts < end) for start, end in spans], axis=0)
        is_image_token = ids == model.image_token_id if model.image_token_id is not None else np.zeros(len(ids), dtype=bool)
        if int(is_image_token.sum()) != len(files) or (files and model.vision is None):
            raise DataError(
                f"{label}: {len(files)} images, and the chat template of data.tokenizer makes {int(is_image_token.sum())} image tokens "
                "of them"
            )
        images, scaled = fit_images(label, files, len(ids) - len(files), model, data) if files else ([], False)
        if len(ids) > data.seq_len:
            raise TooLong(f"{label}: {len(ids)} tokens, and data.seq_len is {data.seq_len}")
        repeats = np.ones(len(ids), dtype=np.int64)
        if images:
            repeats[is_image_token] = [image.height * image.width // merge_factor(model) ** 2 for image in images]
        return [
            Document(
                tokens=np.repeat(ids, repeats),
                images=images,
                shortened=scaled,
                is_target=np.repeat(is_target & ~is_image_token, repeats),
            )
        ]

    return documents


def _mock_lengths(config: TrainerConfig) -> list[int]:
    """Lengths of real documents that the model would read, so that only their content and the images are missing."""
    model = config.model
    real = config.model_copy(update={"data": config.data.model_copy(update={"kind": "vqa" if model.vision is not None else "text"})})
    if real.data.kind == "text":
        return _lengths(open_text(real.data, model), text_documents(model, real.data), real.data)
    return _lengths(open_vqa(real.data), _vqa_documents(model, real.data), real.data)


def _lengths(data: Flat[T] | Sharded[T], documents: Callable[[T], Sequence[Document]], config: DataConfig) -> list[int]:
    items, reader = data.head(), Reader(documents, config)
    pieces = (d for i in range(min(_MOCK_LENGTHS, len(items))) for d in reader.read(items, i))
    return [len(d) for d in islice(pieces, _MOCK_LENGTHS)]


def _seed(config: TrainerConfig, split: Split) -> list[int]:
    return [config.seed, ("train", "eval").index(split)]


def _check_vision(model: ModelConfig, data: DataConfig) -> None:
    """Refuse a model or sizes in the configuration that cannot take images."""
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
