"""Sweeps and interactions: rules on planted curves through `derive`, and how often they err in simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from test_verdict import make_run, series

from playbook.cards.model import Comparison, Expect, Quantity
from playbook.records.case import Activation, Case, Factor, Receipt, Rule, Value, case_problems
from playbook.records.evidence import CaseRef, ClaimRef, CollectiveCount, Machine, Measured, Observed, Plan
from playbook_bench.judge import design, effects, guards, statistics, verdict
from playbook_bench.judge.verdict_rules import VERSION

PROOF = Activation(every=Receipt(require=[Rule(collective="all_to_all")]))
SEEN = Observed(numbers={"layers": 1}, collectives=[CollectiveCount(op="all_to_all", count=2)])
NOISE = [0.0004, -0.0004, 0.0002, -0.0002]


def sweep(values=(1, 2, 4), metric="step_seconds", **fields):
    base = {"id": "s", "kind": "sweep", "summary": "planted", "trainer": "trainer/configs/x.yaml", "knob": "parallel.cp", "metric": metric}
    rows = [Value(at=v, set={"parallel.cp": v}) for v in values]
    return Case(**{**base, "values": rows, "profiles": {"cpu": {}}, "activation": PROOF, **fields})


def square(metric="step_seconds"):
    factors = [
        Factor(name=n, low=Value(at=f"{n}0", set={f"train.{n}": 0}), high=Value(at=f"{n}1", set={f"train.{n}": 1})) for n in ("a", "b")
    ]
    base = {"id": "i", "kind": "interaction", "summary": "planted", "trainer": "trainer/configs/x.yaml", "metric": metric}
    return Case(**base, factors=factors, profiles={"cpu": {}}, activation=PROOF)


def record(case, gains, expect, blocks=4, s_aa=0.002, outcomes=None, looks=(4, 8), fields=None):
    """Runs in the order of a series in which variant i is better than the first by exp(gains[i]) in step time, with a ripple per block and variant."""
    runs, names = [], list(case.variants)
    for launch in design.launched(design.order(0, len(names), (4, 8, 12)), len(names)):
        block, variant = launch.block, names[launch.variant]
        outcome = (outcomes or {}).get(variant, "ok")
        seconds = math.exp(-gains[launch.variant] - NOISE[(block + launch.variant) % 4])
        own = {"config_sha": variant, "observed": SEEN, **(fields or {}).get(variant, {})}
        if outcome == "ok" and block < blocks:
            runs.append(make_run(variant, block, len(runs), seconds=seconds, **own))
        elif block == 0:
            runs.append(make_run(variant, block, len(runs), outcome=outcome, message="planted: no", **own))
    claim = ClaimRef(
        id="X1", card="c", card_sha="", statement="s", kind=case.kind, metric=case.metric, expect=expect, comparison=Comparison()
    )
    return Measured(
        claim=claim,
        case=CaseRef(id=case.id, sha="", content=case),
        machine=Machine(name="m", description="", gpus=0, cpu="", cores=1),
        profile="cpu",
        plan=Plan(rules=VERSION, seed=0, looks=list(looks)),
        strict={"s": {"env": {"A": "1"}}},
        configs=case.variants,
        runs=runs,
        aa=series([0.0], s_aa=s_aa)[1],
    )


def expect(op, margin=5.0, **fields):
    return Expect(op=op, margin=Quantity(value=margin, unit="percent"), **fields)


def judged(case, gains, wanted, **options):
    return verdict.derive(record(case, gains, wanted, **options)).verdict


@pytest.mark.parametrize(
    ("op", "at", "gains", "status"),
    [
        ("best", [4], [-0.3, -0.1, 0.0], "confirmed"),
        ("best", [4], [0.0, 0.3, 0.0], "refuted"),
        ("best", [4], [0.0, math.log(1.05), 0.0], "inconclusive"),
        ("best", [2, 4], [-0.3, 0.2, 0.0], "confirmed"),
        ("best", [2, 4], [0.3, 0.0, 0.0], "refuted"),
        ("not_best", [4], [0.0, 0.3, 0.0], "confirmed"),
        ("not_best", [4], [-0.3, -0.1, 0.0], "refuted"),
        ("band", [], [0.0, 0.01, -0.01], "confirmed"),
        ("band", [], [0.0, 0.0, -0.2], "refuted"),
        ("rising", [], [0.0, 0.1, 0.2], "confirmed"),
        ("rising", [], [0.0, 0.1, 0.1], "refuted"),
        ("knee", [2], [0.0, 0.2, 0.2], "confirmed"),
        ("knee", [], [0.0, 0.2, 0.2], "confirmed"),
        ("knee", [], [0.0, 0.0, 0.2], "refuted"),
        ("knee", [], [0.0, 0.2, 0.4], "refuted"),
        ("reaches", [2], [-0.2, 0.0, 0.01], "confirmed"),
        ("reaches", [2], [-0.2, 0.0, -0.2], "refuted"),
        ("reaches", [2], [0.0, 0.0, 0.0], "refuted"),
        (">=", [], [0.0, -0.3, 0.1], "confirmed"),
        ("<=", [], [0.0, 0.5, 0.0], "confirmed"),
        ("within", [], [0.0, 0.5, 0.2], "refuted"),
    ],
)
def test_the_rules_of_a_sweep(op, at, gains, status):
    assert judged(sweep(), gains, expect(op, at=at)).status == status


@pytest.mark.parametrize(
    ("op", "gains", "status"),
    [
        (">=", [0.0, 0.1, 0.1, 0.4], "confirmed"),
        (">=", [0.0, 0.1, 0.1, 0.2], "refuted"),
        ("<=", [0.0, 0.1, 0.1, 0.2], "confirmed"),
        ("within", [0.0, 0.1, 0.1, 0.2], "confirmed"),
        ("within", [0.0, 0.1, 0.1, 0.0], "refuted"),
        ("crossover", [0.0, 0.2, 0.0, -0.2], "confirmed"),
        ("crossover", [0.0, 0.2, 0.0, 0.2], "refuted"),
        ("crossover", [0.0, math.log(1.05), 0.0, -0.2], "inconclusive"),
    ],
)
def test_the_rules_of_an_interaction(op, gains, status):
    assert judged(square(), gains, expect(op)).status == status


def test_the_difference_of_differences_is_a_ratio_of_ratios():
    found = verdict.derive(record(square(), [0.0, 0.1, 0.2, 0.6], expect(">="))).curve
    assert found.contrasts[0].effect == pytest.approx(math.expm1(0.3), abs=0.01)
    assert found.contrasts[0].low < found.contrasts[0].effect < found.contrasts[0].high
    assert (found.freedom, found.look) == (16 - 4, 1)


def test_the_interval_follows_from_the_figures_of_the_record():
    measured = record(sweep(), [0.0, 0.1, 0.2], expect(">="))
    for i, noise in zip([i for i, r in enumerate(measured.runs) if r.variant == "4"], (0.05, -0.04, 0.03, -0.02), strict=True):
        measured.runs[i] = make_run("4", i // 3, i, seconds=math.exp(-0.2 - noise), config_sha="4", observed=SEEN)
    curve = verdict.derive(measured).curve
    (last,) = curve.contrasts
    half = statistics.t_quantile(curve.alpha_contrast, curve.freedom) * last.used / math.sqrt(curve.blocks)
    assert (last.low, last.high) == pytest.approx((math.expm1(last.mean - half), math.expm1(last.mean + half)))
    rows = [[-math.log(r.samples[0].seconds) for r in sorted(measured.runs[i : i + 3], key=lambda r: int(r.variant))] for i in (0, 3, 6, 9)]
    same = design.contrast(rows, effects.launches(measured.runs, guards.blocks_of(measured.runs, ["1", "2", "4"])), [-1.0, 0.0, 1.0])
    assert half == pytest.approx(
        statistics.t_quantile(curve.alpha_contrast, float(same.degrees_of_freedom)) * float(same.standard_error), rel=1e-3
    )
    assert last.deviation > 0.02, "the last value is noisier than the others, and held to it"


def test_a_value_that_does_not_fit_is_data_only_where_the_claim_says_so():
    gains, gone = [0.0, 0.3, 0.0], {"1": "oom"}
    assert judged(sweep(), gains, expect("best", at=[2], infeasible=[1]), outcomes=gone).status == "confirmed"
    assert judged(sweep(), gains, expect("best", at=[2]), outcomes=gone).reason == "oom"
    assert judged(sweep(), gains, expect("best", at=[2], infeasible=[1]), outcomes={"1": "crash"}).status == "error"


@pytest.mark.parametrize(
    ("at", "gains", "gone", "status"),
    [
        ([4], [0.0, 0.3, 0.6, 0.6], {}, "confirmed"),
        ([4], [0.0, 0.3, 0.6, 0.9], {}, "refuted"),
        ([4], [0.0, 0.3, 0.6, 0.0], {"8": "oom"}, "inconclusive"),  # nothing ran after the claimed knee
        ([2], [0.0, 0.3, 0.6, 0.0], {"1": "oom"}, "inconclusive"),  # nothing ran before it
        ([2, 4], [0.0, 0.3, 0.6, 0.0], {"8": "oom"}, "inconclusive"),  # 2 is none, 4 may be one
        ([2, 4], [0.0, 0.3, 0.3, 0.0], {"8": "oom"}, "confirmed"),
        ([2], [0.0, 0.3, 0.6, 0.0], {"8": "oom"}, "refuted"),
    ],
)
def test_a_knee_is_refuted_only_where_values_ran_on_both_sides_of_it(at, gains, gone, status):
    wanted = expect("knee", at=at, infeasible=[int(v) for v in gone])
    assert judged(sweep((1, 2, 4, 8)), gains, wanted, outcomes=gone).status == status


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"a1+b1": "refused"}, "confirmed"),
        ({"a1+b1": "oom"}, "confirmed"),
        ({}, "refuted"),
        ({"a1+b1": "refused", "a1+b0": "oom"}, "inconclusive"),
        ({"a1+b1": "refused", "a1+b0": "refused"}, "error"),
        ({"a1+b1": "crash"}, "error"),
    ],
)
def test_cells_that_exclude_each_other(outcomes, status):
    wanted = Expect(op="excludes", infeasible=["a1+b1"])
    assert judged(square("fits"), [0.0] * 4, wanted, blocks=1, outcomes=outcomes).status == status


def test_a_deterministic_metric_takes_one_block_and_no_interval():
    bytes_ = {str(v): {"metrics": {"state_bytes_per_rank": 100.0 / v}} for v in (1, 2, 4)}
    case = sweep(metric="state_bytes_per_rank")
    found = verdict.derive(record(case, [0] * 3, expect("rising", 100.0), blocks=1, fields=bytes_))
    assert (found.verdict.status, found.verdict.reason) == ("confirmed", "exact")
    assert [c.effect for c in found.curve.contrasts] == pytest.approx([1.0, 1.0])
    assert judged(case, [0] * 3, expect("band"), blocks=1, fields=bytes_).status == "refuted"


def test_what_voids_a_pair_voids_a_sweep():
    wanted, gains = expect("best", at=[4]), [-0.3, -0.1, 0.0]
    assert judged(sweep(), gains, wanted, fields={"2": {"data_sha": "other"}}).reason == "invalid_pair"
    assert judged(sweep(), gains, wanted, fields={"2": {"strict_sha": "elsewhere"}}).reason == "invalid_pair"
    assert judged(sweep(), gains, wanted, fields={"4": {"trained_parameters": 1}}).reason == "invalid_pair"
    assert judged(sweep(), gains, wanted, fields={"2": {"observed": Observed(numbers={"layers": 1})}}).reason == "not_activated"
    assert judged(sweep(), gains, wanted, blocks=3).reason == "budget", "between looks there is no verdict"
    old = record(sweep(), gains, wanted, s_aa=0.4)
    old = old.model_copy(update={"plan": old.plan.model_copy(update={"rules": 2})})
    assert verdict.derive(old).verdict.status == "inconclusive", "in version 2 the A/A counts"


def test_a_case_that_does_not_make_sense_is_said():
    assert not case_problems(sweep())
    assert not case_problems(square())
    for case, text in (
        (sweep(values=[1]), "at least 2 values"),
        (sweep(values=[1, 1, 2]), "used twice"),
        (sweep(values=["a/b", "c"]), "names a folder too"),
        (sweep(knob=None), "'knob' is missing"),
        (sweep(baseline={"parallel.cp": 1}), "belongs to a case of kind pair"),
        (sweep(activation=Activation()), "nothing proves that the 1 ran as meant"),
        (sweep(activation=Activation(every=PROOF.every, variants={"9": PROOF.every})), "variant '9' is not known"),
        (sweep(budget={"pairs": [3, 4]}), "even numbers"),
        (sweep(kind="pair", budget={"pairs": [4, 7]}), "even numbers, since a pair"),
        (square().model_copy(update={"factors": square().factors[:1]}), "has 2 factors"),
    ):
        assert any(text in message for _, message in case_problems(case)), text


# How often a rule errs, over whole series: three looks, the error rate spent among looks and shared among contrasts.

LOOKS, SERIES, ORDERS = (4, 8, 12), 600, 20


def simulate(gains, wanted, deviations, seed, interaction=False, drift=0.0):
    """Shares of simulated series that end confirmed and refuted. Launches are normal on logarithms; blocks share a level and drift."""
    rng, rules = np.random.default_rng(seed), verdict.RULES[VERSION]
    names = ["l", "a", "b", "ab"] if interaction else [str(2**i) for i in range(len(gains))]
    q = effects.claim_rule(wanted, names, math.log1p(wanted.margin.value / 100))
    contrasts = effects.rule_contrasts(q, interaction)
    weights = [[c.weights.get(n, 0.0) for n in names] for c in contrasts]
    k, outcome = len(names), []
    for each in range(ORDERS):
        order = design.order(each, k, LOOKS)
        n, count = len(order), SERIES // ORDERS
        y = np.array(gains)[order] + rng.normal(0, 1, (count, n)) * np.array(deviations)[order] + drift * np.arange(n)
        y += np.repeat(rng.normal(0, 0.02, (count, LOOKS[-1])), k, axis=1)
        bounds = []
        for look in LOOKS:
            model = design.fit(design.launched(order[: k * look], k), k)
            found = [model.contrast(y[:, : k * look], weight) for weight in weights]
            alpha = rules.level(LOOKS, 0.05, look) / len(contrasts)
            half = [stats.t.ppf(1 - alpha / 2, each.degrees_of_freedom) * each.standard_error for each in found]
            bounds.append([(each.value - h, each.value + h) for each, h in zip(found, half, strict=True)])
        for i in range(count):
            statuses = (effects.decide(q, [(low[i], high[i]) for low, high in at]) for at in bounds)
            outcome.append(next((s for s in statuses if s is not None), None))
    return outcome.count(True) / SERIES, outcome.count(False) / SERIES


def test_the_simulation_has_the_intervals_of_the_rules():
    order, rng = design.order(1, 3, LOOKS), np.random.default_rng(0)
    launches, rows = design.launched(order, 3), rng.normal(size=(12, 3))
    y = [rows[launch.block][launch.variant] for launch in launches]
    for weight in ([-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]):
        (found,) = verdict.RULES[VERSION].intervals(rows.tolist(), launches, [weight], 0.01, [])
        same = design.fit(launches, 3).contrast(y, weight)
        half = stats.t.ppf(1 - 0.01 / 2, same.degrees_of_freedom) * same.standard_error
        assert (found.low, found.high) == pytest.approx((same.value - half, same.value + half))


EDGE = math.log(1.05)


@pytest.mark.parametrize(
    ("wanted", "gains", "interaction"),
    [
        (expect("best", at=[4]), [0.0, 0.0, -EDGE, -EDGE], False),
        (expect("not_best", at=[4]), [0.0, 0.0, -EDGE, -EDGE], False),
        (expect("band"), [0.0, EDGE, -EDGE, 0.0], False),
        (expect("rising"), [0.0, EDGE, 2 * EDGE, 3 * EDGE], False),
        (expect("knee", at=[2]), [0.0, EDGE, 2 * EDGE, 2 * EDGE], False),
        (expect("reaches", at=[1]), [0.0, -EDGE, -EDGE, -EDGE], False),
        (expect(">="), [0.0, 0.1, 0.1, 0.2 + EDGE], True),
        (expect("crossover"), [0.0, EDGE, 0.0, -EDGE], True),
    ],
)
@pytest.mark.sample("wanted1-gains1-False", "wanted6-gains6-True")
def test_at_the_margin_a_verdict_of_either_kind_is_rare(wanted, gains, interaction):
    """Also where one variant is three times as noisy as the others."""
    confirmed, refuted = simulate(gains, wanted, [0.01, 0.01, 0.01, 0.03], seed=7, interaction=interaction, drift=0.0005)
    print(f"{wanted.op}: confirmed {confirmed:.3f}, refuted {refuted:.3f} at the margin")
    assert confirmed <= 0.05 + 0.01
    assert refuted <= 0.05 + 0.01


@pytest.mark.parametrize(
    ("wanted", "gains", "interaction", "confirmed_least", "refuted_least"),
    [
        (expect("best", at=[4]), [-0.1, 0.0, 0.0, -0.05], False, 0.95, 0),
        (expect("best", at=[4]), [-0.1, 0.1, 0.0, -0.05], False, 0, 0.95),
        (expect("band"), [0.0, 0.01, -0.01, 0.0], False, 0.95, 0),
        (expect("knee"), [0.0, 0.1, 0.11, 0.12], False, 0.9, 0),
        (expect("reaches", at=[1]), [0.0, -0.1, -0.1, 0.0], False, 0.95, 0),
        (expect(">="), [0.0, 0.1, 0.1, 0.3], True, 0.9, 0),
        (expect(">="), [0.0, 0.1, 0.1, 0.2], True, 0, 0.95),
        (expect("crossover"), [0.0, 0.1, 0.0, -0.1], True, 0.95, 0),
    ],
)
def test_a_true_effect_is_found(wanted, gains, interaction, confirmed_least, refuted_least):
    confirmed, refuted = simulate(gains, wanted, [0.01] * 4, seed=11, interaction=interaction, drift=0.0005)
    print(f"{wanted.op} on {gains}: confirmed {confirmed:.3f}, refuted {refuted:.3f}")
    assert confirmed >= confirmed_least
    assert refuted >= refuted_least
    assert min(confirmed, refuted) <= 0.01
