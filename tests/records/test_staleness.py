"""A verdict from a machine like the reader's, once the reader's libraries or driver have moved on, or its test was edited: the command line and MCP say the same, the site nothing of libraries."""

from __future__ import annotations

from datetime import date

import in_process
import pytest

from playbook.cards import load
from playbook.cards.model import by_claim
from playbook.paths import data_root
from playbook.records.machine import Here, updates_since
from playbook.records.read import read
from playbook_app.mcp.answers import library_here
from playbook_app.mcp.server import claim_answer
from playbook_bench.judge import receipt
from playbook_bench.machine import detect
from playbook_trainer import revision

STRICT = {"machine": {"gpu": "NVIDIA H200", "driver": "580.1"}, "packages": {"torch": "2.11.0", "megatron-core": "0.19.2", "numpy": 7}}


@pytest.mark.parametrize(
    ("gpu", "packages", "driver", "said"),
    [
        ("NVIDIA H200", {"torch": "2.11.4+cu130", "megatron-core": "0.19.3", "triton": "3.6.0", "numpy": "2.4.0"}, "580.1", []),
        ("NVIDIA H200", {"torch": "2.12.0"}, None, ["torch 2.11.0 -> 2.12.0"]),
        ("NVIDIA H200", {"megatron-core": "0.20.0"}, "590.2", ["megatron-core 0.19.2 -> 0.20.0", "driver 580.1 -> 590.2"]),
        ("NVIDIA H100 80GB HBM3", {"torch": "2.12.0"}, "590.2", []),
        (None, {"torch": "2.12.0"}, None, []),
    ],
)
def test_minor_versions_and_the_driver_count_where_the_gpus_are_the_same(gpu, packages, driver, said):
    assert updates_since(STRICT, Here(gpu, packages, driver)) == said


@pytest.mark.parametrize("strict", [{}, {"machine": "a string"}, {"packages": {"torch": "2.0"}}, {"machine": {"gpu": None}, "packages": 1}])
def test_a_record_that_does_not_say_what_it_ran_with_is_left_alone(strict):
    assert updates_since(strict, Here(None, {"torch": "2.12.0"}, "590.2")) == []


@pytest.mark.parametrize(("torch", "gpu", "stale"), [("99.0", None, True), (None, None, False), ("99.0", "NVIDIA H200", False)])
@pytest.mark.sample("99.0-None-True")
def test_every_reader_on_such_a_machine_is_told(torch, gpu, stale, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shelf = load.load_all()
    records = read([data_root("results")], shelf)
    ran = next(
        r
        for r in records
        if r.claim
        and r.get("measured", "machine", "gpus") == 0
        and r.status == "confirmed"
        and r.get("measured", "strict")
        and not r.altered
        and r.get("measured", "runs")
    )
    packages = next(iter(ran.get("measured", "strict").values()))["packages"]
    home, claim = by_claim(shelf)[ran.claim]
    # Nothing makes it stale but its test, which was edited, and perhaps its libraries.
    monkeypatch.setattr(
        revision, "numbers", lambda: dict.fromkeys(revision.BACKENDS, ran.get("measured", "runs")[0]["performance_revision"])
    )
    monkeypatch.setattr(receipt, "case_changes", lambda _: ["seed 1 -> 2"])
    current = Here(gpu, packages | ({"torch": torch} if torch else {}))
    monkeypatch.setattr(detect, "here", lambda: current)
    shown = in_process.document(capsys, "cards", "show", home)["status"][claim.id]["verdicts"]
    answered = claim_answer(library_here(), home, claim.id).verdicts[claim.id]
    by_terminal = next(" ".join(v["stale"]) for v in shown if v["machine"] == ran.machine)
    by_server = next(v["stale"] or "" for v in answered if v["machine"] == ran.machine)
    wanted = f"torch {packages['torch']} -> 99.0"
    assert [wanted in text for text in (by_terminal, by_server)] == [stale] * 2
    assert all("its test has been edited since: seed 1 -> 2" in text for text in (by_terminal, by_server))
    assert wanted not in (ran.stale(date(2026, 1, 1), claim) or ""), "a page of the site is for every reader"
