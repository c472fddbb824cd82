"""What the tests run in an allocation: one series after the other, of planted ranks, by the harness's own functions.

`planted_series.py CASE RESULTS PLANT...`: each PLANT is JSON for `planted.py`, `cancel`, a hang that is cancelled from outside,
or `node`, a hang during which the last node goes down.
The outcomes of the runs and the path of each record go to stdout, a JSON line per series.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from playbook_bench.launch import slurm as batch_job
from playbook_bench.run import confirm
from playbook_bench.run.options import Options

PLANTED = (sys.executable, str(Path(__file__).with_name("planted.py")))


def strike(plant, results):
    """Cancel the step, or take a node away, as soon as its ranks run."""
    deadline = time.monotonic() + 600
    while not (found := list(results.glob("work/*/*/step"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    cancel = ["scancel", "--signal=KILL", f"{os.environ['SLURM_JOB_ID']}.{found[0].read_text().strip()}"]
    down = ["scontrol", "update", "nodename=n2", "state=down", "reason=test"]
    subprocess.run(cancel if plant == "cancel" else down, check=True)


def main():
    case, results, *plants = sys.argv[1:]
    for number, plant in enumerate(plants):
        folder = Path(results) / str(number)
        os.environ["PLANT"] = '{"candidate": {"fault": "hang"}, "baseline": {"fault": "hang"}}' if plant in ("cancel", "node") else plant
        if plant in ("cancel", "node"):
            threading.Thread(target=strike, args=(plant, folder), daemon=True).start()
        slurm = batch_job.launcher(batch_job.Cluster(platform="cpu"), 0)
        (found,) = confirm.bench_run(case, Options(results=folder, launcher=replace(slurm, command=PLANTED), profile="cpu", seed=1))
        outcomes = [(r.outcome, r.message) for r in found.evidence.measured.runs]
        print(json.dumps({"status": found.status, "outcomes": outcomes, "path": str(found.path)}), flush=True)


if __name__ == "__main__":
    main()
