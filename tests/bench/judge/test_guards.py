"""What two variants must have in common before their figures are compared: each condition, where it holds, where it does not, and what it says."""

from __future__ import annotations

import math

import pytest
from test_verdict import STEPS, make_case, make_run

from playbook.records.case import Activation, Case, Delta, Guardrails, Loss, Receipt, Rule, Traced
from playbook.records.evidence import Baseline, CollectiveCount, Condition, Observed, Run, Sample
from playbook_bench import metrics
from playbook_bench.judge import guards, receipt, statistics

SECONDS = metrics.get("step_seconds")
FOR_A_REASON = {"reason": "as planted"}


def pair(baseline: dict | None = None, candidate: dict | None = None) -> list[tuple[Run, Run]]:
    """One pair, and the fields in which its two runs are not as planted."""
    return [(make_run("baseline", **(baseline or {})), make_run("candidate", position=1, **(candidate or {})))]


def said(gate: Condition) -> tuple[bool, str]:
    return gate.ok, gate.detail


def recompiles(count: float, **fields: object) -> Run:
    return make_run(metrics={"recompiles": count}, **fields)


def stored(*differences: float) -> Baseline:
    """A/A pairs whose second run took so much less time, as a logarithm."""
    runs = [
        make_run("baseline", i, 2 * i + k, role="aa", seconds=math.exp(-d) if k else 1.0) for i, d in enumerate(differences) for k in (0, 1)
    ]
    return Baseline(created="", machine="m", case="planted", profile="cpu", noise_key="k", runs=runs)


def test_pairs_are_the_measured_ones_that_are_whole_in_the_order_of_their_numbers() -> None:
    runs = [
        make_run("candidate", 1, 3),
        make_run("baseline", 1, 2),
        make_run("baseline", 0, 0),
        make_run("candidate", 0, 1),
        make_run("baseline", 2, 4),
        make_run("baseline", 0, 5, role="aa"),
        make_run("candidate", None, 6),
    ]
    assert [(a.run_id, b.run_id) for a, b in guards.pairs_of(runs)] == [("baseline0", "candidate1"), ("baseline2", "candidate3")]


def test_differences_of_a_a_are_those_of_a_b_b_a_over_whole_pairs_by_number() -> None:
    """Fewer recompiles are better, so one more is -1, and in the second pair +1."""
    runs = [
        recompiles(7.0, pair=1, position=1, role="aa"),
        recompiles(5.0, pair=1, position=0, role="aa"),
        recompiles(9.0, pair=0, position=3, role="aa"),
        recompiles(8.0, pair=0, position=2, role="aa"),
        recompiles(1.0, pair=2, position=4, role="aa"),
        make_run(pair=2, position=5, role="aa", outcome="crash", metrics={"recompiles": 4.0}),
        recompiles(1.0, pair=3, position=6, role="aa"),
        make_run(pair=3, position=7, role="aa", metrics={}),
        recompiles(1.0, pair=4, position=8),
        recompiles(2.0, pair=4, position=9),
    ]
    assert guards.aa_differences(runs, metrics.get("recompiles")) == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("configs", "fields", "expected"),
    [
        ({"baseline": {"moe": {"dispatcher": "a"}}, "candidate": {"moe": {"dispatcher": "b"}}}, {}, (True, "")),
        ({"baseline": {}}, {}, (False, "a resolved configuration is missing from the record")),
        ({"candidate": {}}, {}, (False, "a resolved configuration is missing from the record")),
        ({"baseline": {"x": 1, "y": 1}, "candidate": {"x": 2, "y": 2}}, {}, (False, "undeclared difference in x, y")),
        ({"baseline": {}, "candidate": {}}, {"config_sha": "other"}, (False, "a variant ran with more than one configuration")),
    ],
)
def test_variants_differ_in_what_the_case_declares(configs: dict, fields: dict, expected: tuple[bool, str]) -> None:
    pairs = [*pair(), *pair({}, fields)]
    assert said(guards.configurations(make_case(), configs, pairs)) == expected


STRICT = {
    "s": {"env": {"A": "1"}, "trainer": {"world_size": 1}},
    "a2": {"env": {"A": "2"}, "trainer": {"world_size": 1}},
    "less": {"env": {}, "trainer": {"world_size": 1}},
    "wide": {"env": {"A": "1"}, "trainer": {"world_size": 2}},
    "both": {"env": {"A": "2"}, "trainer": {"world_size": 2}},
    "all": {"torch": "2", "env": dict.fromkeys("EDCBA", "3"), "trainer": {"world_size": 2}},
}
DECLARED = Delta(environment={"candidate": {"A": "2"}}, **FOR_A_REASON)


@pytest.mark.parametrize(
    ("seen", "delta", "allowed", "expected"),
    [
        (["s", "s", "s"], Delta(), (), (True, "")),
        (["s", "a2"], Delta(), (), (False, "differs in env.A")),
        (["s", "s", "a2"], Delta(), (), (False, "differs in env.A")),
        (["s", "a2", "s"], Delta(), (), (False, "differs in env.A")),
        (["a2", "s", "s"], Delta(), (), (False, "differs in env.A")),
        (["s", "less"], Delta(), (), (False, "differs in env.A")),
        (["less", "s"], Delta(), (), (False, "differs in env.A")),
        (["s", "both"], Delta(), (), (False, "differs in env.A, trainer.world_size")),
        (["s", "all"], Delta(), (), (False, "differs in env.A, env.B, env.C, env.D, env.E, torch, trainer.world_size")),
        (["s", "a2"], DECLARED, (), (True, "")),
        (["s", "a2"], Delta(), ("env.A",), (True, "")),
        (["s", "wide"], Delta(ranks=True, **FOR_A_REASON), (), (True, "")),
        (["s", "both"], Delta(ranks=True, **FOR_A_REASON), (), (False, "differs in env.A")),
        (["s", "wide"], DECLARED, (), (False, "differs in trainer.world_size")),
        (["s", "unheard"], Delta(), (), (False, "run r1 does not say in which environment it ran")),
    ],
)
def test_every_run_has_one_environment_but_for_what_is_declared(
    seen: list[str], delta: Delta, allowed: tuple[str, ...], expected: tuple[bool, str]
) -> None:
    runs = [make_run(run_id=f"r{i}", strict_sha=sha) for i, sha in enumerate(seen)]
    assert said(guards.environment(make_case(delta=delta), STRICT, runs, allowed)) == expected


PYTHONS = {
    "s": {"python": "3.11", "packages": {"torch": "2.12"}, "trainer": {"world_size": 1}},
    "other": {"python": "3.12", "packages": {"torch": "2.13"}, "trainer": {"world_size": 1}},
    "wide": {"python": "3.12", "packages": {"torch": "2.13"}, "trainer": {"world_size": 2}},
}


@pytest.mark.parametrize(
    ("command", "variants", "seen", "expected"),
    [
        ("{py}", ("a/python", "b/python"), "other", (True, "")),
        ("{py}", ("a/python", "b/python"), "wide", (False, "differs in trainer.world_size")),
        ("{py}", ("a/python", "a/python"), "other", (False, "differs in packages.torch, python")),
        ("python", ("1", "2"), "other", (False, "differs in packages.torch, python")),
        ("", ("1", "2"), "other", (False, "differs in packages.torch, python")),
    ],
)
def test_two_pythons_may_bring_other_packages_and_nothing_else(
    command: str, variants: tuple[str, str], seen: str, expected: tuple[bool, str]
) -> None:
    """Where a command names them; our trainer's cases, here without a command, never do."""
    words = {"trainer": None, "activation": Activation(), "command": [command, "x.py", "{py}", "{more}"]}
    deltas = {"baseline": {"py": variants[0], "more": 1}, "candidate": {"py": variants[1], "more": 2}}
    case = make_case(**words, **deltas) if command else make_case()
    runs = [make_run(run_id=f"r{i}", strict_sha=sha) for i, sha in enumerate(("s", seen))]
    assert said(guards.environment(case, PYTHONS, runs)) == expected


def test_each_variant_has_its_share_of_the_error_rate_of_steadiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single run that is predicted has all of it."""
    shares: list[float] = []
    monkeypatch.setattr(statistics, "change", lambda launches, alpha: shares.append(alpha))
    run = make_run()
    for blocks in ([{"baseline": run}], [{"baseline": run, "candidate": run}]):
        assert guards.steady(blocks, 0.01).ok
    whole = statistics.STEADY_ALPHA
    assert shares == [whole, whole / 2, whole / 2]


def test_a_noise_of_the_neighbourhood_is_said_to_be_one() -> None:
    noise = stored(0.01, 0.01, 0.01, 0.01)
    run = make_run()
    own, other = (
        guards.noise(SECONDS, [run.model_copy(update={"config_sha": sha})], noise)[0] for sha in (noise.runs[0].config_sha, "other")
    )
    assert "measured for" not in own.detail
    assert other.detail.endswith("; measured for planted, in the same place shortly before")
    assert own.ok
    assert other.ok


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (["fork", "fork"], (True, "")),
        (["fork", "fresh processes"], (False, "differs in launch: fork, fresh processes")),
        (["fork", None], (False, "differs in launch: fork, fresh processes")),
        (["mixed", "mixed"], (False, "differs in launch: mixed")),
    ],
)
def test_all_launches_of_a_series_are_made_in_one_way(ways: list[str | None], expected: tuple[bool, str]) -> None:
    """The second is that of an A/A pair, of which no run is compared here."""
    strict = {name: {"launch": way} if way else {} for name, way in zip(("s", "of a/a"), ways, strict=True)}
    assert said(guards.environment(make_case(), strict, [make_run()])) == expected


COMMAND = make_case().model_copy(update={"command": ["train"], "baseline": {}, "candidate": {}})
"""A case of a command: what its log does not tell is not compared, and is said. Our trainer tells all of it."""


@pytest.mark.parametrize(
    ("case", "shas", "expected"),
    [
        (make_case(), ("d", "d"), (True, "")),
        (make_case(), ("d", "e"), (False, "data hashes d, e")),
        (make_case(), ("e", "d"), (False, "data hashes d, e")),
        (make_case(), (None, None), (False, "data hashes None")),
        (make_case(delta=Delta(data=True, **FOR_A_REASON)), ("d", "e"), (True, "declared different: as planted")),
        (COMMAND, (None, None), (True, "not compared: a command's log does not tell it")),
        (COMMAND, ("d", "d"), (True, "")),
        (COMMAND, ("d", "e"), (False, "data hashes d, e")),
        (COMMAND, ("d", None), (False, "data hashes None, d")),
    ],
)
def test_variants_read_the_same_data(case: Case, shas: tuple, expected: tuple[bool, str]) -> None:
    assert said(guards.data(case, pair({"data_sha": shas[0]}, {"data_sha": shas[1]}))) == expected


DIFFERENT = (False, "parameter counts differ between runs")


@pytest.mark.parametrize(
    ("delta", "counts", "of", "expected"),
    [
        (Delta(), ((8, 4), (8, 4)), ("model", "model"), (True, "")),
        (Delta(), ((8, 4), (8, 5)), ("model", "model"), DIFFERENT),
        (Delta(), ((8, 4), (4, 2)), ("model", "model"), DIFFERENT),
        (Delta(), ((8, 4), (4, 2)), ("rank", "rank"), (True, "counted per rank; every layout trains 50% of what it holds")),
        (Delta(), ((8, 0), (4, 0)), ("rank", "rank"), (True, "counted per rank; every layout trains 0% of what it holds")),
        (Delta(), ((8, 4), (4, 2)), ("rank", "model"), DIFFERENT),
        (Delta(), ((8, 4), (4, 1)), ("rank", "rank"), DIFFERENT),
        (Delta(), ((8, 4), (0, 0)), ("rank", "rank"), DIFFERENT),
        (Delta(), ((8, 4), (None, 4)), ("rank", "rank"), DIFFERENT),
        (Delta(parameters=True, **FOR_A_REASON), ((8, 4), (4, 1)), ("model", "model"), (True, "declared different: as planted")),
    ],
)
def test_variants_train_the_same_parameters(delta: Delta, counts: tuple, of: tuple, expected: tuple[bool, str]) -> None:
    fields = [{"num_parameters": n, "trained_parameters": t, "parameters_of": o} for (n, t), o in zip(counts, of, strict=True)]
    assert said(guards.parameters(make_case(delta=delta), pair(*fields))) == expected


RATE = "useful_tokens_per_s_per_gpu"
IN_STEPS = "useful tokens per step differ by 20.0 %; compare useful tokens per second instead"
UNDECLARED = "useful tokens per step differ by 20.0 %; declare delta.work with a reason"


@pytest.mark.parametrize(
    ("metric", "delta", "expected"),
    [
        ("step_seconds", Delta(), (False, IN_STEPS)),
        ("step_seconds", Delta(work=True, **FOR_A_REASON), (False, IN_STEPS)),
        (RATE, Delta(), (False, UNDECLARED)),
        (RATE, Delta(work=True, **FOR_A_REASON), (True, "declared different: as planted")),
        (RATE, Delta(data=True, **FOR_A_REASON), (True, "declared different: as planted")),
    ],
)
def test_unequal_work_is_compared_only_where_declared_and_by_its_unit(metric: str, delta: Delta, expected: tuple[bool, str]) -> None:
    case, metric_ = make_case(metric, delta=delta), metrics.get(metric)
    assert said(guards.work(case, metric_, [*pair({}, {"tokens": 80}), *pair()])) == expected
    assert said(guards.work(case, metric_, pair({"tokens": 80}))) == expected
    assert said(guards.work(case, metric_, pair())) == (True, "")


def steps(count: int, loss: float = 2.0) -> list[Sample]:
    return [Sample(step=i, timed=True, loss=loss, seconds=1.0, useful_tokens=100, raw_tokens=128) for i in range(count)]


@pytest.mark.parametrize(("baseline", "candidate"), [(1, 2), (2, 3)])
def test_work_and_losses_are_means_over_the_steps_of_a_run(baseline: int, candidate: int) -> None:
    found = pair({"samples": steps(baseline)}, {"samples": steps(candidate)})
    assert guards.work(make_case(), SECONDS, found).ok
    assert said(guards.loss(make_case(), found)) == (True, "mean losses differ by 0 %, at most 1 % is allowed")


def test_runs_that_timed_nothing_did_no_work() -> None:
    still = [s.model_copy(update={"timed": False}) for s in steps(2)]
    assert guards.work(make_case(), SECONDS, pair({"samples": still}, {"samples": still})).ok
    assert not guards.work(make_case(), SECONDS, pair({"samples": still})).ok


def without_loss(run: Run) -> Run:
    return run.model_copy(update={"samples": [s.model_copy(update={"loss": None}) for s in run.samples]})


def losing(*losses: float) -> list[tuple[Run, Run]]:
    """One pair for each difference of the candidate's mean loss from the baseline's 2, both lost on every step."""
    return [(make_run("baseline", samples=steps(3)), make_run("candidate", samples=steps(3, loss))) for loss in losses]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (losing(2.0, 2.0), (True, "mean losses differ by 0 %, at most 25 % is allowed")),
        (losing(1.5), (True, "mean losses differ by 25 %, at most 25 % is allowed")),
        (losing(2.0, 1.0, 2.0), (False, "mean losses differ by 50 %, at most 25 % is allowed")),
        (losing(4.0), (False, "mean losses differ by 50 %, at most 25 % is allowed")),
        (losing(-2.0), (False, "mean losses differ by 2e+02 %, at most 25 % is allowed")),
        ([(without_loss(a), b) for a, b in pair()], (False, "a run reported no loss in its timed window")),
        ([(a, without_loss(b)) for a, b in pair()], (False, "a run reported no loss in its timed window")),
    ],
)
def test_the_worst_pair_of_losses_counts(pairs: list[tuple[Run, Run]], expected: tuple[bool, str]) -> None:
    assert said(guards.loss(make_case(guardrails=Guardrails(loss=Loss(relative=0.25))), pairs)) == expected


def test_two_losses_of_nothing_are_equal() -> None:
    assert guards.loss(make_case(), pair({"samples": steps(2, 0.0)}, {"samples": steps(2, 0.0)})).ok


def test_losses_that_are_not_compared_say_why() -> None:
    case = make_case(guardrails=Guardrails(loss=Loss(relative=None, reason="another objective")))
    assert said(guards.loss(case, losing(9.0))) == (True, "not compared: another objective")


def test_noise_needs_two_pairs_on_record() -> None:
    none = (False, "no A/A pairs of this machine are on record for this case")
    for aa in (None, stored(), stored(0.01)):
        gate, differences = guards.noise(SECONDS, [], aa)
        assert (said(gate), differences) == (none, [])
    assert guards.noise(SECONDS, [], stored(0.01, 0.01))[0].ok


def test_noise_is_what_is_on_record_and_the_series_own_pairs_are_tested_against_it() -> None:
    gate, differences = guards.noise(SECONDS, [], stored(0.03, 0.04))
    assert differences == pytest.approx([0.03, -0.04])
    assert said(gate) == (True, "same configuration against itself: -0.50 % over 2 pairs, deviation 3.54 %")
    gate, differences = guards.noise(SECONDS, stored(0.06, -0.06, 0.06).runs, stored(*[0.01] * 8))
    assert differences == pytest.approx([0.01, -0.01] * 4)
    assert said(gate) == (False, "same configuration against itself: +6.00 % over 3 pairs, deviation 1.00 %")
    assert not guards.noise(SECONDS, [], stored(0.06, -0.0601, 0.0599, -0.06))[0].ok


def test_the_deviation_of_step_time_is_that_of_stored_pairs() -> None:
    assert guards.step_deviation(None) == guards.step_deviation(stored()) == 0.0
    assert guards.step_deviation(stored(0.03, -0.03)) == pytest.approx(0.03)


def drifting(share: float) -> list[Run]:
    """Four runs of forty steps, each of which takes so much more than the one before."""
    return [
        make_run(
            position=i,
            samples=[
                Sample(step=k, timed=True, loss=2.0, seconds=1 + share * k + 0.02 * ((k * 7 + i * 3) % 5), useful_tokens=1, raw_tokens=1)
                for k in range(40)
            ],
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("names", [("baseline", "candidate"), ("1", "2")])
def test_a_variant_that_drifts_is_named_with_its_drift(names: tuple[str, str]) -> None:
    still, slower = drifting(0.0), drifting(0.01)
    for sides, named in (((still, slower), names[1]), ((slower, still), names[0])):
        gate = guards.steady([dict(zip(names, block, strict=True)) for block in zip(*sides, strict=True)], 0.001)
        assert said(gate) == (False, f"{named} +31.7 % over the timed steps, gradually")
    assert said(guards.steady([dict(zip(names, block, strict=True)) for block in zip(still, still, strict=True)], 0.001)) == (
        True,
        "",
    )


@pytest.mark.parametrize(
    ("metric", "fields", "says"),
    [
        ("step_seconds", {}, None),
        ("step_seconds", {"steps_wanted": STEPS + 1}, f"baseline timed {STEPS} of {STEPS + 1} steps"),
        ("step_seconds", {"steps_wanted": STEPS - 1}, f"baseline timed {STEPS} of {STEPS - 1} steps"),
        *(
            (
                "step_seconds",
                {"samples": [*steps(1), steps(1)[0].model_copy(update={"seconds": bad})], "steps_wanted": 2},
                "baseline reported a step time that is not a positive number",
            )
            for bad in (0.0, -1.0, math.inf, math.nan)
        ),
        ("recompiles", {"metrics": {}}, "baseline reported no recompiles"),
        ("recompiles", {"metrics": {"recompiles": 0.0}}, None),
        ("step_seconds", {"samples": steps(2), "steps_wanted": 2}, None),
        ("state_bytes_per_rank", {"metrics": {"state_bytes_per_rank": 0.0}}, None),
        ("mfu", {"metrics": {"mfu": 0.25}}, None),
        ("mfu", {"metrics": {"mfu": 0.0}}, "baseline reported mfu of 0; it does not apply on this device"),
        ("mfu", {"metrics": {"mfu": -0.5}}, "baseline reported mfu of -0.5; it does not apply on this device"),
    ],
)
def test_a_run_without_usable_figures_says_which(metric: str, fields: dict, says: str | None) -> None:
    assert guards.complete(make_run(**fields), metrics.get(metric)) == says


@pytest.mark.parametrize(
    ("case", "tokens", "expected"),
    [
        (COMMAND, (0, 0), (True, "not compared: the log tells no tokens")),
        (COMMAND, (100, 100), (True, "")),
        (COMMAND, (100, 80), (False, IN_STEPS)),
        (make_case(), (0, 0), (True, "")),
    ],
)
def test_the_work_of_a_command_is_compared_where_its_log_tells_it(case: Case, tokens: tuple[int, int], expected: tuple[bool, str]) -> None:
    assert said(guards.work(case, SECONDS, pair({"tokens": tokens[0]}, {"tokens": tokens[1]}))) == expected


def test_the_losses_of_a_command_are_compared_where_its_log_tells_them() -> None:
    silent = without_loss(make_run()), without_loss(make_run(variant="candidate", position=1))
    assert said(guards.loss(COMMAND, [silent])) == (True, "not compared: the log tells no loss")
    assert not guards.loss(make_case(), [silent]).ok
    assert not guards.loss(COMMAND, [(make_run(), silent[1])]).ok, "one tells it and one does not"
    assert not guards.loss(COMMAND, pair({}, {"loss": 3.0})).ok


@pytest.mark.parametrize(
    ("delta", "seen", "ok"),
    [
        ({"environment": {"A": "2"}}, "a2", True),
        ({"environment": {"B": "2"}}, "a2", False),
        ({"revision": "v2"}, "source", True),
        ({"files": {"a": "b"}}, "source", True),
        ({"environment": {"A": "2"}}, "source", False),
    ],
)
def test_what_the_variants_of_a_command_set_may_differ(delta: dict, seen: str, ok: bool) -> None:
    strict = STRICT | {"source": {"env": {"A": "1"}, "trainer": {"world_size": 1, "source_sha": "t", "performance_revision": 2}}}
    case = COMMAND.model_copy(update={"candidate": delta})
    assert guards.environment(case, strict, [make_run(), make_run("candidate", strict_sha=seen)]).ok is ok
    plain = make_case().model_copy(update={"candidate": delta})
    assert not guards.environment(plain, strict, [make_run(), make_run("candidate", strict_sha=seen)]).ok


def test_rules_about_a_trace_are_asked_of_the_discarded_launch_and_those_about_the_log_of_the_others() -> None:
    both = Receipt(require=[Rule(collective="all_to_all", count="2"), Rule(log="overlap on")], forbid=[Rule(log="fallback")])
    case = COMMAND.model_copy(update={"activation": Activation(every=both), "trace": Traced(file="trace.json")})
    traced = make_run(role="burn_in", pair=None, observed=Observed(collectives=[CollectiveCount(op="all_to_all", count=2)]))
    logged = make_run(observed=Observed(logs={"overlap on": 1, "fallback": 0}))
    found = receipt.judge_case(case, [traced, logged, make_run(outcome="crash", observed=None)])
    assert [(c.ok, c.observed, c.runs) for c in found] == [(True, 1.0, 1), (True, 0.0, 1), (True, 2.0, 1)], found
    untraced = receipt.judge_case(case.model_copy(update={"trace": None}), [traced, logged])
    assert [c.ok for c in untraced] == [False, True, True], "without a trace of its own, launches of the series show all"
