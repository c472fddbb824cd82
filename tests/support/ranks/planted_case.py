"""A case whose ranks are planted.py, which invents its step times; and how tests run it."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from playbook_bench.launch.local import LocalLauncher
from playbook_bench.run import confirm
from playbook_bench.run.options import Options

HERE = Path(__file__).parent
FAKE = (sys.executable, str(HERE / "planted.py"))
REAL = (*FAKE, "--real")

CASE = """
id: planted
summary: Planted runs of two dispatchers
trainer: trainer/configs/qwen3_moe_tiny.yaml
baseline: {moe.dispatcher: alltoall}
candidate: {moe.dispatcher: allgather}
metric: METRIC
profiles:
  cpu: {ranks: 2, parallel.ep: 2, train.steps: 12, train.warmup_steps: 2, data.seq_len: 64, train.global_batch_size: 2}
activation:
  baseline: {require: [{collective: all_to_all, inside: dispatch}]}
  candidate: {require: [{collective: all_gather, inside: dispatch}], forbid: [{collective: all_to_all, inside: dispatch}]}
budget: {pairs: [4, 8], minutes: 5, launch_timeout_s: TIMEOUT}
"""


class PlannedLauncher(LocalLauncher):
    """Launches that say that they took half a second beside the steps that their ranks invented, whatever a busy machine makes of them."""

    def run(self, spec, on_step=None):
        result = super().run(spec, on_step)
        path = spec.folder / "summary.json"
        return replace(result, wall_s=0.5 + (json.loads(path.read_text())["seconds"]["total"] if path.is_file() else 0.0))


def stretched(seconds, which=""):
    """A launcher whose launches, or those that a name begins, say that they took so long."""

    class Stretched(LocalLauncher):
        def run(self, spec, on_step=None):
            result = super().run(spec, on_step)
            return replace(result, wall_s=seconds) if spec.folder.name.startswith(which) else result

    return Stretched


def wait_for(ready, seconds=180):
    """What `ready` gives once that is true; where it takes longer, the test fails."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def only(outcomes):
    assert len(outcomes) == 1
    return outcomes[0]


def options(tmp_path, command=FAKE, launcher=LocalLauncher, **more):
    return Options(results=tmp_path / "results", launcher=launcher(command), **more)


def bench(case, tmp_path, progress=None, **more):
    return only(confirm.bench_run(case, options(tmp_path, profile="cpu", seed=1, **more), progress))
