"""Verdicts at their edges: an interval that ends on the margin, a side that is seldom taken, a zero to divide by."""

import math

import pytest
from test_verdict import around, judge, make_case, make_run, measured, series

from playbook.cards.model import Quantity
from playbook_bench.judge import curve_rules, effects, guards, metrics, verdict

BESIDE_FIVE = [
    (">=", 5, 9, "confirmed"),
    (">=", 1, 5, None),
    (">=", 1, 4.9, "refuted"),
    ("<=", 1, 5, "confirmed"),
    ("<=", 5, 9, None),
    ("<=", 5.1, 9, "refuted"),
    ("within", -4.9, 4.9, "confirmed"),
    ("within", -5, 4, "confirmed"),
    ("within", -4, 5, "confirmed"),
    ("within", -9, 4, None),
    ("within", -9, -5, None),
    ("within", 5, 9, None),
    ("within", -9, -5.1, "refuted"),
    ("within", 5.1, 9, "refuted"),
    ("within", -9, 9, None),
]


@pytest.mark.parametrize(("op", "low", "high", "status"), BESIDE_FIVE)
def test_an_interval_beside_a_margin_of_five(op: str, low: float, high: float, status: str | None) -> None:
    holds = curve_rules.decide(curve_rules.Question(op, ["a", "b"], 5), [(low, high)])
    assert holds == {"confirmed": True, "refuted": False, None: None}[status]


@pytest.mark.parametrize(
    ("unit", "size"),
    [("count", 1), ("bytes", 1), ("gib", 2**30), ("tokens", 1), ("seconds", 1), ("points", 0.01), ("flops", 1), ("gpus", 1)],
)
def test_a_margin_in_its_unit_is_the_metrics_own(unit: str, size: float) -> None:
    assert effects.threshold(metrics.get("recompiles"), Quantity(value=3, unit=unit)) == 3 * size


@pytest.mark.parametrize(
    ("op", "margin", "status"),
    [
        (">=", 1.0, "confirmed"),
        (">=", 1.000001, "refuted"),
        ("<=", 1.0, "confirmed"),
        ("<=", 0.999999, "refuted"),
        ("within", 1.0, "confirmed"),
        ("within", 0.999999, "refuted"),
    ],
)
def test_an_exact_figure_may_lie_on_the_margin(op: str, margin: float, status: str) -> None:
    """Of a count there is one less, which is better by one; what is left to rounding is a billionth."""
    pair = [make_run("baseline", metrics={"recompiles": 5.0}), make_run("candidate", position=1, metrics={"recompiles": 4.0})]
    found = verdict.derive(measured(pair, op=op, margin=margin, unit="count", metric="recompiles"))
    assert (found.verdict.status, found.verdict.reason) == (status, "exact")


@pytest.mark.parametrize(("before", "after", "status"), [(0.0, 50.0, "refuted"), (50.0, 0.0, "confirmed")])
def test_a_ratio_to_or_from_nothing_has_a_verdict_and_no_figure(before: float, after: float, status: str) -> None:
    """Fewer bytes are better."""
    pair = [
        make_run("baseline", metrics={"state_bytes_per_rank": before}),
        make_run("candidate", position=1, metrics={"state_bytes_per_rank": after}),
    ]
    found = verdict.derive(measured(pair, op=">=", margin=5.0, metric="state_bytes_per_rank"))
    assert found.verdict.status == status
    assert (found.comparison.effect, found.comparison.mean, found.comparison.differences) == (None, None, [])
    assert "without bound as a ratio" in found.verdict.sentence


@pytest.mark.parametrize(("pairs", "wanted"), [(3, 4), (5, 8), (9, 12)])
def test_between_looks_the_next_one_is_named(pairs: int, wanted: int) -> None:
    assert f"stopped after {pairs} pairs, a verdict needs {wanted};" in judge(around(0.2, pairs)).verdict.sentence


def test_a_path_of_which_a_run_says_nothing_is_said_to_be_so() -> None:
    runs, aa = series(around(0.2))
    silent = [r.model_copy(update={"observed": None}) if r.variant == "candidate" else r for r in runs]
    found = verdict.derive(measured(silent, aa)).verdict
    assert (found.status, found.reason) == ("error", "not_activated")
    assert "found not reported" in found.sentence


@pytest.mark.parametrize(
    ("metric", "advice"),
    [("step_seconds", "compare useful tokens per second instead"), ("useful_tokens_per_s_per_gpu", "declare delta.work with a reason")],
)
def test_unequal_work_is_told_in_percent_of_the_larger(metric: str, advice: str) -> None:
    runs, aa = series(around(0.2), tokens=80)
    (gate,) = [g for g in verdict.derive(measured(runs, aa, metric=metric, case=make_case(metric))).gates if g.name == "work"]
    assert (gate.ok, gate.detail) == (False, f"useful tokens per step differ by 20.0 %; {advice}")


@pytest.mark.parametrize(("baseline", "candidate"), [(1.0, math.inf), (math.nan, 1.0), (math.inf, math.inf)])
def test_what_is_not_finite_is_not_compared(baseline: float, candidate: float) -> None:
    with pytest.raises(ValueError, match="step_seconds is not finite"):
        guards.compare(metrics.get("step_seconds"), baseline, candidate)


def test_a_series_without_noise_on_record_has_no_floor() -> None:
    gate, differences = guards.noise(metrics.get("step_seconds"), [], None)
    assert (gate.ok, differences, guards.step_deviation(None)) == (False, [], 0.0)


@pytest.mark.parametrize(("loss", "ok", "percent"), [(2.06, True, "0.5"), (2.24, False, "2")])
def test_losses_may_differ_as_far_as_the_case_lets_them(loss: float, ok: bool, percent: str) -> None:
    """One of six steps has it, the rest 2."""
    runs, aa = series(around(0.2), loss=loss)
    (gate,) = [g for g in verdict.derive(measured(runs, aa)).gates if g.name == "loss"]
    assert (gate.ok, gate.detail) == (ok, f"mean losses differ by {percent} %, at most 1 % is allowed")


def test_an_environment_that_differs_is_named() -> None:
    runs, aa = series(around(0.2), strict_sha="t")
    found = verdict.derive(measured(runs, aa, strict={"s": {"env": {"A": "1"}}, "t": {"env": {"A": "2"}}}))
    assert [(g.ok, g.detail) for g in found.gates if g.name == "environment"] == [(False, "differs in env.A")]
