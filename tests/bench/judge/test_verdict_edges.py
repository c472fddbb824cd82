"""Verdicts at their edges: an interval that ends on the margin, a side that is seldom taken, a zero to divide by."""

import math

import pytest
from test_curve import expect, judged, sweep
from test_verdict import around, judge, make_run, measured, series

from playbook.cards.model import Quantity
from playbook.errors import ConfigError
from playbook.records.evidence import CollectiveCount, Machine, Observed
from playbook_bench import metrics
from playbook_bench.judge import effects, guards, verdict


@pytest.mark.parametrize(
    ("unit", "size"),
    [("count", 1), ("bytes", 1), ("gib", 2**30), ("tokens", 1), ("seconds", 1), ("points", 0.01), ("flops", 1), ("gpus", 1)],
)
def test_a_margin_in_its_unit_is_the_metrics_own(unit: str, size: float) -> None:
    assert effects.threshold(metrics.get("recompiles"), Quantity(value=3, unit=unit)) == 3 * size


@pytest.mark.parametrize(("before", "after", "status"), [(0.0, 50.0, "refuted"), (0.0, 0.5, "refuted"), (50.0, 0.0, "confirmed")])
def test_a_ratio_to_or_from_nothing_has_a_verdict_and_no_figure(before: float, after: float, status: str) -> None:
    """Fewer bytes are better."""
    pair = [
        make_run("baseline", metrics={"state_bytes_per_rank": before}),
        make_run("candidate", position=1, metrics={"state_bytes_per_rank": after}),
    ]
    found = verdict.derive(measured(pair, op=">=", margin=5.0, metric="state_bytes_per_rank"))
    assert found.verdict.status == status
    assert (found.comparison.effect, found.comparison.mean, found.comparison.differences) == (None, None, [])
    assert (found.comparison.baseline, found.comparison.candidate) == (before, after)
    assert "without bound as a ratio" in found.verdict.sentence


@pytest.mark.parametrize(("baseline", "candidate"), [(1.0, math.inf), (math.nan, 1.0), (math.inf, math.inf)])
def test_what_is_not_finite_is_not_compared(baseline: float, candidate: float) -> None:
    with pytest.raises(ValueError, match="step_seconds is not finite"):
        guards.compare(metrics.get("step_seconds"), baseline, candidate)


@pytest.mark.parametrize(
    ("candidate", "reason", "says"),
    [
        ({}, "budget", "the budget ended before the first pair of runs"),
        ({"observed": Observed(collectives=[CollectiveCount(op="all_to_all", count=1)])}, "not_activated", "did not run as configured"),
        ({"data_sha": "other"}, "invalid_pair", "the first run of each shows that they cannot be compared: data"),
    ],
)
def test_the_first_run_of_each_shows_what_no_pair_would_change(candidate: dict, reason: str, says: str) -> None:
    runs = [make_run(role="burn_in", pair=None), make_run("candidate", None, 1, role="burn_in", **candidate)]
    found = verdict.derive(measured(runs)).verdict
    assert (found.reason, says in found.sentence) == (reason, True), found.sentence
    assert verdict.derive(measured(runs[1:])).verdict.reason == "budget", "of one variant alone nothing is said"


def test_a_case_may_look_after_two_pairs() -> None:
    assert judge(around(0.2, 2), looks=(2, 4)).verdict.status == "confirmed"


@pytest.mark.parametrize(
    ("op", "at", "gone", "reason"),
    [
        ("best", ["4"], ["1"], "margin"),
        ("best", ["2", "4", "8"], ["1"], "oom"),  # all that ran are claimed to be the best
        ("best", ["1"], ["1"], "exact"),  # the claimed one did not run
        ("not_best", ["2"], ["1"], "margin"),
        ("not_best", ["1"], ["1"], "oom"),
        ("not_best", ["2", "4", "8"], ["1"], "oom"),
        ("band", [], ["2"], "margin"),
        ("band", [], ["1"], "oom"),
        ("rising", [], ["1"], "margin"),
        ("rising", [], ["1", "2", "4"], "oom"),
        ("knee", [], ["8"], "margin"),
        ("knee", [], ["4", "8"], "oom"),
        ("knee", ["2"], ["1"], "oom"),
        ("knee", ["4"], ["8"], "oom"),
        ("reaches", ["1"], ["2"], "margin"),
        ("reaches", ["1"], ["8"], "oom"),
        ("reaches", ["1"], ["2", "4"], "oom"),
        (">=", [], ["2"], "oom"),
    ],
)
def test_values_that_did_not_fit_leave_a_rule_what_it_stands_on_or_nothing(op: str, at: list[str], gone: list[str], reason: str) -> None:
    """All of a sweep's values are far apart: what can be settled is."""
    wanted = expect(op, at=at, infeasible=gone)
    found = judged(sweep((1, 2, 4, 8)), [0.0, 0.5, 1.0, 1.5], wanted, outcomes=dict.fromkeys(gone, "oom"))
    assert found.reason == reason, found.sentence


@pytest.mark.parametrize(("outcome", "words"), [("oom", "1 did not fit"), ("refused", "1 was refused")])
def test_a_value_that_did_not_run_is_named_with_what_became_of_it(outcome: str, words: str) -> None:
    found = judged(sweep(), [0.0, 0.3, 0.0], expect("best", at=[2], infeasible=[1]), outcomes={"1": outcome})
    assert f"; {words};" in found.sentence


@pytest.mark.parametrize(("value", "unit"), [(-100, "percent"), (0, "ratio"), (-1, "ratio")])
def test_no_margin_asks_for_a_step_that_takes_no_time(value: float, unit: str) -> None:
    with pytest.raises(ConfigError, match="write percent above -100, or a positive ratio"):
        effects.threshold(metrics.get("step_seconds"), Quantity(value=value, unit=unit))


def test_of_no_launches_nothing_is_unsteady() -> None:
    assert guards.steady([], 0.0).ok


def test_a_curve_from_nothing_has_a_verdict_and_no_figure() -> None:
    fields = {v: {"metrics": {"state_bytes_per_rank": b}} for v, b in (("1", 0.0), ("2", 50.0), ("4", 50.0))}
    found = judged(sweep(metric="state_bytes_per_rank"), [0.0] * 3, expect("best", at=[1]), fields=fields, blocks=1)
    assert (found.status, "2 over 1 without bound as a ratio" in found.sentence) == ("confirmed", True), found.sentence


def test_an_exact_figure_is_that_of_the_first_pair() -> None:
    runs = [make_run(v, i, 2 * i + k, metrics={"recompiles": 5.0 - k}) for i in (0, 1) for k, v in enumerate(("baseline", "candidate"))]
    found = verdict.derive(measured(runs, op=">=", margin=1.0, unit="count", metric="recompiles")).comparison
    assert (found.pairs, found.differences) == (1, [1.0])


def test_a_block_with_a_launch_that_failed_is_none_but_where_failing_is_what_is_asked() -> None:
    runs = [make_run(), make_run("candidate", position=1, outcome="oom")]
    assert guards.blocks_of(runs, ("baseline", "candidate")) == []
    assert len(guards.blocks_of(runs, ("baseline", "candidate"), failed=True)) == 1


def on_gpu(baseline, candidate, **fields):
    """A pair of launches on one GPU with such peaks, in bytes, judged with or without an A/A."""
    runs = [make_run("baseline", peak=baseline), make_run("candidate", position=1, peak=candidate)]
    machine = Machine(name="h200x1", description="", gpus=1, gpu="H200", cpu="", cores=1)
    return verdict.derive(measured([*runs, *fields.pop("more", [])], machine=machine, metric="peak_memory_bytes", **fields))


def test_peak_memory_on_gpus_takes_one_pair_and_no_noise():
    """Launches of one configuration repeat it to 0.1 %, so a margin as near as that is not decided."""
    for baseline, op, margin, status in (
        (110_000, ">=", 5.0, "confirmed"),
        (104_000, ">=", 5.0, "refuted"),
        (110_000, "<=", 5.0, "refuted"),
        (105_100, ">=", 5.0, "inconclusive"),
        (104_900, ">=", 5.0, "inconclusive"),
        (105_400, ">=", 5.0, "confirmed"),
    ):
        found = on_gpu(baseline, 100_000, op=op, margin=margin)
        assert (found.verdict.status, found.verdict.reason) == (status, "power" if status == "inconclusive" else "exact"), baseline
        assert found.comparison.design == "deterministic"


def test_peak_memory_that_does_not_repeat_on_gpus_settles_nothing():
    again = [make_run("baseline", 1, 2, peak=110_200), make_run("candidate", 1, 3, peak=100_000)]
    assert on_gpu(110_000, 100_000, more=again).verdict.reason == "environment"


def test_peak_memory_beside_times_is_judged_by_its_intervals():
    _, aa = series([])
    assert on_gpu(110_000, 100_000, aa=aa).verdict.reason == "budget"
