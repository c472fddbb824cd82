"""How the test behind a record has been edited since: the settings of its case, its activation rules, or the trainer's configuration that
the case names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from playbook.errors import PlaybookError
from playbook.records.case import Case, is_shipped, load_case
from playbook.records.evidence import Check, Measured
from playbook_bench.judge.receipt import in_words, judge_case
from playbook_bench.variants.resolve import resolve

_SHOWN, _LONG = 4, 60
_PLACES = frozenset({"output", "data.path", "init.weights", "checkpoint.dir", "checkpoint.export"})
"""Keys that hold paths; what is computed does not depend on them, so they are not compared."""


def case_changes(measured: Measured) -> list[str]:
    """How today's case differs from the one that a record was measured with: a few words for each setting, with both values. Empty if it
    does not, or no such case ships.

    Settings that the trainer's tree has gained or lost since are not compared: its performance revision speaks for those. Budgets and
    bounds are not either: they decide nothing about what ran. Of proofs only what the record's launches do not show counts: a proof that
    they meet as well is no other test.
    """
    if measured.case is None or not is_shipped(measured.case.id):
        return []
    try:
        today = load_case(measured.case.id)
    except PlaybookError:
        return []  # others say what is wrong with such a case
    changes = list(_differences(measured, measured.case.content, today))
    omitted = len(changes) - _SHOWN
    return changes[:_SHOWN] + ([f"{omitted} more"] if omitted > 0 else [])


def _differences(then: Measured, content: Case, today: Case) -> Iterator[str]:
    """In words, what sets today's case apart from `content`, the one that the record `then` holds: its settings, then what its proof
    misses.
    """
    if (content.function, content.arguments) != (today.function, today.arguments):
        yield "what the case computes"
    if content.delta.environment != today.delta.environment:
        yield "environment variables of the variants"
    if then.plan is not None and content.budget.pairs != today.budget.pairs:
        yield f"looks {_short(content.budget.pairs)} -> {_short(today.budget.pairs)}"
    predictions = {v.name: v.predicted for v in today.values}
    edited = [
        (v.name, v.predicted, predictions.get(v.name)) for v in content.values if v.predicted and v.predicted != predictions.get(v.name)
    ]
    yield from (f"the prediction of {name}: {_short(a)} -> {_short(b)}" for name, a, b in edited)
    variants = {run.variant: run for run in then.runs}
    if not variants or then.profile is None:
        return
    if set(variants) - set(today.variants) or then.profile not in today.profiles:
        yield f"the case's variants, or its profile {_short(then.profile)}"
        return
    settings: dict[str, dict[str, str]] = {}
    for name, run in variants.items():
        try:
            now = resolve(today, name, then.profile)
        except PlaybookError:
            yield f"the configuration of {name}, which cannot be read"
            continue
        if then.plan is not None and then.plan.extended:
            now = now.extended()  # as the harness has done then
        was = {**then.configs.get(run.config_sha, {}), "ranks": run.ranks}
        for key, a, b in _changed(was, {**now.dump, "ranks": now.ranks}):
            settings.setdefault(key, {})[name] = f"{key} {_short(a)} -> {_short(b)}"
    yield from (_unmet(check) for check in judge_case(today, then.runs) if not check.ok)
    for key in sorted(settings):
        texts = settings[key]
        common = len(texts) == len(variants) and all(a == b for a, b in pairwise(texts.values()))
        yield from [next(iter(texts.values()))] if common else [f"{name}: {text}" for name, text in texts.items()]


def _unmet(check: Check) -> str:
    return in_words(check, f"{check.variant}: its proof wants ", " ")


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys that both trees have and that differ, with both values; a part that is there in one alone, such as a tower, is one
    key.
    """
    for key in was.keys() & now.keys():
        place, a, b = f"{prefix}{key}", was[key], now[key]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _changed(a, b, f"{place}.")
        elif a != b and place not in _PLACES:
            yield place, a, b


def _short(value: Any) -> str:
    """One line of a few words: a record's values may be anything."""
    line = " ".join(str(value).split())
    return line if len(line) <= _LONG else f"{line[:_LONG]}..."
