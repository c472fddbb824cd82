"""Stretches of time as pairs of begin and end: merged, measured, and one set without another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", int, float)

Interval = tuple[int, int]


def union(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The intervals merged, sorted and without overlap."""
    out: list[tuple[T, T]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def length(intervals: Iterable[tuple[T, T]]) -> T:
    """Total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def subtract(a: Sequence[tuple[T, T]], b: Sequence[tuple[T, T]]) -> list[tuple[T, T]]:
    """What of `a` lies outside `b`; both sorted and without overlap."""
    out: list[tuple[T, T]] = []
    i = 0
    for start, end in a:
        while i < len(b) and b[i][1] <= start:
            i += 1
        at, j = start, i
        while j < len(b) and b[j][0] < end:
            if b[j][0] > at:
                out.append((at, b[j][0]))
            at = max(at, b[j][1])
            j += 1
        if at < end:
            out.append((at, end))
    return out
