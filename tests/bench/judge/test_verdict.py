"""From records to verdicts: every rule, through `derive` alone."""

import dataclasses
import math
import random
from typing import get_args

import pytest

from playbook.cards.model import Comparison, Expect, Quantity
from playbook.errors import ConfigError
from playbook.paths import repo_root
from playbook.records.case import Activation, Case, Delta, Guardrails, Loss, Receipt, Rule
from playbook.records.evidence import (
    Baseline,
    CaseRef,
    ClaimRef,
    CollectiveCount,
    Machine,
    Measured,
    Observed,
    Plan,
    Reason,
    Run,
    Sample,
)
from playbook_bench import metrics
from playbook_bench.judge import design, effects, verdict
from playbook_bench.judge.verdict_rules import VERSION

STEPS = 6
RULE = Activation(baseline=Receipt(require=[Rule(collective="all_to_all")]), candidate=Receipt(forbid=[Rule(collective="all_to_all")]))


def make_case(metric="step_seconds", **fields):
    base = {
        "id": "planted",
        "summary": "planted",
        "trainer": "trainer/configs/x.yaml",
        "metric": metric,
        "activation": RULE,
        "baseline": {"moe.dispatcher": "a"},
        "candidate": {"moe.dispatcher": "b"},
        "profiles": {"cpu": {}},
    }
    return Case(**{**base, **fields})


def make_run(variant="baseline", pair=0, position=0, seconds=1.0, role="measure", **fields):
    samples = fields.pop("samples", None) or [
        Sample(
            step=i,
            timed=True,
            loss=fields.pop("loss", 2.0) if i == 0 else 2.0,
            seconds=seconds * (1 + 0.001 * (i % 2)),
            useful_tokens=fields.get("tokens", 100),
            raw_tokens=128,
            peak_memory_bytes=fields.get("peak", 0),
        )
        for i in range(STEPS)
    ]
    fields.pop("tokens", None)
    fields.pop("peak", None)
    base = {
        "run_id": f"{variant}{position}",
        "variant": variant,
        "role": role,
        "pair": pair,
        "position": position,
        "outcome": "ok",
        "returncode": 0,
        "started": "",
        "wall_s": 1.0,
        "ranks": 1,
        "steps_wanted": STEPS,
        "config_sha": variant,
        "strict_sha": "s",
        "data_sha": "d",
        "num_parameters": 5,
        "trained_parameters": 5,
        "samples": samples,
        "metrics": {"state_bytes_per_rank": 100.0 if variant == "baseline" else 50.0},
        "observed": Observed(
            numbers={"layers": 1}, collectives=[CollectiveCount(op="all_to_all", count=2)] if variant == "baseline" else []
        ),
    }
    return Run(**{**base, **fields})


ORDER = design.order(0, 2, (4, 8, 12, 16))
PLACES = [[i for i, v in enumerate(ORDER) if v == variant] for variant in (0, 1)]
V2 = Plan(rules=2, seed=0, looks=[4, 8, 12])


def series(differences, s_aa=0.005, aa_pairs=4, **candidate):
    """Runs in the order of a series in which pair i is better for the candidate by exp(differences[i]) in step time."""
    runs = []
    for i, d in enumerate(differences):
        runs.append(make_run("baseline", i, PLACES[0][i]))
        runs.append(make_run("candidate", i, PLACES[1][i], seconds=math.exp(-d), **candidate))
    noise = []
    for i in range(aa_pairs):
        noise += [
            make_run("baseline", i, 2 * i, role="aa"),
            make_run("baseline", i, 2 * i + 1, seconds=math.exp(s_aa * (-1) ** (i // 2)), role="aa"),
        ]
    return runs, Baseline(created="", machine="m", case="planted", profile="cpu", noise_key="k", runs=noise)


def measured(runs, aa=None, op=">=", margin=5.0, unit="percent", metric="step_seconds", case=None, looks=(4, 8, 12), **fields):
    case = case or make_case(metric)
    claim = ClaimRef(
        id="X1",
        card="c",
        card_sha="",
        statement="s",
        kind="pair",
        metric=metric,
        expect=Expect(op=op, margin=Quantity(value=margin, unit=unit)),
        comparison=Comparison(),
    )
    base = {
        "claim": claim,
        "case": CaseRef(id="planted", sha="", content=case),
        "machine": Machine(name="m", description="", gpus=0, cpu="", cores=1),
        "profile": "cpu",
        "plan": Plan(rules=VERSION, seed=0, looks=list(looks)),
        "strict": {"s": {"env": {"A": "1"}}},
        "configs": {"baseline": {"moe": {"dispatcher": "a"}}, "candidate": {"moe": {"dispatcher": "b"}}},
        "runs": runs,
        "aa": aa,
    }
    return Measured(**{**base, **fields})


def judge(differences, **options):
    runs, aa = series(differences, **{k: options.pop(k) for k in ("s_aa", "aa_pairs") if k in options})
    return verdict.derive(measured(runs, aa, **options))


NOISE = [0.002, -0.002, 0.001, -0.001]


def around(effect, pairs=4):
    return [math.log(1 + effect) + NOISE[i % 4] for i in range(pairs)]


@pytest.mark.parametrize(
    ("op", "margin", "effect", "status"),
    [
        (">=", 5, 0.10, "confirmed"),
        (">=", 5, 0.0, "refuted"),
        (">=", 5, 0.05, "inconclusive"),
        ("<=", 5, 0.0, "confirmed"),
        ("<=", 5, 0.10, "refuted"),
        ("<=", 5, 0.05, "inconclusive"),
        ("<=", -3, -0.08, "confirmed"),
        ("<=", -3, 0.0, "refuted"),
        ("within", 5, 0.0, "confirmed"),
        ("within", 5, 0.10, "refuted"),
        ("within", 5, -0.10, "refuted"),
        ("within", 5, 0.05, "inconclusive"),
    ],
)
def test_the_interval_against_the_margin(op, margin, effect, status):
    found = judge(around(effect), op=op, margin=margin)
    assert found.verdict.status == status
    assert found.comparison.effect == pytest.approx(effect, abs=1e-4)
    assert found.comparison.low < found.comparison.effect < found.comparison.high


def test_a_margin_as_a_ratio_equals_the_same_in_percent():
    assert judge(around(1.3), op=">=", margin=2.0, unit="ratio").verdict.status == "confirmed"
    assert judge(around(0.8), op=">=", margin=2.0, unit="ratio").verdict.status == "refuted"


def test_a_unit_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="points does not fit step_seconds"):
        judge(around(0.1), unit="points")
    with pytest.raises(ConfigError, match="percent does not fit"):
        effects.threshold(metrics.get("compile_time_share"), Quantity(value=5.0, unit="percent"))


def test_undecided_says_what_would_settle_it():
    found = judge([0.10, -0.08, 0.09, -0.07] * 3)
    assert (found.verdict.status, found.verdict.reason) == ("inconclusive", "power")
    assert found.comparison.mde > 0
    assert found.comparison.pairs_needed > 12
    assert str(found.comparison.pairs_needed) in found.verdict.sentence


@pytest.mark.parametrize(("pairs", "wanted"), [(1, 4), (3, 4), (5, 8), (7, 8), (9, 12), (11, 12), (13, 12)])
def test_between_looks_there_is_no_verdict_and_the_next_one_is_named(pairs, wanted):
    found = judge(around(0.5, pairs))
    assert f"stopped after {pairs} pairs, a verdict needs {wanted};" in found.verdict.sentence
    assert (found.verdict.status, found.verdict.reason) == ("inconclusive", "budget")
    assert found.comparison.look is None


def test_between_looks_the_figures_have_an_interval_and_the_sentence_has_none():
    found = judge(around(0.5, 5))
    assert effects.show_effect(found.comparison, between=True).startswith("+50.0 % [49.4, 50.7]")
    assert "[" not in found.verdict.sentence.split(";")[0]
    alone = judge(around(0.5, 1)).comparison
    assert effects.show_effect(alone, between=True) == effects.show_effect(alone), "one pair has no interval"


def placed(pairs):
    """The launches of so many complete pairs, in the order of `series`."""
    every = [launch for launch in design.launched(ORDER, 2) if launch.block < pairs]
    seen = {launch.at for launch in every}
    return [dataclasses.replace(launch, before=launch.before if launch.at - 1 in seen else None) for launch in every]


def test_an_interval_between_looks_spends_no_more_than_the_plan():
    """A series that time stops anywhere, with an interval there and at each look before: how often any of them misses the truth."""
    draw, rules = random.Random(4), verdict.RULES[VERSION]
    missed = 0
    for _ in range(800):
        last = draw.randint(2, 12)
        noise = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(last)]
        seen = sorted({n for n in (4, 8, 12) if n < last} | {last})
        found = [rules.intervals(noise[:n], placed(n), [(-1.0, 1.0)], rules.level((4, 8, 12), 0.05, n), [])[0] for n in seen]
        missed += any(not i.low <= 0 <= i.high for i in found)
    assert missed / 800 < 0.05


def test_a_record_of_version_2_needs_its_a_a():
    found = verdict.derive(measured(series(around(0.2))[0], None, plan=V2))
    assert (found.verdict.status, found.verdict.reason) == ("inconclusive", "environment")
    quiet, noisy = judge([0.06] * 4, s_aa=0.001, plan=V2), judge([0.06] * 4, s_aa=0.02, plan=V2)
    assert (quiet.verdict.status, noisy.verdict.status) == ("confirmed", "inconclusive")


def test_in_a_record_of_version_2_a_fresh_a_a_pair_that_differs_voids_the_series():
    runs, aa = series(around(0.2), s_aa=0.003)
    fresh = [make_run("baseline", 0, 90, role="aa"), make_run("baseline", 0, 91, seconds=1.3, role="aa")]
    found = verdict.derive(measured(runs + fresh, aa, plan=V2))
    assert (found.verdict.status, found.verdict.reason) == ("inconclusive", "environment")


def test_step_time_is_not_asked_to_be_steady_where_ranks_take_turns_on_a_gpu():
    runs, aa = series(around(0.2), s_aa=0.001)

    def drifting(run):
        held = {"baseline": 10_000, "candidate": 8_000}[run.variant] + run.position
        samples = [
            s.model_copy(update={"seconds": s.seconds * (1 + 0.02 * i), "peak_memory_bytes": held}) for i, s in enumerate(run.samples)
        ]
        return run.model_copy(update={"ranks": 4, "samples": samples})

    runs, aa = [drifting(r) for r in runs], aa.model_copy(update={"runs": [drifting(r) for r in aa.runs]})
    case = make_case("peak_memory_bytes", profiles={"h200x1": {"ranks": 4}})

    def judged(gpus):
        machine = Machine(name="m", description="", gpus=gpus, gpu="NVIDIA H200", cpu="", cores=1)
        return verdict.derive(measured(runs, aa, metric="peak_memory_bytes", case=case, machine=machine)).verdict

    assert judged(4).reason == "not_steady"
    alone = judged(1)
    assert (alone.status, alone.reason) == ("confirmed", "margin")
    assert alone.sentence.endswith("; 4 ranks took turns on one GPU")


def test_steadiness_is_asked_once_of_the_pairs_to_the_first_look():
    """A test at every look would reject at its rate each time; pairs after the first look are no part of it."""
    runs, aa = series([0.2, 0.19, 0.21, 0.2] * 2, s_aa=0.001)

    def late(run):
        return run.model_copy(
            update={"samples": [s.model_copy(update={"seconds": s.seconds * (1 + 0.02 * i)}) for i, s in enumerate(run.samples)]}
        )

    assert verdict.derive(measured([late(r) if r.pair >= 4 else r for r in runs], aa)).verdict.reason == "margin"
    assert verdict.derive(measured([late(r) if r.pair < 4 else r for r in runs], aa)).verdict.reason == "not_steady"


@pytest.mark.parametrize("rules", [1, 99])
def test_a_record_of_rules_that_are_not_known_is_refused(rules):
    with pytest.raises(ConfigError, match=f"version {rules}; this playbook knows 2 and 3"):
        judge(around(0.2), plan=Plan(rules=rules, seed=0, looks=[4, 8, 12]))


def test_the_guide_has_the_table_of_states():
    rows = [f"| {when[0].upper() + when[1:]} | {state} | `{reason}` |" for reason, (state, when) in verdict.STATES.items()]
    guide = (repo_root() / "docs/guide/verdicts.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in guide


def test_each_reason_has_its_state_in_one_table():
    assert set(verdict.STATES) == set(get_args(Reason))
    assert {state for state, _ in verdict.STATES.values()} == {
        "not applicable", "error", "inconclusive", "measured", "confirmed or refuted",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"data_sha": "other"}, "data"),
        ({"data_sha": None}, "data"),
        ({"trained_parameters": 4}, "parameters"),
        ({"tokens": 90}, "work"),
        ({"loss": 3.0}, "loss"),
        ({"strict_sha": "t"}, "environment"),
        ({"config_sha": "third"}, "configuration"),
    ],
)
def test_what_makes_a_pair_invalid(change, gate):
    runs, aa = series(around(0.2), **change)
    found = verdict.derive(measured(runs, aa, strict={"s": {"env": {"A": "1"}}, "t": {"env": {"A": "2"}}}))
    assert (found.verdict.status, found.verdict.reason) == ("inconclusive", "invalid_pair")
    assert [g.name for g in found.gates if not g.ok] == [gate]


@pytest.mark.parametrize(
    ("change", "delta", "guard"),
    [
        ({"data_sha": "other"}, Delta(data=True, reason="r"), None),
        ({"trained_parameters": 4}, Delta(parameters=True, reason="r"), None),
        ({"strict_sha": "t"}, Delta(environment={"candidate": {"A": "2"}}, reason="r"), None),
        ({"loss": 3.0}, Delta(), Loss(relative=None, reason="r")),
    ],
)
def test_what_a_case_may_declare(change, delta, guard):
    runs, aa = series(around(0.2), **change)
    case = make_case(delta=delta, guardrails=Guardrails(loss=guard or Loss()))
    found = verdict.derive(measured(runs, aa, case=case, strict={"s": {"env": {"A": "1"}}, "t": {"env": {"A": "2"}}}))
    assert found.verdict.status == "confirmed"


def test_unequal_work_is_compared_per_useful_token_and_never_by_step():
    delta = Delta(work=True, reason="r")
    for metric, reason in (("useful_tokens_per_s_per_gpu", "margin"), ("step_seconds", "invalid_pair")):
        runs, aa = series(around(0.5), tokens=90)
        assert verdict.derive(measured(runs, aa, metric=metric, case=make_case(metric, delta=delta))).verdict.reason == reason


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        ("oom", "inconclusive", "oom"),
        ("nan", "error", "run_error"),
        ("hang", "error", "run_error"),
        ("crash", "error", "run_error"),
        ("killed", "error", "run_error"),
    ],
)
def test_failed_runs(outcome, status, reason):
    runs, aa = series(around(0.2))
    runs[-1] = runs[-1].model_copy(update={"outcome": outcome, "message": "why"})
    found = verdict.derive(measured(runs, aa)).verdict
    assert (found.status, found.reason) == (status, reason)
    assert "why" in found.sentence


OTHER_PATH = Observed(numbers={"layers": 1}, collectives=[CollectiveCount(op="all_to_all", count=1)])


@pytest.mark.parametrize(("ran", "decided"), [({}, ("confirmed", "exact")), ({"observed": OTHER_PATH}, ("error", "not_activated"))])
def test_out_of_memory_is_data_when_the_claim_is_about_fitting_and_the_tested_path_ran(ran, decided):
    runs = [make_run("baseline", outcome="oom", samples=[], observed=None, metrics={}), make_run("candidate", position=1, **ran)]
    found = verdict.derive(measured(runs, metric="fits", margin=100.0, unit="points")).verdict
    assert (found.status, found.reason) == decided
    assert found.sentence.startswith("+100.0 points; claimed ") is (decided[0] == "confirmed")


@pytest.mark.parametrize(("observed", "said"), [(OTHER_PATH, "found 1"), (None, "found not reported")])
def test_a_path_that_did_not_run_or_of_which_a_run_says_nothing_is_an_error(observed, said):
    runs, aa = series(around(-0.5))
    runs[3] = runs[3].model_copy(update={"observed": observed})
    found = verdict.derive(measured(runs, aa, op="<=", margin=0.0)).verdict
    assert (found.status, found.reason, said in found.sentence) == ("error", "not_activated", True), found.sentence


def test_a_deterministic_metric_that_does_not_repeat_settles_nothing():
    runs, aa = series([0.0, 0.0])
    runs[2] = runs[2].model_copy(update={"metrics": {"state_bytes_per_rank": 101.0}})
    found = verdict.derive(measured(runs, aa, metric="state_bytes_per_rank"))
    assert found.verdict.reason == "environment"
    assert [g.ok for g in found.gates if g.name == "repeatable"] == [False]


def test_a_missing_metric_is_an_error():
    runs, aa = series(around(0.2))
    found = verdict.derive(measured(runs, aa, metric="images_per_s", case=make_case("images_per_s"))).verdict
    assert (found.status, found.reason) == ("error", "run_error")
    with pytest.raises(ConfigError, match="did you mean 'step_seconds'"):
        metrics.get("step_second")
