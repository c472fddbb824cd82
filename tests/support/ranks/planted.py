"""A rank for tests of the harness: writes what docs/trainer-files.md says, or misbehaves as PLANT says.

`planted.py CONFIG` invents step times; `planted.py --real CONFIG` runs the real trainer and misbehaves around it.
PLANT is JSON: per variant (told by the dispatcher in the configuration) a mapping with
  fault: hang | kill | nan | crash | oom | refused | memory | short | silent | worker | disable
  computing: share of the step, in percent, in which its GPU would compute
  late: seconds that the first launch takes before its ranks do anything
  loss: what is added to its losses
  noise: standard deviation of its launches, as a share
  slower: share by which its steps take longer;  at: the step of the fault;  rank: whose;  launches: only those launches, from 0
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STEP_S = 0.001
"""All steps of a launch take less than starting a process does: what is invented must fit in the launch."""
ENDS = {
    "crash": "ValueError: planted",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "oom": 4,
    "refused": 2,
}
"""With what a rank ends: its exit code, or the last words of one that ends with 1."""


def plan(config):
    variant = {"alltoall": "baseline", "allgather": "candidate"}[config["moe"]["dispatcher"]]
    planted = json.loads(os.environ.get("PLANT", "{}"))
    if any(name.startswith("seed") for name in planted):  # sweeps and interactions
        name = f"seed{config['seed']}"
        return {**planted.get(name, {}), **planted.get(f"{name}-lr{config['optimizer']['lr']}", {}), "variant": variant}
    tree = Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]) / "plant.json"
    if tree.is_file():  # the gate: what is planted belongs to the commit, not to the variant
        return {**json.loads(tree.read_text()), "variant": variant}
    return {**planted.get(variant, {}), "variant": variant}


def strike(fault):
    """Carry out the fault in this rank."""
    if fault == "worker":  # a loader worker in a process group of its own, then a hang
        subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
    if fault in ("hang", "worker"):
        time.sleep(600)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ENDS:
        sys.exit(ENDS[fault])


def fake(config, planted):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out = Path(config["output"])
    train = config["train"]
    launch = random.Random(
        out.name.rpartition("-")[0]
    )  # without the name's random end: the same noise in every run of a test, so that a rule with a rate of error cannot err now and then
    factor = (1 + planted.get("slower", 0.0)) * (1 + launch.gauss(0, planted.get("noise", 0.003)))
    fault, at = planted.get("fault"), planted.get("at", 5)
    mine = rank == planted.get("rank", 0)
    if fault == "silent":
        return 0
    if out.name.startswith("000-"):
        time.sleep(planted.get("late", 0.0))
    steps = train["steps"] - (2 if fault == "short" else 0)
    if rank:
        if fault and mine:
            time.sleep(0.2)
            strike(fault)
        # The other ranks wait for the first, as collectives make them.
        deadline = time.monotonic() + 600
        while not (out / "summary.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return 0
    took = {True: 0.0, False: 0.0}
    with (out / "metrics.jsonl").open("w") as f:
        for step in range(1, steps + 1):
            nan = fault == "nan" and step >= at
            row = {
                "step": step,
                "timed": step > train["warmup_steps"],
                "loss": None if nan else 5.0 - 0.01 * step + planted.get("loss", 0.0),
                **({"nan": True} if nan else {}),
                "grad_norm": 1.0,
                "peak_memory_bytes": 1 << 20,
                "lr": 0.1,
                "seconds": STEP_S * factor * (1 + launch.gauss(0, 0.01)),
                "useful_tokens": 1000,
                "raw_tokens": 1024,
                "data_seconds": 0.0,
            }
            took[row["timed"]] += row["seconds"]
            f.write(json.dumps(row) + "\n")
            f.flush()
            if nan:
                return 3
            if fault and mine and step == at:
                strike(fault)
            if fault == "wait":
                time.sleep(0.2)
    if fault == "wait" or (world > 1 and fault and not mine and fault in ("hang", "kill", "worker")):
        time.sleep(600)
    collective = "all_gather" if (planted["variant"] == "candidate") != (fault == "disable") else "all_to_all"
    summary = {
        "schema": "summary/1",
        "outcome": "ok",
        "world_size": world,
        "source_sha": "s",
        "performance_revision": 1,
        "data_sha": "d",
        "num_parameters": 10,
        "trained_parameters": 10,
        "seconds": {"start_up": 0.01, "warm_up": took[False], "timed": took[True], "total": 0.02 + sum(took.values())},
        "metrics": {
            "dispatch_bytes_per_token_layer": 100 if planted["variant"] == "baseline" else 300,
            "recompiles": 0,
        },
        "receipt": {
            "numbers": {"layers": 4, "microbatches": 1},
            "ranges": {"dispatch": 4},
            "collectives": [{"op": collective, "group": "ep", "inside": "dispatch", "phase": "forward", "count": 4, "bytes": 10}],
            "counters": {"recompiles": 0, "gpu_computing_percent": planted.get("computing", 100)},
        },
        "env": {"strict": {"torch": "none"}, "context": {}},
    }
    (out / "summary.tmp").write_text(json.dumps(summary))
    (out / "summary.tmp").rename(out / "summary.json")
    return 0


def real(config, planted, words):
    """The real trainer, with the fault struck once its metrics show the step."""
    fault, at = planted.get("fault"), planted.get("at", 3)
    if fault == "disable":  # the configuration still says allgather; the trainer takes the other path, as a silent fallback would
        from playbook_trainer.torch.parallel import dispatch

        dispatch.DISPATCHERS["allgather"] = dispatch.DISPATCHERS["alltoall"]
    elif fault and int(os.environ["RANK"]) == planted.get("rank", 0):
        log = Path(config["output"]) / "metrics.jsonl"

        def watch():
            while True:
                with contextlib.suppress(OSError):
                    if log.read_text().count("\n") >= at:
                        os.kill(os.getpid(), {"hang": signal.SIGSTOP, "terminate": signal.SIGTERM}.get(fault, signal.SIGKILL))
                        return
                time.sleep(0.01)

        threading.Thread(target=watch, daemon=True).start()
    from playbook_trainer.__main__ import main

    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def main():
    words = sys.argv[1:]
    is_real = words[0] == "--real"
    config = json.loads(Path(words[-1]).read_text())
    planted = plan(config)
    if "launches" in planted:
        number = int(Path(config["output"]).name.split("-")[0])
        if number not in planted["launches"]:
            planted = {k: v for k, v in planted.items() if k not in ("fault", "slower")}
    return real(config, planted, words[1:]) if is_real else fake(config, planted)


if __name__ == "__main__":
    sys.exit(main())
