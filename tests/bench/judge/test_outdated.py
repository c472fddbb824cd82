"""A verdict whose test has been edited since: what is otherwise is told, and nothing else is called an edit."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from playbook.paths import data_root
from playbook.records.case import Rule, load_case
from playbook.records.evidence import Measured
from playbook.records.read import EVIDENCE, read
from playbook_bench.judge import receipt

CASE = "moe-dispatcher-allgather-vs-alltoall"


@cache
def measured():
    """What was measured of a pair whose test is as it was."""
    found = [r.data["measured"] for r in read([data_root("results")]) if r.schema == EVIDENCE and r.get("measured", "case", "id") == CASE]
    return next(each for each in found if not changes_of(each))


@pytest.fixture
def record():
    """That record, to be changed."""
    return copy.deepcopy(measured())


def changes_of(measured):
    """What the harness says of a record's plain data."""
    return receipt.case_changes(Measured.model_validate(measured))


def today(monkeypatch, **changes):
    """The case of today with other fields; the files stay as they are."""
    case = load_case(CASE)
    monkeypatch.setattr(receipt, "load_case", lambda _: case.model_copy(update=changes))


def test_both_values_of_a_setting_are_named(record, monkeypatch):
    case, profile = load_case(CASE), record["profile"]
    today(monkeypatch, profiles={**case.profiles, profile: {**case.profiles[profile], "data.seq_len": 64}})
    then = next(iter(record["configs"].values()))["data"]["seq_len"]
    assert changes_of(record) == [f"data.seq_len {then} -> 64"]


def test_a_setting_of_one_variant_says_whose(record, monkeypatch):
    today(monkeypatch, candidate={**load_case(CASE).candidate, "optimizer.lr": 0.5})
    (said,) = changes_of(record)
    assert said.startswith("candidate: optimizer.lr ")
    assert said.endswith(" -> 0.5")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"summary": "Other words.", "also": [], "guardrails": None}, []),
        ({"function": "another"}, ["what the case computes"]),
        ({"candidate": {}, "kind": "sweep"}, ["variants, or its profile"]),
        ({"profiles": {}}, ["variants, or its profile"]),
        ({"trainer": "trainer/configs/none.yaml"}, ["baseline, which cannot be read", "candidate, which cannot be read"]),
    ],
)
def test_what_decides_what_runs_counts_and_nothing_else(changes, said, record, monkeypatch):
    today(monkeypatch, **changes)
    found = changes_of(record)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(collective="all_to_all", inside="dispatch"), []),
        (
            Rule(collective="all_to_all", op=">=", count="1000 * layers"),
            ["baseline: its proof wants require all_to_all >= 1000 * layers = "],
        ),
        (Rule(counter="of_tomorrow"), ["baseline: its proof wants require of_tomorrow >= 1, found not reported"]),
    ],
)
def test_a_proof_that_the_launches_do_not_meet_is_another_test(rule, said, record, monkeypatch):
    """One that they meet as well is none."""
    proof = load_case(CASE).activation
    baseline = proof.baseline.model_copy(update={"require": [*proof.baseline.require, rule]})
    today(monkeypatch, activation=proof.model_copy(update={"baseline": baseline}))
    found = changes_of(record)
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_launches_that_were_not_counted_prove_nothing(record, monkeypatch):
    """A discarded first launch, or one that failed, is not what the verdict rests on."""
    proof = load_case(CASE).activation
    strict = proof.baseline.model_copy(update={"require": [Rule(counter="of_tomorrow")]})
    today(monkeypatch, activation=proof.model_copy(update={"baseline": strict}))
    for run in record["runs"]:
        run["role"] = "burn_in"
    assert changes_of(record) == []


def test_many_edits_are_counted(record, monkeypatch):
    case, profile = load_case(CASE), record["profile"]
    more = {"data.seq_len": 64, "train.steps": 3, "train.warmup_steps": 1, "optimizer.lr": 0.5, "seed": 7, "train.log_every": 3}
    today(monkeypatch, profiles={**case.profiles, profile: {**case.profiles[profile], **more}})
    found = changes_of(record)
    assert len(found) == 5
    assert found[-1] == "2 more"


def test_a_warm_up_that_the_harness_lengthened_is_no_edit(record):
    record["plan"]["extended"] = True
    for train in (config["train"] for config in record["configs"].values()):
        train["steps"], train["warmup_steps"] = 2 * train["steps"] - train["warmup_steps"], train["steps"]
    assert changes_of(record) == []
    record["configs"][next(iter(record["configs"]))]["train"]["steps"] += 1
    assert changes_of(record) != []


def test_a_part_of_the_model_that_came_or_went_is_an_edit(record):
    for config in record["configs"].values():
        assert config["model"]["vision"] is None
        config["model"]["vision"] = {"depth": 27}
    assert changes_of(record) == ["model.vision {'depth': 27} -> None"]


def test_ranks_are_compared(record):
    for run in record["runs"]:
        run["ranks"] += 1
    assert any(text.startswith("ranks ") for text in changes_of(record))


def test_values_of_a_record_stay_a_few_words_on_one_line(record):
    for config in record["configs"].values():
        config["data"]["seq_len"] = "# a heading\n" * 50
    (said,) = changes_of(record)
    assert "\n" not in said
    assert len(said) < 120


def test_a_record_of_no_shipped_case_is_left_alone(record):
    assert changes_of({**record, "case": None}) == []
    assert changes_of({**record, "case": {**record["case"], "id": "../../etc/passwd"}}) == []
