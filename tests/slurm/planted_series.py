"""What the tests run in an allocation: one series after the other, of planted ranks, by the harness's own functions.

`planted_series.py CASE RESULTS PLANT...`: each PLANT is JSON for `planted.py`, or `cancel`, a hang that is cancelled from outside.
The outcomes of the runs and the path of each record go to stdout, a JSON line per series.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from playbook_bench import cluster, confirm

PLANTED = (sys.executable, str(Path(__file__).parents[1] / "multiproc" / "planted.py"))


def cancel_the_step(results):
    """Cancel the step as soon as its ranks run."""
    deadline = time.monotonic() + 60
    while not (found := list(results.glob("work/*/*/step"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    subprocess.run(["scancel", "--signal=KILL", f"{os.environ['SLURM_JOB_ID']}.{found[0].read_text().strip()}"], check=True)


def main():
    case, results, *plants = sys.argv[1:]
    for number, plant in enumerate(plants):
        folder = Path(results) / str(number)
        os.environ["PLANT"] = '{"candidate": {"fault": "hang"}, "baseline": {"fault": "hang"}}' if plant == "cancel" else plant
        if plant == "cancel":
            threading.Thread(target=cancel_the_step, args=(folder,), daemon=True).start()
        slurm = cluster.launcher(cluster.Cluster(platform="cpu"), 0)
        (found,) = confirm.bench_run(case, results=folder, command=PLANTED, profile="cpu", seed=1, slurm=slurm)
        outcomes = [(r.outcome, r.message) for r in found.evidence.measured.runs]
        print(json.dumps({"status": found.status, "outcomes": outcomes, "path": str(found.path)}), flush=True)


if __name__ == "__main__":
    main()
