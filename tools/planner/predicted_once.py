"""One launch of each run that a case predicts, beside what was predicted: how far off a prediction is costs a launch, whether its interval holds a series.

    python tools/planner/predicted_once.py --profile h200x1 --out DIR [--budget 500] [--timed 10] predicted-dense-4k-megatron ...

Each launch adds a line to DIR/predicted.jsonl; runs that have one are not launched again. The summary has the median error, and the order of each case's runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from playbook.records.case import Case, load_case
from playbook_bench.launch.local import LocalLauncher, interruptible
from playbook_bench.machine import detect, requirements
from playbook_bench.run.series import read_run, threads_per_rank
from playbook_bench.run.variants import Resolved, resolve_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=500.0, help="begin no launch after so many seconds")
    parser.add_argument("--timed", type=int, help="timed steps of a launch, instead of the case's")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = args.out / "predicted.jsonl"
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    began = time.monotonic()
    with interruptible():
        for name in args.cases:
            case = load_case(name)
            for resolved in resolve_all(case, args.profile).values():
                if any((d["case"], d["run"]) == (case.id, resolved.variant) and d["outcome"] == "ok" for d in done):
                    continue
                if time.monotonic() - began > args.budget:
                    print(f"{case.id} {resolved.variant}: no time left", flush=True)
                    continue
                done.append(launch(case, shortened(resolved, args.timed), args))
                with lines.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(json.dumps(done[-1]), flush=True)
    summarise(done)


def shortened(resolved: Resolved, timed: int | None) -> Resolved:
    if timed is None:
        return resolved
    train = resolved.config.train
    train = train.model_copy(update={"steps": train.warmup_steps + timed, "log_every": 1})
    return replace(resolved, config=resolved.config.model_copy(update={"train": train}))


def launch(case: Case, resolved: Resolved, args: argparse.Namespace) -> dict[str, Any]:
    machine = requirements.restrict(detect.detect(), args.profile)
    folder = args.out / "runs" / f"{case.id}-{resolved.variant}-{time.time_ns()}"
    folder.mkdir(parents=True)
    settings = resolved.settings(threads_per_rank(machine, [resolved]), args.out / "cache")
    environment = {**detect.visible_devices(machine, args.profile), **settings, **resolved.environment}
    result = resolved.launch(LocalLauncher(), folder, environment, case.budget.launch_timeout_s)
    predicted = next(v.predicted for v in case.values if v.name == resolved.variant)
    assert predicted is not None
    row: dict[str, Any] = {
        "case": case.id,
        "run": resolved.variant,
        "outcome": result.outcome,
        "message": result.message[:300],
        "wall_s": round(result.wall_s, 1),
    }
    row |= {"predicted": predicted.value, "low": predicted.low, "high": predicted.high}
    if result.outcome != "ok":
        return row
    timed = [s for s in read_run(folder).fields["samples"] if s.timed]
    speed = math.fsum(s.useful_tokens for s in timed) / math.fsum(s.seconds for s in timed) / resolved.ranks
    row |= {
        "measured": round(speed, 1),
        "error_percent": round(100 * (predicted.value / speed - 1), 2),
        "steps": [round(s.seconds, 4) for s in timed],
    }
    return row | {"peak_gib": round(max(s.peak_memory_bytes for s in timed) / 2**30, 2), "loss": timed[-1].loss}


def summarise(done: list[dict[str, Any]]) -> None:
    seen = [d for d in done if d["outcome"] == "ok"]
    if not seen:
        return
    errors = [abs(d["error_percent"]) for d in seen]
    inside = sum(d["low"] <= d["measured"] <= d["high"] for d in seen)
    print(f"{len(seen)} runs: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %, {inside} inside their intervals")
    for case in dict.fromkeys(d["case"] for d in seen):
        runs = [d for d in seen if d["case"] == case]
        order = [sorted(runs, key=lambda d: -d[key]) for key in ("predicted", "measured")]
        tied = len(runs) > 1 and order[0][0]["low"] <= order[0][1]["high"]
        print(
            f"{case}: predicted {' > '.join(d['run'] for d in order[0])}, measured {' > '.join(d['run'] for d in order[1])}{', a tie by prediction' if tied else ''}"
        )


if __name__ == "__main__":
    main()
