"""What the gate decides from invented launches of commits, without git and without processes: what ends it, what it says, what it costs in launches."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any
from unittest.mock import create_autospec

import pytest

from playbook.errors import ConfigError, LaunchError
from playbook.records.case import Activation, Budget, Case, Guardrails, Loss, Receipt, Rule
from playbook_bench.judge import statistics
from playbook_bench.judge.verdict import OUTSIDE
from playbook_bench.judge.verdict_rules import Rules
from playbook_bench.launch.outcome import Result
from playbook_bench.machine import detect
from playbook_bench.run import gate
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.variants import checkout

RIPPLE = [0.002, -0.001, 0.001, -0.002, 0.0015, -0.0015]
SPEED, BYTES = "useful_tokens_per_s_per_gpu", "dispatch_bytes_per_token_layer"


class Invented:
    """A launcher that writes what a run would; `commits` says by variant what is planted."""

    def __init__(self, commits: dict[str, dict[str, Any]]) -> None:
        self.commits, self.launched = commits, []

    def run(self, spec: Any, on_step: Any = None) -> Result:
        variant = spec.folder.name.split("-")[1]
        planted = self.commits.get(variant, {})
        number = sum(v == variant for v in self.launched)
        self.launched.append(variant)
        factor = planted.get("factor", 1.0) * (1 + planted.get("noise", 1.0) * RIPPLE[len(self.launched) % 6])
        rows = [
            {
                "step": step,
                "timed": step > 2,
                "loss": 5.0 - 0.01 * step + planted.get("loss", 0.0),
                "grad_norm": planted.get("grad_norm", 1.0),
                "peak_memory_bytes": planted.get("memory", 1000),
                "seconds": 0.1 * factor * (1 + RIPPLE[step % 6]),
                "data_seconds": planted.get("waiting", 0.0) * 0.1 * factor,
                "useful_tokens": planted.get("tokens", 1000),
                "raw_tokens": 1024,
            }
            for step in range(1, 13 - planted.get("missing_steps", {}).get(number, 0))
        ]
        (spec.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        summary = {
            "outcome": "ok", "world_size": 1, "source_sha": planted.get("source", "s"), "performance_revision": 1,
            "revisions": planted.get("revisions", {}), "data_sha": planted.get("data", "d"),
            "num_parameters": 10, "trained_parameters": 10,
            "seconds": {"timed": sum(r["seconds"] for r in rows if r["timed"])},
            "metrics": {BYTES: planted.get("bytes", 100), "recompiles": 0, OUTSIDE: 10.0 + planted.get("outside", 0.0)},
            "receipt": {"numbers": {"layers": 4}, "collectives": [{"op": planted.get("collective", "all_to_all"), "count": 4}], "counters": {"recompiles": 0}},
            "env": {"strict": {"torch": "none"}},
        }  # fmt: skip
        (spec.folder / "summary.json").write_text(json.dumps(summary))
        outcome = planted.get("outcome", {}).get(number, "ok")
        return Result(
            outcome,
            0 if outcome == "ok" else 1,
            "" if outcome == "ok" else "why",
            0.0,
            10.0 + planted.get("outside", 0.0) + sum(r["seconds"] for r in rows),
        )


CASE = Case(
    id="planted",
    summary="s",
    trainer="trainer/configs/qwen3_moe_tiny.yaml",
    metric=SPEED,
    baseline={"moe.dispatcher": "alltoall"},
    candidate={"moe.dispatcher": "allgather"},
    profiles={"cpu": {"ranks": 1, "train.steps": 12, "train.warmup_steps": 2}},
    activation=Activation(baseline=Receipt(require=[Rule(collective="all_to_all")])),
)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Runs the gate on what is planted in each commit; the configurations that the trees resolve differ in `resolved`."""
    real: dict[str, Any] = {}

    @contextlib.contextmanager
    def files_of(root, reference):
        (tmp_path / reference).mkdir(exist_ok=True)
        yield tmp_path / reference

    def resolve_in(tree, path, trainer, overrides):
        real.setdefault("overrides", []).append((tree.name, str(trainer), dict(overrides)))
        found = json.loads(json.dumps(real["dump"]))
        for key, value in real.get(tree.name, {}).items():
            if isinstance(value, Exception):
                raise value
            section, _, name = key.rpartition(".")
            (found[section] if section else found)[name] = value
        return found

    monkeypatch.setattr(checkout, "repository", lambda root: tmp_path)
    monkeypatch.setattr(checkout, "commit_of", lambda root, reference: {"also-old": "old"}.get(reference, reference))
    monkeypatch.setattr(checkout, "files_of", files_of)
    monkeypatch.setattr(checkout, "resolve_in", resolve_in)
    monkeypatch.setattr(detect, "exported", dict)

    def run(case=CASE, limits=None, anchor=None, resolved=None, noted=None, since=None, **commits):
        commits["anchor"] = since or {}
        options = {k: commits.pop(k) for k in ("pairs", "budget_s") if k in commits}
        launcher = Invented(commits)
        real.update({"dump": gate.resolve_variant(case, "baseline", "cpu").dump}, **(resolved or {}))
        asked = Options(profile="cpu", results=tmp_path / "results", launcher=launcher, seed=1, **options)
        (tmp_path / "new").mkdir(exist_ok=True)
        found = gate.run(case, "old", asked, limits, noted, root=tmp_path, judged=tmp_path / "new", anchor=anchor)
        return found, launcher.launched

    run.real = real
    return run


# Burn-in of both, 8 launches of four pairs.
@pytest.mark.parametrize(
    ("factor", "status", "code", "words"),
    [(1.0, "pass", 0, "is ruled out"), (0.98, "pass", 0, "is ruled out"), (1.1, "regression", 1, "is certain")],
)
def test_a_clear_answer_takes_four_pairs(judged, factor, status, code, words):
    found, launched = judged(candidate={"factor": factor})
    assert (found.status, found.exit_code, found.limit) == (status, code, 0.03), found.sentence
    told = re.match(rf"{SPEED}: (faster|slower) by (\S+) % \[", found.sentence)
    assert {"faster": -1, "slower": 1}[told[1]] * float(told[2]) == pytest.approx(100 * (factor - 1), abs=0.3)
    assert found.sentence.endswith(f"a slowdown above 3 % {words}")
    assert (len(launched), launched.count("baseline")) == (10, 5)
    assert (found.case, found.reference, found.profile, found.pairs_needed, found.anchor) == ("planted", "old", "cpu", None, None)
    assert (found.comparison.pairs, found.comparison.look) == (4, 1)
    assert found.comparison.effect == pytest.approx(1 / factor - 1, abs=0.003)
    assert {g.name for g in found.gates} == {
        "environment", "data", "parameters", "work", "loss", "fields", "skipped_steps", "grad_norm", "memory", "process", "carry_over",
    }  # fmt: skip


def test_what_is_told_as_json_is_what_was_found(judged):
    found, launched = judged(candidate={"factor": 1.1})
    told = gate.as_json(found)
    assert told == {
        "schema": "gate/1", "status": "regression", "exit_code": 1, "sentence": found.sentence, "case": "planted", "baseline": "old",
        "profile": "cpu", "limit": 0.03, "pairs_needed": None, "differences": [], "revision": "", "launches": len(launched), "anchor": None,
        "comparison": found.comparison.model_dump(mode="json"), "gates": [g.model_dump(mode="json") for g in found.gates],
    }  # fmt: skip


def test_near_the_limit_further_pairs_are_run_to_the_last_look_and_the_number_that_would_settle_it_is_named(judged):
    found, launched = judged(candidate={"factor": 1.0265, "noise": 4.0}, baseline={"noise": 4.0})
    assert (found.status, found.exit_code, len(launched)) == ("undecided", 3, 2 + 24), found.sentence
    need = found.pairs_needed
    bounds = re.search(r"\[(\S+), (\S+)\]: a slowdown above 3 % is neither shown nor ruled out after 12 pairs; (.*)$", found.sentence)
    excluded, settles = bounds[3].split("; ")
    assert excluded == f"one above {math.ceil(float(bounds[2]))} % is ruled out"
    told = f"about {need} pairs would settle it at this noise (--pairs {need}, and a --budget for them)"
    assert settles == (told if need else "it lies so near that no number of pairs tells: a person decides, or another --limit")
    near, _ = judged(candidate={"factor": 1.01, "noise": 6.0}, baseline={"noise": 6.0}, pairs=4)
    assert (near.status, near.pairs_needed is not None) == ("undecided", True), near.sentence
    assert f"about {near.pairs_needed} pairs would settle it" in near.sentence


def test_noise_ends_the_series_at_its_first_look_with_its_cause(judged):
    found, launched = judged(candidate={"noise": 60.0}, baseline={"noise": 60.0})
    assert (found.status, found.exit_code, len(launched)) == ("too_noisy", 3, 10), found.sentence
    assert "too noisy to see a slowdown above 3 % even with 100 pairs: launches of one commit differ by" in found.sentence
    assert found.sentence.endswith("quieten the machine, or raise --limit")


@pytest.mark.parametrize(("pairs", "why"), [(1, "stopped after 1 of the 4"), (2, "stopped after 2 of the 4")])
def test_fewer_pairs_than_a_look_show_nothing_however_clear(judged, pairs, why):
    found, launched = judged(candidate={"factor": 2.0}, pairs=pairs)
    assert (found.status, min(launched.count(v) for v in ("baseline", "candidate"))) == ("undecided", 1 + pairs), found.sentence
    assert len(launched) <= 10
    assert f"{why} pairs that the gate needs, without a failure; raise --budget (or --pairs)" in found.sentence


def test_a_budget_that_holds_no_pair_shows_nothing(judged):
    found, launched = judged(budget_s=1e-6)
    assert (found.status, found.comparison, len(launched)) == ("undecided", None, 2), found.sentence
    assert "stopped after 0 of the 4 pairs" in found.sentence


@pytest.mark.parametrize("variant", ["baseline", "candidate"])
@pytest.mark.parametrize(
    ("planted", "says"), [({"outcome": {0: "nan"}}, "ended as nan: why"), ({"missing_steps": {0: 1}}, "timed 9 of 10 steps")]
)
def test_a_first_launch_that_cannot_be_used_is_the_last(judged, variant, planted, says):
    found, launched = judged(**{variant: planted})
    assert (found.status, found.exit_code) == ("error", 5), found.sentence
    assert says in found.sentence
    assert launched[-1] == variant
    assert launched.count(variant) == 1
    assert len(found.runs) == len(launched) <= 2


def test_a_later_launch_that_cannot_be_used_is_no_pass(judged):
    for variant, number in (("baseline", 3), ("candidate", 2)):
        found, launched = judged(**{variant: {"outcome": {number: "crash"}}})
        assert (found.status, f"a {variant} run ended as crash: why" in found.sentence) == ("error", True), found.sentence
        assert launched.count(variant) == number + 1
    found, _ = judged(candidate={"missing_steps": {1: 1}})
    assert (found.status, "a run cannot be used: candidate timed 9 of 10 steps" in found.sentence) == ("error", True), found.sentence


def test_a_path_that_did_not_run_is_no_pass(judged):
    found, _ = judged(candidate={"collective": "all_gather"})
    assert found.status == "error"
    assert found.sentence.startswith("the candidate did not run as configured: require all_to_all")


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({"data": "other"}, "the two commits cannot be compared: data"),
        ({"tokens": 900}, "the two commits cannot be compared: work"),
        ({"loss": 0.1}, "the two commits cannot be compared: loss: mean losses differ by 2 %"),
        ({"grad_norm": 2.0}, "the two commits cannot be compared: grad_norm"),
    ],
)
@pytest.mark.parametrize("metric", [SPEED, BYTES])
def test_a_commit_that_trains_otherwise_is_no_pass(judged, planted, says, metric):
    found, launched = judged(case=CASE.model_copy(update={"metric": metric}), candidate=planted)
    assert (found.status, says in found.sentence) == ("error", True), found.sentence
    assert (len(launched) == 2) == (metric == BYTES or "grad_norm" not in planted), "what the first launch of each shows takes no more"


def test_a_loss_within_the_band_is_told_apart_once_launches_of_one_commit_show_their_rounding(judged):
    found, launched = judged(candidate={"loss": 0.02})
    assert "the two commits cannot be compared: loss: loss of step 12 is 4.9, and 4.88 before" in found.sentence
    assert len(launched) > 2


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({"memory": 1030}, "peak memory +3.0 %"),
        (
            {"outside": 5.0},
            "beside its timed steps a launch is longer by 44.6 % of the older one's time [+44.6, +44.7]: more than 3 % is certain",
        ),
    ],
)
def test_a_commit_that_costs_more_beside_its_steps_is_a_regression(judged, planted, says):
    found, _ = judged(candidate=planted)
    assert (found.status, says in found.sentence) == ("regression", True), found.sentence
    allowed = gate.Limits(allowed={"memory": 0.05, "process": 9.0})
    assert judged(candidate=planted, limits=allowed)[0].status == "pass"


def test_steps_that_slow_down_are_a_regression_whatever_is_saved_beside_them(judged):
    found, _ = judged(baseline={"outside": 0.15}, candidate={"factor": 1.2})
    assert found.status == "regression", found.sentence


def test_sources_and_revision_may_differ_between_commits(judged):
    for planted in ({}, {"factor": 0.9, "revisions": {"torch.experts": 2}}):
        found, _ = judged(candidate={"source": "t", **planted})
        assert (found.status, found.revision) == ("pass", "")


@pytest.mark.parametrize(
    ("files", "paths"),
    [
        ({}, "torch"),
        ({"exit_codes.py": "1"}, "torch"),
        ({"torch/kernels/experts.py": "1"}, "torch.experts"),
        ({"torch/parallel/dispatch.py": "1", "exit_codes.py": "1"}, "torch.experts"),
        ({"data/packing.py": "1", "torch/model/vision.py": "1"}, "data"),
        ({"loop.py": "1", "torch/engine.py": "1"}, "loop and torch"),
    ],
)
def test_the_paths_to_raise_are_those_that_ran_and_whose_files_changed(judged, tmp_path, files, paths):
    for name, text in files.items():
        path = tmp_path / "new" / "trainer" / "playbook_trainer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found, _ = judged(candidate={"source": "t", "factor": 0.9})
    assert f"raise the revision of {paths} in playbook_trainer/revision.py" in found.revision


@pytest.mark.parametrize(
    ("after", "allowed", "status"), [(100, 0.0, "pass"), (99, 0.0, "pass"), (101, 0.0, "regression"), (101, 0.01, "pass")]
)
def test_an_exact_metric_takes_one_pair_and_may_not_get_worse(judged, after, allowed, status):
    limits = gate.Limits(allowed={"metric": allowed}) if allowed else None
    found, launched = judged(case=CASE.model_copy(update={"metric": BYTES}), limits=limits, candidate={"bytes": after})
    assert (found.status, sorted(launched)) == (status, ["baseline", "candidate"]), found.sentence
    assert found.sentence == f"{BYTES} {100 * (100 / after - 1):+.1f} %" + (", 1 % is allowed" if allowed else "")
    dearer, _ = judged(case=CASE.model_copy(update={"metric": BYTES}), limits=limits, candidate={"bytes": 90, "memory": 1200})
    assert (dearer.status, dearer.sentence) == (
        "regression",
        f"{BYTES} +11.1 %" + (", 1 % is allowed" if allowed else "") + "; peak memory +20.0 %",
    )


def test_the_worse_of_baseline_and_anchor_counts(judged):
    """The last commit is as fast, the accepted one was not: burn-in of three, then blocks of three."""
    found, launched = judged(baseline={"factor": 1.1}, candidate={"factor": 1.1}, anchor="first")
    assert (found.status, found.exit_code, found.anchor.status, found.anchor.reference) == ("regression", 1, "regression", "first")
    assert "is ruled out; since the anchor first: " in found.sentence
    assert found.sentence.endswith("a slowdown above 3 % is certain")
    assert {v: launched.count(v) for v in ("baseline", "candidate", "anchor")} == {"baseline": 7, "candidate": 7, "anchor": 7}
    assert len(found.anchor.runs) == len(found.runs) == 21
    assert gate.as_json(found)["anchor"]["status"] == "regression"
    found, _ = judged(baseline={"factor": 0.9}, candidate={}, anchor="first")
    assert (found.status, found.anchor.status) == ("regression", "pass")
    found, _ = judged(anchor="first")
    assert (found.status, found.anchor.status, found.pairs_needed) == ("pass", "pass", None)


def test_what_is_open_since_the_anchor_goes_on_although_the_baseline_is_settled(judged):
    found, launched = judged(baseline={"factor": 1.028, "noise": 3.0}, candidate={"factor": 1.028, "noise": 3.0}, anchor="first")
    assert (found.status, found.anchor.status) == ("undecided", "undecided"), found.sentence
    assert "is ruled out; since the anchor" in found.sentence
    assert found.pairs_needed == found.anchor.pairs_needed
    assert launched.count("candidate") == 13, "one to warm up, and all looks"


def test_the_larger_number_of_pairs_is_asked_for(judged):
    noisy = {"noise": 6.0}
    found, _ = judged(since={"factor": 0.99, **noisy}, baseline=noisy, candidate=noisy, anchor="first", pairs=4)
    alone, _ = judged(baseline=noisy, candidate=noisy, pairs=4)
    assert found.anchor.pairs_needed is not None, found.sentence
    assert found.pairs_needed == max(found.anchor.pairs_needed, alone.pairs_needed) > alone.pairs_needed


def test_training_may_have_changed_since_the_anchor_and_its_work_may_not(judged):
    found, _ = judged(anchor="first", since={"loss": 0.5, "data": "then", "grad_norm": 3.0})
    assert (found.status, found.anchor.status, [g.name for g in found.anchor.gates]) == (
        "pass",
        "pass",
        ["work", "memory", "process", "carry_over"],
    )
    found, _ = judged(anchor="first", since={"tokens": 500})
    assert (found.status, found.anchor.status) == ("error", "error")
    assert "since the anchor first: the two commits cannot be compared: work" in found.sentence
    found, _ = judged(anchor="first", candidate={"outcome": {2: "crash"}})
    assert (found.status, found.anchor) == ("error", None)


@pytest.mark.parametrize("anchor", ["old", "also-old"])
def test_an_anchor_that_is_the_baseline_is_not_run_twice(judged, anchor):
    found, launched = judged(anchor=anchor)
    assert (found.anchor, "anchor" in launched) == (None, False)


def test_what_the_trees_resolve_differently_is_said_first(judged):
    noted, exact = create_autospec(Progress), create_autospec(Progress)
    found, _ = judged(resolved={"new": {"seed": 7, "train.brand_new": 1}}, noted=noted)
    assert found.differences == ["seed: 1234 -> 7", "train.brand_new: no such key -> 1"]
    assert (
        noted.note.mock_calls[0].args[0]
        == "the commits resolve the configuration differently: seed: 1234 -> 7; train.brand_new: no such key -> 1"
    )
    assert found.status == "pass"
    noted.series.assert_called_once_with("gate planted", 10)
    judged(case=CASE.model_copy(update={"metric": BYTES}), noted=exact)
    exact.series.assert_called_once_with("gate planted", 2)


@pytest.mark.parametrize(
    ("resolved", "says"),
    [
        ({"new": {"train.steps": 13}}, "the candidate trains 13 steps and not 12; name them in the case's profile"),
        ({"old": {"train.warmup_steps": 3}}, "the baseline trains 12 steps and not 12; name them in the case's profile"),
        ({"old": {"train.steps": LaunchError("no such key")}}, "the baseline cannot be run: no such key"),
    ],
)
def test_a_tree_that_resolves_another_number_of_steps_is_not_run(judged, resolved, says):
    found, launched = judged(resolved=resolved)
    assert (found.status, found.sentence, launched) == ("error", says, [])


def test_each_tree_is_asked_for_the_cases_file_with_the_overrides_of_its_first_variant(judged):
    own = CASE.model_copy(update={"variant_profiles": {"cpu": {"baseline": {"train.global_batch_size": 4}, "candidate": {}}}})
    judged(case=own.model_copy(update={"metric": BYTES}), anchor="first")
    asked = judged.real["overrides"]
    assert {(tree, file) for tree, file, _ in asked} == {(tree, "qwen3_moe_tiny.yaml") for tree in ("old", "new", "first")}
    wanted = {"train.steps": 12, "train.warmup_steps": 2, "moe.dispatcher": "alltoall", "train.global_batch_size": 4}
    assert all(wanted.items() <= overrides.items() for _, _, overrides in asked)


@pytest.mark.parametrize(
    ("looks", "pairs", "all_looks"),
    [([4, 12], 20, range(4, 21, 2)), ([4, 8, 12], 19, range(4, 19, 2)), ([4, 8, 12], None, range(4, 13, 2)), ([4], 9, (4, 8))],
)
def test_further_looks_are_as_far_apart_as_the_last_two_and_within_the_pairs(judged, looks, pairs, all_looks):
    open_ = {"factor": 1.03, "noise": 4.0}
    found, _ = judged(case=CASE.model_copy(update={"budget": Budget(pairs=looks)}), candidate=open_, baseline={"noise": 4.0}, pairs=pairs)
    assert found.comparison.pairs == all_looks[-1]
    assert found.comparison.alpha_look == pytest.approx(statistics.levels(tuple(all_looks), Rules.spent * 0.05)[-1])


def test_two_pairs_are_enough_where_they_are_a_look(judged):
    found, launched = judged(case=CASE.model_copy(update={"budget": Budget(pairs=[2, 4])}), candidate={"factor": 1.2})
    assert (found.status, len(launched)) == ("regression", 2 + 4), found.sentence


@pytest.mark.parametrize(("relative", "ok"), [(0.5, True), (0.015, False), (None, False)])
def test_the_mean_loss_stays_within_the_cases_band_or_the_usual_one(judged, relative, ok):
    loss = Loss(relative=relative, reason="r") if relative is None else Loss(relative=relative)
    own = CASE.model_copy(update={"metric": BYTES, "guardrails": Guardrails(loss=loss)})
    found, _ = judged(case=own, candidate={"loss": 0.1})
    assert next(g for g in found.gates if g.name == "loss").ok is ok


@pytest.mark.parametrize(
    ("metric", "planted", "status"), [(SPEED, {"factor": 2.3}, "regression"), ("data_time_share", {"waiting": 0.8}, "pass")]
)
def test_a_limit_is_a_share_of_the_time_or_so_many_points(judged, metric, planted, status):
    """Twice as long is the limit of 100 %, as a ratio; 80 points are less than 100."""
    found, _ = judged(
        case=CASE.model_copy(update={"metric": metric}), candidate=planted, limits=gate.Limits(limit=1.0, allowed={"process": 9.0})
    )
    assert found.status == status, found.sentence


@pytest.mark.parametrize("limit", [0.0, -0.01, 10.0])
def test_a_limit_leaves_room_for_something(limit):
    with pytest.raises(ConfigError, match="--limit is"):
        gate.Limits(limit=limit)
    assert gate.Limits(limit=9.9).limit == 9.9
    assert gate.Limits(allowed={"loss": 0.0}).allowed == {"loss": 0.0}
    with pytest.raises(ConfigError, match="loss is -1 %"):
        gate.Limits(allowed={"loss": -0.01})
    with pytest.raises(ConfigError, match="--allow speed is not known"):
        gate.Limits(allowed={"speed": 0.1})


def test_a_case_that_launches_nothing_is_refused(judged):
    with pytest.raises(ConfigError, match="launches nothing"):
        gate.run(Case(id="a", kind="arithmetic", summary="s", function="x"), "old")


def test_a_limit_of_the_users_is_the_one_that_counts(judged):
    found, _ = judged(candidate={"factor": 1.1}, limits=gate.Limits(limit=0.2))
    assert (found.status, found.limit) == ("pass", 0.2)
    assert "a slowdown above 20 % is ruled out" in found.sentence


def test_a_metric_that_is_compared_by_difference_is_told_in_points(judged):
    waiting = CASE.model_copy(update={"metric": "data_time_share"})
    found, _ = judged(case=waiting, candidate={"waiting": 0.1})
    assert (found.status, found.sentence.startswith("data_time_share: slower by 10.0 points [")) == ("regression", True), found.sentence
