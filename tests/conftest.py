"""What holds for all tests: which of them `make test` leaves out, in which order they run, how often cycles are looked for, and no deadline for examples of property tests.

Property tests take the time that they take: where a machine does other work too, a pause is no fault of an example.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_collection_finish() -> None:
    """What was imported stays, so that nobody looks through it again for cycles: a seventh of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that may take the longest, as their time limits say, come first: on several workers none of them is what all others wait for at the end."""
    longest: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), limit.args[0] if limit else 0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test with a `sample` every other case is marked `full`."""
    sample = item.get_closest_marker("sample")
    if sample is not None and isinstance(item, pytest.Function) and item.callspec.id not in sample.args:
        item.add_marker("full")
