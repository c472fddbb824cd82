"""A case over the real package Lightning, with a planted difference; the Hugging Face Trainer is tuned in tests/bench/tune."""

import sys
from pathlib import Path
from statistics import median

import preloaded
import pytest

from playbook_bench.run import confirm, replay
from playbook_bench.run.options import Options

SCRIPTS = Path(__file__).parents[2] / "support" / "examples"
CASE = """
id: real-trainer
kind: command
summary: A trainer of somebody else.
command: [{python}, {preloaded}, {socket}, {script}, --steps, "10", --output, "{{run}}/out"]
baseline: {{arguments: [--pause-ms, '400']}}
candidate: {{arguments: [--pause-ms, '40']}}
steps: {{log: lightning, file: "{{run}}/out/metrics.csv", count: 10, warm_up: 4}}
metric: step_seconds
profiles: {{cpu: {{}}}}
budget: {{pairs: [2], launch_timeout_s: 300}}
guardrails: {{loss: {{relative: 0.01}}}}
"""

pytestmark = [pytest.mark.timeout(7000), pytest.mark.usefixtures("planned")]


@pytest.mark.full
def test_a_shorter_pause_in_lightning_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not in this repository, whose files may change meanwhile: launches of other files are not compared
    script, path = SCRIPTS / "train_lightning.py", tmp_path / "real-trainer.yaml"
    with preloaded.serving(script) as place:
        path.write_text(CASE.format(python=sys.executable, preloaded=preloaded.__file__, socket=place, script=script))
        (found,) = confirm.bench_run(str(path), Options(profile="cpu", results=tmp_path / "results", seed=1))
    # An effect, whether or not launches are even enough for a verdict: what noise does to verdicts is tested with planted times.
    assert found.evidence.derived.comparison is not None, found.evidence.derived.verdict.sentence
    assert replay.replay(found.path) == (True, [])
    # In what its process computes and sleeps.
    usual = {
        variant: median(s.seconds for run in found.evidence.measured.runs if run.variant == variant for s in run.samples if s.timed)
        for variant in ("baseline", "candidate")
    }
    assert usual["candidate"] / usual["baseline"] < 0.9
