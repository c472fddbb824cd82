"""Scopes: for which machines and runs a claim speaks, as predicates over named facts.

A scope is a mapping of a key to a predicate; all must hold. Numbers: `2`, `">=2"`, `"<=8"`, `"2..8"` (both ends belong), `[2, 4]`.
Words: `nvlink`, `"H100|H200"`, `[H100, H200]`; a word matches whole words of the fact, so `B200` is not `GB200`. Flags: `true`, `false`.

Sizes: what a rule that names one says for a run. The planner has the last word on them: where a rule's size was within 5 % of its
fastest layout the rule says so, and a test asks both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from playbook.planner.layout import cp_for
from playbook.yaml_files import did_you_mean

if TYPE_CHECKING:
    from playbook.cards.model import Card, Decision, Sizes
    from playbook.cards.terms import Facts

Kind = Literal["number", "word", "flag"]

KEYS: dict[str, Kind] = {
    "gpus": "number",
    "gpu": "word",
    "interconnect": "word",
    "gpu_memory_gib": "number",
    "nodes": "number",
    "ranks": "number",
    "tp": "number",
    "pp": "number",
    "cp": "number",
    "ep": "number",
    "dp": "number",
    "seq_len": "number",
    "top_k": "number",
    "backend": "word",
    "model": "word",
    "vision": "flag",
    "moe": "flag",
}
"""What a scope may speak of. The harness fills the facts: `gpu` is the device's name, `gpus` how many the run may use."""

MACHINE_KEYS = frozenset({"gpus", "gpu", "interconnect", "gpu_memory_gib", "nodes"})
"""The keys that a CPU can never meet; a claim with `cpu_scope` is tried there without them."""

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
COMPARE = re.compile(rf"\s*(>=|<=|==|>|<)?\s*({_NUMBER})\s*\Z")
RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*\Z")
"""The two notations of a predicate on a number: `>=2`, and `2..8` with both ends."""


def problems(scope: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with a scope as it is written: (key, message) for each."""
    faults = []
    for key, predicate in scope.items():
        if key not in KEYS:
            faults.append((key, f"unknown scope key '{key}'{did_you_mean(key, KEYS)}"))
            continue
        fault = _fault(KEYS[key], predicate)
        if fault:
            faults.append((key, f"scope '{key}': {fault}"))
    return faults


def unmet(scope: Mapping[str, Any], facts: Mapping[str, Any], waive: Collection[str] = ()) -> list[str]:
    """The parts of `scope` that `facts` do not meet, each as 'key: found .., expected ..'; keys in `waive` are not asked.

    Raises:
        ValueError: the scope itself is wrong; `playbook cards check` reports that with its place.
    """
    faults = problems(scope)
    if faults:
        raise ValueError("; ".join(message for _, message in faults))
    missing = []
    for key, predicate in scope.items():
        if key in waive:
            continue
        fact = facts.get(key)
        if fact is None or not _holds(KEYS[key], predicate, fact):
            missing.append(f"{key}: found {'nothing' if fact is None else _show(fact)}, expected {_show(predicate)}")
    return missing


def _fault(kind: Kind, predicate: Any) -> str | None:
    """What is wrong with a predicate of this kind; None where it is sound."""
    if isinstance(predicate, list):
        if not predicate:
            return "an empty list is met by nothing; name at least one value"
        return next((f for f in (_fault(kind, p) if not isinstance(p, list) else "lists do not nest" for p in predicate) if f), None)
    if kind == "flag":
        return None if isinstance(predicate, bool) else f"expected true or false, found {predicate!r}"
    if kind == "word":
        ok = isinstance(predicate, str) and all(_words(part) for part in predicate.split("|"))
        return None if ok else f"expected words such as 'nvlink' or 'H100|H200', found {predicate!r}"
    if (
        isinstance(predicate, bool)
        or not isinstance(predicate, int | float | str)
        or (isinstance(predicate, float) and not isfinite(predicate))
    ):
        return f"expected a number, '>=2' or '2..8', found {predicate!r}"
    if isinstance(predicate, str):
        span = RANGE.match(predicate)
        if span and float(span[1]) > float(span[2]):
            return f"'{predicate}' is empty: the first number is larger than the second"
        if not span and not COMPARE.match(predicate):
            return f"expected a number, '>=2' or '2..8', found '{predicate}'"
    return None


def _holds(kind: Kind, predicate: Any, fact: Any) -> bool:
    """Whether a fact meets a predicate of this kind, which `problems` has accepted."""
    if isinstance(predicate, list):
        return any(_holds(kind, p, fact) for p in predicate)
    if kind == "flag":
        return bool(fact == predicate)
    if kind == "word":
        have = set(_words(str(fact)))
        return any(set(_words(part)) <= have for part in predicate.split("|"))
    if not isinstance(fact, int | float):
        return False
    if not isinstance(predicate, str):
        return bool(fact == predicate)
    span = RANGE.match(predicate)
    if span:
        return float(span[1]) <= fact <= float(span[2])
    match = COMPARE.match(predicate)
    assert match is not None  # `problems` has accepted it
    op, bound = match[1] or "==", float(match[2])
    return {">=": fact >= bound, "<=": fact <= bound, "==": fact == bound, ">": fact > bound, "<": fact < bound}[op]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _show(value: Any) -> str:
    return " or ".join(_show(v) for v in value) if isinstance(value, list) else str(value).replace("|", " or ")


def words(sizes: Sizes, seq_len: int) -> list[str]:
    """What `playbook plan --fix` takes for the sizes of a rule at this length."""
    cp = [f"cp={cp_for(seq_len, sizes.tokens_per_cp_rank)}"] if sizes.tokens_per_cp_rank else []
    return [*cp, *(f"{k}={v}" for k, v in sizes.keep.items())]


def agrees(sizes: Sizes, run: Mapping[str, Any]) -> bool:
    """Whether a run lies in one of the ranges in which the rule and the planner agree."""
    return any(not unmet(where, run) for where in sizes.agrees)


def follow(card: Card, run: Facts) -> list[str]:
    """One line for each rule of a card whose size holds for a run, else one that names the planner; none where the run or the card says
    nothing of sizes.
    """
    rules = [rule.sizes for rule in card.decide if rule.sizes]
    if not rules or run.model is None or run.seq_len is None:
        return []
    kind = run.hardware[0] if len(run.hardware) == 1 else "KIND"  # capital words are left to fill in
    plan = f"playbook plan {run.model} --gpus {run.gpus or 'N'} --hardware {kind} --seq {run.seq_len or 'TOKENS'}"
    near = [s for s in rules if all(agrees(s, facts) for facts in run.each()) and _room(s, run.seq_len, run.gpus)]
    lines = [f"{' '.join(words(s, run.seq_len))} by the card, within 5 % of the planner's fastest layout; the rest by {plan}" for s in near]
    return lines or [
        f"{plan}: the card's rule is not known to come within 5 % of its fastest layout here, and it weighs memory, TP, CP and EP together"
    ]


def _room(sizes: Sizes, seq_len: int, gpus: int | None) -> bool:
    return gpus is None or sizes.tokens_per_cp_rank is None or cp_for(seq_len, sizes.tokens_per_cp_rank) <= gpus


def note(rule: Decision) -> str:
    """Where a rule's size agrees with the planner, and what to follow elsewhere; empty where it names none."""
    if rule.sizes is None:
        return ""
    where = " or ".join(", ".join(f"{k} {v}" for k, v in part.items()) for part in rule.sizes.agrees)
    return (
        f"size: within 5 % of the planner's fastest layout for {where}; elsewhere follow playbook plan"
        if where
        else "size: follow playbook plan, whose fastest layouts often have another"
    )
