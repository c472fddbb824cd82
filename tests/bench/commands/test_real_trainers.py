"""Cases over the real packages: the Hugging Face Trainer and Lightning, with planted differences, and proofs that are missed when they are gone."""

import sys
from pathlib import Path
from statistics import median

import preloaded
import pytest

from playbook_bench.run import aa, confirm, replay
from playbook_bench.run.options import Options

SCRIPTS = Path(__file__).parents[2] / "support" / "examples"
CASE = """
id: real-trainer
kind: command
summary: A trainer of somebody else.
command: [{python}, {preloaded}, {socket}, {script}, --steps, "{steps}", --output, "{{run}}/out"]
baseline: {baseline}
candidate: {candidate}
steps: {{{where}, count: {steps}, warm_up: 4}}
metric: step_seconds
profiles: {{cpu: {{}}}}
budget: {{pairs: [2], launch_timeout_s: 300}}
guardrails: {{loss: {{relative: 0.01}}}}
{more}
"""
PROOF = """
activation:
  baseline: {forbid: [{log: one product for all tokens}]}
  candidate: {require: [{log: one product for all tokens}]}
"""

pytestmark = [pytest.mark.timeout(7000), pytest.mark.usefixtures("planned")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not in this repository, whose files may change meanwhile: launches of other files are not compared."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def hugging_face():
    with preloaded.serving(SCRIPTS / "train_hugging_face.py") as place:
        yield place, SCRIPTS / "train_hugging_face.py"


@pytest.fixture(scope="module")
def lightning():
    with preloaded.serving(SCRIPTS / "train_lightning.py") as place:
        yield place, SCRIPTS / "train_lightning.py"


def case(folder, trainer, baseline, candidate, where, more="", steps=10):
    path = folder / "real-trainer.yaml"
    values = {"baseline": baseline, "candidate": candidate, "where": where, "more": more, "steps": steps}
    place, script = trainer
    path.write_text(CASE.format(python=sys.executable, preloaded=preloaded.__file__, socket=place, script=script, **values))
    return str(path)


def measured(path, folder):
    (found,) = confirm.bench_run(path, Options(profile="cpu", results=folder / "results", seed=1))
    # An effect, whether or not launches are even enough for a verdict: what noise does to verdicts is tested with planted times.
    assert found.evidence.derived.comparison is not None, found.evidence.derived.verdict.sentence
    assert replay.replay(found.path) == (True, [])
    return found.evidence


def times_as_long(evidence):
    """How many times as long as the baseline's the candidate's usual step takes, in what its process computes and sleeps."""
    usual = {
        variant: median(s.seconds for run in evidence.measured.runs if run.variant == variant for s in run.samples if s.timed)
        for variant in ("baseline", "candidate")
    }
    return usual["candidate"] / usual["baseline"]


@pytest.mark.full
def test_a_slow_collator_of_the_hugging_face_trainer_is_found(tmp_path, hugging_face):
    """From what it prints, which holds no time: the arrival of its lines is the clock."""
    slow = "{arguments: [--collate-ms, '400']}"
    found = measured(case(tmp_path, hugging_face, "{arguments: [--collate-ms, '30']}", slow, "log: hf"), tmp_path)
    assert times_as_long(found) > 1.5
    assert "not vouched for" in found.derived.verdict.sentence


@pytest.mark.full
def test_a_faster_setting_of_the_hugging_face_trainer_is_found_and_proven(tmp_path, hugging_face):
    """From the state that it saves. A candidate that leaves the setting out is noticed."""
    where = 'file: "{run}/out/trainer_state.json"'
    words = "--batch, '64'"  # for 0.1 s of products in each slow step: what takes milliseconds is all noise where a machine has other work
    told = (hugging_face, f"{{arguments: [{words}]}}", f"{{arguments: [{words}, --faster]}}", where, PROOF)
    found = measured(case(tmp_path, *told), tmp_path)
    assert times_as_long(found) < 0.9
    assert [c.ok for c in found.derived.receipts] == [True, True]
    path = case(tmp_path, *told[:2], "{arguments: [--batch, '24', --collate-ms, '1']}", *told[3:], steps=6)
    assert [(p.outcome, p.ok) for p in aa.prove([path], profile="cpu")] == [("ok", True), ("ok", False)]


@pytest.mark.full
def test_a_shorter_pause_in_lightning_is_found(tmp_path, lightning):
    where = 'log: lightning, file: "{run}/out/metrics.csv"'
    told = ("{arguments: [--pause-ms, '400']}", "{arguments: [--pause-ms, '40']}", where)
    assert times_as_long(measured(case(tmp_path, lightning, *told), tmp_path)) < 0.9
