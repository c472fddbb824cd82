"""Lint rules on what cards claim: undeclared contradictions, comparisons of unequal work, claims that no run can settle, outdated
sources.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import chain
from typing import Any

from playbook.cards.load import LoadedCard
from playbook.cards.model import Claim, ConfigFamily, Decision, Expect, Figure
from playbook.lint.base import LintInput, LintRule, Problem, each, gpus_named, is_number, linked, overlap, place, show
from playbook.yaml_files import KeyPath, did_you_mean

_SHARED_ALIASES = 0.6
_KNOBS = {"parallel.fsdp": "full sharding", "megatron.data_parallel": "full sharding"}
"""Keys of two backends that decide the same thing."""
_TITLE_OVERLAP = 0.75
_FILLER = re.compile(r"\b(?:an?|and|at|by|for|from|into?|its?|of|on|or|the|to|using|when|with|choosing|use|guide|training|performance)\b")


def _opposed_claims(shelf: LintInput) -> Iterator[Problem]:
    """Claims on one comparison and metric that cannot both hold where their scopes overlap."""
    index: dict[str, list[tuple[LoadedCard, int, Claim]]] = {}
    for entry, i, claim in each(shelf.every, lambda card: card.claims):
        if claim.kind == "pair":
            sides = sorted(_frozen(getattr(claim.comparison, v)) for v in ("baseline", "candidate"))
            index.setdefault(json.dumps([claim.metric, *sides]), []).append((entry, i, claim))
    for (first, _, a), (second, i, b) in shelf.rivals(index.values()):
        if _opposed(a, b) and overlap(a.scope, b.scope) and not linked(first, a, second, b):
            yield Problem(
                second,
                ("claims", i, "expect"),
                f"{b.id} and {place(first, second, a.id)} cannot both hold: one comparison and metric, scopes that overlap,"
                " opposite expectations; narrow a scope, or link them by supersedes or contradicts",
            )


def _opposed(a: Claim, b: Claim) -> bool:
    one, two = effect(a.expect), effect(b.expect)
    if one is None or two is None or one[0] != two[0]:
        return False
    if a.comparison.baseline != b.comparison.baseline:
        two = (two[0], -two[2], -two[1])
    return max(one[1], two[1]) > min(one[2], two[2])


def effect(expect: Expect) -> tuple[str, float, float] | None:
    """The interval of effects that an expectation allows, as (scale, least, most); ratios and percentages become logarithms."""
    if expect.margin is None or expect.op == "holds":
        return None
    unit, value = expect.margin.unit, expect.margin.value
    if unit in ("percent", "ratio"):
        ratio = 1 + value / 100 if unit == "percent" else value
        if ratio <= 0:
            return None
        scale, bound = "log", math.log(ratio)
    else:
        scale, bound = unit, value
    low, high = {">=": (bound, math.inf), "<=": (-math.inf, bound)}.get(expect.op, (-abs(bound), abs(bound)))
    return scale, low, high


def _opposed_decisions(shelf: LintInput) -> Iterator[Problem]:
    """Decisions that set one key, or one knob under two keys, to different values where both apply.

    A condition that only one of them names does not separate them; without a common one, nobody knows. Words such as `order` are keys
    only where all conditions are common.
    """
    index: dict[str, list[tuple[LoadedCard, int, Decision, str]]] = {}
    for entry, i, decision in each(shelf.every, lambda card: card.decide):
        for key in decision.set:
            words = "" if "." in key else " ".join(sorted(decision.when))
            index.setdefault(f"{_KNOBS.get(key, key)} {words}", []).append((entry, i, decision, key))
    for (first, _, a, other), (second, i, b, key) in shelf.rivals(index.values()):
        if (key == other and a.set[key] == b.set[key]) or not a.when.keys() & b.when.keys():
            continue
        if overlap(a.when, b.when) and not linked(first, None, second, None):
            who = place(first, second, "another decision")
            yield Problem(
                second,
                ("decide", i, "set", key),
                f"sets {key} to {show(b.set[key])}, and {who} sets {other} to {show(a.set[other])} in the same situation; keep"
                " one, or narrow `when`",
            )


def _avoided_settings(shelf: LintInput) -> Iterator[Problem]:
    """Decisions that set what another one says to avoid, in a situation that both meet."""
    warnings: dict[str, list[tuple[int, LoadedCard, Decision]]] = {}
    for n, entry in enumerate(shelf.every):
        for decision in entry.card.decide:
            for key in decision.avoid:
                warnings.setdefault(key, []).append((n, entry, decision))
    checked = {id(e) for e in shelf.checked}
    for m, sets in enumerate(shelf.every):
        for i, decision in enumerate(sets.card.decide):
            met = {id(other): (n, warns, other) for key in decision.set for n, warns, other in warnings.get(key, ())}
            for n, warns, other in met.values():
                later = shelf.every[max(m, n)]
                if id(later) in checked and overlap(decision.when, other.when) and not linked(warns, None, sets, None):
                    yield from _avoided(warns, other, sets, i, decision)


def _avoided(warns: LoadedCard, other: Decision, sets: LoadedCard, i: int, decision: Decision) -> Iterator[Problem]:
    for key in sorted(decision.set.keys() & other.avoid.keys()):
        common = _members(decision.set[key]) & _members(other.avoid[key])
        if common:
            because = ", ".join(other.because)
            who = place(warns, sets, "a decision")
            yield Problem(
                sets,
                ("decide", i, "set", key),
                f"sets {key} to {', '.join(sorted(common))}, which {who} says to avoid (because {because}); follow the evidence, or"
                " narrow `when`",
            )


def _unsupported_decisions(shelf: LintInput) -> Iterator[Problem]:
    """Decisions for the sake of a metric that a claim says the setting does not improve."""
    claims = {c.id: (e, c) for e in shelf.every for c in e.card.claims}
    useless = [(e, c) for e, c in claims.values() if c.kind == "pair" and _gains_nothing(c) and c.comparison.candidate]
    for entry, i, decision in each(shelf.checked, lambda card: card.decide):
        reasons = [claims[r][1] for r in decision.because if r in claims]
        metrics = {r.metric for r in reasons}
        for owner, claim in useless:
            if claim.metric not in metrics or claim.id in decision.because or not overlap(claim.scope, decision.when):
                continue
            settled = any(linked(owner, claim, entry, r) for r in reasons)
            if not settled and all(_members(v) <= _members(decision.set.get(k, [])) for k, v in claim.comparison.candidate.items()):
                yield Problem(
                    entry,
                    ("decide", i, "set"),
                    f"sets what {place(owner, entry, claim.id)} says gains nothing in {claim.metric};"
                    " say by supersedes or contradicts which claim stands, or change the decision",
                )


def _gains_nothing(claim: Claim) -> bool:
    bounds = effect(claim.expect)
    return bounds is not None and bounds[0] == "log" and bounds[2] <= math.log(1.02)


def _sets_unspecified(lint_input: LintInput) -> Iterator[Problem]:
    """Families that set a key which they list as unspecified by their source."""
    for entry, i, family in each(lint_input.checked, lambda card: card.families):
        for key in sorted(set(family.unspecified) & family.layout.keys()):
            yield Problem(
                entry,
                ("families", i, "layout", key),
                f"'{family.name}' sets {key} to {family.layout[key]}, and lists it as unspecified by its source; remove one",
            )


_Family = tuple[LoadedCard, int, ConfigFamily]
"""A family with its card and its place among the card's families."""


def _conflicting_families(lint_input: LintInput) -> Iterator[Problem]:
    """Families that describe one configuration with different values, or set a key that the other one's source leaves open."""
    by_model: dict[tuple[str, int | None], list[_Family]] = {}
    for entry, i, family in each(lint_input.every, lambda card: card.families):
        by_model.setdefault((family.model, family.gpus), []).append((entry, i, family))
    for first, second in lint_input.rivals(by_model.values()):
        a, b = first[2], second[2]
        same_gpus = gpus_named(a.hardware) & gpus_named(b.hardware)
        if _one_row(a, b) and same_gpus and not linked(first[0], None, second[0], None):
            yield from _row_differs(first, second)


def _one_row(a: ConfigFamily, b: ConfigFamily) -> bool:
    if a.layout == b.layout and not a.unspecified and not b.unspecified:
        return False  # nothing to disagree about
    grid = [k for k in ("tp", "pp", "cp", "ep", "etp") if k in a.layout and k in b.layout]
    equal_degrees = all(a.layout[k] == b.layout[k] for k in grid)
    work = all(a.settings[k] == b.settings[k] for k in ("seq_len", "precision") if k in a.settings and k in b.settings)
    return work and equal_degrees and (len(grid) >= 3 or a.name == b.name)


def _row_differs(first: _Family, second: _Family) -> Iterator[Problem]:
    """What two families of the same work and degrees say differently, key by key."""
    (entry_a, _, a), (entry_b, place_b, b) = first, second
    other = place(entry_a, entry_b, f"'{a.name}'")
    for key in sorted(a.layout.keys() & b.layout.keys()):
        if a.layout[key] != b.layout[key]:
            yield Problem(
                entry_b,
                ("families", place_b, "layout", key),
                f"'{b.name}' has {key} {b.layout[key]}, {other} has {a.layout[key]} for the same model, GPUs and degrees; keep what the"
                " source says",
            )
    for silent, (entry, i, family), who in ((a, second, other), (b, first, place(entry_b, entry_a, f"'{b.name}'"))):
        for key in sorted(set(silent.unspecified) & family.layout.keys()):
            yield Problem(
                entry,
                ("families", i, "layout", key),
                f"'{family.name}' has {key} {family.layout[key]}, which {who} says the source leaves open; remove it, or name the source",
            )


def _one_measurement(shelf: LintInput) -> Iterator[Problem]:
    """Families with equal measurements but different settings: one row copied under two descriptions."""
    index: dict[str, list[_Family]] = {}
    for entry, i, family in each(shelf.every, lambda card: card.families):
        for name, value in family.measured.items():
            if len(re.sub(r"\D", "", f"{value.value:g}").rstrip("0").lstrip("0")) >= 3:
                index.setdefault(f"{name} {value.value:g} {value.unit}", []).append((entry, i, family))
    reported: set[tuple[int, int, int, int]] = set()
    for (first, j, a), (second, i, b) in shelf.rivals(index.values()):
        pair = (id(first), j, id(second), i)
        if pair not in reported and (first is not second or i != j):
            reported.add(pair)
            yield from _described_twice(first, a, second, i, b)


def _described_twice(first: LoadedCard, a: ConfigFamily, second: LoadedCard, i: int, b: ConfigFamily) -> Iterator[Problem]:
    facts = [{**f.settings, **f.layout, "model": f.model, **({"gpus": f.gpus} if f.gpus else {})} for f in (a, b)]
    for key in sorted(facts[0].keys() & facts[1].keys()):
        if facts[0][key] != facts[1][key]:
            other = place(first, second, f"'{a.name}'")
            message = (
                f"'{b.name}' has the figures of {other}, but {key} is {show(facts[1][key])} here and {show(facts[0][key])} there;"
                " one measurement has one description, correct it"
            )
            where: KeyPath = ("families", i, "settings", key) if key in b.settings else ("families", i, "layout")
            yield Problem(second, where, message)


def _duplicate_subjects(shelf: LintInput) -> Iterator[Problem]:
    """Cards on the same subject by title and aliases, which a search cannot tell apart."""
    words = {id(e): (_title(e.card.title), frozenset(_plain(a) for a in e.card.aliases)) for e in shelf.every}
    for (first,), (second,) in shelf.rivals([[(entry,) for entry in shelf.every]]):
        if first.card.id == second.card.id or linked(first, None, second, None):
            continue
        (title_a, alias_a), (title_b, alias_b) = words[id(first)], words[id(second)]
        shared = alias_a & alias_b
        few = min(len(alias_a), len(alias_b))
        aliases = len(shared) >= 2 and len(shared) / few >= _SHARED_ALIASES
        titles = len(title_a & title_b) >= 2 and len(title_a & title_b) / len(title_a | title_b) >= _TITLE_OVERLAP
        if aliases or titles:
            why = f"share the aliases {', '.join(sorted(shared))}" if aliases else "have nearly the same title"
            yield Problem(
                second,
                ("aliases",) if aliases else ("title",),
                f"'{second.card.id}' and '{first.card.id}' {why}; merge them, or let one supersede the other",
            )


def _title(text: str) -> frozenset[str]:
    return frozenset(w.rstrip("s") for w in re.findall(r"[a-z0-9]+", _FILLER.sub(" ", text.lower())))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _members(value: Any) -> frozenset[str]:
    return frozenset(str(v) for v in value) if isinstance(value, list) else frozenset({str(value)})


def _frozen(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


RULES = (
    LintRule("conflict-claims", "Two claims on one comparison and metric that cannot both hold, unlinked", _opposed_claims),
    LintRule("conflict-decisions", "Two decisions that set one key differently in the same situation", _opposed_decisions),
    LintRule("conflict-avoid", "A decision that sets what another one says to avoid", _avoided_settings),
    LintRule("conflict-evidence", "A decision for a metric that a claim says the setting does not improve", _unsupported_decisions),
    LintRule(
        "conflict-row",
        "One configuration that two families state differently, or that fills in what its source leaves open",
        lambda lint_input: chain(_sets_unspecified(lint_input), _conflicting_families(lint_input)),
    ),
    LintRule("conflict-measurement", "The same figures under two descriptions", _one_measurement),
    LintRule("duplicate-subject", "Two cards on one subject, by titles and aliases", _duplicate_subjects),
)


# Lint rules on what decision rules rest on: claims that agree, and conditions that somebody can measure.

_BY_DEGREE = re.compile(r"\b(?:exposed|visible)", re.I)


def _both_sides(shelf: LintInput) -> Iterator[Problem]:
    """Decisions that set a key because of two claims of which one denies the other."""
    denies = {c.id: {*c.contradicts, *c.supersedes} for e in shelf.every for c in e.card.claims}
    for entry, i, rule in each(shelf.checked, lambda card: card.decide):
        keys = [k for k in rule.set if "." in str(k)]
        for n, second in enumerate(rule.because if keys else ()):
            for first in rule.because[:n]:
                if first in denies.get(second, ()) or second in denies.get(first, ()):
                    yield Problem(
                        entry,
                        ("decide", i, "because", n),
                        f"sets {keys[0]} because of {first} and of {second}, which denies it; name the one that stands, or say `try`",
                    )


def _without_threshold(shelf: LintInput) -> Iterator[Problem]:
    """Conditions of more or less, without the number from which on they hold."""
    for entry, i, rule in each(shelf.checked, lambda card: card.decide):
        for key, value in rule.when.items():
            words = _BY_DEGREE.search(f"{key} {value}".replace("_", " "))
            if words and not (str(key).endswith("_percent") and is_number(value)):
                yield Problem(
                    entry,
                    ("decide", i, "when", key),
                    f"'{key}: {value}' does not say from which share of the step on; write a number, such as"
                    " exposed_dispatch_percent: '>=2'",
                )


DECISION_RULES = (
    LintRule("decision-dispute", "A decision that rests on both sides of a contradiction", _both_sides),
    LintRule(
        "decision-threshold", "A condition such as `exposed` without the share of the step from which on it holds", _without_threshold
    ),
)


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


def _ranked_rows(shelf: LintInput) -> Iterator[Problem]:
    """Rankings of families that did unequal work, or whose figures say the opposite."""
    for entry in shelf.checked:
        families = {f.name: f for f in entry.card.families}
        for i, ranking in enumerate(entry.card.rankings):
            missing = [(key, name) for key, name in (("better", ranking.better), ("than", ranking.than)) if name not in families]
            for key, name in missing:
                yield Problem(entry, ("rankings", i, key), f"family '{name}' does not exist{did_you_mean(name, families)}")
            if not missing:
                yield from (Problem(entry, ("rankings", i), m) for m in _unequal(families[ranking.better], families[ranking.than]))


def _unequal(a: ConfigFamily, b: ConfigFamily) -> Iterator[str]:
    for key in _WORK:
        value_a, value_b = a.settings.get(key), b.settings.get(key)
        if value_a != value_b:
            yield (
                f"'{a.name}' and '{b.name}' do unequal work: {key} {_or_nothing(value_a)} against {_or_nothing(value_b)};"
                " rank rows of equal work only, or drop the ranking"
            )
    if a.model != b.model:
        yield f"'{a.name}' and '{b.name}' train different models, {a.model} and {b.model}; rank rows of one model only"


def _or_nothing(value: object) -> str:
    return "not stated" if value is None else show(value)


def _compared_work(shelf: LintInput) -> Iterator[Problem]:
    """Claims whose variants process different numbers of tokens per step."""
    for entry, i, claim in each(shelf.checked, lambda card: card.claims):
        work = [_tokens(side) for side in (claim.comparison.baseline, claim.comparison.candidate)]
        if claim.kind == "pair" and None not in work and work[0] != work[1]:
            yield Problem(
                entry,
                ("claims", i, "comparison"),
                f"{claim.id} compares {work[0]} with {work[1]} tokens per step; give both variants the same number",
            )


def _tokens(side: Mapping[str, Any]) -> int | None:
    """Tokens per step of a variant that sets both batch size and sequence length."""
    batch, length = side.get("train.global_batch_size"), side.get("data.seq_len")
    return batch * length if isinstance(batch, int) and isinstance(length, int) else None


def _cannot_settle(shelf: LintInput) -> Iterator[Problem]:
    """Claims that no run can contradict: the variants are equal, or every result meets the margin."""
    for entry, i, claim in each(shelf.checked, lambda card: card.claims):
        if claim.kind == "pair" and claim.comparison.baseline == claim.comparison.candidate:
            yield Problem(entry, ("claims", i, "comparison"), f"{claim.id} compares a run with itself; baseline and candidate must differ")
        bounds = effect(claim.expect)
        if bounds and bounds[0] == "log" and (bounds[1] > math.log(100) or (claim.expect.op == "<=" and bounds[2] > math.log(100))):
            yield Problem(
                entry,
                ("claims", i, "expect"),
                f"{claim.id} speaks of a factor above 100, which no run will settle; state a margin that can fail",
            )


def _source_dates(shelf: LintInput) -> Iterator[Problem]:
    """Sources dated in the future."""
    for entry in shelf.checked:
        parts: dict[str, Sequence[Claim | Figure]] = {"claims": entry.card.claims, "figures": entry.card.figures}
        for part, owners in parts.items():
            for i, owner in enumerate(owners):
                for j, source in enumerate(owner.sources):
                    where: KeyPath = (part, i, "sources", j, "date")
                    if not _is_date(source.date):
                        yield Problem(entry, where, f"'{source.date}' is no date; write YYYY, YYYY-MM or YYYY-MM-DD")
                    elif source.date > shelf.today[: len(source.date)]:
                        yield Problem(entry, where, f"the source is dated {source.date}, after today ({shelf.today}); correct the date")


def _old_sources(shelf: LintInput) -> Iterator[Problem]:
    """Claims whose newest source is old."""
    for entry, i, claim in each(shelf.checked, lambda card: card.claims):
        newest = max(s.date for s in claim.sources)
        if _is_date(newest) and _months(newest, shelf.today) > _SOURCE_MONTHS:
            yield Problem(
                entry,
                ("claims", i, "sources"),
                f"{claim.id} rests on sources of {newest} at the latest, more than {_SOURCE_MONTHS} months ago;"
                " look whether they still stand, and add what you found as a source",
            )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat((text + "-01-01")[:10] if len(text) == 4 else (text + "-01")[:10])
    except ValueError:
        return False
    return True


def _months(then: str, now: str) -> int:
    year, month = int(then[:4]), int(then[5:7] or 12)
    return (int(now[:4]) - year) * 12 + int(now[5:7]) - month


WORK_RULES = (
    LintRule("work-ranking", "A ranking between rows of unequal work", _ranked_rows),
    LintRule("work-claim", "A claim whose variants process different numbers of tokens per step", _compared_work),
    LintRule("claim-unsettled", "A claim that no run can contradict", _cannot_settle),
    LintRule("source-date", "A source dated in the future, or by no date", _source_dates),
    LintRule("source-old", "A claim whose newest source is more than two years old", _old_sources, warning=True),
)
