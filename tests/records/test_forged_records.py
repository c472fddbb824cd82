"""Records that were changed and sealed again: every reader refuses them alike, and says why."""

from __future__ import annotations

import contextlib
import copy
import json
from datetime import date
from pathlib import Path

import in_process
import pytest

from playbook.cards.load import load_all
from playbook.cards.model import by_claim
from playbook.errors import ConfigError, StoreError
from playbook.paths import data_root
from playbook.records.evidence import Measured, stored_sha
from playbook.records.read import read, standings, verdicts
from playbook_app.mcp.answers import library_here
from playbook_app.mcp.server import evidence_list
from playbook_app.services import check
from playbook_app.site.cards import Shelf
from playbook_app.site.evidence import evidence_page
from playbook_app.site.text import text
from playbook_bench.judge import receipt
from playbook_bench.run import replay, store

CPU = "01M80142Q87YRVRJJAXCMBK0K2"
"""A committed record of a pair with launches, measured on a CPU."""


def measured_on_a_cpu() -> dict:
    """The record as the harness would write it under rules of version 2."""
    found = json.loads((data_root("results") / "cpu" / f"{CPU}.json").read_text(encoding="utf-8"))
    found["measured"]["plan"]["rules"] = 2
    found["derived"] = replay.derive(Measured.model_validate(found["measured"])).model_dump(mode="json")
    return found


@pytest.fixture(scope="module")
def data():
    return measured_on_a_cpu()


def sealed(folder: Path, data: dict, change=None, name: str = "forged") -> Path:
    """A copy of a record with a change, a hash that fits, and the verdict that follows from it where there is one."""
    forged = copy.deepcopy(data)
    if change:
        change(forged["measured"])
    with contextlib.suppress(ValueError, ConfigError):
        forged["derived"] = replay.derive(Measured.model_validate(forged["measured"])).model_dump(mode="json")
    forged["sha256"] = stored_sha(forged)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(forged), encoding="utf-8")
    return path


def halve(measured):
    for run in measured["runs"]:
        if run["variant"] == "candidate":
            for sample in run["samples"]:
                sample["seconds"] /= 2


def duplicate(measured):
    """The last pair once more under new names."""
    last = max(r["pair"] for r in measured["runs"] if r["role"] == "measure")
    again = [copy.deepcopy(r) for r in measured["runs"] if r["role"] == "measure" and r["pair"] == last]
    for i, run in enumerate(again):
        run.update(run_id=f"{run['run_id']}-again", pair=last + 1, position=len(measured["runs"]) + i)
    measured["runs"] += again
    measured["plan"]["order"].append(measured["plan"]["order"][-1])


def drop(measured):
    last = max(r["pair"] for r in measured["runs"] if r["role"] == "measure")
    measured["runs"] = [r for r in measured["runs"] if r["role"] != "measure" or r["pair"] != last]


def noiseless(measured):
    for run in measured["aa"]["runs"]:
        run["samples"] = measured["aa"]["runs"][0]["samples"]


def swap_order(measured):
    measured["plan"]["order"][0] = measured["plan"]["order"][0][::-1]


def of_another_configuration(measured, **more):
    """An A/A that says it is of the neighbourhood: of the same place, and of a configuration that no run of the series has."""
    shared = next(iter(measured["configs"].values()))
    measured["aa"].update(place="here", config={**shared, **more})
    for run in measured["aa"]["runs"]:
        run.update(config_sha="0" * 16, started="2020-01-01T00:00:00Z")


def no_window(measured):
    halve(measured)
    for run in measured["runs"]:
        run["seconds"]["timed"] = 0.0


def tenfold(runs):
    for run in runs:
        run["seconds"]["timed"] *= 10
        for sample in run["samples"]:
            sample["seconds"] *= 10


def leave_out(measured):
    """The first pair: those after it move up, in the order that they had."""
    measured["runs"] = [r for r in measured["runs"] if r["role"] != "measure" or r["pair"] != 0]
    for position, run in enumerate(measured["runs"]):
        run.update(position=position, pair=run["pair"] - 1 if run["role"] == "measure" else run["pair"])
    del measured["plan"]["order"][0]


def at_once(measured):
    for run in measured["runs"]:
        run["started"] = measured["runs"][0]["started"]


FORGERIES = {
    "candidate times halved, without a window": (no_window, "its timed window 0 s"),
    "steps longer than their launch": (lambda m: tenfold(r for r in m["runs"] if r["variant"] == "candidate"), "the whole launch"),
    "A/A of steps longer than their launch": (lambda m: tenfold(m["aa"]["runs"]), "the whole launch"),
    "A/A without a window": (lambda m: [r["seconds"].update(timed=0.0) for r in m["aa"]["runs"]], "its timed window 0 s"),
    "a pair left out and the rest renumbered": (leave_out, "its seed gives"),
    "another seed": (lambda m: m["plan"].update(seed=m["plan"]["seed"] + 1), "its seed gives"),
    "launches at once": (at_once, "launches follow one another"),
    "candidate times halved": (halve, "timed window"),
    "error rate": (lambda m: m["plan"].update(alpha=0.9), "error rate"),
    "looks": (lambda m: m["plan"].update(looks=[2, 4]), "looks after"),
    "duplicated pair": (duplicate, "same step times"),
    "deleted pair": (drop, "pairs, the runs are of"),
    "order": (swap_order, "its order says"),
    "noiseless A/A": (noiseless, "same step times"),
    "A/A of another machine": (lambda m: m["aa"].update(machine="h200x4"), "the A/A is of h200x4"),
    "A/A of another environment": (lambda m: m["aa"].update(noise_key="0" * 16), "noise key"),
    "A/A of another workload": (
        lambda m: of_another_configuration(m, backend="megatron"),
        "another environment, backend or number of ranks",
    ),
    "A/A of another year": (of_another_configuration, "was not measured within"),
    "another machine's name": (lambda m: m["machine"].update(name="h200x4"), "is called h200x4"),
    "another machine": (lambda m: m["machine"].update(cpu="Another CPU"), "another machine: cpu"),
    "rules that nobody knows": (lambda m: m["plan"].update(rules=1), "rules of version 1"),
    "another host's memory": (lambda m: m["machine"].update(memory_gib=8.0), "another machine: memory_gib"),
    "another case's name": (lambda m: m["case"].update(id="another-case"), "the case is called another-case"),
    "a run twice": (lambda m: m["runs"].append(m["runs"][-1]), "used twice"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_that_was_sealed_again_counts_for_nothing(tmp_path, data, name):
    change, said = FORGERIES[name]
    path = sealed(tmp_path / "cpu", data, change)
    (found,) = read([tmp_path])
    assert found.status == "altered"
    assert any(said in problem for problem in found.problems), found.problems
    assert verdicts([found], found.claim) == []
    same, differences = replay.replay(path)
    assert not same
    assert any(said in line for line in differences)
    for take in (replay.accept, lambda p: replay.take_in(p, "acme", tmp_path)):
        with pytest.raises(StoreError, match="does not replay"):
            take(path)
    assert replay.unsound([found])


@pytest.mark.full
def test_terminal_server_and_site_refuse_each_with_the_same_words(tmp_path, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = {store.new_id(): words for _, words in FORGERIES.values()}
    for evidence_id, (change, _) in zip(said, FORGERIES.values(), strict=True):
        sealed(tmp_path / ".playbook/results/cpu", data | {"evidence_id": evidence_id}, change, name=evidence_id)
    listed = {r["evidence"]: r for r in in_process.document(capsys, "evidence", "list") if r["status"] == "altered"}
    rows = evidence_list(library_here(), data["measured"]["claim"]["id"], 500).records
    served = {r["evidence"]: r for r in rows if r["status"] == "altered"}
    assert set(listed) == set(served) == set(said)
    cards = load_all()
    records = {r.id: r for r in read([Path(".playbook/results")], cards)}
    for evidence_id, words in said.items():
        assert served[evidence_id]["sentence"] == listed[evidence_id]["sentence"]
        assert words in listed[evidence_id]["sentence"]
        page = evidence_page(Shelf(cards, [records[evidence_id]], date(2026, 11, 1), {}), records[evidence_id], "x")
        assert text(words) in page


@pytest.mark.parametrize("name", ["another machine's name", "another host's memory"])
def test_a_forgery_renames_no_machine_of_a_sound_record(tmp_path, data, name):
    """The labels of machines were made of all records, so that one forgery showed sound ones under another machine's name."""
    sound = sealed(tmp_path / "cpu", data)
    sealed(tmp_path / "cpu", data | {"evidence_id": store.new_id()}, FORGERIES[name][0], name="x")
    assert {r.path: r.machine for r in read([tmp_path]) if not r.altered} == {sound: "cpu"}


@pytest.mark.full
def test_the_check_of_cards_reads_all_evidence(tmp_path, data, monkeypatch):
    """It read none: a forged record was found by whoever happened to replay it."""
    sealed(tmp_path / "cpu", data, FORGERIES["candidate times halved"][0])
    real = check.data_root
    monkeypatch.setattr(check, "data_root", lambda kind: tmp_path if kind == "results" else real(kind))
    found = [f.message for f in check.check_all([], "2026-11-24")[2] if f.file.startswith(str(tmp_path))]
    assert found
    assert all("timed window" in f and f.endswith("restore the file, or run the case again") for f in found)


def test_a_rewritten_claim_is_no_verdict_on_todays(tmp_path, data, capsys):
    """An easier margin, sealed again: the record agrees with itself, and no reader takes it for a verdict on the claim as the card has it."""
    cards = load_all()
    claim = by_claim(cards)[data["measured"]["claim"]["id"]][1]

    def easier(measured):
        measured["claim"]["expect"]["margin"] = {"value": -90.0, "unit": "percent"}
        measured["claim"]["expect"]["op"] = ">="

    path = sealed(tmp_path / "cpu", data, easier)
    (record,) = read([tmp_path], cards)
    today = date.fromisoformat(data["expires"])
    assert standings([record], claim, today) == {"stale"}
    assert list(record.reasons(today, claim)) == ["the claim has changed since"]
    words = sealed(tmp_path / "words" / "cpu", data, lambda m: m["claim"].update(statement="Any other words."))
    (reworded,) = read([tmp_path / "words"], cards)
    assert reworded.other_words(claim) == "Any other words."
    for rewritten, part in ((path, "expect"), (words, "statement")):
        assert (
            f"on another claim: {record.claim_ref.card}/{claim.id} has another {part}"
            in in_process.run(capsys, "bench", "replay", str(rewritten))[1]
        )
        with pytest.raises(StoreError, match=f"on another claim: .* has another {part}"):
            replay.accept(rewritten)
    with pytest.raises(StoreError, match="has another expect today"):
        replay.take_in(path, "acme", tmp_path / "taken")


def test_an_unchanged_copy_counts(tmp_path, data):
    sealed(tmp_path / "cpu", data)
    (found,) = read([tmp_path])
    assert found.problems == ()
    assert replay.unsound([found]) == []


def test_a_verdict_that_its_runs_do_not_give_is_found_by_replay(tmp_path, data):
    forged = copy.deepcopy(data)
    forged["derived"]["verdict"]["status"] = "refuted" if data["derived"]["verdict"]["status"] != "refuted" else "confirmed"
    forged["sha256"] = stored_sha(forged)
    path = tmp_path / "forged.json"
    path.write_text(json.dumps(forged), encoding="utf-8")
    assert not replay.replay(path)[0]
    assert replay.unsound(read([tmp_path]))


def other_cpu(measured):
    measured["machine"]["cpu"] = "Other CPU"
    for strict in measured["strict"].values():
        strict["machine"]["cpu"] = "Other CPU"
    measured["aa"] = None
    measured["missing"] = [{"reason": "scope", "detail": "for this test"}]


def test_a_machine_of_the_same_name_and_another_kind_speaks_for_itself_alone(tmp_path, data):
    """Else a newer record from somebody's laptop, also called cpu, would take the place of this machine's verdict."""
    sealed(tmp_path / "cpu", data, name="own")
    other = copy.deepcopy(data) | {"evidence_id": store.new_id(), "created": "2999-01-01T00:00:00Z"}
    sealed(tmp_path / "cpu", other, other_cpu, name="other")
    records = read([tmp_path])
    assert [r.problems for r in records] == [(), ()]
    found = verdicts(records, records[0].claim)
    assert {r.machine: r.status for r in found} == {"cpu-amd-epyc": data["derived"]["verdict"]["status"], "cpu-other": "not_applicable"}


def of_host(gib):
    def change(measured):
        measured["machine"]["memory_gib"] = gib
        for strict in measured["strict"].values():
            strict["machine"]["memory_gib"] = gib

    return change


def test_hosts_of_other_memory_speak_for_themselves_and_an_older_record_for_the_one_that_is_known(tmp_path, data):
    sealed(tmp_path / "cpu", data, name="before it was noted")
    sealed(tmp_path / "cpu", data | {"evidence_id": store.new_id(1.9e9)}, of_host(62.7), name="newer")
    records = read([tmp_path])
    assert [r.problems for r in records] == [(), ()], "its A/A is of the same noise key"
    (only,) = verdicts(records, records[0].claim)
    assert (only.path.stem, only.machine) == ("newer", "cpu")
    sealed(tmp_path / "cpu", data | {"evidence_id": store.new_id(1.8e9)}, name="read last, of before it was noted")
    assert {r.machine for r in read([tmp_path])} == {"cpu"}, "whichever of them is read last"
    sealed(tmp_path / "cpu", data | {"evidence_id": store.new_id(1.95e9)}, of_host(251.0), name="larger")
    records = read([tmp_path])
    assert {r.machine for r in verdicts(records, records[0].claim)} == {"cpu-unknown-host-memory", "cpu-64-gib-host", "cpu-256-gib-host"}


def test_an_imported_record_shows_whose_it_is_and_takes_no_verdicts_place(tmp_path, data):
    own = sealed(tmp_path / "results" / "cpu", data, name=CPU)
    theirs = sealed(tmp_path / "elsewhere", copy.deepcopy(data) | {"evidence_id": store.new_id()})
    path = replay.take_in(theirs, "acme", tmp_path / "results")
    assert path.parent.name == "cpu@acme"
    found = verdicts(records := read([tmp_path / "results"]), records[0].claim)
    assert {r.machine: r.path for r in found} == {"cpu": own, "cpu@acme": path}


def test_the_command_line_takes_a_record_in_under_a_name_and_lists_it_so(tmp_path, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs = sealed(tmp_path / "mail", data | {"evidence_id": store.new_id()})
    assert in_process.run(capsys, "evidence", "import", str(theirs), "--from", "acme")[0] == 0
    rows = in_process.document(capsys, "evidence", "list")
    ((name, status),) = [(r["machine"], r["status"]) for r in rows if r["origin"] == "acme"]
    # Where records that ship are of hosts of unlike memory, the host's is part of the name.
    assert (name.partition("-")[0].partition("@")[0], name.rpartition("@")[2]) == ("cpu", "acme")
    assert status == data["derived"]["verdict"]["status"]
    assert in_process.run(capsys, "evidence", "import", str(theirs), "--from", "acme")[0] == 2


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a" * 33])
def test_an_origin_is_a_plain_name(tmp_path, data, name):
    with pytest.raises(ConfigError, match="--from"):
        replay.take_in(sealed(tmp_path, data), name, tmp_path)


def test_a_record_of_somebody_elses_never_hides_one_of_the_same_id(tmp_path, data):
    sealed(tmp_path / "results" / "aaa@acme", data)
    own = sealed(tmp_path / "results" / "cpu", data)
    (found,) = read([tmp_path / "results"])
    assert found.path == own


COMMAND = "01M88X1W9PH9046THFZ1H9CK2K"
"""A committed record of two commands."""


def test_a_commands_launch_that_was_copied_is_no_second_one(tmp_path):
    """Logs of commands were let repeat: one pair, copied twelve times, had an interval without width."""
    (path,) = data_root("results").glob(f"*/{COMMAND}.json")

    def copy_first(measured):
        first = {r["variant"]: r["samples"] for r in reversed(measured["runs"]) if r["role"] == "measure"}
        for run in measured["runs"]:
            run["samples"] = first[run["variant"]] if run["role"] == "measure" else run["samples"]

    forged = sealed(tmp_path, json.loads(path.read_text(encoding="utf-8")), copy_first)
    assert any("same step times" in line for line in replay.replay(forged)[1])


def test_other_looks_in_plan_and_case_are_not_those_of_the_case_that_ships(data):
    changed = copy.deepcopy(data["measured"])
    changed["plan"]["looks"] = changed["case"]["content"]["budget"]["pairs"] = [2, 4, 6]
    assert any("looks" in text for text in receipt.case_changes(Measured.model_validate(changed)))
    assert not any("looks" in text for text in receipt.case_changes(Measured.model_validate(data["measured"])))
