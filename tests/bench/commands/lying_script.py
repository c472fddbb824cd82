"""A training script whose log lies: a step takes `--takes` seconds, and its line says what `--lie` makes of them.

It waits for nothing. When its lines come, and how long the launch takes, it plans: `planned_clock.py` reads it from `planned.json` in the launch's folder, `--launch`.
"""

import argparse
import json
import random
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--launch", type=Path, required=True, help="the launch's folder, whose number seeds what is drawn")
parser.add_argument("--takes", type=float, default=0.005)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lie", default="")
parser.add_argument("--loss", default="constant", choices=["constant", "unseeded", "seeded", "rising", "falling"])
told = parser.parse_args()
draw = random.Random(told.launch.name[:3])
chance = random.Random("one for all" if told.loss == "seeded" else f"of launch {told.launch.name[:3]}")
middle = (told.steps // 5 + 1 + told.steps) / 2
slope = {"rising": 0.02, "falling": -0.02}.get(told.loss, 0.0)


def loss(step):
    """Of this step; rising and falling have one mean over the timed steps."""
    course = 2.0 + slope * (step - middle)
    return course * (1 + (chance.gauss(0, 0.002) if told.loss in ("seeded", "unseeded") else 0))


takes = told.takes * (1 + draw.gauss(0, 0.003))
beside, work, lines, arrivals = 0.5 * (1 + draw.gauss(0, 0.02)), told.steps * takes, [], []
now = 0.9 * work if told.lie == "before" else 0.0
for step in range(1, told.steps + 1):
    seconds = takes * (0.1 if told.lie in ("before", "between") else 1) * (1 + draw.gauss(0, 0.005))
    now += seconds + (0.9 * takes if told.lie == "between" else 0)
    name, seconds = {
        "halved": ("seconds", seconds / 2),
        "at the end": ("seconds", seconds / 2),
        "tenth": ("seconds", seconds / 10),
        "milliseconds": ("seconds", 1000 * seconds),
        "thousandth": ("ms", seconds),
        "rounded": ("seconds", round(seconds, 2)),
    }.get(told.lie, ("seconds", seconds))
    lines.append(json.dumps({"step": step, name: seconds, "loss": loss(step), "tokens": 8}))
    arrivals.append(now)
if told.lie == "at the end":
    arrivals = [now] * told.steps
print(*lines, sep="\n")
(told.launch / "planned.json").write_text(json.dumps({"arrivals": arrivals, "whole": beside + now}))
