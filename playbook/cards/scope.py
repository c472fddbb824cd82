"""Scopes: for which machines and runs a claim speaks, as predicates over named facts.

A scope is a mapping of a key to a predicate; all must hold. Numbers: `2`, `">=2"`, `"<=8"`, `"2..8"` (both ends belong), `[2, 4]`.
Words: `nvlink`, `"H100|H200"`, `[H100, H200]`; a word matches whole words of the fact, so `B200` is not `GB200`. Flags: `true`, `false`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, Literal

from playbook.yaml_files import did_you_mean

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
_COMPARE = re.compile(rf"\s*(>=|<=|==|>|<)?\s*({_NUMBER})\s*\Z")
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*\Z")


def problems(scope: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with a scope as it is written: (key, message) for each."""
    found = []
    for key, predicate in scope.items():
        if key not in KEYS:
            found.append((key, f"unknown scope key '{key}'{did_you_mean(key, KEYS)}"))
            continue
        fault = _fault(KEYS[key], predicate)
        if fault:
            found.append((key, f"scope '{key}': {fault}"))
    return found


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
        found = facts.get(key)
        if found is None or not _holds(KEYS[key], predicate, found):
            missing.append(f"{key}: found {'nothing' if found is None else _show(found)}, expected {_show(predicate)}")
    return missing


def _fault(kind: Kind, predicate: Any) -> str | None:
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
        span = _RANGE.match(predicate)
        if span and float(span[1]) > float(span[2]):
            return f"'{predicate}' is empty: the first number is larger than the second"
        if not span and not _COMPARE.match(predicate):
            return f"expected a number, '>=2' or '2..8', found '{predicate}'"
    return None


def _holds(kind: Kind, predicate: Any, found: Any) -> bool:
    if isinstance(predicate, list):
        return any(_holds(kind, p, found) for p in predicate)
    if kind == "flag":
        return bool(found == predicate)
    if kind == "word":
        have = set(_words(str(found)))
        return any(set(_words(part)) <= have for part in predicate.split("|"))
    if not isinstance(found, int | float):
        return False
    return _number_holds(predicate, float(found)) if isinstance(predicate, str) else bool(found == predicate)


def _number_holds(predicate: str, found: float) -> bool:
    span = _RANGE.match(predicate)
    if span:
        return float(span[1]) <= found <= float(span[2])
    match = _COMPARE.match(predicate)
    assert match is not None  # `problems` has accepted it
    op, bound = match[1] or "==", float(match[2])
    return {">=": found >= bound, "<=": found <= bound, "==": found == bound, ">": found > bound, "<": found < bound}[op]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _show(value: Any) -> str:
    return " or ".join(_show(v) for v in value) if isinstance(value, list) else str(value).replace("|", " or ")
