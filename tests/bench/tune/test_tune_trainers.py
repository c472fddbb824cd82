"""A tuning of our trainer on the CPU. Every launch is real, and so are losses and proofs; the seconds are planned.

What steps take on a busy machine is not what this test is about: seconds of a launch are those of its settings, with noise of half a percent.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import yaml

from playbook.records.case import load_case
from playbook_app.services import tuning
from playbook_bench.launch.forked import ForkLauncher, closing
from playbook_bench.machine import detect
from playbook_bench.run.confirm import Quiet
from playbook_bench.run.options import Options
from playbook_bench.tune import record, session
from playbook_bench.tune.knobs import Knobs
from playbook_bench.tune.subject import Launcher

pytestmark = [pytest.mark.full, pytest.mark.timeout(7000)]

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
GAINS = {"experts=grouped": 0.3, "recompute=none": 0.1, "rows=2": -0.05}


@pytest.fixture
def gains(monkeypatch):
    """A launch takes 1 s less what its settings gain."""
    draw, observation, launch = random.Random(5), Launcher.observation, Launcher.launch

    def planned(self, due, *rest):
        seen = observation(self, due, *rest)
        value = draw.gauss(1, 0.005)
        for pair in self.launching.settings:
            value /= 1 + GAINS.get("=".join(pair), 0.0)
        return replace(seen, value=value if seen.value else None)

    def launched(self, due, words):
        self.launching = due
        return launch(self, due, words)

    monkeypatch.setattr(Launcher, "observation", planned)
    monkeypatch.setattr(Launcher, "launch", launched)


@pytest.mark.usefixtures("gains")
def test_our_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not in this repository, whose files may change meanwhile
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the processor to others
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
    launcher = ForkLauncher()
    options = Options(results=tmp_path / "results", launcher=launcher, pairs=2)
    with closing(launcher):
        asked = tuning.Request(seed=3)
        plan, order = tuning.planned(
            load_case(path), "cpu", Knobs.model_validate({"knobs": knobs}), detect.detect(), asked, options.results, ""
        )
        found = session.run(plan, options, Quiet(), resume=False)
    assert found.ended == "complete"
    assert record.replay(session.write_record(found)) == []
    assert {(d.knob, d.value) for d in found.tuning.kept} == {("experts", "grouped"), ("recompute", "none")}
    reasons = {d.knob: d.reason for d in found.tuning.decisions.values() if not d.kept}
    assert set(reasons) == {"rows", "rate"}
    assert "loss" in reasons["rate"]
    assert {row.knob for row in order if row.skipped} == {"nowhere", "broken"}  # what cannot run is never launched
    assert found.final is not None
    assert yaml.safe_load(path.read_text())["baseline"]["moe.experts"] == "loop"
