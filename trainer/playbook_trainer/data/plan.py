"""Which samples share a row, for every row of a run: a function of lengths and seed alone, the same on every rank and worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np


def pack_rows(order: Sequence[int], lengths: Sequence[int], seq_len: int, buffer: int) -> Iterator[list[int]]:
    """First fit with look-ahead: a row takes the earliest of the next `buffer` samples that still fits, until none does.

    Every length must be at most `seq_len`. Each sample appears once.
    """
    coming = iter(order)
    waiting: list[int] = []

    def refill() -> None:
        while len(waiting) < buffer and (following := next(coming, None)) is not None:
            waiting.append(following)

    refill()
    while waiting:
        row, room = [], seq_len
        while (at := next((i for i, sample in enumerate(waiting) if lengths[sample] <= room), None)) is not None:
            row.append(waiting.pop(at))
            room -= lengths[row[-1]]
            refill()
        yield row


class Plan:
    """Rows of samples, epoch after epoch; each epoch shuffles anew and starts its own rows."""

    def __init__(self, lengths: Sequence[int], seq_len: int, *, pack: bool, buffer: int, seed: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._seq_len = seq_len
        self._buffer = buffer if pack else 0
        self._seed = list(seed)
        self._starts = [0]  # first row of each epoch known so far, and of the one after
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def row(self, k: int) -> list[int]:
        """The samples of row `k` of the run."""
        while k >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._rows(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, k) - 1
        return self._rows(epoch)[k - self._starts[epoch]]

    def _rows(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:  # one epoch is kept; a run reads forward
            order = np.random.default_rng([*self._seed, epoch]).permutation(len(self._lengths)).tolist()
            packed = pack_rows(order, self._lengths, self._seq_len, self._buffer) if self._buffer else ([i] for i in order)
            self._epoch = (epoch, list(packed))
        return self._epoch[1]
