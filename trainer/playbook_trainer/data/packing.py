"""Which samples share a row, for every row of a run: a function of the data and the seed alone, the same on every rank and worker.

Rows are dealt to lanes, row k to lane k mod L, where L is the number of rows of a step. A lane draws chunks i, i + L, i + 2L, ... of the
endless shuffled stream and packs what they hold, so that it needs to know the lengths of its own samples only. A rank plans the lanes of
its own rows; where a lane stands is a few numbers, from which any rank and worker can go on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from playbook.errors import ConfigError
from playbook_trainer.data.sources.streams import Items, Stream

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


T = TypeVar("T")


class Sized(Protocol):
    """A sample whose length in tokens is known."""

    def __len__(self) -> int: ...


D = TypeVar("D", bound=Sized)

Place = tuple[int, int, int]
"""A document within a lane, by three numbers from 0: of the chunk in the order of drawing, of the sample in that chunk, of the piece of that sample."""

LaneState = list[int]
"""Rows made, then the place to draw from next, then the places of the documents that wait; three numbers a place."""


@dataclass(frozen=True)
class Packing:
    """How documents become rows; `buffer` 0 puts one document into each row."""

    seq_len: int
    buffer: int


def pack(waiting: deque[T], source: Iterator[T], packing: Packing, length: Callable[[T], int]) -> list[T]:
    """The next row: the earliest of what waits that still fits, until nothing does; `waiting` is filled up from `source`. Empty where both are."""
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

    `documents` gives those of one of the items, none where it is left out. First fit with look-ahead: a row takes the earliest of the waiting documents that still fits, until none does. At most `buffer` wait.
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
