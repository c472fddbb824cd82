"""Predictions: a metric that must fall into an interval which was part of the case before any run."""

import copy
import json
import math
from collections import Counter

import numpy as np
import pytest
from test_curve import NOISE, PROOF, record
from test_outdated import changes_of

from playbook.cards.model import Expect, Quantity
from playbook.records.case import Case, Predicted, Value, case_problems
from playbook.records.evidence import Seconds
from playbook_bench.judge import design, effects, receipt, verdict
from playbook_bench.judge.verdict_rules import VERSION
from playbook_bench.run import replay, store

TRAINER = "trainer/configs/qwen3_moe_tiny.yaml"


def prediction(**bands):
    """Two runs: what was predicted for each, as (value, low, high) seconds."""
    rows = [Value(at=f"mbs{i}", set={"train.micro_batch_size": i}, predicted=told(band)) for i, band in enumerate(bands.values(), 1)]
    base = {"id": "p", "kind": "prediction", "summary": "planted", "trainer": TRAINER, "metric": "step_seconds"}
    return Case(**base, values=rows, profiles={"cpu": {}}, activation=PROOF, guardrails={"loss": {"relative": None, "reason": "planted"}})


def told(band):
    value, low, high = band
    return Predicted(value=value, low=low, high=high)


def judged(case, gains=(0.0, 0.0), wanted=None, **options):
    measured = record(case, list(gains), wanted or Expect(op="inside"), **options)
    return verdict.derive(measured)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ((1.0, 0.9, 1.1), (1.0, 0.9, 1.1), "confirmed"),
        ((0.95, 0.9, 1.1), (1.05, 0.9, 1.1), "confirmed"),
        ((1.0, 0.9, 1.1), (1.3, 1.2, 1.4), "refuted"),
        ((0.7, 0.6, 0.8), (1.0, 0.9, 1.1), "refuted"),
        ((1.0, 0.9, 1.1), (0.95, 0.9, 1.0), "inconclusive"),
        ((1.05, 1.0, 1.1), (1.0, 0.9, 1.1), "inconclusive"),
        ((1.05, 1.0, 1.1), (1.3, 1.2, 1.4), "refuted"),
    ],
)
def test_a_measured_interval_lies_inside_the_predicted_one_outside_or_across_its_end(first, second, status):
    found = judged(prediction(a=first, b=second), looks=(4,))
    assert found.verdict.status == status
    assert found.verdict.reason == ("power" if status == "inconclusive" else "margin")


def test_each_run_is_compared_with_its_own_prediction():
    (first, second) = judged(prediction(a=(2.0, 1.9, 2.1), b=(1.0, 0.9, 1.1)), gains=(0.0, -math.log(2))).curve.contrasts
    assert first.effect == pytest.approx(1.0, abs=0.01)  # a step of one second where two were predicted
    assert second.effect == pytest.approx(-0.5, abs=0.01)
    assert first.low < first.effect < first.high


def test_one_run_alone_may_be_predicted_and_must_run_as_its_configuration_says():
    case = prediction(a=(1.0, 0.9, 1.1))
    assert judged(case, gains=(0.0,)).verdict.status == "confirmed"
    measured = record(case, [0.0], Expect(op="inside"))
    runs = [r.model_copy(update={"data_sha": f"other {r.position}"}) for r in measured.runs]
    assert verdict.derive(measured.model_copy(update={"runs": runs})).verdict.reason == "invalid_pair"


def test_a_case_that_no_claim_names_has_its_verdict_all_the_same():
    measured = record(prediction(a=(1.0, 0.9, 1.1), b=(1.3, 1.2, 1.4)), [0.0, 0.0], Expect(op="inside")).model_copy(update={"claim": None})
    found = verdict.derive(measured).verdict
    assert found.status == "refuted"
    assert "predicted mbs1 1 [0.9, 1.1], mbs2 1.3 [1.2, 1.4] s" in found.sentence


def test_a_claim_about_the_order_of_what_is_predicted_looks_at_the_runs_alone():
    case, margin = prediction(a=(9.0, 8.0, 10.0), b=(9.0, 8.0, 10.0)), Quantity(value=5.0, unit="percent")
    assert judged(case, (0.0, 0.2), Expect(op=">=", margin=margin)).verdict.status == "confirmed"
    assert judged(case, (0.0, 0.0), Expect(op=">=", margin=margin)).verdict.status == "refuted"


def test_a_variation_from_block_to_block_widens_the_interval_of_an_absolute_figure():
    """What all variants of a block share cancels in their comparison, and does not in a comparison with a number."""
    case = prediction(a=(1.0, 0.97, 1.03), b=(1.0, 0.97, 1.03))
    measured = record(case, [0.0, 0.0], Expect(op="inside"))
    assert verdict.derive(measured).verdict.status == "confirmed"
    shift = [0.03, -0.03, 0.03, -0.03]
    runs = [
        r.model_copy(update={"samples": [s.model_copy(update={"seconds": s.seconds * math.exp(shift[r.pair])}) for s in r.samples]})
        for r in measured.runs
    ]
    found = verdict.derive(measured.model_copy(update={"runs": runs}))
    assert found.verdict.status == "inconclusive"
    assert found.curve.blocks_needed > len(NOISE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["values"][0].pop("predicted"), "'predicted' is missing for mbs1"),
        (lambda c: c["values"][0]["predicted"].update(low=1.05), "predicted 1 does not lie from 1.05 to 1.1"),
        (lambda c: c.update(values=[]), "at least 1 value"),
        (lambda c: c.update(kind="sweep", knob="x"), "'predicted' belongs to a case of kind prediction"),
        (lambda c: c.update(baseline={"a": 1}), "'baseline' belongs to a case of kind pair"),
    ],
)
def test_a_prediction_without_its_interval_is_refused(change, said):
    content = prediction(a=(1.0, 0.9, 1.1), b=(1.0, 0.9, 1.1)).model_dump(mode="json")
    change(content)
    assert any(said in text for _, text in case_problems(Case.model_validate(content)))


def test_an_edited_prediction_is_found(monkeypatch):
    case = prediction(a=(1.0, 0.9, 1.1), b=(1.0, 0.9, 1.1))
    measured = record(case, [0.0, 0.0], Expect(op="inside")).model_copy(update={"runs": []}).model_dump(mode="json")
    monkeypatch.setattr(receipt, "is_shipped", lambda _: True)
    monkeypatch.setattr(receipt, "load_case", lambda _: case)
    assert changes_of(measured) == []
    wider = [case.values[0].model_copy(update={"predicted": told((1.0, 0.5, 2.0))}), case.values[1]]
    monkeypatch.setattr(receipt, "load_case", lambda _: case.model_copy(update={"values": wider}))
    (said,) = changes_of(measured)
    assert said.startswith("the prediction of mbs1: value=1.0 low=0.9 high=1.1 -> value=1.0 low=0.5")


def test_a_record_replays_and_one_whose_prediction_was_widened_is_refused(tmp_path):
    measured = record(prediction(a=(1.0, 0.9, 1.1), b=(1.3, 1.2, 1.4)), [0.0, 0.0], Expect(op="inside"))
    evidence = store.evidence_of(measured, replay.derive(measured), "playbook bench run p", Seconds())
    path = store.write(evidence, tmp_path)
    kept, before = store.load_checked(path)
    assert replay.derive(kept.measured) == evidence.derived
    data = json.loads(path.read_text(encoding="utf-8"))
    widened = copy.deepcopy(data)
    widened["measured"]["case"]["content"]["values"][1]["predicted"]["low"] = 0.5
    path.write_text(json.dumps(widened), encoding="utf-8")
    (why,) = set(store.load_checked(path)[1]) - set(before)
    assert "not the one that was sealed" in why


@pytest.mark.parametrize(("launch", "block"), [(0.003, 0.0), (0.003, 0.01), (0.003, 0.002)])
def test_a_mean_at_the_end_of_the_predicted_interval_is_seldom_called_inside_or_outside(launch, block):
    """At either end both answers are wrong: each is given as often as one look's error rate allows, whatever the blocks share."""
    draw, alpha, said, series = np.random.default_rng(1), 0.05, Counter(), 1500
    asked = effects.claim_rule(Expect(op="inside"), ["a"], 0.0, {"a": (-0.1, 0.0)})
    launches = design.launched(design.order(0, 1, (4,)), 1)
    for _ in range(series):
        rows = draw.normal(0, launch, (4, 1)) + draw.normal(0, block, (4, 1))
        (found,) = verdict.RULES[VERSION].intervals(rows.tolist(), launches, [[1.0]], alpha, [])
        said[effects.decide(asked, [(found.low, found.high)])] += 1
    assert said[True] / series < alpha / 2 + 0.012
    assert said[False] / series < alpha / 2 + 0.012
