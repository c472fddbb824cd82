"""Questions that people asked in public issue threads, with the cards that answer each: by these the search knows what is beyond the cards.

`asked.csv` has them paraphrased; OWNER/REPOSITORY#NUMBER stands for https://github.com/OWNER/REPOSITORY/issues/NUMBER. Cards stand best first; none
where no card answers. Of the first seven batches only questions whose hash is even belong there: the other half measures the search, and stands among
the tests. The eighth and ninth tune and belong there whole, the tenth measures and stands among the tests whole.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from playbook.paths import data_root

_FILE = "asked.csv"


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
    with (data_root("tables") / _FILE).open(encoding="utf-8", newline="") as file:
        return tuple(Asked(row["question"], frozenset(row["cards"].split()), row["thread"]) for row in csv.DictReader(file))
