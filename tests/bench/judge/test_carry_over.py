"""What the design of a series makes of noise and carry-over, from records through `derive`."""

import math
import random

import pytest
from test_verdict import NOISE, around, make_run, measured, series

from playbook_bench.judge import verdict


@pytest.mark.parametrize("noisy", ["baseline", "candidate"])
def test_the_noise_of_either_variant_enters_the_interval(noisy):
    """Also where the other one repeats to the last digit, and where the pairs' differences are all the same."""
    runs, _ = series([0.08] * 4)
    loud = [r for r in runs if r.variant == noisy]
    spread = {r.run_id: math.exp(x) for r, x in zip(loud, (0.05, -0.04, 0.03, -0.04), strict=True)}
    shaken = [
        r.model_copy(update={"samples": [s.model_copy(update={"seconds": s.seconds * spread.get(r.run_id, 1.0)}) for s in r.samples]})
        for r in runs
    ]
    assert verdict.derive(measured(runs)).verdict.status == "confirmed"
    assert verdict.derive(measured(shaken)).verdict.status == "inconclusive"
    together = [
        r.model_copy(update={"samples": [s.model_copy(update={"seconds": s.seconds * spread[loud[r.pair].run_id]}) for s in r.samples]})
        for r in runs
    ]
    found = verdict.derive(measured(together))
    assert max(found.comparison.differences) == pytest.approx(min(found.comparison.differences))
    assert found.verdict.status == "inconclusive", "pairs are no blocks: what two launches have in common by their numbers is chance"


def test_no_a_a_is_needed_since_version_3():
    runs = series(around(0.2))[0]
    found = verdict.derive(measured(runs))
    assert (found.verdict.status, found.comparison.floor) == ("confirmed", None)
    assert found == verdict.derive(measured(runs, series([], s_aa=0.5)[1])), "and none that is there counts"


def carrying(share, effect=0.0):
    """A series in which a launch after one of the candidate takes a `share` more time."""
    runs = [*series([effect + x for x in NOISE * 2])[0], make_run("candidate", None, -1, role="burn_in")]
    before = {r.position: r.variant for r in runs}
    return [
        r.model_copy(
            update={
                "samples": [
                    s.model_copy(update={"seconds": s.seconds * (1 + share * (before.get(r.position - 1) == "candidate"))})
                    for s in r.samples
                ]
            }
        )
        for r in runs
    ]


@pytest.mark.parametrize("effect", [0.0, math.log(1.1)])
def test_what_a_launch_leaves_behind_is_taken_out_of_the_effect_and_said(effect):
    found = verdict.derive(measured(carrying(0.05, effect=effect), op=">=", margin=5))
    assert found.comparison.mean == pytest.approx(effect, abs=2e-3)
    (gate,) = [g for g in found.gates if g.name == "carry_over"]
    assert "a launch after candidate is better by -4.8 %" in gate.detail
    assert gate.ok
    assert found.verdict.sentence.endswith(f"; {gate.detail}")
    assert "more than a third of the margin" in gate.detail


@pytest.mark.parametrize(("margin", "remarked"), [(5, True), (7, False), (-5, True)])
def test_carry_over_is_said_from_a_third_of_the_margin_on(margin, remarked):
    found = verdict.derive(measured(carrying(0.02), op=">=", margin=margin))
    assert ("a launch after" in found.verdict.sentence) is remarked
    assert [("a third" in g.detail) for g in found.gates if g.name == "carry_over"] == [remarked]


def test_of_noise_no_carry_over_is_said():
    """At most in one series of a hundred, however small the margin."""
    draw, said = random.Random(1), 0
    for _ in range(120):
        runs, _ = series([draw.gauss(0, 0.02) for _ in range(8)])
        said += "a launch after" in verdict.derive(measured(runs, margin=0.8)).verdict.sentence
    assert said <= 4
