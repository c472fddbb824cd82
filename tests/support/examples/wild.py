"""Documents with some values that nobody would write, and a pickle that nobody should open."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

VALUES: tuple[Any, ...] = (None, True, -1, 10**30, "x" * 500, [], {}, [None, {}], {"ranks": 5}, 0.5, "\x00")


def plant(rng: random.Random, place: Any) -> None:
    """Put up to eight such values somewhere into a document of lists and dictionaries."""
    for _ in range(rng.choice([1, 3, 8])):
        here = place
        while isinstance(here, dict | list) and here:
            key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
            if rng.random() < 0.4 or not isinstance(here[key], dict | list) or not here[key]:
                here[key] = rng.choice(VALUES)
                break
            here = here[key]


class Called:
    """A pickle of it calls the function where it is opened: a bomb, if that is more than to make an object."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts
