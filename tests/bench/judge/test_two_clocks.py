"""The log's clock and the arrival of lines, from invented launches: which differences are no verdict."""

from __future__ import annotations

import pytest
from test_verdict import make_run

from playbook.records.evidence import Run
from playbook_bench import metrics
from playbook_bench.judge import verdict

NOISE = (0.6, 1.7, 1.2, 0.9)
"""Lines of one launch arrive in this many times the time of another."""


def pairs(log: float, arrival: float, noise: tuple[float, ...] = (1.0,) * 4) -> list[tuple[Run, Run]]:
    """Four pairs whose candidate takes these shares of the baseline's second a step, by its log and by the arrival of its lines."""

    def run(variant: str, step: float, wall: float) -> Run:
        return make_run(variant, seconds=step).model_copy(update={"metrics": {metrics.WALL_STEP: wall}})

    return [(run("baseline", 1.0, 1.0), run("candidate", log, arrival * x)) for x in noise]


@pytest.mark.parametrize(
    ("log", "arrival", "noise", "ok"),
    [
        (0.5, 0.5, (1.0,) * 4, True),
        (0.5, 1.0, (1.0,) * 4, False),
        (0.5, 1.0, NOISE, False),  # nothing is certain, and nothing bears the log out
        (2.0, 1.0, NOISE, False),
        (0.5, 0.6, NOISE, True),
        (1.0, 1.1, (1.0,) * 4, False),
        (1.01, 1.1, NOISE, True),  # the log claims no effect, and the difference may be noise
    ],
)
def test_lines_bear_out_what_the_log_says(log: float, arrival: float, noise: tuple[float, ...], ok: bool) -> None:
    (found,) = verdict.conditions(metrics.get("step_seconds"), pairs(log, arrival, noise))
    assert (found.name, found.ok) == ("clock", ok), found.detail
