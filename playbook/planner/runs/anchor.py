"""Scaling predictions to runs that were measured: the nearer in kind, the more a run counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, pstdev

from playbook.planner.runs.table import Run

_CONFIGURATION = ("model", "hardware", "gpus", "precision", "seq_len", "mbs", "gbs", "tp", "cp", "pp", "ep", "layers", "hidden", "heads")
_CHOICES = ("vpp", "etp", "dispatcher", "recompute", "cuda_graph", "offload")
_TIERS: tuple[tuple[str, ...], ...] = (
    (),
    ("hardware",),
    ("source_group",),
    ("source_group", "hardware", "precision"),
    ("source_group", "model", "hardware"),
    ("source_group", "model", "hardware", "precision"),
    ("source_group", "model", "hardware", "precision", "tp", "pp", "ep", "fsdp"),
)
"""Kinds of runs, from any to the same layout of the same model on the same hardware in the same precision by the same people."""
_KINDS_SPREAD = 0.2
"""Standard deviation of the logarithm by which one kind of runs differs from the wider one."""
_RUNS_SPREAD = 0.15
"""The least by which runs of one kind differ; a single run is taken to differ so much from its kind."""
_KNOWN = (1.0, 1.0, 1.0, 1.0, 1.0, 0.95, 0.45)
"""What is left of a prediction's spread once runs of a kind have scaled it, tier by tier; from the published runs, each left out in turn."""


@dataclass(frozen=True)
class Scale:
    """The logarithm of a scale, and what it leaves of the spread."""

    log: float
    left: float


NO_SCALE = Scale(0.0, 1.0)


@dataclass(frozen=True)
class Anchors:
    """Runs with the logarithm of measured over predicted speed."""

    runs: Sequence[tuple[Run, float]]

    def scale(self, run: Run, *, leave_out: bool = False) -> Scale:
        """The scale for a run: in each kind, the median of its runs together with that of the wider kind.

        With `leave_out`, runs of the same configuration do not count.
        """
        counted = [(r, e) for r, e in self.runs if not (leave_out and _alike(r, run))]
        found, left = 0.0, 1.0
        for tier, columns in enumerate(_TIERS):
            same = _same(run, columns)
            errors = [e for r, e in counted if same(r)]
            if not errors:
                continue
            found += _trust(errors) * (median(errors) - found)
            left = _KNOWN[tier]
        return Scale(found, left)


def _trust(errors: Sequence[float]) -> float:
    """How far to go from what is known of the wider kind to the median of these: less, the fewer they are and the more they differ."""
    own = max(_RUNS_SPREAD, pstdev(errors))
    return len(errors) * _KINDS_SPREAD**2 / (len(errors) * _KINDS_SPREAD**2 + own**2)


def configuration(run: Run) -> tuple[str, ...]:
    """What makes two runs the same configuration, whoever ran it and when."""
    return tuple(_plain(run, c) for c in _CONFIGURATION)


def newest(runs: Iterable[Run]) -> set[str]:
    """Ids of the runs that are the newest release of their configuration in their source; those of one release all count."""
    latest: dict[tuple[str, ...], str] = {}
    kept: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        key = (run.word("source_group"), run.word("task"), run.word("routing").partition(",")[2], *configuration(run))
        release = run.word("release_or_date")
        if release > latest.get(key, ""):
            latest[key], kept[key] = release, []
        if release == latest.get(key, ""):
            kept.setdefault(key, []).append(run.id)
    return {i for ids in kept.values() for i in ids}


def _alike(a: Run, b: Run) -> bool:
    """Whether two runs may be the same configuration: what one of them leaves open counts as the same."""
    said = [(a.word(c).lower(), b.word(c).lower()) for c in _CHOICES]
    return configuration(a) == configuration(b) and all(x == y or not x or not y for x, y in said)


def _same(run: Run, columns: tuple[str, ...]) -> Callable[[Run], bool]:
    wanted = [_plain(run, c) for c in columns]
    return lambda other: [_plain(other, c) for c in columns] == wanted


def _plain(run: Run, column: str) -> str:
    """A cell without what spelling may differ in: case and punctuation."""
    return _letters(run.word(column))


@lru_cache(maxsize=65536)
def _letters(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())
