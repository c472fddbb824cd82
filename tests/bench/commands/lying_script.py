"""A training script whose log lies: it takes `--takes` seconds a step and prints each step as it ends, with what `--lie` makes of its seconds."""

import argparse
import json
import random
import time

parser = argparse.ArgumentParser()
parser.add_argument("--takes", type=float, default=0.005)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lie", default="")
parser.add_argument("--planned", action="store_true", help="log what steps should take, whatever a busy machine makes of them")
parser.add_argument("--loss", default="constant", choices=["constant", "unseeded", "seeded", "rising", "falling"])
told = parser.parse_args()
draw = random.Random()
chance = random.Random(1 if told.loss == "seeded" else None)
middle = (told.steps // 5 + 1 + told.steps) / 2
slope = {"rising": 0.02, "falling": -0.02}.get(told.loss, 0.0)


def loss(step):
    """Of this step; rising and falling have one mean over the timed steps."""
    course = 2.0 + slope * (step - middle)
    return course * (1 + (chance.gauss(0, 0.002) if told.loss in ("seeded", "unseeded") else 0))


def sleep(seconds):
    """Spin: a sleep as short as a step lasts as long as the machine likes."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


work, lines = told.steps * told.takes, []
if told.lie == "before":
    sleep(0.9 * work)
for step in range(1, told.steps + 1):
    began = time.perf_counter()
    planned = told.takes * (0.1 if told.lie in ("before", "after", "between", "unsynchronised") else 1) * (1 + draw.gauss(0, 0.005))
    sleep(planned)
    seconds = planned if told.planned else time.perf_counter() - began
    if told.lie in ("between", "unsynchronised"):
        sleep(0.9 * told.takes)
    name, seconds = {
        "halved": ("seconds", seconds / 2),
        "at the end": ("seconds", seconds / 2),
        "tenth": ("seconds", seconds / 10),
        "milliseconds": ("seconds", 1000 * seconds),
        "thousandth": ("ms", seconds),
        "rounded": ("seconds", round(seconds, 2)),
    }.get(told.lie, ("seconds", seconds))
    lines.append(json.dumps({"step": step, name: seconds, "loss": loss(step), "tokens": 8}))
    if told.lie != "at the end":
        print(lines[-1], flush=True)
if told.lie == "at the end":
    print(*lines, sep="\n")
if told.lie == "after":
    sleep(0.9 * work)
