"""Statistics of matched launches: coverage, error rates, and what must never be said."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from playbook_bench.judge import design, statistics
from playbook_bench.judge.effects import ClaimRule
from playbook_bench.judge.effects import decide as decided
from playbook_bench.judge.verdict_rules import Rules

S = 0.007  # deviation of a paired log difference
LOOKS = (4, 8, 12)
ALPHA = 0.05
positive = st.floats(0.5, 2.0)


RULES = Rules()


def placed(blocks, variants=2, seed=0):
    """So many blocks of launches in the order of a series."""
    return design.launched(design.order(seed, variants, (4, 8, 12))[: blocks * variants], variants)


def interval(differences, alpha):
    """The interval of a candidate's differences from a baseline that repeats."""
    launches = [launch for launch in placed(12) if launch.block < len(differences)]
    return RULES.intervals([(0.0, d) for d in differences], launches, [(-1.0, 1.0)], alpha, [])[0]


def decide(op, margin, low, high):
    return {True: "confirmed", False: "refuted", None: None}[decided(ClaimRule(op, ["a", "b"], margin), [(low, high)])]


def settle(rng, effect, margin, op, count, noisier=1.0, orders=20):
    """So many simulated series against one claim, as the harness runs them; the candidate's launches may be noisier."""
    out = []
    for seed in range(orders):
        launches = placed(LOOKS[-1], seed=seed)
        candidate = np.array([p.variant for p in launches])
        y = rng.normal(size=(count // orders, len(launches))) * S / math.sqrt(2) * np.where(candidate, noisier, 1.0) + effect * candidate
        status: list[str | None] = [None] * len(y)
        for n in LOOKS:
            found = design.fit(launches[: 2 * n], 2).contrast(y[:, : 2 * n], (-1.0, 1.0))
            half = student.ppf(1 - RULES.level(LOOKS, ALPHA, n) / 2, found.degrees_of_freedom) * found.standard_error
            ends = zip(found.value - half, found.value + half, strict=True)
            status = [before or decide(op, margin, low, high) for before, (low, high) in zip(status, ends, strict=True)]
        out += [each or "inconclusive" for each in status]
    return out


@pytest.mark.parametrize(("slower", "wanted"), [(0.0, "refuted"), (0.01, "refuted"), (0.05, "confirmed")])
def test_at_least_three_percent_slower(slower, wanted):
    rng = np.random.default_rng(20260)
    statuses = settle(rng, math.log(1 - slower), math.log(1 - 0.03), "<=", 200)
    wrong = {"refuted": "confirmed", "confirmed": "refuted"}[wanted]
    assert statuses.count(wanted) >= 190
    assert statuses.count(wrong) <= 2


@pytest.mark.parametrize("noisier", [1.0, 2.0, 4.0])
def test_truth_at_the_margin_is_rarely_decided_either_way(noisier):
    """At most 2.5 % a side are promised, also for a candidate that varies more than the baseline."""
    rng = np.random.default_rng(11)
    statuses = settle(rng, math.log(1.05), math.log(1.05), ">=", 1500, noisier)
    assert statuses.count("confirmed") <= 0.025 * 1500 + 14
    assert statuses.count("refuted") <= 0.025 * 1500 + 14


def test_the_looks_spend_the_error_rate_once():
    """For normal deviates, by simulation: all looks together spend what was given to them, and none as much as Bonferroni would have to."""
    rates = statistics.levels(LOOKS, ALPHA)
    assert rates == pytest.approx((0.0096, 0.0211, 0.0346), abs=2e-4)
    draws = np.random.default_rng(8).normal(size=(40_000, LOOKS[-1])).cumsum(axis=1)
    crossed = [np.abs(draws[:, n - 1]) / math.sqrt(n) > NormalDist().inv_cdf(1 - rate / 2) for n, rate in zip(LOOKS, rates, strict=True)]
    assert np.mean(np.any(crossed, axis=0)) == pytest.approx(ALPHA, abs=0.0035)


def test_one_look_spends_all_and_between_looks_the_next_one_counts():
    assert statistics.levels((8,), ALPHA) == pytest.approx((ALPHA,))
    assert RULES.level(LOOKS, ALPHA, 5) == RULES.level(LOOKS, ALPHA, 8)
    assert RULES.level(LOOKS, ALPHA, 13) == RULES.level(LOOKS, ALPHA, 12)


@pytest.mark.parametrize("pairs", [4, 12])
def test_a_drift_and_a_carry_over_of_any_size_move_no_difference(pairs):
    rng = np.random.default_rng(3)
    for seed in range(5):
        launches = placed(pairs, seed=seed)
        y = rng.normal(size=2 * pairs)
        disturbed = y + np.array([50.0 * launch.at + 20.0 * launch.before for launch in launches])
        plain, found = (design.fit(launches, 2).contrast(values, (-1.0, 1.0)) for values in (y, disturbed))
        for name in ("value", "standard_error", "degrees_of_freedom"):
            assert getattr(found, name) == pytest.approx(getattr(plain, name)), name


@pytest.mark.parametrize("variants", [3, 4])
@pytest.mark.parametrize("blocks", [4, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.sample("4-4")
def test_a_contrast_of_the_noisiest_variant_covers(variants, blocks):
    """The last variant is five times as noisy as the rest: its contrast has no more degrees of freedom than its own blocks give it."""
    rng, alpha, series = np.random.default_rng(5), ALPHA / len(LOOKS), 2000
    weights = [-1.0, *[0.0] * (variants - 2), 1.0]
    missed = 0.0
    for seed in range(20):
        launches = placed(blocks, variants, seed)
        noise = rng.normal(0, 1, (series // 20, len(launches))) * np.array([5.0 if p.variant == variants - 1 else 1.0 for p in launches])
        found = design.fit(launches, variants).contrast(noise, weights)
        beyond = [statistics.t_quantile(alpha, float(freedom)) for freedom in found.degrees_of_freedom]
        missed += float(np.mean(np.abs(found.value) > beyond * found.standard_error)) / 20
    assert missed <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / series)


@given(st.lists(positive, min_size=4, max_size=12), st.floats(1.0001, 1.5))
@settings(max_examples=200, deadline=None)
def test_perfect_separation_is_never_no_difference(baseline, factor):
    """Where every candidate launch beats every baseline launch, no rule may say that the candidate is not better."""
    worst = max(baseline)
    candidate = [worst * factor * (1 + 0.1 * (i % 3)) for i in range(len(baseline))]
    d = [statistics.log_ratio(a, b, True) for a, b in zip(baseline, candidate, strict=True)]
    found = interval(d, 0.05 / 3)
    assert found.mean > 0
    assert decide("<=", 0.0, found.low, found.high) != "confirmed"
    assert decide(">=", 0.0, found.low, found.high) != "refuted"
    # Equal within a band may be confirmed only where the band really holds the whole interval.
    if decide("within", 0.01, found.low, found.high) == "confirmed":
        assert 0 < found.mean < 0.01


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=12), st.floats(-0.3, 0.3), st.sampled_from([">=", "<="]))
@settings(max_examples=200, deadline=None)
def test_swapping_the_variants_mirrors_the_verdict(d, margin, op):
    found, mirrored = interval(d, 0.05), interval([-x for x in d], 0.05)
    assert mirrored.low == pytest.approx(-found.high)
    other = {">=": "<=", "<=": ">="}[op]
    if min(abs(found.low - margin), abs(found.high - margin)) > 1e-9:
        assert decide(op, margin, found.low, found.high) == decide(other, -margin, mirrored.low, mirrored.high)


@given(positive, positive, st.booleans())
def test_a_log_ratio_is_antisymmetric(a, b, higher):
    assert statistics.log_ratio(a, b, higher) == pytest.approx(-statistics.log_ratio(b, a, higher))
    assert statistics.log_ratio(a, b, higher) == pytest.approx(-statistics.log_ratio(a, b, not higher))


def test_ratios_against_zero():
    assert statistics.log_ratio(0, 0, True) == 0
    assert statistics.log_ratio(5, 0, higher_is_better=False) == math.inf
    assert statistics.log_ratio(0, 5, higher_is_better=False) == -math.inf
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="at least 0"):
            statistics.log_ratio(1.0, bad, True)


def test_no_interval_from_one_pair_or_from_nan():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        interval([0.1], 0.05)
    with pytest.raises(ValueError, match="not finite"):
        interval([0.1, math.nan], 0.05)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([1.0] * 4 + [1 + 1e-15], None),
        ([1.0] * 4 + [1.0 + 1e-9], 4),
        ([1e6] * 4 + [1e6 + 1e-8], None),
        ([0.0] * 4 + [5.0], 4),
        ([0.0] * 5, None),
        ([], None),
        ([1.0, 1.0, 9.0], None),
        ([0.01 * i for i in range(8)], None),
        ([1.0] * 5 + [1.1] + [1.0] * 2, 5),
    ],
)
def test_what_differs_by_rounding_or_drifts_does_not_stand_out(values, place):
    assert statistics.stands_out(values) == place


def slow(rng, n, rho=0.0, spread=0.01, pattern=0.0, count=4):
    """Steps of launches with stationary noise, neighbours correlated by `rho`, and a pattern of the data that all of them share."""
    out = np.empty((count, n))
    out[:, 0] = rng.normal(0, spread, count)
    for i in range(1, n):
        out[:, i] = rho * out[:, i - 1] + math.sqrt(1 - rho**2) * rng.normal(0, spread, count)
    return 1 + out + rng.normal(0, pattern or 1e-12, n)


def share_found(rng, n, shape, series=100, **noise):
    found = [statistics.change((slow(rng, n, **noise) * shape).tolist(), statistics.STEADY_ALPHA / 2) for _ in range(series)]
    return np.mean([f.certain for f in found])


@pytest.mark.parametrize("n", [8, 12, 40])
@pytest.mark.parametrize("noise", [{}, {"rho": 0.6}, {"rho": 0.9}, {"pattern": 0.05}, {"rho": 0.9, "pattern": 0.01}])
def test_steady_steps_are_called_steady(n, noise):
    """At most 2.5 % of variants may be called unsteady, whatever neighbouring steps have in common; three deviations of 400 series more."""
    rng = np.random.default_rng(9)
    assert share_found(rng, n, np.ones(n), 400, **noise) <= 0.025 + 0.024


@pytest.mark.parametrize("part", [0.7, 0.5, 0.2])
@pytest.mark.parametrize("n", [10, 20, 40])
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_first_part_at_half_speed_is_found(part, n, rho):
    rng, first = np.random.default_rng(10), round(part * n)
    shape = np.where(np.arange(n) < first, 2.0, 1.0)
    assert share_found(rng, n, shape, rho=rho, spread=0.03) == 1.0
    found = statistics.change((slow(rng, n) * shape).tolist(), 0.025)
    assert found.after == first
    assert f"from step {first + 1} on" in str(found)


@pytest.mark.parametrize(("spread", "rho"), [(0.005, 0.9), (0.01, 0.3)])
def test_a_fall_by_five_percent_is_found_in_slow_noise(spread, rho):
    assert share_found(np.random.default_rng(13), 16, 1 + 0.05 * np.linspace(1, 0, 16), rho=rho, spread=spread) >= 0.9


@pytest.mark.parametrize("n", [8, 20, 40])
def test_one_slow_step_is_no_change(n):
    """Wherever it lies, and in all launches alike."""
    for at in range(n):
        shape = np.ones(n)
        shape[at] = 3.0
        assert not statistics.change((slow(np.random.default_rng(at), n, spread=0.001) * shape).tolist(), 0.025).certain


def test_two_launches_are_too_few_to_ask_whether_they_agree():
    assert share_found(np.random.default_rng(14), 30, 1 + 0.003 * np.arange(30), count=2) == 1.0


def test_a_change_that_is_too_small_for_any_claim_is_let_pass():
    tiny = [[1 + 1e-6 * i for i in range(30)]] * 4
    found = statistics.change(tiny, 0.025)
    assert "gradually" in str(found)
    assert 0 < abs(found.size) < 0.001


def test_too_few_steps_and_equal_ones_show_nothing():
    assert statistics.change([[1.0, 2.0, 2.0]] * 2, 0.05) is None
    found = statistics.change([[1.0, 1.0, 2.0, 2.0]] * 2, 0.05)
    assert (found.after, found.certain) == (2, True), "four are enough"
    assert not statistics.change([[1.0] * 8] * 4, 0.025).certain
    with pytest.raises(ValueError, match="equally many"):
        statistics.change([[1.0] * 8, [1.0] * 7], 0.025)


@pytest.mark.parametrize("distance", [0.004, 0.01, 0.0173, 0.05])
def test_the_pairs_needed_are_the_fewest_that_settle_the_distance(distance):
    need = statistics.pairs_needed(distance, 0.01, 0.02)
    assert statistics.least_effect(need, 0.01, 0.02) <= distance
    assert need == 2 or statistics.least_effect(need - 1, 0.01, 0.02) > distance


def test_without_noise_two_pairs_settle_all_and_with_too_much_no_number_does():
    assert statistics.pairs_needed(0.0, 0.0, 0.02) == 2
    assert statistics.pairs_needed(0.0001, 1.0, 0.02) is None
    assert statistics.pairs_needed(0.0, S, ALPHA) is None


@pytest.mark.parametrize("scale", [0.01, 7.0])
def test_a_change_is_a_share_of_the_step_however_long_steps_take(scale):
    """Launches of one variant may have other speeds too."""
    launches = np.array([[1.0] * 6 + [1.1] * 6, [1.0] * 6 + [1.1001] * 6])
    found, other = (statistics.change(x.tolist(), 0.05) for x in (launches, launches * [[scale], [2 * scale]]))
    assert (other.after, other.certain) == (found.after, found.certain) == (6, True)
    assert other.size == pytest.approx(found.size) == pytest.approx(0.1 / 1.05, rel=1e-3)


@pytest.mark.parametrize("steps", [4, 5])
def test_one_slow_step_of_a_few_is_no_change(steps):
    assert not statistics.change([[1.0] * (steps - 1) + [2.0]] * 2, 0.05).certain


def test_a_step_change_leaves_a_fifth_of_the_steps_on_either_side():
    assert [statistics.change([[2.0] * k + [1.0] * (12 - k)] * 2, 0.05).after for k in (2, 3, 9, 10)] == [3, 3, 9, 9]
