"""A training script of somebody else, whose step times are invented: it takes as long as they say, and then prints JSON lines, all at once. Faults are planted by its options, or by `plant.json` beside it.

By a planned clock (`planned_clock.py`) it waits for nothing.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

PLANTED = Path(__file__).with_name("plant.json")


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--step-s", type=float, default=0.01, help="seconds of a step: more make whole launches tell it, fewer are sooner over"
    )
    parser.add_argument("--slower", type=float, default=0.0)
    parser.add_argument("--noise", type=float, default=0.002)
    parser.add_argument("--launch", default="", help="the launch's folder, whose number seeds what is drawn")
    parser.add_argument("--fault", default="")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace-of", type=Path, help="a trace to leave as trace.json in the launch's folder")
    parser.set_defaults(**(json.loads(PLANTED.read_text()) if PLANTED.is_file() else {}))
    return parser.parse_args()


def row(told, step, seconds, drift):
    if (told.fault == "slow first part" and step <= 0.4 * told.steps) or (told.fault == "every fourth" and step % 4 == 0):
        seconds *= 1.5
    sound = {"step": step, "seconds": seconds, "loss": 4.0 / (1 + step), "tokens": 1024}
    changed = {
        "nan loss": {"loss": float("nan")},
        "nan throughput": {"seconds": float("nan")},
        "no throughput": {"seconds": None},
        "no tokens": {"tokens": None},
        "fewer tokens": {"tokens": 900},
        "unseeded": {"loss": sound["loss"] * (1 + drift)},
        "no loss": {"loss": None},
        "other loss": {"loss": 1.5 * sound["loss"]},
    }
    return {k: v for k, v in {**sound, **changed.get(told.fault, {})}.items() if v is not None}


def main():
    told = options()
    draw = random.Random(Path(told.launch).name[:3])
    launch = told.step_s * (1 + told.slower) * (1 + draw.gauss(0, told.noise))
    if told.fast and told.fault != "no path":
        print("the fast path is on")
    if told.fault == "hang":
        time.sleep(3600)
    if told.fault == "no memory":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    last = int(0.4 * told.steps) if told.fault == "ends early" else told.steps
    drift = random.Random(f"loss of launch {Path(told.launch).name[:3]}").gauss(0, 1e-3)
    rows = [row(told, step, launch * (1 + draw.gauss(0, 0.01)), drift) for step in range(1, last + 1)]
    if "PLANNED_CLOCK" not in os.environ:
        time.sleep(sum(each.get("seconds") or 0.0 for each in rows if told.fault != "nan throughput"))
    lines = [json.dumps(each) for each in rows]
    text = "\n".join(lines) + "\n"
    if told.trace_of:
        (Path(told.launch) / "trace.json").write_bytes(told.trace_of.read_bytes())
    told.out.write_text(text) if told.out else sys.stdout.write(text)


main()
