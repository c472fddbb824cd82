"""What holds for all tests: which of them `make test` leaves out, in which order they run, what is worked out once for all of them, and that every run draws the same numbers.

Property tests take the time that they take: where a machine does other work too, a pause is no fault of an example.
"""

from __future__ import annotations

import gc
import json
import random
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from playbook.cards import load as cards
from playbook.cards import search as cards_search
from playbook.paths import data_root
from playbook.planner.choice import search
from playbook.records import read as records
from playbook_app.services import check
from playbook_bench.judge import design
from playbook_bench.machine import detect
from playbook_bench.variants import checkout

# A fixture that a test's examples share is what its author chose; slowness is the machine's. The same examples every time, so more of them find no more.
settings.register_profile(
    "the same everywhere",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("the same everywhere")

gc.disable()  # until all tests are collected: what is imported stays, and looking through it takes a tenth of the time
FULL_MODULE = re.compile(r"^pytestmark = \[?pytest\.mark\.full", re.MULTILINE)


def remembered(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once in a process for each key; always where the key is None. What it returns is frozen, or copied by who changes it."""
    known: dict[Any, Any] = {}

    @wraps(function)
    def wrapped(*words: Any, **named: Any) -> Any:
        place = key(*words, **named)
        if place is None:
            return function(*words, **named)
        if place not in known:
            known[place] = function(*words, **named)
        return known[place]

    return wrapped


def shipped(kind: str) -> Callable[..., Any]:
    """The key of a file that ships: its path, when it changed, and how it is read. Files of tests have none."""
    folder = data_root(kind)

    def key(path: Path, *how: Any, **more: Any) -> Any:
        return (path, path.stat().st_mtime_ns, how, *more.items()) if folder in path.parents else None

    return key


def without_code(tree: Path, path: str, trainer: Path, overrides: dict[str, Any]) -> Any:
    """The key of a configuration that a commit's tree resolves: its text, where the tree has no code of its own, but that of this checkout."""
    file = tree / "trainer" / "configs" / trainer
    own = (tree / "trainer/playbook_trainer").exists()
    return (file.name, file.read_text(), json.dumps(overrides)) if file.is_file() and not own else None


# Before any test imports them: a third of the suite's time would go into reading the same records and cards, and into the same searches.
records._record = remembered(records._record, shipped("results"))
cards.load = remembered(cards.load, shipped("cards"))  # type: ignore[attr-defined]
cards_search.index = remembered(cards_search.index, lambda cards, pages=(): (cards_search.load_asked, *map(id, cards.values()), *pages))
search.search = remembered(search.search, lambda question, count=5, *, prune=True: (question, count, prune))
checkout.resolve_in = remembered(checkout.resolve_in, without_code)
check.load = remembered(check.load, shipped("cases"))  # type: ignore[attr-defined]
detect.versions = remembered(detect.versions, lambda: ())  # read after every launch
design.order = remembered(design.order, lambda seed, variants, looks: (seed, variants, tuple(looks)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests for GPUs, and modules that are `full` as a whole, are imported only where the marks ask for them: that takes each worker ten seconds. A file that is named is read."""
    asked = config.getoption("markexpr")
    gpu = asked.replace("not gpu", "").replace("not multigpu", "")
    if collection_path == Path(__file__).parent / "gpu" and gpu and "gpu" not in gpu:
        return True
    if (
        "not full" not in asked
        or collection_path.suffix != ".py"
        or collection_path in {Path(a.partition("::")[0]).resolve() for a in config.args}
    ):
        return None
    return True if FULL_MODULE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_runtest_setup() -> None:
    """Whatever ran before, and in whichever worker, a test draws the same numbers from generators that it has not seeded itself."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported stays, so that nobody looks through it again for cycles: a seventh of the suite's time."""
    gc.enable()
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
