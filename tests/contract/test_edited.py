"""A verdict whose test has been edited since: every reader is told what is otherwise, and nothing else is called an edit."""

from __future__ import annotations

import copy
import json
from datetime import date

import in_process
import pytest
from hypothesis import given
from hypothesis import strategies as st

from playbook import site_records, validate
from playbook.cards import by_claim
from playbook.cli_mcp import library_here
from playbook.mcp import claim_answer
from playbook.moved import Here
from playbook.paths import data_root
from playbook_bench import edited as module
from playbook_bench import preflight, store
from playbook_bench.case import load_case
from playbook_bench.edited import edited
from playbook_bench.store import standing

CASE = "moe-dispatcher-allgather-vs-alltoall"


@pytest.fixture(scope="module")
def record():
    """What was measured of a pair, by the newest record on a CPU, and its claim's card."""
    found = [(e, p) for p, e in store.records([data_root("results")]) if e.measured.case and e.measured.case.id == CASE]
    path = max((p for e, p in found if e.measured.machine.gpus == 0), key=lambda p: p.stem, default=max(p for _, p in found))
    return json.loads(path.read_text())["measured"]


def today(monkeypatch, **changes):
    """The case of today with other fields; the files stay as they are."""
    case = load_case(CASE)
    monkeypatch.setattr(module, "load_case", lambda _: case.model_copy(update=changes))


def test_a_case_as_it_was_is_not_edited(record):
    assert edited(record) == []


def test_both_values_of_a_setting_are_named(record, monkeypatch):
    case, profile = load_case(CASE), record["profile"]
    today(monkeypatch, profiles={**case.profiles, profile: {**case.profiles[profile], "data.seq_len": 64}})
    then = next(iter(record["configs"].values()))["data"]["seq_len"]
    assert edited(record) == [f"data.seq_len {then} -> 64"]


def test_a_setting_of_one_variant_says_whose(record, monkeypatch):
    today(monkeypatch, candidate={**load_case(CASE).candidate, "optimizer.lr": 0.5})
    (said,) = edited(record)
    assert said.startswith("candidate: optimizer.lr ")
    assert said.endswith(" -> 0.5")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"summary": "Other words.", "also": [], "budget": None, "guardrails": None, "activation": None}, []),
        ({"function": "another"}, ["what the case computes"]),
        ({"candidate": {}, "kind": "sweep"}, ["variants, or its profile"]),
        ({"profiles": {}}, ["variants, or its profile"]),
        ({"trainer": "trainer/configs/none.yaml"}, ["baseline, which cannot be read", "candidate, which cannot be read"]),
    ],
)
def test_what_decides_what_runs_counts_and_nothing_else(changes, said, record, monkeypatch):
    today(monkeypatch, **changes)
    found = edited(record)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_many_edits_are_counted(record, monkeypatch):
    case, profile = load_case(CASE), record["profile"]
    more = {"data.seq_len": 64, "train.steps": 3, "train.warmup_steps": 1, "optimizer.lr": 0.5, "seed": 7, "train.log_every": 3}
    today(monkeypatch, profiles={**case.profiles, profile: {**case.profiles[profile], **more}})
    found = edited(record)
    assert len(found) == 5
    assert found[-1] == "2 more"


def test_a_warm_up_that_the_harness_lengthened_is_no_edit(record):
    longer = copy.deepcopy(record)
    longer["plan"]["extended"] = True
    for train in (config["train"] for config in longer["configs"].values()):
        train["steps"], train["warmup_steps"] = 2 * train["steps"] - train["warmup_steps"], train["steps"]
    assert edited(longer) == []
    longer["configs"][next(iter(longer["configs"]))]["train"]["steps"] += 1
    assert edited(longer) != []


def test_a_part_of_the_model_that_came_or_went_is_an_edit(record):
    other = copy.deepcopy(record)
    for config in other["configs"].values():
        assert config["model"]["vision"] is None
        config["model"]["vision"] = {"depth": 27}
    assert edited(other) == ["model.vision {'depth': 27} -> None"]


def test_ranks_are_compared(record):
    other = copy.deepcopy(record)
    for run in other["runs"]:
        run["ranks"] += 1
    assert any(text.startswith("ranks ") for text in edited(other))


def test_values_of_a_record_stay_a_few_words_on_one_line(record):
    other = copy.deepcopy(record)
    for config in other["configs"].values():
        config["data"]["seq_len"] = "# a heading\n" * 50
    (said,) = edited(other)
    assert "\n" not in said
    assert len(said) < 120


@pytest.mark.parametrize("measured", [None, 7, [], {}, {"case": 1}, {"case": {"id": "../../etc/passwd", "content": {}}}, {"runs": "x"}])
def test_what_is_no_record_of_a_shipped_case_is_left_alone(measured):
    assert edited(measured) == []


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    )
)
def test_any_plain_data_has_an_answer(runs):
    assert isinstance(
        edited({"case": {"id": CASE, "content": {}}, "profile": "cpu", "runs": runs, "configs": {"a": {}}, "plan": None}), list
    )


def test_every_reader_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shelf = validate.load_all()
    claims = by_claim(shelf)
    every = [e for found in standing([data_root("results")], claims).values() for _, e in found if e.measured.runs]
    speaking = next(e for e in every if not edited(e.measured))
    claim = claims[speaking.measured.claim.id][1]
    monkeypatch.setattr(preflight, "here", lambda: Here(None, {}))
    monkeypatch.setattr(preflight, "performance_revision", lambda: speaking.measured.runs[0].performance_revision)
    home, case = claims[claim.id][0], speaking.measured.case
    original = module.load_case
    other = original(case.id)
    profile = {**other.profiles[speaking.measured.profile], "seed": 99}
    changed = other.model_copy(update={"profiles": {**other.profiles, speaking.measured.profile: profile}})
    monkeypatch.setattr(module, "load_case", lambda name: changed if name == case.id else original(name))
    wanted = f"its test has been edited since: seed {next(iter(speaking.measured.configs.values()))['seed']} -> 99"
    machine = speaking.measured.machine.name
    shown = json.loads(in_process.run(capsys, "cards", "show", home, "--json")[1])["status"][claim.id]["verdicts"]
    assert any(wanted in " ".join(v["stale"]) for v in shown if v["machine"] == machine)
    answered = claim_answer(library_here(), home, claim.id).verdicts[claim.id]
    assert any(wanted in (v.stale or "") for v in answered if v.machine == machine)
    page = next(r for r in site_records.read([data_root("results")], None, shelf, edited=edited) if r.id == speaking.evidence_id)
    assert page.stale(date(2026, 1, 1), claim) == wanted
