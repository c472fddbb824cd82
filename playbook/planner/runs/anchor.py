"""Scaling predictions to runs that were measured: the nearer in kind, the more a run counts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
import numpy.typing as npt

from playbook.errors import ConfigError
from playbook.planner.models import named
from playbook.planner.runs.table import Run
from playbook.planner.time.cluster import cluster
from playbook.planner.time.spread import has_experts

_Vector = npt.NDArray[np.float64]

_CONFIGURATION = ("model", "hardware", "gpus", "precision", "seq_len", "mbs", "gbs", "tp", "cp", "pp", "ep", "layers", "hidden", "heads")
_CHOICES = ("vpp", "etp", "dispatcher", "recompute", "cuda_graph", "offload")
_KINDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("experts", "generation", "batch"), 0.05),
    (("preset", "generation", "batch"), 0.1),
    (("source_group",), 0.05),
    (("source_group", "hardware", "precision"), 0.1),
    (("source_group", "model", "hardware"), 0.1),
    (("source_group", "model", "hardware", "precision", "tp", "pp", "ep", "fsdp"), 0.2),
)
"""Kinds of runs, and what being of one adds to the correlation of two predictions' errors.

Only the first two hold between sources; how their weights were chosen: docs/experiments/planner-accuracy.md.
"""
_PARTS = 0.4
"""The most that steps of the same parts add for runs of the same people, whose hosts, networks and versions are the same."""
_OWN_GROUP = ("source_group",)
_RUN = 0.09
"""Standard deviation of the logarithm by which one run differs from all others of its kind."""
_MOST_OWN = 0.8
"""The most that this is of a prediction's spread, as where the weights were chosen: for a GPU that was calibrated the spread is less than
`_RUN`, and other runs would say nothing of it."""


@dataclass(frozen=True)
class Anchor:
    """A run with the logarithm of measured over predicted speed, the spread of that prediction, and what the step's parts take, as
    `spread.weights` has them.
    """

    run: Run
    error: float
    spread: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """The logarithm of a scale, and what it leaves of the spread."""

    log: float
    left: float


NO_SCALE = Scale(0.0, 1.0)


class Anchors:
    """Runs that scale others: predictions err together as far as their runs are of one kind and their steps spend time on the same parts.

    The scale is the mean of the error to expect, given these runs' errors, where all are normal (a Gaussian process).
    """

    def __init__(self, anchors: Sequence[Anchor]) -> None:
        self._anchors = list(anchors)
        self._codes = [_Codes([_key(a, columns) for a in self._anchors]) for columns, _ in _KINDS]
        self._groups = _Codes([_key(a, _OWN_GROUP) for a in self._anchors])
        self._shared = np.array([_shared(a) for a in self._anchors])
        self._parts = _unit(np.array([a.parts for a in self._anchors]))
        rows = [self._covariance(a) for a in self._anchors]
        run_variance = np.array([a.spread**2 for a in self._anchors]) - self._shared**2
        self._inverse = np.linalg.inv(np.array(rows) + np.diag(run_variance))
        self._errors = np.array([a.error for a in self._anchors])
        self._configurations: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, anchor in enumerate(self._anchors):
            self._configurations[configuration(anchor.run)].append(i)

    def scale(self, asked: Anchor, *, leave_out: str = "") -> Scale:
        """The scale for a run, whose own error is not looked at.

        With `leave_out`, runs of the same configuration do not count; where it is `source`, none of the same source does either.
        """
        near = self._covariance(asked)
        same_configuration = self._configurations.get(configuration(asked.run), []) if leave_out else []
        out = [i for i in same_configuration if _alike(self._anchors[i].run, asked.run)]
        if leave_out == "source":
            group = asked.run.word("source_group")
            out = sorted({*out, *(i for i, a in enumerate(self._anchors) if a.run.word("source_group") == group)})
        near[out] = 0.0
        weights = self._inverse @ near
        if out:  # the inverse without these rows, from the whole one
            block = self._inverse[np.ix_(out, out)]
            weights = weights - self._inverse[:, out] @ np.linalg.solve(block, weights[out])
            weights[out] = 0.0
        return Scale(float(weights @ self._errors), sqrt(max(0.0, 1 - float(near @ weights) / asked.spread**2)))

    def _covariance(self, asked: Anchor) -> _Vector:
        """Of the asked prediction's error with that of each anchor's."""
        weights = sum(
            (weight * codes.same(_key(asked, columns)) for (columns, weight), codes in zip(_KINDS, self._codes, strict=True)),
            np.zeros(len(self._anchors)),
        )
        weights = weights + _PARTS * self._groups.same(_key(asked, _OWN_GROUP)) * (self._parts @ _unit(np.array([asked.parts]))[0])
        return np.asarray(_shared(asked) * self._shared * weights)


class _Codes:
    """Keys as numbers, so that many are compared at once."""

    def __init__(self, keys: Sequence[tuple[str, ...]]) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._all = np.array([self._numbers.setdefault(key, len(self._numbers)) for key in keys])

    def same(self, key: tuple[str, ...]) -> _Vector:
        return np.asarray(self._all == self._numbers.get(key, -1), dtype=np.float64)


def _shared(anchor: Anchor) -> float:
    """The part of the spread that runs of one kind share, once what a run has to itself is taken out."""
    return sqrt(anchor.spread**2 - min(_RUN, _MOST_OWN * anchor.spread) ** 2)


def _unit(rows: _Vector) -> _Vector:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))


def configuration(run: Run) -> tuple[str, ...]:
    """What makes two runs the same configuration, whoever ran it and when."""
    return tuple(_plain(run, c) for c in _CONFIGURATION)


def newest_release_ids(runs: Iterable[Run]) -> set[str]:
    """Ids of the runs that are the newest release of their configuration in their source; those of one release all count.

    A release such as `26.04` is compared by its month with those that have a date.
    """
    latest: dict[tuple[str, ...], str] = {}
    ids_of: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        key = (run.word("source_group"), run.word("task"), run.word("routing").partition(",")[2], *configuration(run))
        if run.release_date > latest.get(key, ""):
            latest[key], ids_of[key] = run.release_date, []
        if run.release_date == latest.get(key, ""):
            ids_of.setdefault(key, []).append(run.id)
    return {i for ids in ids_of.values() for i in ids}


def _alike(a: Run, b: Run) -> bool:
    """Whether two runs may be the same configuration: what one of them leaves open counts as the same."""
    choices = [(a.word(c).lower(), b.word(c).lower()) for c in _CHOICES]
    return configuration(a) == configuration(b) and all(x == y or not x or not y for x, y in choices)


def _key(anchor: Anchor, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_KEYS[c](anchor) if c in _KEYS else _plain(anchor.run, c) for c in columns)


def _batch(run: Run) -> str:
    """Nothing where the batch is stated, else the run's own name: where it is a guess, the error is the guess's, and no other run shares
    it.
    """
    return "" if run.word("mbs") or run.word("gbs") else run.id


@lru_cache(maxsize=1024)
def _preset(name: str) -> str:
    return named(name) or _letters(name)


@lru_cache(maxsize=1024)
def _generation(hardware: str) -> str:
    """The letters before a product's number: H100, H200 and H800 are one generation, B200 and GB200 another."""
    try:
        name = cluster(hardware).name
    except ConfigError:
        return _letters(hardware)
    return re.sub("^g|[0-9_].*", "", name)


_KEYS: dict[str, Callable[[Anchor], str]] = {
    "preset": lambda a: _preset(a.run.word("model")),
    "generation": lambda a: _generation(a.run.word("hardware")),
    "batch": lambda a: _batch(a.run),
    "experts": lambda a: str(has_experts(a.parts)),
}


def _plain(run: Run, column: str) -> str:
    """A cell without what spelling may differ in: case and punctuation."""
    return _letters(run.word(column))


@lru_cache(maxsize=65536)
def _letters(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())
