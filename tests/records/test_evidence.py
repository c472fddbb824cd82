"""Records as every reader has them: which one speaks for a claim on a machine, and what makes its verdict stale."""

from __future__ import annotations

import json
from datetime import date

import pytest
from stored import long_run, record

from playbook.errors import FileError
from playbook.records import read as read_module
from playbook.records.evidence import Sample, seal
from playbook.records.machine import Here
from playbook.records.read import Present, Reader, read, verdicts
from playbook_bench.run import store

TODAY = date(2026, 2, 1)


def speaking(folder, claim="W9"):
    """What speaks for a claim on the one machine that there is, or None."""
    found = verdicts(read([folder]), claim)
    assert len(found) <= 1
    return found[0].id if found else None


def reasons(folder, evidence, today=TODAY, **present):
    """Why this record no longer speaks, once it is the only one there."""
    store.write(evidence, folder)
    (found,) = read([folder], present=Present(**present))
    reasons = list(found.reasons(today, None))
    assert found.stale(today, None) == ("; ".join(reasons) or None)
    return reasons


def test_what_is_dear_to_find_out_is_not_asked_where_another_reason_makes_a_verdict_stale(tmp_path):
    def compared(_):
        raise AssertionError("the case was read and resolved")

    evidence = record("confirmed", "2026-01-01T00:00:00Z")
    store.write(evidence, tmp_path)
    (found,) = read([tmp_path], present=Present(case_changes=compared))
    assert "expired" in next(found.reasons(date(2099, 1, 1), None))


def test_a_record_that_settles_something_goes_before_a_newer_one_that_did_not_apply(tmp_path):
    settled = record("refuted", "2026-01-01T00:00:00Z")
    later = [record("not_applicable", "2026-02-01T00:00:00Z"), record("error", "2026-03-01T00:00:00Z"), record(claim="V1")]
    for evidence in (settled, *later):
        store.write(evidence, tmp_path)
    assert speaking(tmp_path) == settled.evidence_id
    newer = record("inconclusive", "2026-04-01T00:00:00Z")
    store.write(newer, tmp_path)
    assert speaking(tmp_path) == newer.evidence_id
    assert speaking(tmp_path, "Z1") is None


def test_what_was_measured_last_speaks_whenever_it_was_judged(tmp_path):
    def measured(status, created, started):
        return record(status, created, runs=[long_run().model_copy(update={"started": started})])

    early = measured("refuted", "2026-05-01T00:00:00Z", "2026-01-01T00:00:00Z")
    late = measured("confirmed", "2026-04-01T00:00:00Z", "2026-03-01T00:00:00Z")
    again = measured("inconclusive", "2026-06-01T00:00:00Z", "2026-03-01T00:00:00Z")
    for evidence, speaks in ((early, early), (late, late), (again, again)):
        store.write(evidence, tmp_path)
        assert speaking(tmp_path) == speaks.evidence_id


def test_an_altered_record_counts_for_nothing(tmp_path):
    kept = record("refuted", "2026-01-01T00:00:00Z")
    store.write(kept, tmp_path)
    changed = record("confirmed", "2026-02-01T00:00:00Z")
    path = store.write(changed, tmp_path)
    assert speaking(tmp_path) == changed.evidence_id
    path.write_text(path.read_text().replace("2026-02-01", "2026-03-01"))
    assert speaking(tmp_path) == kept.evidence_id
    assert {r.id: r.status for r in read([tmp_path])} == {kept.evidence_id: "refuted", changed.evidence_id: "altered"}


def test_a_whole_copy_of_a_record_goes_before_an_altered_one(tmp_path):
    evidence = record()
    mine, theirs = (store.write(evidence, tmp_path / name) for name in ("mine", "theirs"))
    mine.write_text(mine.read_text().replace("2026-01-01", "2026-01-02"))
    (found,) = read([tmp_path / "mine", tmp_path / "theirs"])
    assert (found.path, found.status) == (theirs, "confirmed")


def test_the_folder_of_one_machine_may_be_named_as_well(tmp_path):
    """Else `playbook evidence list --results RESULTS/MACHINE` shows what ships and none of the user's, without a word."""
    path = store.write(record(), tmp_path)
    assert [r.path for r in read([path.parent])] == [r.path for r in read([tmp_path])] == [path]


@pytest.mark.parametrize("text", ["{}", "[1]", '{"schema_version": "evidence/1"}', "{", "[" * 100_000, '{"schema_version": "evidence/2"}'])
def test_a_broken_file_among_the_records_is_an_error(tmp_path, text):
    path = store.write(record(), tmp_path)
    path.with_name(store.new_id() + ".json").write_text(text)
    with pytest.raises(FileError):
        read([tmp_path])


@pytest.mark.parametrize(
    ("present", "today", "said"),
    [
        ({"revisions": {"torch": 1, "megatron": 9}}, TODAY, []),
        ({"revisions": {"torch": 2}}, TODAY, ["the trainer's path torch is at performance revision 2, the runs at 1"]),
        ({"here": Here(None, {"torch": "2.13.4+cpu", "triton": "9"}, "1")}, TODAY, []),
        ({"here": Here(None, {"torch": "2.14.0"})}, TODAY, ["torch 2.13.0 -> 2.14.0"]),
        ({"here": Here(None, {}, "2")}, TODAY, ["driver 1 -> 2"]),
        ({"here": Here("another GPU", {"torch": "2.14.0"}, "2")}, TODAY, []),
        ({"case_changes": lambda _: ["seed 1 -> 2"]}, TODAY, ["its test has been edited since: seed 1 -> 2"]),
        ({}, date(2026, 6, 1), []),
        ({}, date(2026, 6, 2), ["expired on 2026-06-01"]),
        (
            {"revisions": {"torch": 2}},
            date(2027, 1, 1),
            ["expired on 2026-06-01", "the trainer's path torch is at performance revision 2, the runs at 1"],
        ),
    ],
)
def test_what_makes_a_verdict_stale(tmp_path, present, today, said):
    """What a laptop has says nothing about a verdict from elsewhere."""
    assert reasons(tmp_path, record(runs=[long_run()]), today, **present) == said


@pytest.mark.parametrize(("now", "said"), [({"torch": 1}, "2"), ({"torch": 3}, "1, 2"), ({}, None)])
def test_one_run_of_another_revision_is_enough(tmp_path, now, said):
    runs = [long_run(), long_run().model_copy(update={"run_id": "later", "position": 1, "performance_revision": 2})]
    wanted = [f"the trainer's path torch is at performance revision {now['torch']}, the runs at {said}"] if said else []
    assert reasons(tmp_path, record(runs=runs), revisions=now) == wanted


@pytest.mark.parametrize(("now", "stale"), [({"torch": 9, "megatron": 1}, []), ({"torch": 1, "megatron": 2}, ["megatron"])])
def test_a_run_ages_with_its_own_backend_alone(tmp_path, now, stale):
    evidence, run = record(), long_run()
    own = evidence.measured.model_copy(update={"runs": [run], "configs": {run.config_sha: {"backend": "megatron"}}})
    found = reasons(tmp_path, seal(evidence.model_copy(update={"measured": own})), revisions=now)
    assert found == [f"the trainer's path {name} is at performance revision 2, the runs at 1" for name in stale]


@pytest.mark.parametrize("strict", [{}, {"s": {"machine": "a string", "packages": 1}}])
def test_the_age_of_a_record_is_told_whatever_its_environment_holds(tmp_path, strict):
    path = store.write(record(runs=[long_run()]), tmp_path)
    data = json.loads(path.read_text())
    data["measured"]["strict"] = strict
    path.write_text(json.dumps(data))
    (found,) = read([tmp_path], present=Present(here=Here(None, {"torch": "2"}, "1")))
    assert not list(found.reasons(TODAY, None))


def test_a_server_reads_a_file_again_only_once_it_has_changed(tmp_path, monkeypatch):
    first, second = record(), record("refuted", claim="V1")
    path = store.write(first, tmp_path)
    seen: list[str] = []
    parse = read_module.parse
    monkeypatch.setattr(read_module, "parse", lambda p: seen.append(p.stem) or parse(p))
    reader = Reader()
    assert reader.read([tmp_path]) is reader.read([tmp_path])
    store.write(second, tmp_path)
    assert {r.id for r in reader.read([tmp_path])} == {first.evidence_id, second.evidence_id}
    path.write_text(path.read_text().replace("playbook confirm c", "playbook confirm other"))
    assert {r.status for r in reader.read([tmp_path])} == {"altered", "refuted"}
    assert seen == [first.evidence_id, second.evidence_id, first.evidence_id]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("place", ["loss", "context"])
def test_a_record_holds_finite_numbers_alone(tmp_path, number, place):
    """Also where its model lets anything be, as in the context of the runs."""
    sample = Sample(step=1, timed=True, seconds=1.0, useful_tokens=1, raw_tokens=1)
    path = store.write(record(runs=[long_run().model_copy(update={"samples": [sample]})]), tmp_path)
    data = json.loads(path.read_text())
    if place == "context":
        data["measured"]["context"] = {"x": 12.345678}
    else:
        data["measured"]["runs"][0]["samples"][0]["loss"] = 12.345678
    path.write_text(json.dumps(data).replace("12.345678", number))
    with pytest.raises(FileError, match=r"finite|not JSON compliant"):
        read([tmp_path])
