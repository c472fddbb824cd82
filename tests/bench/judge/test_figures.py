"""The figures of a record, each against a calculation of its own, and conditions at the value where they turn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from test_curve import NOISE, expect, record, square, sweep
from test_slowdown import worse as slower
from test_verdict import ORDER, around, judge, make_case, make_run, measured, series

from playbook.cards.model import Comparison as Compared
from playbook.cards.model import Expect
from playbook.records.case import Activation, Case, Receipt, Rule
from playbook.records.evidence import CaseRef, ClaimRef, CollectiveCount, Machine, Measured, Missing, Observed, Plan
from playbook_bench import metrics
from playbook_bench.judge import effects, guards, receipt, slowdown, statistics, verdict
from playbook_bench.judge.verdict_rules import VERSION, Rules

SECONDS = metrics.get("step_seconds")
RATES = statistics.levels((4, 8, 12), Rules.spent * 0.05)


def by_hand(d: list[float], alpha: float) -> tuple[float, float, float]:
    """Mean, half width and standard error of a pair's interval: least squares with a level for each variant, a drift and a carry-over, the variance of
    each variant from its own residuals, and degrees of freedom by Satterthwaite. The first launch of `series` follows none.
    """
    of = np.array(ORDER[: 2 * len(d)])
    y, n = np.zeros(len(of)), len(of)
    y[of == 1] = d
    x = np.column_stack([of == 0, of == 1, np.arange(n), [0, *np.where(of[:-1] == 1, 1, -1)]]).astype(float)
    solved = np.linalg.solve(x.T @ x, x.T)
    left, share = y - x @ (solved @ y), 1 - np.diag(x @ solved)
    weights = solved[1] - solved[0]
    parts = [(left[of == v] ** 2).sum() / share[of == v].sum() * (weights[of == v] ** 2).sum() for v in (0, 1)]
    freedom = sum(parts) ** 2 / sum(p**2 / share[of == v].sum() for v, p in enumerate(parts))
    error = math.sqrt(sum(parts))
    return float(weights @ y), stats.t.ppf(1 - alpha / 2, freedom) * error, error


def test_the_record_of_a_pair() -> None:
    d = [0.101, 0.099, 0.102, 0.098]
    found = judge(d).comparison
    mean, half, error = by_hand(d, RATES[0])
    used = half * 2 / stats.t.ppf(1 - RATES[0] / 2, 6)
    assert found.model_dump() == {
        "metric": "step_seconds", "unit": "s", "better": "lower", "design": "launches_abba", "scale": "log_ratio",
        "baseline": pytest.approx(1.0005), "candidate": pytest.approx(1.0005 * np.mean(np.exp([-x for x in d]))),
        "effect": pytest.approx(math.expm1(mean)), "low": pytest.approx(math.expm1(mean - half)), "high": pytest.approx(math.expm1(mean + half)),
        "pairs": 4, "look": 1, "alpha_look": pytest.approx(RATES[0]), "differences": pytest.approx(d), "mean": pytest.approx(mean),
        "deviation": pytest.approx(2 * error), "floor": None,
        "mde": pytest.approx(statistics.least_effect(4, used, RATES[0])), "pairs_needed": None,
    }  # fmt: skip


def test_the_record_of_an_exact_pair() -> None:
    runs = [make_run(metrics={"recompiles": 5.0}), make_run("candidate", position=1, metrics={"recompiles": 2.0})]
    found = verdict.derive(measured(runs, op=">=", margin=1.0, unit="count", metric="recompiles"))
    c = found.comparison
    assert (c.design, c.scale, c.baseline, c.candidate, c.pairs) == ("deterministic", "difference", 5.0, 2.0, 1)
    assert (c.effect, c.low, c.high, c.mean, c.differences) == (3.0, 3.0, 3.0, 3.0, [3.0])
    assert (c.look, c.alpha_look, c.floor, c.deviation, c.mde, c.pairs_needed) == (None,) * 6
    assert [g.ok for g in found.gates if g.name == "repeatable"] == [True]
    assert found.verdict.sentence.startswith("+3.000 count; claimed ")
    assert "None" not in found.verdict.sentence


def test_a_sweeps_intervals_share_the_error_rate() -> None:
    found = verdict.derive(record(sweep(), [0.0, 0.1, 0.2], expect("rising"))).curve
    alpha = statistics.levels((4, 8), Rules.spent * 0.05)[0] / 2
    assert found.alpha_contrast == pytest.approx(alpha)
    assert (found.design, found.freedom, found.blocks, found.look, found.floor) == (
        "launches_blocks",
        12 - 3,
        4,
        1,
        None,
    )
    assert [c.name for c in found.contrasts] == ["2 over 1", "4 over 2"]
    for c in found.contrasts:
        half = stats.t.ppf(1 - alpha / 2, 9) * c.used / 2
        assert (c.low, c.high) == pytest.approx((math.expm1(c.mean - half), math.expm1(c.mean + half)))
    assert [(p.variant, p.launches, p.outcome) for p in found.points] == [(v, 4, "ok") for v in ("1", "2", "4")]
    # The ripple of four blocks is the same four values for every variant, in another order: it cancels in the mean.
    assert [p.effect for p in found.points] == pytest.approx([0.0, math.expm1(0.1), math.expm1(0.2)])
    assert found.points[1].value == pytest.approx(1.0005 * math.exp(-0.1) * np.mean(np.exp(NOISE)))


def test_a_contrast_that_did_not_come_about_may_be_anything() -> None:
    found = verdict.derive(record(sweep(), [0.0, 0.1, 0.2], expect("rising"))).curve
    gone = found.model_copy(update={"contrasts": [c.model_copy(update={"mean": None}) for c in found.contrasts]})
    assert effects.bounds(gone) == [(-math.inf, math.inf)] * 2


def test_of_two_planned_contrasts_one_that_did_not_come_about_still_has_its_share() -> None:
    gone = expect("best", at=[2], infeasible=[1])
    found = verdict.derive(record(sweep(), [0.0, 0.3, 0.0], gone, outcomes={"1": "oom"})).curve
    assert (len(found.contrasts), found.alpha_contrast) == (1, pytest.approx(statistics.levels((4, 8), Rules.spent * 0.05)[0] / 2))
    assert next((p.variant, p.outcome, p.launches, p.value) for p in found.points) == ("1", "oom", 1, None)


def test_between_looks_a_sweeps_sentence_has_no_interval() -> None:
    found = verdict.derive(record(sweep(), [0.0, 0.1, 0.2], expect("rising"), blocks=5))
    assert "[" not in found.verdict.sentence
    assert "[" in effects.show(found.curve, between=True)


def test_a_case_that_no_claim_names_is_measured_against_its_first_variant() -> None:
    runs, aa = series(around(0.2))
    found = verdict.derive(measured(runs, aa).model_copy(update={"claim": None}))
    assert (found.verdict.status, found.verdict.reason) == ("measured", "no_claim")
    assert found.verdict.sentence.startswith("+20.0 % [")
    assert (found.comparison.effect, found.comparison.pairs_needed) == (pytest.approx(0.2, abs=1e-3), None)
    of_sweep = record(sweep(), [0.0, 0.1, 0.2], expect("rising")).model_copy(update={"claim": None})
    assert [c.name for c in verdict.derive(of_sweep).curve.contrasts] == ["2 over 1", "4 over 1"]


def test_the_claims_metric_is_the_one_that_is_judged() -> None:
    """A case may be of another metric than one of its claims."""
    runs, aa = series(around(0.2))
    found = verdict.derive(measured(runs, aa, metric="step_seconds", case=make_case("useful_tokens_per_s_per_gpu")))
    assert found.comparison.metric == "step_seconds"


@pytest.mark.parametrize(
    ("telling", "proof", "said"),
    [
        ({"data_sha": None}, Activation(), "; not vouched for: data; activation not proven"),
        ({"data_sha": None, "tokens": 0}, make_case().activation, "; not vouched for: data, equal work"),
        ({}, Activation(), "; activation not proven"),
    ],
)
def test_a_commands_verdict_says_what_it_does_not_rest_on(telling: dict, proof: Activation, said: str) -> None:
    case = make_case(activation=proof).model_copy(update={"command": ["train"]})
    runs, aa = series(around(0.2), **{k: v for k, v in telling.items() if k == "data_sha"})
    bare = [r.model_copy(update={"data_sha": telling.get("data_sha", "d")}) for r in runs]
    if "tokens" in telling:
        bare = [r.model_copy(update={"samples": [s.model_copy(update={"useful_tokens": 0}) for s in r.samples]}) for r in bare]
    found = verdict.derive(measured(bare, aa, case=case)).verdict
    assert (found.status, found.sentence.endswith(said)) == ("confirmed", True), found.sentence
    assert "vouched" not in judge(around(0.2)).verdict.sentence


def test_the_first_launches_of_a_command_show_whether_its_log_has_the_metric() -> None:
    case = make_case().model_copy(update={"command": ["train"]})
    runs = [make_run(v, None, i, role="burn_in", samples=[]) for i, v in enumerate(("baseline", "candidate"))]
    short = [r.model_copy(update={"samples": make_run().samples[:2]}) for r in runs]
    assert verdict.derive(measured(short, case=case)).verdict.reason == "run_error"
    assert verdict.derive(measured(short)).verdict.reason == "budget", "of our trainer their speed is not looked at"


def test_the_first_thing_that_is_missing_is_the_reason() -> None:
    missing = [Missing(reason="package", detail="no deep_ep"), Missing(reason="profile", detail="no profile")]
    found = verdict.derive(measured([], missing=missing)).verdict
    assert (found.reason, found.sentence) == ("package", "not applicable: no deep_ep; no profile")


@pytest.mark.parametrize(("holds", "status"), [(True, "confirmed"), (False, "refuted")])
def test_a_statement_that_is_computed(holds: bool, status: str) -> None:
    case = Case(id="a", kind="arithmetic", summary="s", function="f")
    claim = ClaimRef(
        id="X1", card="c", card_sha="", statement="s", kind="arithmetic", metric="m", expect=Expect(op="holds"), comparison=Compared()
    )
    machine = Machine(name="m", description="", gpus=0, cpu="", cores=1)
    made = Measured(claim=claim, case=CaseRef(id="a", sha="", content=case), machine=machine)
    found = verdict.derive(made, (holds, "as computed", {"x": 1}))
    assert (found.verdict.status, found.verdict.reason, found.verdict.sentence, found.figures) == (status, "exact", "as computed", {"x": 1})
    with pytest.raises(Exception, match="needs what its function gave"):
        verdict.derive(made)


def test_records_of_every_version_are_judged() -> None:
    assert (VERSION, sorted(verdict.RULES)) == (3, [2, 3])


def test_one_pair_is_never_enough_for_an_interval_even_at_a_look() -> None:
    found = judge(around(0.2, 1), looks=(1, 4)).verdict
    assert (found.reason, "stopped after 1 pairs, a verdict needs 4" in found.sentence) == ("budget", True)


@pytest.mark.parametrize(
    ("pairs", "reason", "words"), [(4, "budget", "after 4 of 12"), (8, "budget", "after 8 of 12"), (12, "power", "after all 12")]
)
def test_what_is_open_before_the_last_look_is_a_matter_of_time(pairs: int, reason: str, words: str) -> None:
    found = judge(around(0.05, pairs))
    assert (found.verdict.reason, f"undecided {words} pairs" in found.verdict.sentence) == (reason, True), found.verdict.sentence
    assert (found.comparison.look, found.comparison.alpha_look) == (pairs // 4, pytest.approx(RATES[pairs // 4 - 1]))


def test_how_many_pairs_would_settle_it_is_counted_from_the_end_that_is_open() -> None:
    d = [0.045, 0.045, 0.055, 0.055]
    mean, _, error = by_hand(d, RATES[0])
    for op, ends in ((">=", [math.log(1.055)]), ("within", [math.log(1.055), -math.log(1.055)])):
        found = judge(d, op=op, margin=5.5)
        assert found.comparison.pairs_needed == statistics.pairs_needed(mean - ends[0], 2 * error, RATES[0]), op
    wide = judge([-0.045, 0.035, -0.055, 0.045], op=">=", margin=1.0).comparison  # 1 % worse is no end of `>=`, though the interval has it
    assert wide.pairs_needed == statistics.pairs_needed(wide.mean - math.log(1.01), wide.deviation, RATES[0])
    both = [-0.084, 0.076, -0.073, 0.065]
    for sign in (1, -1):  # both ends are open, and the nearer one needs more
        open_ = judge([sign * x for x in both], op="within", margin=3.0).comparison
        near = math.log(1.03) - abs(open_.mean)
        assert open_.pairs_needed == statistics.pairs_needed(near, open_.deviation, RATES[0])
    assert judge(around(0.2)).comparison.pairs_needed is None, "settled"


@pytest.mark.parametrize(
    ("before", "after", "op", "margin", "status"),
    [
        (5.0, 4.0, ">=", 1.0, "confirmed"),
        (5.0, 4.0, ">=", 1.000001, "refuted"),
        (5.0, 4.0, "<=", 1.0, "confirmed"),
        (5.0, 4.0, "<=", 0.999999, "refuted"),
        (5.0, 4.0, "within", 1.0, "confirmed"),
        (5.0, 4.0, "within", 0.999999, "refuted"),
        (2e6, 1e-3, ">=", 2e6, "confirmed"),  # a billionth of the margin
        (2e6, 1e-2, ">=", 2e6, "refuted"),
        (5.0, 6.0000000001, "within", 1.0, "confirmed"),
        (5.0, 6.00000001, "within", 1.0, "refuted"),
        (5.0, 5.0000000001, ">=", 0.0, "confirmed"),
    ],
)
def test_a_margin_is_met_to_a_billionth_of_it(before: float, after: float, op: str, margin: float, status: str) -> None:
    pair = [make_run(metrics={"recompiles": before}), make_run("candidate", position=1, metrics={"recompiles": after})]
    assert verdict.derive(measured(pair, op=op, margin=margin, unit="count", metric="recompiles")).verdict.status == status


def test_no_margin_is_a_margin_of_nothing() -> None:
    assert effects.threshold(SECONDS, None) == 0.0


def test_the_first_runs_alone_are_looked_at_before_pairs() -> None:
    """A launch of the A/A is no first run."""
    runs = [
        make_run(role="burn_in", pair=None),
        make_run("candidate", None, 1, role="burn_in"),
        make_run(position=2, role="aa", data_sha="other"),
    ]
    assert verdict.derive(measured(runs)).verdict.reason == "budget"


def test_what_a_claim_calls_impossible_is_said_in_words() -> None:
    wanted = Expect(op="excludes", infeasible=["a1+b1"])
    for outcome, words in (("refused", "was refused"), ("oom", "was out of memory")):
        found = verdict.derive(record(square("fits"), [0.0] * 4, wanted, blocks=1, outcomes={"a1+b1": outcome}))
        assert f"a1+b1 {words}: planted: no" in found.verdict.sentence
        assert [p.variant for p in found.curve.points] == ["a0+b0", "a1+b0", "a0+b1", "a1+b1"]
    runs = record(square("fits"), [0.0] * 4, wanted, blocks=1, outcomes={"a1+b1": "oom"})
    cut = runs.model_copy(update={"runs": [r for r in runs.runs if r.variant != "a0+b1"]})
    left = verdict.derive(cut)
    assert (left.verdict.reason, [p.variant for p in left.curve.points]) == ("budget", ["a1+b1"]), "no block is complete"


@pytest.mark.parametrize(("by", "ok"), [(0.0, True), (0.02, False)])
def test_whether_a_series_starts_over_with_a_longer_warm_up(by: float, ok: bool) -> None:
    runs, _ = series(around(0.2))
    bent = [
        r.model_copy(update={"samples": [s.model_copy(update={"seconds": s.seconds * (1 + by * i)}) for i, s in enumerate(r.samples)]})
        for r in runs
    ]
    plan = Plan(rules=VERSION, seed=0, looks=[4])
    assert verdict.steady(plan, bent, ("baseline", "candidate")) is ok
    short = [r.model_copy(update={"samples": r.samples[:-1]}) for r in bent]
    assert verdict.steady(plan, short, ("baseline", "candidate")) is True, "derive has the verdict for that"


# Statistics at the value where they turn.


def test_the_least_effect_by_the_table_of_students_t() -> None:
    """t(0.975, 3) = 3.1824 and t(0.8, 3) = 0.9785."""
    assert statistics.least_effect(4, 0.01, 0.05) == pytest.approx((3.1824 + 0.9785) * 0.01 / 2, rel=1e-4)
    assert statistics.pairs_needed(1e6, 0.01, 0.05) == 2


def test_one_pair_has_a_deviation_and_a_difference_its_sign() -> None:
    assert statistics.aa_deviation([0.1]) == pytest.approx(0.1)
    assert (statistics.difference(1.0, 3.0, True), statistics.difference(1.0, 3.0, False)) == (2.0, -2.0)


@pytest.mark.parametrize("n", [1, 4])
def test_fresh_launches_against_stored_noise(n: int) -> None:
    """t(0.995, 4) = 4.6041 times 0.01, over the root of their number."""
    limit = 4.6041 * 0.01 / math.sqrt(n)
    assert not statistics.contaminated([0.999 * limit] * n, 0.01, 4)
    assert statistics.contaminated([1.001 * limit] * n, 0.01, 4)
    assert statistics.contaminated([-1.001 * limit] * n, 0.01, 4)


def test_an_a_a_against_its_own_deviation() -> None:
    """t(0.995, 3) = 5.8409 times the sample deviation over 2."""
    spread = [0.01, -0.01, 0.01, -0.01]
    limit = 5.8409 * np.std(spread, ddof=1) / 2
    assert not statistics.contaminated([0.999 * limit + s for s in spread], None)
    assert statistics.contaminated([1.001 * limit + s for s in spread], None)
    assert not statistics.contaminated([0.0025, 0.0025], 1e-9, 4), "finer than any claim"
    assert statistics.contaminated([0.0026, 0.0026], 1e-9, 4)


@pytest.mark.parametrize("n", [4, 8])
def test_a_launch_stands_out_where_its_studentised_residual_is_beyond_the_bound(n: int) -> None:
    rest = [1.0 + 0.01 * (-1) ** i for i in range(n - 1)]
    mean, deviation = np.mean(rest), np.std(rest, ddof=1)
    bound = stats.t.ppf(1 - 0.05 / n / 2, n - 2) * deviation * math.sqrt(1 + 1 / (n - 1))
    assert statistics.stands_out([*rest, mean + 0.999 * bound]) is None
    assert statistics.stands_out([*rest, mean + 1.001 * bound]) == n - 1
    assert statistics.stands_out([mean - 1.001 * bound, *rest]) == 0


def shapes(n: int) -> list[np.ndarray]:
    at, edge = np.arange(n), max(2, math.ceil(n / 5))
    return [at.astype(float), *((at >= k).astype(float) for k in range(edge, n - edge + 1))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [4, 7, 10])
def test_a_change_is_certain_where_correlation_with_the_best_shape_is(n: int, seed: int) -> None:
    """Two launches are not asked whether they agree: p of Pearson's r, times the number of shapes."""
    y = 1 + 0.01 * np.random.default_rng(seed).normal(size=(2, n)) + 0.01 * np.arange(n) / n
    profile = (y / np.median(y, axis=1, keepdims=True)).mean(axis=0)
    p = min(stats.pearsonr(s, profile).pvalue for s in shapes(n)) * len(shapes(n))
    alpha = lambda factor: min(0.999 * len(shapes(n)), p * factor)  # noqa: E731
    assert statistics.change(y.tolist(), alpha(1.001)).certain
    assert not statistics.change(y.tolist(), alpha(0.999)).certain


def test_a_change_of_the_last_digits_is_none() -> None:
    assert not statistics.change([[1 + 1e-14 * i for i in range(8)]] * 4, 0.025).certain
    assert statistics.change([[1 + 1e-7 * i for i in range(8)]] * 4, 0.025).certain


@pytest.mark.parametrize("launches", [3, 5])
def test_launches_that_do_not_agree_show_no_change(launches: int) -> None:
    """A t test of the change of each, at two fifths of the rate; the mean of the launches shows a step of a tenth beyond doubt."""
    rng, n = np.random.default_rng(launches), 12
    jump = 0.1 + 0.05 * rng.normal(size=(launches, 1))
    y = 1 + jump * (np.arange(n) >= 6) + 1e-4 * rng.normal(size=(launches, n))
    found = statistics.change(y.tolist(), 0.9)
    assert (found.certain, found.after) == (True, 6)
    scaled = y / np.median(y, axis=1, keepdims=True)
    sizes = scaled[:, 6:].mean(axis=1) - scaled[:, :6].mean(axis=1)
    p = stats.ttest_1samp(sizes, 0.0).pvalue
    assert found.size == pytest.approx(sizes.mean())
    assert statistics.change(y.tolist(), 1.001 * p / 0.4).certain
    assert not statistics.change(y.tolist(), 0.999 * p / 0.4).certain


# Guards.


@pytest.mark.parametrize(
    ("factors", "odd"),
    [
        ([1.0, 1.001, 0.999, 1.0, 1.0, 1.3, 1.001, 0.999], 2),
        ([1.0, 1.001, 0.999, 1.0, 1.0, 1.001, 1.001, 0.999], None),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.002, 1.0, 1.0], None),  # finer than any claim
        ([1.3, 1.001, 0.999, 1.0, 1.0, 0.999, 1.001, 0.999], 0),
    ],
)
def test_the_pair_with_the_one_launch_that_stands_out(factors: list[float], odd: int | None) -> None:
    runs = [make_run(pair=i // 2, position=i, role="aa", seconds=f) for i, f in enumerate(factors)]
    assert guards.odd_pair(runs, SECONDS) == odd
    others = [make_run(pair=i, position=20 + i, seconds=9.0) for i in range(3)]
    aside = [
        make_run(pair=None, position=30, role="aa", seconds=9.0),
        make_run(pair=9, position=31, role="aa", seconds=9.0, outcome="crash"),
    ]
    assert guards.odd_pair([*others, *runs, *aside], SECONDS) == odd
    assert guards.odd_pair(runs, metrics.get("state_bytes_per_rank")) is None, "exact metrics repeat or do not"
    short = [r.model_copy(update={"samples": r.samples[1:]}) if i == 1 else r for i, r in enumerate(runs)]
    assert guards.odd_pair(short, SECONDS) is None


def test_small_losses_are_compared_as_shares() -> None:
    low = [s.model_copy(update={"loss": 0.1}) for s in make_run().samples]
    high = [s.model_copy(update={"loss": 0.102}) for s in make_run().samples]
    pairs = [(make_run(samples=low), make_run("candidate", samples=high))]
    assert guards.loss(make_case(), pairs).detail == "mean losses differ by 2 %, at most 1 % is allowed"


def test_rounding_of_a_large_count_is_no_other_count() -> None:
    observed = Observed(numbers={"n": 3e8}, collectives=[CollectiveCount(op="all_to_all", count=10**8)])
    rule = Activation(baseline=Receipt(require=[Rule(collective="all_to_all", count="n / 3 * 1.0000000001")]))
    assert [c.ok for c in receipt.judge_runs(rule, [make_run(observed=observed)])] == [True]


# The gate's decision.


def settles(looks: list[int], deviation: float, distance: float, error: float, spent: float) -> int:
    """The first look that would settle it, looks added at the distance of the last two, at the rate of the last."""
    step = looks[-1] - looks[-2] if len(looks) > 1 else looks[0]
    rates = dict(zip(looks, statistics.levels(tuple(looks), 2 * spent * error), strict=True))
    for pairs in range(looks[0], 1000, step):
        rate = next((rates[look] for look in looks if look >= pairs), rates[looks[-1]]) / 2
        reach = stats.t.isf(rate, 4 * (pairs - 2) / 2 if pairs > 2 else 2) + stats.norm.ppf(0.8)
        if reach * deviation / math.sqrt(pairs) <= distance:
            return pairs
    return 1000


@pytest.mark.parametrize("looks", [[4], [4, 12], [2, 4, 8], [3, 4]])
@pytest.mark.parametrize(("mean", "error", "spent"), [(0.014, 0.001, 0.4), (0.045, 0.025, Rules.spent)])
def test_the_gate_names_the_first_look_that_would_probably_settle_it(looks: list[int], mean: float, error: float, spent: float) -> None:
    limit, seen = math.log1p(0.03), set()
    for deviation in np.linspace(0.006, 0.03, 15):
        found = slowdown.judge_slowdown(slower(mean, deviation), 4, limit, looks)
        need = settles(looks, deviation, abs(limit - mean), error, spent)
        if found.answer == "undecided":
            assert found.pairs_needed == (need if need <= 100 else None)
            seen.add(need)
    assert len(seen) > 3


@pytest.mark.parametrize(("looks", "most"), [([4, 8, 12], 100), ([5, 9, 13], 97)])
def test_a_hundred_pairs_are_the_most_that_are_asked_for(looks: list[int], most: int) -> None:
    """The deviations are those at which so many pairs just settle that there is no slowdown, and just do not."""
    limit, found = math.log1p(0.03), {}
    for deviation in np.linspace(0.05, 0.09, 60):
        answer = slowdown.judge_slowdown(slower(0.0, deviation), 4, limit, looks)
        found[answer.answer] = max(found.get(answer.answer, 0), answer.pairs_needed or 0)
    assert found == {"undecided": most, "too_noisy": 0}
    assert (slowdown.LIMIT, slowdown.MOST_PAIRS) == (0.03, 100)
