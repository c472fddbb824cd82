"""Rules of sweeps and interactions, from intervals alone: each at its edges, where the table in `playbook_bench.judge.effects` says which side counts."""

import pytest
from test_curve import expect

from playbook.cards.model import Expect, Quantity
from playbook.errors import ConfigError
from playbook_bench.judge import effects
from playbook_bench.judge.effects import ClaimRule

THREE, FOUR = ("a", "b", "c"), ("a", "b", "c", "d")
YES, NO, OPEN = True, False, None


@pytest.mark.parametrize(
    ("question", "contrasts"),
    [
        (ClaimRule("<=", FOUR, 0), ["d over a"]),
        (ClaimRule("best", THREE, 0, ["c"]), ["a over c", "b over c"]),
        (ClaimRule("not_best", THREE, 0, ["b", "c"]), ["a over b", "a over c"]),
        (ClaimRule("band", THREE, 0), ["b over a", "c over a"]),
        (ClaimRule("rising", FOUR, 0), ["b over a", "c over b", "d over c"]),
        (ClaimRule("knee", THREE, 0, ["b"]), ["b over a", "c over b"]),
        (ClaimRule("reaches", THREE, 0, ["b"]), ["b over a", "b over c"]),
    ],
)
def test_what_a_rule_looks_at(question, contrasts):
    assert [a.name for a in effects.rule_contrasts(question)] == contrasts
    assert all(sorted(a.weights.values()) == [-1, 1] for a in effects.rule_contrasts(question))


def test_the_cells_of_an_interaction_that_a_rule_looks_at():
    crossing = effects.rule_contrasts(ClaimRule("crossover", FOUR, 0), interaction=True)
    assert [a.weights for a in crossing] == [{"b": 1, "a": -1}, {"c": 1, "d": -1}]
    (coupled,) = effects.rule_contrasts(ClaimRule(">=", FOUR, 0), interaction=True)
    assert coupled.weights == {"d": 1, "c": -1, "b": -1, "a": 1}


@pytest.mark.parametrize(
    ("op", "low", "high", "status"),
    [
        (">=", 5, 9, YES),
        (">=", 1, 5, OPEN),
        (">=", 1, 4.9, NO),
        ("<=", 1, 5, YES),
        ("<=", 5, 9, OPEN),
        ("<=", 5.1, 9, NO),
        ("within", -4.9, 4.9, YES),
        ("within", -5, 4, YES),
        ("within", -4, 5, YES),
        ("within", -9, 4, OPEN),
        ("within", -9, -5, OPEN),
        ("within", 5, 9, OPEN),
        ("within", -9, -5.1, NO),
        ("within", 5.1, 9, NO),
        ("within", -9, 9, OPEN),
    ],
)
def test_an_interval_of_a_pair_or_of_first_and_last_beside_a_margin_of_five(op, low, high, status):
    assert effects.decide(ClaimRule(op, THREE[:2], 5), [(low, high)]) is status
    assert effects.decide(ClaimRule(op, THREE, 5), [(low, high)]) is status


@pytest.mark.parametrize(
    ("op", "names", "at", "bounds", "status"),
    [
        ("rising", THREE, [], [(1, 2), (1, 3)], YES),
        ("rising", THREE, [], [(0.9, 2), (1, 3)], OPEN),
        ("rising", THREE, [], [(-1, 1), (1, 2)], OPEN),
        ("rising", THREE, [], [(-1, 0.9), (1, 2)], NO),
        ("band", THREE, [], [(-0.9, 0.9), (-0.9, 0.9)], YES),
        ("band", THREE, [], [(-1, 0.9), (0, 0)], YES),
        ("band", THREE, [], [(-0.9, 1), (0, 0)], YES),
        ("band", THREE, [], [(1, 2), (0, 0)], OPEN),
        ("band", THREE, [], [(1.1, 2), (0, 0)], NO),
        ("band", THREE, [], [(-3, -1), (0, 0)], OPEN),
        ("band", THREE, [], [(-3, -1.1), (0, 0)], NO),
        ("band", THREE, [], [(-3, 0), (0, 0)], OPEN),
        ("best", THREE, ["c"], [(0, 1), (0, 1)], YES),
        ("best", THREE, ["c"], [(0, 1.1), (0, 1)], OPEN),
        ("best", THREE, ["c"], [(1, 2), (0, 1)], OPEN),
        ("best", THREE, ["c"], [(1.1, 2), (0, 1)], NO),
        ("best", THREE, ["b", "c"], [(1.1, 2), (0, 1)], YES),
        ("best", THREE, ["b", "c"], [(1.1, 2), (0, 1.1)], OPEN),
        ("best", THREE, ["b", "c"], [(1.1, 2), (1.1, 2)], NO),
        ("not_best", THREE, ["c"], [(1, 2), (-5, 0)], YES),
        ("not_best", THREE, ["c"], [(0.9, 2), (-5, 0)], OPEN),
        ("not_best", THREE, ["c"], [(0, 1), (-5, 0.9)], OPEN),
        ("not_best", THREE, ["c"], [(0, 0.9), (-5, 0.9)], NO),
        ("not_best", THREE, ["b", "c"], [(1, 2), (1, 2)], YES),
        ("not_best", THREE, ["b", "c"], [(1, 2), (0.5, 2)], OPEN),
        ("not_best", THREE, ["b", "c"], [(1, 2), (0, 0.9)], NO),
        ("reaches", THREE, ["b"], [(1, 2), (-1, 1)], YES),
        ("reaches", THREE, ["b"], [(0.9, 2), (-1, 1)], OPEN),
        ("reaches", THREE, ["b"], [(1, 2), (-1, 1.1)], OPEN),
        ("reaches", THREE, ["b"], [(0, 1), (-1, 1)], OPEN),
        ("reaches", THREE, ["b"], [(0, 0.9), (-1, 1)], NO),
        ("reaches", THREE, ["b"], [(1, 2), (1, 2)], OPEN),
        ("reaches", THREE, ["b"], [(1, 2), (1.1, 2)], NO),
        ("knee", FOUR, [], [(1, 2), (0, 1), (0, 1)], YES),
        ("knee", FOUR, [], [(1, 2), (1, 2), (-1, 1)], YES),
        ("knee", FOUR, ["b"], [(1, 2), (1.1, 2), (-1, 1)], NO),
        ("knee", FOUR, [], [(0.9, 2), (0, 1), (0, 1)], OPEN),
        ("knee", FOUR, [], [(0, 1), (0, 1), (0, 1)], OPEN),
        ("knee", FOUR, [], [(0, 0.9), (1, 2), (0, 1)], NO),
        ("knee", FOUR, [], [(1, 2), (1, 2), (1, 2)], OPEN),
        ("knee", FOUR, [], [(1, 2), (1.1, 2), (1.1, 2)], NO),
        ("knee", FOUR, [], [(1, 2), (0, 0.9), (1.1, 2)], NO),
        ("knee", FOUR, ["a"], [(0, 0.9), (0, 0.9), (0, 0.9)], OPEN),
    ],
)
def test_intervals_beside_a_margin_of_one(op, names, at, bounds, status):
    assert effects.decide(ClaimRule(op, names, 1, at), bounds) is status


@pytest.mark.parametrize(("second", "status"), [((1, 2), YES), ((0.9, 2), OPEN), ((0, 1), OPEN), ((0, 0.9), NO)])
def test_a_crossing_beside_a_margin_of_one(second, status):
    assert effects.decide(ClaimRule("crossover", FOUR, 1), [(1, 2), second]) is status


INSIDE = "op 'inside' has neither 'margin' nor 'infeasible': the case has the intervals, and all of it must run"
SWEPT, CELLS = ["1", "2", "4"], ["a0+b0", "a1+b0", "a0+b1", "a1+b1"]


@pytest.mark.parametrize(
    ("wanted", "names", "problem"),
    [
        (expect("reaches", at=[2]), SWEPT, None),
        (expect("reaches", at=[1, 2]), SWEPT, "op 'reaches' has one reference, found 2"),
        (expect("reaches", at=[4]), SWEPT, "cannot be the last"),
        (expect("rising"), SWEPT, None),
        (expect("rising"), ["1", "2"], "op 'rising' needs at least 3 values, the case has 2"),
        (expect("best", at=[2]), ["1", "2"], None),
        (expect("best", at=[4]), SWEPT, None),
        (expect("best"), SWEPT, "needs 'at'"),
        (expect("best", at=[8]), SWEPT, "no such variant"),
        (expect("best", at=[1, 2, 4]), SWEPT, "beside those of 'at'"),
        (expect("band", at=[2]), SWEPT, "has no 'at'"),
        (expect("knee", at=[2]), SWEPT, None),
        (expect("knee", at=[1]), SWEPT, "1 cannot be one"),
        (expect("knee", at=[2, 4]), SWEPT, "4 cannot be one"),
        (Expect(op="inside"), ["1", "2"], None),
        (Expect(op="inside", margin=Quantity(value=5, unit="percent")), ["1", "2"], INSIDE),
        (Expect(op="inside", infeasible=[2]), ["1", "2"], INSIDE),
        (Expect(op="excludes"), SWEPT, "needs 'infeasible'"),
        (expect("best", at=["a0+b0"], infeasible=["a1+b1"]), CELLS, None),
    ],
)
def test_what_a_rule_needs_of_its_case(wanted, names, problem):
    found = effects.claim_problems(wanted, names, "sweep")
    assert not found if problem is None else any(problem in text for text in found)


def test_an_interaction_needs_all_its_cells():
    gone = expect(">=", 1, infeasible=["a1+b1"])
    assert any("needs all four cells" in p for p in effects.claim_problems(gone, CELLS, "interaction"))
    assert not any("four cells" in p for p in effects.claim_problems(Expect(op="excludes", infeasible=["a1+b1"]), CELLS, "interaction"))
    with pytest.raises(ConfigError, match="no rule for an interaction"):
        effects.rule_contrasts(effects.claim_rule(expect("band"), CELLS, 0.0), interaction=True)
