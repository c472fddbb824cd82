"""Rows for `train.epochs`: each sample once an epoch, planned from the lengths of all samples.

An epoch is packed by as many lanes as a step has rows. A lane that has nothing left draws the next chunk that nobody has drawn, and its rows
end with the epoch; then those of the next epoch begin. Row k of the run is row k of this plan, whatever lane it comes from.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from playbook.errors import DataError
from playbook_trainer.data.document import Document
from playbook_trainer.data.packing import LaneState, Packing, order_key, pack, permute
from playbook_trainer.data.reader import Lost, Reader
from playbook_trainer.data.sources.streams import Items, Recent, Stream

T = TypeVar("T")

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
        self._plan: EpochPlan | None = None
        self.extent = stream.extent
        # As lanes do: what a lane draws comes from one chunk, or from the one before.
        self._chunks: dict[int, Recent[Items[T]]] = {}
        self._long: Recent[Sequence[Document]] = Recent(self._documents, lambda pieces: sum(map(len, pieces)), _OPEN_TOKENS)
        self._lane = 0

    def row(self, k: int) -> list[Document]:
        """The documents of row `k`."""
        if self._plan is None:
            self._plan = self._make()
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
        assert self._plan is not None
        chunk = bisect_right(self._plan.sizes.chunks, sample) - 1
        opened = self._chunks.setdefault(self._lane, Recent(self._stream.chunk, lambda _: 1, 2))
        return self._reader.read(opened.get(int(self._plan.sizes.numbers[chunk])), sample - int(self._plan.sizes.chunks[chunk]))
