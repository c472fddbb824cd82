"""Questions that people asked in public issue threads, with the cards that answer each: what the search knows of how readers put things.

The other half of the questions measures the search, and stands among the tests; a hash of the question says which half it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import yaml

from playbook.paths import data_root

_FILE = "asked.yaml"


@dataclass(frozen=True)
class Asked:
    """One question, paraphrased."""

    text: str
    cards: frozenset[str]
    """Ids of the cards that answer it; none where no card does."""
    thread: str
    """Where it was asked, as OWNER/REPOSITORY#NUMBER."""


@cache
def load_asked() -> tuple[Asked, ...]:
    """The questions that ship."""
    rows = yaml.safe_load((data_root("tables") / _FILE).read_text(encoding="utf-8"))
    return tuple(Asked(q["ask"], frozenset(q["cards"]), q["from"]) for q in rows)
