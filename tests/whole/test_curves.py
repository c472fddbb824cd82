"""Sweeps and interactions with planted runs, told apart by the seed in their configuration: each rule gets the verdict that was planted."""

import pytest
from planted_case import only, options

from playbook_bench.run import confirm, replay, report

CURVE = """
id: planted-curve
KIND
summary: Planted runs
trainer: trainer/configs/qwen3_moe_tiny.yaml
metric: METRIC
profiles:
  cpu: {ranks: 1, train.steps: 12, train.warmup_steps: 2, data.seq_len: 64, train.global_batch_size: 2}
activation:
  every: {require: [{collective: all_to_all, inside: dispatch}]}
budget: {pairs: [4, 6], minutes: 5, launch_timeout_s: 600}
"""
SWEEP = "kind: sweep\nknob: seed\nvalues: [{at: 1, set: {seed: 1}}, {at: 2, set: {seed: 2}}, {at: 3, set: {seed: 3}}]"
SQUARE = """kind: interaction
factors:
  - {name: seed, low: {at: s1, set: {seed: 1}}, high: {at: s2, set: {seed: 2}}}
  - {name: rate, low: {at: r0, set: {optimizer.lr: 0.1}}, high: {at: r1, set: {optimizer.lr: 0.2}}}"""


@pytest.fixture
def curve_card(tmp_path):
    def write(kind, expect, metric="useful_tokens_per_s_per_gpu"):
        for folder in ("bench/cases", "cards"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        text = CURVE.replace("KIND", SWEEP if kind == "sweep" else SQUARE).replace("METRIC", metric)
        (tmp_path / "bench/cases/planted-curve.yaml").write_text(text)
        card = tmp_path / "cards" / "planted-card.yaml"
        card.write_text(f"""
id: planted-card
title: Planted
summary: Planted
symptoms: [none]
phase: profile
wall: compute
claims:
  - id: Z1
    statement: The planted curve has the shape that was planted.
    mechanism: It was planted that way, so it must come out.
    kind: {kind}
    metric: {metric}
    expect: {expect}
    label: benchmark-only
    sources: [{{title: Planted, origin: ours, date: "2026-01"}}]
    case: planted-curve
""")
        return str(card)

    return write


def confirmed(card, tmp_path, **more):
    return only(confirm.run([card], options(tmp_path, seed=3, **more)))


def test_a_planted_curve_gets_its_verdict_in_blocks_that_replay(curve_card, tmp_path, plant):
    plant(seed1={"slower": 0.3}, seed3={"slower": 0.2})
    found = confirmed(curve_card("sweep", "{op: best, at: [2], margin: {value: 5, unit: percent}}"), tmp_path)
    assert (found.status, found.evidence.derived.verdict.reason) == ("confirmed", "margin")
    measured, curve = found.evidence.measured, found.evidence.derived.curve
    order = [b.split() for b in measured.plan.order]
    assert all(sorted(b) == ["1", "2", "3"] for b in order)
    assert (curve.blocks, curve.look, measured.aa) == (4, 1, None)
    assert replay.replay(found.path) == (True, [])
    assert report.as_json([found])["claims"][0]["curve"]["points"][0]["outcome"] == "ok"


@pytest.mark.full
def test_a_value_that_does_not_fit_is_left_out_where_the_claim_allows_it(curve_card, tmp_path, plant, capsys):
    plant(seed3={"fault": "oom"}, seed1={"slower": 0.3})
    found = confirmed(curve_card("sweep", "{op: best, at: [2], infeasible: [3], margin: {value: 5, unit: percent}}"), tmp_path)
    assert found.status == "confirmed"
    assert [r.variant for r in found.evidence.measured.runs].count("3") == 1, "what does not fit is not launched again"
    report.print_outcome(found, report.console())
    assert "out of memory" in capsys.readouterr().out
    assert (
        confirmed(curve_card("sweep", "{op: band, margin: {value: 5, unit: percent}}"), tmp_path).evidence.derived.verdict.reason == "oom"
    )


@pytest.mark.parametrize(("fault", "reason"), [("disable", "not_activated"), ("nan", "run_error")])
@pytest.mark.sample("nan-run_error")
def test_a_failing_value_is_an_error_and_never_slower(curve_card, tmp_path, plant, fault, reason):
    plant(seed2={"fault": fault, "slower": 0.5})
    found = confirmed(curve_card("sweep", "{op: best, at: [1], margin: {value: 5, unit: percent}}"), tmp_path)
    assert (found.status, found.evidence.derived.verdict.reason) == ("error", reason)
    assert found.evidence.derived.curve is None


def test_a_value_with_losses_of_its_own_ends_the_series_with_the_first_block(curve_card, tmp_path, plant):
    plant(seed2={"loss": 0.5})
    found = confirmed(curve_card("sweep", "{op: best, at: [1], margin: {value: 5, unit: percent}}"), tmp_path)
    assert (found.status, found.evidence.derived.verdict.reason) == ("inconclusive", "invalid_pair")
    assert "cannot be compared: loss: 2 against 1: mean losses differ by 9.2 %" in found.evidence.derived.verdict.sentence
    assert "3 against 1" not in found.evidence.derived.verdict.sentence
    assert [r.role for r in found.evidence.measured.runs] == ["burn_in"] * 3
    assert replay.replay(found.path) == (True, [])


@pytest.mark.full
def test_a_planted_coupling_is_found(curve_card, tmp_path, plant):
    plant(**{"seed2-lr0.2": {"slower": -0.3}})
    found = confirmed(curve_card("interaction", '{op: ">=", margin: {value: 5, unit: percent}}'), tmp_path)
    assert found.status == "confirmed"
    assert found.evidence.derived.curve.contrasts[0].effect == pytest.approx(1 / 0.7 - 1, abs=0.05)


@pytest.mark.parametrize(("fault", "status"), [("oom", "confirmed"), (None, "refuted")])
@pytest.mark.sample("oom-confirmed")
def test_cells_exclude_each_other_or_do_not(curve_card, tmp_path, plant, fault, status):
    plant(**{"seed2-lr0.2": {"fault": fault}})
    found = confirmed(curve_card("interaction", "{op: excludes, infeasible: [s2+r1]}", "fits"), tmp_path)
    assert found.status == status
    assert replay.replay(found.path)[0]
