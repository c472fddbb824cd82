"""A clock that follows the plans of launched commands: what a busy machine makes of their seconds is no part of what a test judges.

`python planned_clock.py ab ...` is `playbook ab ...` by this clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playbook_bench.variants import program

BESIDE_S, UNTOLD_S = 0.5, 60.0
"""What a launch takes beside its steps, and in all where nothing tells their seconds."""
MORE = re.compile(r"takes (\d+) s before its first step")


class Clock:
    """Stands still while a command runs, and then goes on by what its launch was planned to take."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now, self.began = 0.0, time.time() - 3600

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        """Launches follow each other, and all of them have ended by now, as in any record."""
        return self.began + self.now


def install(put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Let the harness time commands by their plans; `put` is such as pytest's monkeypatch.setattr."""
    clock, finish = Clock(), program._PrintedOutput.finish

    def finished(self: program._PrintedOutput) -> None:
        finish(self)
        arrivals, whole = planned(self.path)
        self.arrivals = [clock.now + moment for moment in arrivals] or self.arrivals
        clock.now += whole

    put(program, "time", clock)
    put(program._PrintedOutput, "finish", finished)


def planned(log: Path) -> tuple[list[float], float]:
    """When each line of a launch comes, in seconds from its start, and how long the launch takes.

    That is what it left in planned.json beside its log; else its lines come all at once, after the seconds that they tell.
    """
    plan = log.with_name("planned.json")
    if plan.is_file():
        told = json.loads(plan.read_text())
        return told["arrivals"], told["whole"]
    text = log.read_text(errors="replace") if log.is_file() else ""
    steps = math.fsum(filter(math.isfinite, map(seconds, text.splitlines()))) or UNTOLD_S
    return [], BESIDE_S + sum(map(float, MORE.findall(text))) + steps


def seconds(line: str) -> float:
    """Of the step that a line of JSON tells; 0 where it tells none."""
    with contextlib.suppress(ValueError, AttributeError):
        return float(json.loads(line).get("seconds") or 0)
    return 0.0


if __name__ == "__main__":
    from playbook_app.cli.app import main

    install()
    main()
