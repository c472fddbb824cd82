"""What was seen of a step, by its reader or in a trace: shares by name, and what they make of the planner's breakdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from playbook.errors import ConfigError
from playbook.yaml_files import did_you_mean


@dataclass(frozen=True)
class Kind:
    """Which wall a share of the step is, and which parts of a predicted step it is."""

    wall: str
    parts: tuple[str, ...] = ()


_SENT = "exposed communication"
COMMUNICATION = Kind(_SENT, ("tp", "ep", "cp", "pp", "dp"))
KINDS: Mapping[str, Kind] = {
    "all-to-all": Kind(_SENT, ("ep",)),
    "all-gather": Kind(_SENT, ("tp", "dp")),
    "reduce-scatter": Kind(_SENT, ("tp", "dp")),
    "all-reduce": Kind(_SENT, ("tp", "dp")),
    "send-recv": Kind(_SENT, ("ep", "cp", "pp")),  # NCCL sends an all-to-all as pairs
    "communication": COMMUNICATION,
    "idle": Kind("host-bound", ("host",)),
    "data": Kind("data wait"),
    "bubble": Kind("bubble", ("bubble",)),
    "stragglers": Kind("stragglers", ("stragglers",)),
    "recompute": Kind("memory"),
    "elementwise": Kind("memory-bound kernels", ("elementwise",)),
    "optimizer": Kind("memory-bound kernels", ("optimizer",)),
    "attention": Kind("compute-bound", ("attention",)),
    "products": Kind("compute-bound", ("products", "grouped")),
}
"""What a reader may have seen, by name. A share of `communication` has the collectives that are named beside it in itself."""
_TRACED = {"idle": "host_idle", "data": "data_wait", "communication": "exposed"}
"""What a trace tells, by its own names."""
_MOST = 40
_ROUNDED = 0.02
"""By how much the shares of a step may add up to more than all of it."""


def parsed(words: Iterable[str]) -> dict[str, float]:
    """`all-to-all=40%` and the like, or several with commas, as shares of the step.

    Raises:
        ConfigError: a name or share is none, or together they are more than a step.
    """
    shares: dict[str, float] = {}
    for word in (w.strip() for text in words for w in text[:2000].split(",") if w.strip()):
        name, _, text = word.partition("=")
        share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", text.strip(), re.ASCII)
        if name not in KINDS:
            raise ConfigError(f"saw '{name[:_MOST]}' is not known{did_you_mean(name[:_MOST], KINDS)}; expected some of {', '.join(KINDS)}")
        if share is None or name in shares:
            raise ConfigError(f"saw '{word[:_MOST]}'; expected each once with its percentage of the step, such as all-to-all=40%")
        shares[name] = float(share[1]) / 100
    whole = sum(walls(shares).values())
    if whole > 1 + _ROUNDED:
        raise ConfigError(f"saw {whole:.0%} of a step in all; expected at most 100 %: shares are of the whole step, and do not overlap")
    return shares


def of_trace(trace: Mapping[str, Any]) -> dict[str, float]:
    """The shares of a trace as `playbook bench trace --file FILE --json` gives them."""
    shares = {name: trace.get(key) for name, key in _TRACED.items()}
    named = {name: share for name, share in (trace.get("collectives") or {}).items() if name in KINDS}
    scale = min(1.0, (shares["communication"] or 0.0) / whole) if (whole := sum(named.values())) else 1.0  # several may run at once
    shares |= {name: share * scale for name, share in named.items()}
    return {name: share for name, share in shares.items() if share is not None}


def walls(shares_seen: Mapping[str, float]) -> dict[str, float]:
    """What was seen by wall."""
    shares: dict[str, float] = {}
    for name, share in shares_seen.items():
        if name != "communication":
            shares[KINDS[name].wall] = shares.get(KINDS[name].wall, 0.0) + share
    if "communication" in shares_seen:
        shares[_SENT] = max(shares_seen["communication"], shares.get(_SENT, 0.0))
    return shares


def composition(parts: Mapping[str, float], shares_seen: Mapping[str, float]) -> dict[str, float]:
    """Shares of a step by part: those that were seen, and the planner's breakdown of the rest.

    What was seen and is no part of the predicted step, such as a wait for data, is left out, so that the shares may add up to less than
    one.
    """
    shares: dict[str, float] = {}
    for name, kind in KINDS.items():
        if name in shares_seen and name != "communication":
            _divide(shares, parts, [p for p in kind.parts if p not in shares and parts.get(p)] or list(kind.parts), shares_seen[name])
    sent = [p for p in COMMUNICATION.parts if p not in shares]
    if "communication" in shares_seen:
        named = sum(shares_seen[n] for n in shares_seen if n != "communication" and KINDS[n].wall == _SENT)
        _divide(shares, parts, sent, max(0.0, shares_seen["communication"] - named))
    others = {p: v for p, v in parts.items() if p not in shares}
    remaining = max(0.0, 1 - sum(walls(shares_seen).values()))
    whole = sum(others.values())
    return shares | {p: remaining * v / whole for p, v in others.items()}


def _divide(shares: dict[str, float], parts: Mapping[str, float], names: Iterable[str], share: float) -> None:
    """Spread a share over those parts that the step has, as the planner does."""
    predicted = {p: parts[p] for p in names if parts.get(p)}
    whole = sum(predicted.values())
    for part, value in predicted.items():
        shares[part] = shares.get(part, 0.0) + share * value / whole


def changed(shares: Mapping[str, float], before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Shares of the old step that its parts take once they change as the planner says; what is new counts as predicted."""
    whole = sum(before.values())
    return {
        part: shares[part] * after.get(part, 0.0) / before[part] if before.get(part) else after[part] / whole
        for part in {**shares, **after}
    }
