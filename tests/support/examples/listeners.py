"""A listener that keeps the order of ranges."""

from __future__ import annotations


class Recorder:
    """`+name` where a range begins, `-name` where it ends."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.seen.append(f"+{name}")

    def pop(self, name: str) -> None:
        self.seen.append(f"-{name}")

    def tally(self, name: str, amount: int) -> None:
        """Counts are not asked about."""
