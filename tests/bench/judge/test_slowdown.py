"""Two commits of one trainer, from invented launches: the answer at a look, what else a commit may cost, and what it does to older verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from test_verdict import make_run

from playbook.records.evidence import Comparison, Observed, Run, Sample
from playbook_bench import metrics
from playbook_bench.judge import design, slowdown, statistics
from playbook_bench.judge.guards import Pair

LOOKS = (4, 8, 12)
LIMIT = math.log1p(0.03)


def worse(mean: float, deviation: float, pairs: int = 4, freedom: float = 4.0) -> design.Estimate:
    """A slowdown by so many pairs of this deviation."""
    return design.Estimate(np.asarray(mean), np.asarray(deviation / math.sqrt(pairs)), np.asarray(freedom))


def launch(variant: str = "baseline", pair: int = 0, wall_s: float = 10.0, role: str = "measure", **steps: object) -> Run:
    """Six steps of a second; `steps` holds a field of every step, or a list of one value for each."""
    fields = {"seconds": 1.0, "loss": 2.0, "grad_norm": 1.0, "peak_memory_bytes": 1000, "useful_tokens": 1, **steps}
    at = lambda value, i: value[i] if isinstance(value, list) else value  # noqa: E731
    samples = [Sample(step=i, timed=True, raw_tokens=1, **{k: at(v, i) for k, v in fields.items()}) for i in range(6)]
    return make_run(variant, pair, wall_s=wall_s, role=role, samples=samples)


def series(
    pairs: int = 2, before: dict | None = None, after: dict | None = None, noise: list[dict] | None = None
) -> tuple[list[Pair], list[Run]]:
    """Pairs of commits, and every run with an A/A of the older one whose launches are as `noise` says."""
    made = [(launch("baseline", i, **(before or {})), launch("candidate", i, **(after or {}))) for i in range(pairs)]
    aa = [launch("baseline", i // 2, role="aa", **{**(before or {}), **fields}) for i, fields in enumerate(noise or [{}, {}])]
    return made, [*aa, *(r for pair in made for r in pair)]


def gates(which: str, made: tuple[list[Pair], list[Run]], allowed: dict[str, float] | None = None) -> dict[str, str]:
    """What each condition that does not hold says."""
    pairs, runs = made
    allowed = allowed or {}
    trained = [slowdown.same_fields(pairs), *slowdown.same_training(pairs, runs, allowed)]
    found = trained if which == "training" else [slowdown.same_memory(pairs, runs, allowed.get("memory", slowdown.MEMORY))]
    return {g.name: g.detail for g in found if not g.ok}


def test_norms_of_zero_hide_no_later_difference() -> None:
    before, after = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    made = series(before={"grad_norm": before}, after={"grad_norm": after})
    assert "grad_norm of step 4 is 2, and 1 before" in gates("training", made)["grad_norm"]
    assert "grad_norm of step 1 is 0.0002" in gates("training", series(before={"grad_norm": 1e-4}, after={"grad_norm": 2e-4}))["grad_norm"]


def test_two_launches_of_the_older_commit_show_its_rounding() -> None:
    pairs, runs = series(pairs=2, after={"loss": 2.001})
    assert "loss" in gates("training", (pairs, [r for r in runs if r.role != "aa"])), "a relative difference of 5e-4"
    alone = [(pairs[0][0], pairs[0][1])]
    assert gates("training", (alone, [*alone[0]])) == {}


def test_a_launch_of_the_noise_that_was_cut_short_is_compared_as_far_as_it_goes() -> None:
    pairs, runs = series()
    cut = [r.model_copy(update={"samples": r.samples[:3]}) if r.role == "aa" else r for r in runs]
    assert gates("training", (pairs, cut)) == {}


# Each bound is the mean and Student's quantile at the look's part of its rate, times the standard error: here 0.002, with 4 degrees of freedom.
FAILS = stats.t.isf(statistics.levels(LOOKS, 2 * 0.76 * 0.025)[0] / 2, 4) * 0.002
PASSES = stats.t.isf(statistics.levels(LOOKS, 2 * 0.4 * 0.001)[0] / 2, 4) * 0.002


@pytest.mark.parametrize(
    ("mean", "answer"),
    [
        (LIMIT - 0.05, "pass"),
        (LIMIT - 1.01 * PASSES, "pass"),
        (LIMIT - 0.99 * PASSES, "undecided"),
        (LIMIT + 0.99 * FAILS, "undecided"),
        (LIMIT + 1.01 * FAILS, "regression"),
    ],
)
def test_a_slowdown_passes_or_fails_only_where_its_interval_says_so(mean: float, answer: str) -> None:
    found = slowdown.judge_slowdown(worse(mean, 0.004), 4, LIMIT, LOOKS)
    assert found.answer == answer
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - FAILS, mean + PASSES))
    assert found.deviation == pytest.approx(0.004)


def test_the_last_look_has_more_of_the_error_rates_and_between_looks_the_next_one_counts() -> None:
    high = {
        n: slowdown.judge_slowdown(design.Estimate(*map(np.asarray, (0.0, 0.01, 8.0))), n, LIMIT, LOOKS).high for n in (4, 6, 8, 12, 13)
    }
    assert high[4] > high[6] == high[8] > high[12] == high[13]


@pytest.mark.parametrize(("baseline", "candidate"), [(1.0, 1.0), (1.0, 4.0), (4.0, 1.0)])
@pytest.mark.sample("1.0-4.0")
def test_a_slowdown_as_large_as_the_limit_passes_in_one_of_a_thousand_whatever_the_noise(baseline: float, candidate: float) -> None:
    """Over all looks, in the order of series; also where one commit is four times noisier than the other."""
    rng, looks, passed, count = np.random.default_rng(2), (4, 6, 8, 10, 12), 0, 40_000
    for seed in range(20):
        launches = design.launched(design.order(seed, 2, looks), 2)
        of = np.array([launch.variant for launch in launches])
        y = rng.normal(size=(count // 20, len(of))) * 0.01 * np.where(of, candidate, baseline) + LIMIT * of
        open_ = np.ones(len(y), dtype=bool)
        for look in looks:
            found = design.fit(launches[: 2 * look], 2).contrast(y[:, : 2 * look], (-1.0, 1.0))
            # The answer of one series at these degrees of freedom, for all of them at once.
            rate = slowdown._rate(slowdown._PASS_ERROR, looks, look)
            high = found.value + stats.t.isf(rate, found.degrees_of_freedom) * found.standard_error
            one = slowdown.judge_slowdown(
                design.Estimate(found.value[0], found.standard_error[0], found.degrees_of_freedom[0]), look, LIMIT, looks
            )
            assert one.high == pytest.approx(high[0])
            passed += int((open_ & (high < LIMIT)).sum())
            open_ &= high >= LIMIT
    assert passed / count <= 0.001 + 2 * math.sqrt(0.001 / count)


@pytest.mark.parametrize(
    ("mean", "deviation", "answer"),
    [(0.0, 0.02, "undecided"), (0.02, 0.01, "undecided"), (0.0, 0.07, "too_noisy"), (0.03, 0.07, "too_noisy")],
)
def test_what_no_number_of_pairs_would_rule_out_is_too_noisy(mean: float, deviation: float, answer: str) -> None:
    assert slowdown.judge_slowdown(worse(mean, deviation), 4, LIMIT, LOOKS).answer == answer


def test_the_number_of_pairs_that_would_settle_it() -> None:
    """Looks go on at their distance until the interval and 80 % power fit into the distance."""
    need = {d: slowdown.judge_slowdown(worse(0.02, d), 4, LIMIT, LOOKS).pairs_needed for d in (0.004, 0.006, 0.01, 0.02)}
    assert need == {0.004: 8, 0.006: 12, 0.01: 24, 0.02: 88}
    assert slowdown.judge_slowdown(worse(0.04, 0.01), 4, LIMIT, LOOKS).pairs_needed == 12, "a regression is cheaper to show"
    assert slowdown.judge_slowdown(worse(LIMIT, 0.004), 4, LIMIT, LOOKS).pairs_needed is None
    assert slowdown.judge_slowdown(worse(0.02, 0.006), 4, LIMIT, (4,)).pairs_needed % 4 == 0, "of one look, its own distance"


def test_two_pairs_are_enough_for_an_answer() -> None:
    assert slowdown.judge_slowdown(worse(0.0, 0.00001, 2, 2.0), 2, LIMIT, (2,)).answer == "pass"


@pytest.mark.parametrize(("mean", "error"), [(math.nan, 0.1), (0.0, math.inf)])
def test_no_number_gives_no_answer(mean: float, error: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        slowdown.judge_slowdown(design.Estimate(*map(np.asarray, (mean, error, 4.0))), 4, LIMIT, LOOKS)


def test_the_cause_of_noise_is_what_the_runs_tell() -> None:
    def ran(variant: str, computing: float, stolen: float) -> Run:
        return make_run(variant, observed=Observed(counters={"gpu_computing_percent": computing}), telemetry={"stolen_percent": stolen})

    quiet, busy = [ran("baseline", 90, 0), ran("candidate", 80, 1.9)], [ran("baseline", 90, 3), ran("candidate", 79, 2)]
    assert slowdown.cause_of_noise(quiet, 0.05) == "launches of one commit differ by 5.0 %"
    text = slowdown.cause_of_noise(busy, 0.001)
    assert (
        text
        == "launches of one commit differ by 0.1 %; the GPU computes in only 79 % of the step, so the host is what is timed; other machines on this hardware had 2 % of its processor time"
    )


@pytest.mark.parametrize(
    ("name", "before", "after", "allowed", "worse"),
    [
        ("recompiles", 2.0, 2.0, 0.0, False),
        ("recompiles", 2.0, 1.0, 0.0, False),
        ("recompiles", 2.0, 3.0, 0.0, True),
        ("recompiles", 0.0, 1.0, 0.5, True),
        ("param_bytes_per_rank", 1000.0, 1010.0, 0.01, False),
        ("param_bytes_per_rank", 1000.0, 1010.1, 0.01, True),
        ("param_bytes_per_rank", 1e12, 1e12 + 1, 0.0, False),
        ("fits", 1.0, 0.0, 0.0, True),
        ("fits", 0.0, 1.0, 0.0, False),
    ],
)
def test_an_exact_metric_may_not_get_worse(name: str, before: float, after: float, allowed: float, worse: bool) -> None:
    assert slowdown.exact_worse(metrics.get(name), before, after, allowed) is worse


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"loss": [2.0, None, 2.0, 2.0, 2.0, 2.0]}, "1 steps without a finite loss, 0 before"),
        ({}, {"nan": [False, True, True, False, False, False]}, "2 steps without a finite loss, 0 before"),
        ({"nan": [True, False, False, False, False, False]}, {"nan": [False, True, False, False, False, False]}, None),
        ({"nan": [True, False, False, False, False, False]}, {}, None),
    ],
)
def test_no_step_more_is_skipped(before: dict, after: dict, said: str | None) -> None:
    assert gates("training", series(before=before, after=after)).get("skipped_steps") == said


@pytest.mark.parametrize(
    ("noise", "change", "allowed", "ok"),
    [
        ([{}, {}], 0.9e-5, None, True),  # launches of one commit agree to the last digit: 1e-5 counts
        ([{}, {}], 1.1e-5, None, False),
        ([{}, {"loss": 2.0 * (1 + 1e-4)}], 3.9e-4, None, True),  # they differ by 1e-4: four times that counts
        ([{}, {"loss": 2.0 * (1 + 1e-4)}], 4.2e-4, None, False),
        ([{}, {"loss": 2.0 * (1 + 1e-4)}], 2e-4, 1e-4, False),  # what is allowed is stated, whatever they do
        ([{}, {}], 0.01, 0.02, True),
    ],
)
def test_losses_agree_as_closely_as_launches_of_one_commit_do(noise: list[dict], change: float, allowed: float | None, ok: bool) -> None:
    made = series(after={"loss": 2.0 * (1 + change)}, noise=noise)
    assert ("loss" not in gates("training", made, {} if allowed is None else {"loss": allowed})) is ok


def test_the_worst_step_is_named_with_both_its_values() -> None:
    found = gates("training", series(after={"grad_norm": [1.0, 1.1, 1.0, 1.5, 1.0, 1.0]}))
    assert found == {"grad_norm": "grad_norm of step 4 is 1.5, and 1 before: 333 times more than is explained by rounding"}


def test_rounding_that_launches_show_at_a_step_explains_later_steps_and_no_earlier_ones() -> None:
    noise = [{}, {"loss": [2.0, 2.0, 2.002, 2.0, 2.0, 2.0]}]
    later, earlier = [2.0, 2.0, 2.0, 2.0, 2.003, 2.0], [2.0, 2.003, 2.0, 2.0, 2.0, 2.0]
    assert "loss" not in gates("training", series(after={"loss": later}, noise=noise))
    assert "loss" in gates("training", series(after={"loss": earlier}, noise=noise))


def test_one_launch_shows_no_rounding_so_a_percent_of_loss_and_a_tenth_of_a_norm_are_let_pass() -> None:
    def alone(**after: float) -> dict[str, str]:
        pair = (launch("baseline"), launch("candidate", **after))
        return gates("training", ([pair], [*pair]))

    assert alone(loss=2.015, grad_norm=1.09) == {}
    assert set(alone(loss=2.03, grad_norm=1.2)) == {"loss", "grad_norm"}


@pytest.mark.parametrize(
    ("before", "after", "allowed", "said"),
    [
        (1000, 1019, {}, None),
        (1000, 1021, {}, "peak memory +2.1 %"),
        (1000, 900, {}, None),
        (1000, 1000, {"memory": 0.0}, None),
        (1000, 1099, {"memory": 0.1}, None),
        (1000, 1101, {"memory": 0.1}, "peak memory +10.1 %"),
    ],
)
def test_memory_may_not_grow_by_more_than_is_allowed(before: int, after: int, allowed: dict, said: str | None) -> None:
    steps = lambda most: {"peak_memory_bytes": [1, 1, most, 1, 1, 1]}  # noqa: E731
    assert gates("cost", series(before=steps(before), after=steps(after)), allowed).get("memory") == said


def test_memory_that_the_older_commit_does_not_report_is_said_to_be_not_compared() -> None:
    pairs, runs = series(before={"peak_memory_bytes": 0}, after={"peak_memory_bytes": 5})
    found = slowdown.same_memory(pairs, runs, slowdown.MEMORY)
    assert (found.ok, found.detail) == (True, "not compared: the older commit reports none")


def rest(pairs: list[Pair], strict: dict | None = None) -> list[float]:
    """By pair, how much more of a launch lies beside its timed steps."""
    rows = slowdown.overhead_rows([{"baseline": a, "candidate": b} for a, b in pairs], "baseline", strict or {})
    return [after - before for before, after in rows]


def warmed(run: Run, seconds: float = 1.0) -> Run:
    """A run whose first step is warm-up and takes so long; its launch is longer by what that is more than a second."""
    first = run.samples[0].model_copy(update={"timed": False, "seconds": seconds})
    return run.model_copy(update={"samples": [first, *run.samples[1:]], "wall_s": run.wall_s + seconds - 1.0})


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        ({"wall_s": 11.0}, 0.1),
        ({"wall_s": 9.0}, -0.1),
        ({"seconds": 0.5}, 0.3),  # steps take 3 s less, and the launch as long as before
        ({"seconds": 0.5, "wall_s": 7.0}, 0.0),
    ],
)
def test_time_that_moved_out_of_the_steps_is_not_gained(after: dict, worse: float) -> None:
    """It is a share of the older commit's launch, of 10 s."""
    assert rest(series(after=after)[0]) == pytest.approx([worse, worse])


def test_a_longer_first_step_counts_although_it_is_not_timed() -> None:
    pairs = [(warmed(a), warmed(b, 4.0)) for a, b in series()[0]]
    assert rest(pairs) == pytest.approx([0.3, 0.3])


def test_a_line_of_a_log_counts_for_all_of_its_steps() -> None:
    pairs = series(before={"wall_s": 70.0}, after={"wall_s": 70.0, "seconds": 0.9})[0]
    assert rest(pairs, {"s": {"trainer": {"log_every": 10}}}) == pytest.approx([6 / 70] * 2)


def test_start_up_that_varies_is_no_excuse() -> None:
    """Half of the time between lines of a log passed where start-up varied by as much; now it is open."""
    found = slowdown.judge_slowdown(worse(0.16, 0.12), 4, 0.1, LOOKS)
    assert found.answer in ("undecided", "too_noisy")
    assert "--allow process=" in slowdown.overhead_in_words(found, 0.1)
    beside = slowdown.overhead_in_words(found, 0.1, is_slower=True)
    assert beside.endswith("too few launches to judge that, and the answer does not need it")
    assert "ruled out" not in beside
    certain = slowdown.judge_slowdown(worse(0.5, 0.01), 4, 0.1, LOOKS)
    assert slowdown.overhead_in_words(certain, 0.1, is_slower=True).endswith("more than 10 % is certain")


@pytest.mark.parametrize("lost", ["loss", "grad_norm", "useful_tokens", "images", "peak_memory_bytes"])
def test_a_figure_that_a_commit_tells_no_longer_is_missed(lost: str) -> None:
    absent = None if lost in ("loss", "grad_norm") else 0
    told = {"images": 1}
    found = gates("training", series(before=told, after={**told, lost: absent}))
    assert found["fields"] == f"no longer told: {lost}"
    assert "fields" not in gates("training", series(before={**told, lost: absent}, after=told))


def test_a_reported_metric_that_vanishes_is_missed() -> None:
    pairs, runs = series()
    pairs = [(a.model_copy(update={"metrics": {"mfu": 0.3, "hfu": None}}), b) for a, b in pairs]
    assert gates("training", (pairs, runs)) == {"fields": "no longer told: mfu"}


def effect(low: float | None, high: float | None, **fields: object) -> Comparison:
    base = {
        "metric": "step_seconds",
        "unit": "s",
        "better": "lower",
        "design": "launches_abba",
        "scale": "log_ratio",
        "baseline": 1.0,
        "candidate": 1.0,
    }
    mean = None if low is None or high is None else (low + high) / 2
    return Comparison(**{**base, "effect": mean, "low": low, "high": high, "pairs": 4, **fields})


def commits(
    after: str = "b", revisions: tuple[int | None, int | None] = (3, 3), paths: tuple[dict, dict] = ({}, {"torch.ep": 1})
) -> tuple[list[Run], dict]:
    numbered = zip(("baseline", "candidate"), revisions, paths, strict=True)
    runs = [make_run(v, strict_sha=v, performance_revision=r, revisions=p) for v, r, p in numbered]
    return runs, {v: {"trainer": {"source_sha": s}} for v, s in (("baseline", "a"), ("candidate", after))}


@pytest.mark.parametrize(("low", "high", "shown"), [(0.011, 0.031, "+2.1 % [1.1, 3.1]"), (-0.031, -0.011, "-2.1 % [-3.1, -1.1]")])
def test_a_commit_that_moves_speed_and_no_revision_is_told_to_raise_it(low: float, high: float, shown: str) -> None:
    assert slowdown.unraised(effect(low, high), *commits(), ["torch", "torch.ep"]) == (
        f"step_seconds moved by {shown}; if that is meant, raise the revision of torch and torch.ep in playbook_trainer/revision.py, "
        "so that older verdicts go stale"
    )


@pytest.mark.parametrize(
    ("found", "made"),
    [
        (effect(0.01, 0.03), commits()),
        (effect(-0.03, -0.01), commits()),
        (effect(-0.005, 0.03), commits()),
        (effect(None, None), commits()),
        (effect(0.1, 0.1, design="deterministic"), commits()),
        (effect(0.1, 0.2, scale="difference"), commits()),
        (effect(0.1, 0.2), commits(after="a")),
        (effect(0.1, 0.2), commits(revisions=(3, 4))),
        (effect(0.1, 0.2), commits(revisions=(None, None))),
        (effect(0.1, 0.2), commits(paths=({}, {"torch.ep": 2}))),
    ],
)
def test_no_revision_is_asked_for_where_speed_is_not_sure_to_move_or_the_trainer_is_the_same(
    found: Comparison, made: tuple[list[Run], dict]
) -> None:
    assert slowdown.unraised(found, *made, ["torch"]) == ""


def test_norms_of_nothing_are_alike() -> None:
    """As of a trainer that clips to zero, or of losses that vanish: equal is equal at any allowance."""
    made = series(before={"grad_norm": 0.0, "loss": 0.0}, after={"grad_norm": 0.0, "loss": 0.0})
    assert gates("training", made) == gates("training", made, {"loss": 0.0, "grad_norm": 0.0}) == {}
