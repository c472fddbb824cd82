"""Tunings of real trainers on the CPU: the Hugging Face Trainer and our own. Every launch is real, and so are crashes, losses and proofs; the seconds are planned.

What steps take on a busy machine is not what these tests are about: seconds of a launch are those of its settings, with noise of half a percent.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import preloaded
import pytest
import yaml

from playbook.records.case import Case, load_case
from playbook_app.services import tuning
from playbook_bench.launch.forked import ForkLauncher, closing
from playbook_bench.machine import detect
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.tune import record, session
from playbook_bench.tune.knobs import Knobs
from playbook_bench.tune.subject import Launcher

SCRIPT = Path(__file__).parents[2] / "support" / "examples" / "train_hugging_face.py"

pytestmark = [pytest.mark.full, pytest.mark.timeout(7000)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not in this repository, whose files may change meanwhile. Threads that wait leave the processor to others, which takes a tenth of the time on a busy one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Tunes a case; a launch takes 1 s less what its settings gain, by knob and value."""

    def run(case, knobs, gains, options):
        draw, observation = random.Random(5), Launcher.observation

        def planned(self, due, *rest):
            seen = observation(self, due, *rest)
            value = draw.gauss(1, 0.005)
            for pair in self.launching.settings:
                value /= 1 + gains.get("=".join(pair), 0.0)
            return replace(seen, value=value if seen.value else None)

        launch = Launcher.launch

        def launched(self, due, words):
            self.launching = due
            return launch(self, due, words)

        monkeypatch.setattr(Launcher, "observation", planned)
        monkeypatch.setattr(Launcher, "launch", launched)
        machine = detect.detect()
        asked = tuning.Request(seed=3)
        plan, order = tuning.planned(case, "cpu", Knobs.model_validate({"knobs": knobs}), machine, asked, options.results, "")
        found = session.run(plan, options, Progress(), resume=False)
        assert found.ended == "complete"
        assert record.replay(session.write_record(found)) == []
        return found, order

    return run


@pytest.fixture(scope="module")
def started():
    """How a script is started without importing the trainer each time, which takes more than all of its steps."""
    with preloaded.serving(SCRIPT) as place:
        yield [sys.executable, preloaded.__file__, place]


def test_the_hugging_face_trainer(tuned, tmp_path, started):
    case = Case.model_validate(
        {
            "id": "hf",
            "kind": "command",
            "summary": "The Hugging Face Trainer.",
            "command": [*started, str(SCRIPT), "--steps", "8", "--collate-ms", "20", "--output", "{run}/out"],
            "steps": {"log": "hf", "count": 8, "warm_up": 2},
            "metric": "step_seconds",
            "budget": {"pairs": [2]},
            "profiles": {"cpu": {}},
        }
    )
    knobs = {
        "idle": {"environment": "IDLE", "values": [None, "1"]},
        "faster": {"argument": "--faster", "values": [False, True], "require": [{"log": "one product for all tokens"}]},
        "collate": {"argument": "--collate-ms", "values": ["20", "0", "40"]},
        "crash": {"argument": "--logging-steps", "values": [None, "-1"]},
        "rate": {"argument": "--learning-rate", "values": [None, "1.0"]},
    }
    gains = {"faster=true": 0.2, "collate=0": 0.08, "collate=40": -0.08}
    found, _ = tuned(case, knobs, gains, Options(results=tmp_path / "results", budget_s=None, pairs=2))
    reasons = {(d.knob, d.value): d.reason for d in found.tuning.decisions.values() if not d.kept}
    assert {(d.knob, d.value) for d in found.tuning.kept} == {("faster", "true"), ("collate", "0")}, reasons
    assert set(reasons) == {("crash", "-1"), ("rate", "1.0"), ("collate", "40"), ("idle", "1")}
    assert reasons["crash", "-1"].startswith("crashed")
    assert "loss" in reasons["rate", "1.0"]
    assert found.final is not None


TRAINER = """
id: tiny
summary: Our trainer, small.
trainer: trainer/configs/qwen3_moe_tiny.yaml
baseline: {moe.experts: loop, train.recompute: full}
candidate: {moe.experts: grouped, train.recompute: full}
metric: step_seconds
profiles: {cpu: {ranks: 1, model.num_layers: 2, data.seq_len: 64, train.steps: 4, train.warmup_steps: 2}}
budget: {pairs: [2]}
activation: {every: {require: [{range: experts}]}}
"""


def test_our_trainer(tuned, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TRAINER)
    knobs = {
        "experts": {"key": "moe.experts", "values": ["loop", "grouped"], "require": [{"counter": "grouped_products"}]},
        "recompute": {"key": "train.recompute", "values": ["full", "none"]},
        "rows": {"key": "train.micro_batch_size", "values": [1, 2]},
        "nowhere": {"sets": {"off": {}, "on": {"data.source": str(tmp_path / "nothing-here")}}},
        "rate": {"key": "optimizer.lr", "values": [None, 0.3]},
        "broken": {"key": "parallel.tp", "values": [1, 3]},
    }
    gains = {"experts=grouped": 0.3, "recompute=none": 0.1, "rows=2": -0.05}
    launcher = ForkLauncher()
    with closing(launcher):
        found, order = tuned(load_case(path), knobs, gains, Options(results=tmp_path / "results", launcher=launcher, pairs=2))
    assert {(d.knob, d.value) for d in found.tuning.kept} == {("experts", "grouped"), ("recompute", "none")}
    reasons = {d.knob: d.reason for d in found.tuning.decisions.values() if not d.kept}
    assert set(reasons) == {"rows", "rate"}
    assert "loss" in reasons["rate"]
    assert {row.knob for row in order if row.skipped} == {"nowhere", "broken"}  # what cannot run is never launched
    assert found.final is not None
    assert yaml.safe_load(path.read_text())["baseline"]["moe.experts"] == "loop"
