"""From which figures on a reader is told about the machine: clocks that were held down, time spent on data, processor time that other machines took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

NOTABLE_DATA = 0.03
"""Share of the step spent on data."""
NOTABLE_STOLEN = 2.0
"""Percent of a run's processor time that other machines on the same hardware had."""
_NOTABLE_NOISE = 0.03
"""Deviation of A/A pairs, about a share: from here on the host is what keeps a series from seeing more."""
_NOTABLE_LIMITED = 10.0
"""Percent of the GPUs' readings in timed steps with clocks held down."""
TIMED_STEPS = "timed steps"
"""Value of `over` in telemetry that was read in the timed steps. Older records have readings of whole launches, most of which may be start-up."""


def host_limit(found: Mapping[str, Any]) -> str:
    """A clause where launches differ so much that this host is the limit of what a series can see; else nothing. `found`: a comparison or curve.

    By the A/A, or since rules of version 3, which have none, by the launches that are compared.
    """
    first = next(iter(found.get("contrasts") or ()), found)
    noise = found.get("floor") if found.get("floor") is not None else first.get("deviation")
    if not isinstance(noise, int | float) or found.get("scale") != "log_ratio" or noise < _NOTABLE_NOISE:
        return ""
    return f"this host is the limit: pairs of launches differ by {100 * noise:.1f} %"


def limited(runs: Iterable[tuple[str, Any]]) -> list[str]:
    """For each limit that held GPUs' clocks down in the timed steps, a clause with its share of the readings and the clock. `runs`: (variant, telemetry) of the measured runs."""
    shares: dict[str, dict[str, list[float]]] = {}
    clocks: dict[str, list[float]] = {}
    for variant, telemetry in runs:
        if not isinstance(telemetry, Mapping) or telemetry.get("over") != TIMED_STEPS:
            continue
        clock = _mapping(telemetry.get("clock_sm_mhz")).get("p50")
        if _finite(clock):
            clocks.setdefault(variant, []).append(float(clock))
        for limit, share in _mapping(telemetry.get("limited_percent")).items():
            if _finite(share):
                shares.setdefault(str(limit), {}).setdefault(variant, []).append(float(share))
    found = []
    for limit, each in shares.items():
        medians = {variant: statistics.median(values) for variant, values in sorted(each.items())}
        if max(medians.values()) >= _NOTABLE_LIMITED:
            at = {v: f" ({statistics.median(clocks[v]):,.0f} MHz)" if v in clocks else "" for v in medians}
            found.append(f"{limit} in {', '.join(f'{round(m)} % of {v}{at[v]}' for v, m in medians.items())}")
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
