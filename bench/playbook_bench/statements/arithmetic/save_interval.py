"""How often to save: what checkpoints and failures cost at Young's interval, beside the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from playbook_bench.judge.verdict import Statement


def save_interval(
    *, waits_s: Sequence[float], failures_h: Sequence[float], slack: float, at_h: float, before_s: float, after_s: float, gain: float
) -> Statement:
    """Whether Young's interval loses at most `slack` more of the time than the best interval, for each wait per save and each time between failures;
    and whether, with `at_h` hours between failures, a wait of `after_s` in place of `before_s` loses at least `gain` less.

    Sources: Young 1974 for the interval sqrt(2 x wait x time between failures); Daly 2006 for what is lost at any interval.
    """
    rows = []
    for hours in failures_h:
        for wait in waits_s:
            young = _young(wait, 3600 * hours)
            least = _least_lost(wait, 3600 * hours)
            rows.append(
                {"wait_s": wait, "failures_h": hours, "every_s": young, "lost": _lost(young, wait, 3600 * hours), "least_lost": least}
            )
    excess = max(row["lost"] - row["least_lost"] for row in rows)
    before, after = (_lost(_young(wait, 3600 * at_h), wait, 3600 * at_h) for wait in (before_s, after_s))
    sentence = (
        f"saving every sqrt(2 x wait x time between failures) loses at most {100 * excess:.2g} points more than the best interval;"
        f" with {at_h:g} h between failures {before:.1%} at {before_s:g} s a save (every {_young(before_s, 3600 * at_h):.0f} s)"
        f" and {after:.1%} at {after_s:g} s (every {_young(after_s, 3600 * at_h):.0f} s)"
    )
    return (
        excess <= slack and before - after >= gain,
        sentence,
        {"rows": rows, "excess": excess, "lost_before": before, "lost_after": after},
    )


def _young(wait: float, between: float) -> float:
    return math.sqrt(2 * wait * between)


def _lost(every: float, wait: float, between: float) -> float:
    """Share of the time that saves and work done twice take, where failures come at random, `between` seconds apart on average."""
    return 1 - every / (between * math.expm1((every + wait) / between))


def _least_lost(wait: float, between: float) -> float:
    """The share at the best interval."""
    from scipy.optimize import minimize_scalar  # start-up time: the table of statements is listed by commands that compute nothing

    return float(minimize_scalar(lambda log: _lost(math.exp(log), wait, between), bounds=(0, math.log(9 * between)), method="bounded").fun)
