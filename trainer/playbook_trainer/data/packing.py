"""Which samples share a row, for every row of a run: a function of the data and the seed alone, the same on every rank and worker.

Rows are dealt to lanes, row k to lane k mod L, where L is the number of rows of a step. A lane draws chunks i, i + L, i + 2L, ... of the
endless shuffled stream and packs what they hold, so that it needs to know the lengths of its own samples only. A rank plans the lanes of
its own rows; where a lane stands is a few numbers, from which any rank and worker can go on.

With `train.epochs` each sample is read once an epoch, and all rows are planned from the lengths of all samples (`EpochPlan`). An epoch is
packed by as many lanes as a step has rows. A lane that has nothing left draws the next chunk that nobody has drawn, and its rows end with
the epoch; then those of the next epoch begin. Row k of the run is row k of this plan, whatever lane it comes from.

Documents of samples that are bad or too long follow the policies for those; texts are cut into documents of a row's length.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.tree import DataConfig
from playbook_trainer.data.collate import Document
from playbook_trainer.data.images import BadImage
from playbook_trainer.data.sources.streams import Flat, Items, Joined, Mapped, Recent, Stream
from playbook_trainer.data.sources.vqa import TooLong

T = TypeVar("T")

_MOST_LOST = 10_000
"""Samples in a row that may be left out; where as many are, data and configuration do not fit each other."""


class Lost(NamedTuple):
    """A sample that is left out."""

    counter: str
    """`samples_dropped` (too long) or `samples_bad` (not readable as a sample)."""
    why: str
    """Its place, and what is wrong with it."""


class Reader(Generic[T]):
    """Documents of samples under the policies for those that are bad or too long; remembers which ones it left out."""

    def __init__(self, documents: Callable[[T], Sequence[Document]], data: DataConfig) -> None:
        self._documents, self._skip = documents, data.on_bad_sample == "skip"
        self.lost: list[Lost] = []
        self._in_vain: list[Lost] = []

    def read(self, items: Items[T], i: int) -> Sequence[Document]:
        """The documents of item `i`; none where it is left out.

        Raises:
            DataError: it is bad and the policy is to fail, or too many in a row are left out.
        """
        try:
            documents = self._documents(items[i])
        except BadImage:  # which data.on_bad_image is about
            raise
        except TooLong as e:
            lost = Lost("samples_dropped", str(e))
        except DataError as e:
            if not self._skip:
                raise DataError(f"{e}; or set data.on_bad_sample: skip, which leaves such samples out and counts them") from e
            lost = Lost("samples_bad", str(e))
        else:
            self._in_vain.clear()
            return documents
        self.lost.append(lost)
        self._in_vain.append(lost)
        if len(self._in_vain) == _MOST_LOST:
            raise DataError(none_left(self._in_vain))
        return []


def none_left(lost: Sequence[Lost]) -> str:
    """What to say where all of the samples in a row are left out."""
    return (
        f"the data has {len(lost)} samples in a row of which none can be used, first {lost[0].why}; raise data.seq_len or "
        "data.max_images_per_sample, set data.on_long_sample: cut, or mend the data"
    )


class Pieces(Sequence[Document]):
    """A tokenized text in pieces of `seq_len` tokens, the last one shorter; each is made when it is asked for."""

    def __init__(self, tokens: NDArray[Any], seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._seq_len)

    @overload
    def __getitem__(self, i: int) -> Document: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Document]: ...
    def __getitem__(self, i: int | slice) -> Document | Sequence[Document]:
        if isinstance(i, slice):
            return [self[n] for n in range(len(self))[i]]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return Document(self._tokens[i * self._seq_len : (i + 1) * self._seq_len].astype(np.int64))


def pieces(texts: Flat[T], documents: Callable[[T], Sequence[Document]]) -> Flat[Document]:
    """The pieces of all texts as samples, all held as token ids."""

    def cut(i: int) -> Items[Document]:
        try:
            return documents(texts.items[i])
        except DataError as e:
            return Mapped(_refused, [e])  # one piece: whoever reads it learns why

    return Flat(Joined([cut(i) for i in range(len(texts.items))]), texts.name)


def _refused(why: DataError) -> Document:
    raise why


# Shuffling without a table: the order of any number of things, one place at a time.

_ROUNDS = 6
_MASK = (1 << 64) - 1


def order_key(*parts: int) -> int:
    """A key for `permute`, from integers such as seed and epoch; other integers give an unrelated order."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(place: int, count: int, key: int) -> int:
    """The number in 0..count-1 that stands at `place` of the permutation `key`.

    A Feistel network over the next even number of bits, applied again until it lands below `count` (cycle walking): a bijection for any
    round function, needing no memory, so that a worker can shuffle a billion samples.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), section 3.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right + key + number * 0x9E3779B97F4A7C15) & mask)
        value = left << half | right
        if value < count:
            return value


def _mix(value: int) -> int:
    """The finaliser of splitmix64.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), figure 18.
    """
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


D = TypeVar("D", bound=Sized)
"""A document, whose length is its tokens."""

Place = tuple[int, int, int]
"""A document within a lane, by three numbers from 0: of the chunk in the order of drawing, of the sample in that chunk,
of the piece of that sample."""

LaneState = list[int]
"""Rows made, then the place to draw from next, then the places of the documents that wait; three numbers a place."""


@dataclass(frozen=True)
class Packing:
    """How documents become rows; `buffer` 0 puts one document into each row."""

    seq_len: int
    buffer: int


def pack(waiting: deque[T], source: Iterator[T], packing: Packing, length: Callable[[T], int]) -> list[T]:
    """The next row: the earliest of what waits that still fits, until nothing does; `waiting` is filled up from `source`.
    Empty where both are.
    """
    most = max(1, packing.buffer)

    def fill() -> None:
        waiting.extend(islice(source, max(0, most - len(waiting))))  # a run may go on with a smaller buffer

    fill()
    row, room = list[T](), packing.seq_len
    at: int | None = 0 if waiting else None
    while at is not None:
        entry = waiting[at]
        del waiting[at]
        row.append(entry)
        room -= length(entry)
        if not packing.buffer:
            break
        fill()
        at = next((i for i, each in enumerate(waiting) if length(each) <= room), None)
    return row


class Lane(Generic[T, D]):
    """Rows k, k + L, k + 2 L, ... of an endless run of rows, packed in that order.

    `documents` gives those of one of the items, none where it is left out. First fit with look-ahead: a row takes the earliest of the
    waiting documents that still fits, until none does. At most `buffer` wait.
    """

    def __init__(
        self,
        stream: Stream[T],
        documents: Callable[[Items[T], int], Sequence[D]],
        packing: Packing,
        *,
        number: int,
        lanes: int,
        seed: Sequence[int],
        state: LaneState | None = None,
    ) -> None:
        """Lane `number` of `lanes`, from its start or from `state`; `documents(items, i)` are the documents of sample `i` of a chunk."""
        self._stream, self._documents, self._packing = stream, documents, packing
        self._number, self._lanes, self._seed = number, lanes, tuple(seed)
        self._chunk: tuple[int, Items[T]] = (-1, [])
        self._sample: tuple[tuple[int, int], Sequence[D]] = ((-1, -1), [])
        self._waiting: deque[tuple[Place, D]] = deque()
        self._drawn = iter(self._draw, None)  # a generator would be at its end after an error
        self.rows = 0
        self._next: Place = (0, 0, 0)
        if state is not None:
            self.rows = state[0]
            places = [(state[i], state[i + 1], state[i + 2]) for i in range(1, len(state), 3)]
            self._next = places[0]
            self._waiting.extend((place, self._at(place)) for place in places[1:])

    def row(self) -> list[D]:
        """Pack the next row of the lane."""
        row = pack(self._waiting, self._drawn, self._packing, lambda entry: len(entry[1]))
        self.rows += 1
        return [document for _, document in row]

    def state(self) -> LaneState:
        """Where the lane stands, for a lane that goes on from here."""
        return [self.rows, *self._next, *(number for place, _ in self._waiting for number in place)]

    def _draw(self) -> tuple[Place, D]:
        while True:
            drawn, sample, piece = self._next
            if sample >= len(self._open(drawn)):
                self._next = (drawn + 1, 0, 0)
            elif piece >= len(self._read(drawn, sample)):
                self._next = (drawn, sample + 1, 0)
            else:
                self._next = (drawn, sample, piece + 1)
                return (drawn, sample, piece), self._read(drawn, sample)[piece]

    def _at(self, place: Place) -> D:
        drawn, sample, piece = place
        if sample < len(self._open(drawn)) and piece < len(self._read(drawn, sample)):
            return self._read(drawn, sample)[piece]
        raise ConfigError(
            f"the checkpoint's data stream has a document at {list(place)} of lane {self._number}, and this run's data has none there; "
            "resume with the seed and the data that saved it, or choose another checkpoint.dir to start anew"
        )

    def _read(self, drawn: int, sample: int) -> Sequence[D]:
        if self._sample[0] != (drawn, sample):
            items = self._open(drawn)
            at = permute(sample, len(items), order_key(*self._seed, drawn, self._number))
            self._sample = ((drawn, sample), self._documents(items, at))
        return self._sample[1]

    def _open(self, drawn: int) -> Items[T]:
        if self._chunk[0] != drawn:
            epoch, place = divmod(self._number + drawn * self._lanes, self._stream.num_chunks)
            number = permute(place, self._stream.num_chunks, order_key(*self._seed, epoch))
            self._chunk = (drawn, self._stream.chunk(number))
        return self._chunk[1]


_OPEN_TOKENS = 2**24
"""Tokens of samples in several pieces that are kept until the next row asks for more of them."""


class Sizes(NamedTuple):
    """Lengths of all pieces of all samples; a sample that is left out is one piece of length 0."""

    lengths: NDArray[np.uint32]
    samples: NDArray[np.int64]
    """The first piece of each sample, and the number of pieces."""
    chunks: NDArray[np.int64]
    """The first sample of each chunk, and the number of samples."""
    numbers: NDArray[np.int64]
    """The stream's number of each chunk."""


def measured(stream: Stream[T], reader: Reader[T]) -> Sizes:
    """Read every sample once, and no image."""
    # Parts of one shard follow each other, so that each is opened once.
    numbers = sorted(range(stream.num_chunks), key=lambda number: (number % stream.shards, number))
    lengths, samples, chunks = array("I"), array("q", [0]), array("q", [0])
    for number in numbers:
        items = stream.chunk(number)
        for i in range(len(items)):
            lengths.extend([len(document) for document in reader.read(items, i)] or [0])
            samples.append(len(lengths))
        chunks.append(len(samples) - 1)
        reader.lost.clear()
    return Sizes(np.asarray(lengths, dtype=np.uint32), *(np.asarray(each, dtype=np.int64) for each in (samples, chunks, numbers)))


class EpochPlan:
    """The rows of each epoch, as pieces by number; an epoch is planned when it is first asked for."""

    def __init__(self, sizes: Sizes, packing: Packing, lanes: int, seed: Sequence[int]) -> None:
        if not sizes.lengths.any():
            raise DataError("the training data has no sample that can be used; mend the data, or raise data.seq_len")
        self.sizes, self._packing, self._lanes, self._seed = sizes, packing, lanes, tuple(seed)
        self._epochs: list[tuple[NDArray[np.uint32], NDArray[np.int64]]] = []

    def rows(self, epoch: int) -> int:
        """Rows of an epoch."""
        return len(self._planned(epoch)[1]) - 1

    def row(self, k: int) -> NDArray[np.uint32]:
        """The pieces of row `k` of the run."""
        epoch = 0
        while k >= self.rows(epoch):
            k -= self.rows(epoch)
            epoch += 1
        pieces, starts = self._planned(epoch)
        return pieces[starts[k] : starts[k + 1]]

    def count(self, epochs: float) -> int:
        """Rows that hold the samples of so many epochs; of the last, a part may be asked for."""
        whole, part = int(epochs), epochs % 1
        return sum(self.rows(epoch) for epoch in range(whole)) + (math.ceil(part * self.rows(whole)) if part else 0)

    def _planned(self, epoch: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        while len(self._epochs) <= epoch:
            rows = list(self._plan(len(self._epochs)))
            pieces = np.fromiter((piece for row in rows for piece in row), dtype=np.uint32)
            self._epochs.append((pieces, np.cumsum([0, *map(len, rows)])))
        return self._epochs[epoch]

    def _plan(self, epoch: int) -> list[list[int]]:
        """The rows of an epoch, each as the numbers of its pieces; an empty piece stands in the row that was filled when it was drawn."""
        lengths, lost = self.sizes.lengths, list[int]()
        number = len(self.sizes.chunks) - 1
        key = order_key(*self._seed, epoch)
        chunks = iter([permute(place, number, key) for place in range(number)])

        def drawn() -> Iterator[int]:
            for chunk in chunks:  # which all lanes share
                first, end = self.sizes.chunks[chunk : chunk + 2].tolist()
                for place in range(end - first):
                    sample = first + permute(place, end - first, order_key(*self._seed, epoch, chunk))
                    for piece in range(*self.sizes.samples[sample : sample + 2].tolist()):
                        if lengths[piece]:
                            yield piece
                        else:
                            lost.append(piece)

        rows: list[list[int]] = []
        lanes = [(deque[int](), drawn()) for _ in range(self._lanes)]
        while lanes:
            for lane in tuple(lanes):
                waiting, source = lane
                if row := pack(waiting, source, self._packing, lambda piece: int(lengths[piece])):
                    rows.append(row + lost)
                    lost.clear()
                else:
                    lanes.remove(lane)
        rows[-1] += lost
        return rows


class EpochRows(Generic[T]):
    """The rows of a plan, each read by its number alone."""

    def __init__(self, plan: Callable[[], EpochPlan], stream: Stream[T], reader: Reader[T], lanes: int) -> None:
        self._make, self._stream, self._reader, self._lanes = plan, stream, reader, lanes
        self.extent = stream.extent
        # As lanes do: what a lane draws comes from one chunk, or from the one before.
        self._chunks: dict[int, Recent[Items[T]]] = {}
        self._long: Recent[Sequence[Document]] = Recent(self._documents, lambda pieces: sum(map(len, pieces)), _OPEN_TOKENS)
        self._lane = 0

    @cached_property
    def _plan(self) -> EpochPlan:
        return self._make()

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        self._reader.lost.clear()
        self._lane, samples = k % self._lanes, self._plan.sizes.samples
        row = []
        for piece in self._plan.row(k).tolist():
            sample = bisect_right(samples, piece) - 1
            first, end = int(samples[sample]), int(samples[sample + 1])
            pieces = self._long.get(sample) if end - first > 1 else self._documents(sample)
            if len(pieces) != end - first and self._plan.sizes.lengths[piece]:
                raise DataError(f"sample {sample} of the data has another length than when the run began; start it anew")
            row += [pieces[piece - first]] if pieces else []
        return row

    def lost(self) -> list[Lost]:
        """The samples that were left out in making the last row."""
        return list(self._reader.lost)

    def state(self, k: int) -> LaneState:
        """Each row is known by its number alone."""
        return []

    def _documents(self, sample: int) -> Sequence[Document]:
        chunk = bisect_right(self._plan.sizes.chunks, sample) - 1
        opened = self._chunks.setdefault(self._lane, Recent(self._stream.chunk, lambda _: 1, 2))
        return self._reader.read(opened.get(int(self._plan.sizes.numbers[chunk])), sample - int(self._plan.sizes.chunks[chunk]))
