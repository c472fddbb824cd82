"""Lint rules on comparisons: unequal work, claims that no run can settle, and outdated sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from playbook.cards.model import Claim, ConfigFamily, Figure
from playbook.lint.base import Found, Rule, Shelf, show
from playbook.lint.conflicts import effect
from playbook.yaml_files import Path_, did_you_mean

_WORK = (
    "global_batch_size",
    "seq_len",
    "data",
    "images_per_sample",
    "routing",
    "moe_router_force_load_balancing",
    "moe_expert_capacity_factor",
    "frozen",
    "freeze_vision",
    "task",
)
"""Settings that decide how much work a step does; rows that differ in one of them cannot be compared on speed."""

_SOURCE_MONTHS = 24
"""Sources older than this are reported. Ours: megatron-core renames labels and fields about every half year."""


def _ranked_rows(shelf: Shelf) -> Iterator[Found]:
    """Rankings of families that did unequal work, or whose figures say the opposite."""
    for entry in shelf.checked:
        families = {f.name: f for f in entry.card.families}
        for i, ranking in enumerate(entry.card.rankings):
            here: Path_ = ("rankings", i)
            missing = [(key, name) for key, name in (("better", ranking.better), ("than", ranking.than)) if name not in families]
            for key, name in missing:
                yield entry, (*here, key), f"family '{name}' does not exist{did_you_mean(name, families)}"
            if not missing:
                a, b = families[ranking.better], families[ranking.than]
                yield from ((entry, here, m) for m in _unequal(a, b))


def _unequal(a: ConfigFamily, b: ConfigFamily) -> Iterator[str]:
    for key in _WORK:
        left, right = a.settings.get(key), b.settings.get(key)
        if left != right:
            yield (
                f"'{a.name}' and '{b.name}' do unequal work: {key} {_or_nothing(left)} against {_or_nothing(right)};"
                " rank rows of equal work only, or drop the ranking"
            )
    if a.model != b.model:
        yield f"'{a.name}' and '{b.name}' train different models, {a.model} and {b.model}; rank rows of one model only"


def _or_nothing(value: object) -> str:
    return "not stated" if value is None else show(value)


def _compared_work(shelf: Shelf) -> Iterator[Found]:
    """Claims whose variants process different numbers of tokens per step."""
    for entry in shelf.checked:
        for i, claim in enumerate(entry.card.claims):
            work = [_tokens(side) for side in (claim.comparison.baseline, claim.comparison.candidate)]
            if claim.kind != "pair" or None in work:
                continue
            if work[0] != work[1]:
                message = f"{claim.id} compares {work[0]} with {work[1]} tokens per step; give both variants the same number"
                yield entry, ("claims", i, "comparison"), message


def _tokens(side: Mapping[str, Any]) -> int | None:
    """Tokens per step of a variant that sets both batch size and sequence length."""
    batch, length = side.get("train.global_batch_size"), side.get("data.seq_len")
    return batch * length if isinstance(batch, int) and isinstance(length, int) else None


def _cannot_settle(shelf: Shelf) -> Iterator[Found]:
    """Claims that no run can contradict: the variants are equal, or every result meets the margin."""
    for entry in shelf.checked:
        for i, claim in enumerate(entry.card.claims):
            here: Path_ = ("claims", i)
            if claim.kind == "pair" and claim.comparison.baseline == claim.comparison.candidate:
                yield entry, (*here, "comparison"), f"{claim.id} compares a run with itself; baseline and candidate must differ"
            bounds = effect(claim.expect)
            if bounds and bounds[0] == "log" and (bounds[1] > math.log(100) or (claim.expect.op == "<=" and bounds[2] > math.log(100))):
                yield (
                    entry,
                    (*here, "expect"),
                    f"{claim.id} speaks of a factor above 100, which no run will settle; state a margin that can fail",
                )


def _source_dates(shelf: Shelf) -> Iterator[Found]:
    """Sources dated in the future."""
    for entry in shelf.checked:
        parts: dict[str, Sequence[Claim | Figure]] = {"claims": entry.card.claims, "figures": entry.card.figures}
        for part, owners in parts.items():
            for i, owner in enumerate(owners):
                for j, source in enumerate(owner.sources):
                    where: Path_ = (part, i, "sources", j, "date")
                    if not _is_date(source.date):
                        yield entry, where, f"'{source.date}' is no date; write YYYY, YYYY-MM or YYYY-MM-DD"
                    elif source.date > shelf.today[: len(source.date)]:
                        yield entry, where, f"the source is dated {source.date}, after today ({shelf.today}); correct the date"


def _old_sources(shelf: Shelf) -> Iterator[Found]:
    """Claims whose newest source is old."""
    for entry in shelf.checked:
        for i, claim in enumerate(entry.card.claims):
            newest = max((s.date for s in claim.sources), default="")
            if _is_date(newest) and _months(newest, shelf.today) > _SOURCE_MONTHS:
                message = (
                    f"{claim.id} rests on sources of {newest} at the latest, more than {_SOURCE_MONTHS} months ago;"
                    " look whether they still stand, and add what you found as a source"
                )
                yield entry, ("claims", i, "sources"), message


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat((text + "-01-01")[:10] if len(text) == 4 else (text + "-01")[:10])
    except ValueError:
        return False
    return True


def _months(then: str, now: str) -> int:
    year, month = int(then[:4]), int(then[5:7] or 12)
    return (int(now[:4]) - year) * 12 + int(now[5:7]) - month


RULES = (
    Rule("work-ranking", "A ranking between rows of unequal work", _ranked_rows),
    Rule("work-claim", "A claim whose variants process different numbers of tokens per step", _compared_work),
    Rule("claim-unsettled", "A claim that no run can contradict", _cannot_settle),
    Rule("source-date", "A source dated in the future, or by no date", _source_dates),
    Rule("source-old", "A claim whose newest source is more than two years old", _old_sources, warning=True),
)
