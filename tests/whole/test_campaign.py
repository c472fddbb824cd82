"""A campaign: claims without a fresh verdict, the most valuable first, within a budget, over several calls and machines."""

import shutil
import time
from collections import Counter
from datetime import date
from types import SimpleNamespace

import pytest
from in_process import run
from planted_case import options, stretched

from playbook.cards.load import load_all
from playbook.cards.model import by_claim
from playbook.paths import data_root
from playbook.records.case import load_case
from playbook.records.evidence import Evidence
from playbook.records.read import read
from playbook.records.standing import untested_claims, untraced_verdicts
from playbook_bench.run import confirm, tracing
from playbook_bench.run.journal import Journal
from playbook_bench.run.progress import Progress

CARDS = load_all()
DAY = date(2026, 11, 24)
QUICK = ["long-context-cp-sizing/L9", "long-context-cp-sizing/L2"]


def of_one_gpu(record):
    return isinstance(record.content, Evidence) and record.content.measured.profile == "h200x1"


def undecided(records):
    """Claims that all pairs of their cases have left open on one H200 so far."""
    claims = by_claim(CARDS)
    newest = {r.claim: r for r in sorted(records, key=lambda r: r.measured or "") if of_one_gpu(r) and r.claim in claims and not r.altered}
    return {
        f"{claims[i][0]}/{i}" for i, r in newest.items() if r.content.derived.verdict.reason == "power" and not r.stale(DAY, claims[i][1])
    }


def test_the_claims_that_most_rules_rest_on_come_first_and_settled_ones_not_at_all():
    records = read([data_root("results")], CARDS)
    waiting = untested_claims(CARDS, records, "h200x1", DAY)
    rules = Counter(claim for card in CARDS.values() for rule in card.decide for claim in rule.because)
    late = undecided(records)
    counts = [rules[target.partition("/")[2].removesuffix(".m")] for target in waiting if target not in late]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    fresh = {
        f"{home}/{i}"
        for i, (home, claim) in by_claim(CARDS).items()
        for r in records
        if r.claim == i and of_one_gpu(r) and not r.altered and r.status in ("confirmed", "refuted") and not r.stale(DAY, claim)
    }
    assert fresh
    assert not fresh & set(waiting), "each has a fresh verdict"
    assert fresh & set(untested_claims(CARDS, records, "h200x1", date(2099, 1, 1))), "verdicts expire"
    claims = {f"{home}/{i}": claim for i, (home, claim) in by_claim(CARDS).items()}
    profiles = [load_case(claims[target].case).profiles for target in waiting]
    assert all("h200x1" in p for p in profiles if p)


def test_what_failed_when_it_last_ran_waits_until_all_others_have_run():
    first, *_ = untested_claims(CARDS, [], "h200x1", DAY)
    record = next(r for r in read([data_root("results")], CARDS) if r.claim == "W1")
    failed = SimpleNamespace(
        **{k: getattr(record, k) for k in ("schema", "content", "altered", "measured")},
        claim=first.partition("/")[2],
        status="error",
        stale=lambda today, claim: None,
    )
    assert untested_claims(CARDS, [failed], "h200x1", DAY)[-1] == first


def test_a_spent_budget_leaves_the_next_cases_to_the_next_call(tmp_path):
    spent = options(tmp_path, profile="cpu", campaign=True, budget_s=10.0, began=time.monotonic() - 11)
    assert confirm.run(QUICK, spent) == []
    assert not (tmp_path / "results" / "cpu").exists()
    assert [o.status for o in confirm.run(QUICK, options(tmp_path, profile="cpu", campaign=True, budget_s=60.0))] == ["confirmed"] * 2


@pytest.mark.full
def test_no_case_is_begun_whose_first_launch_the_budget_may_not_hold(card, tmp_path, plant):
    plant()
    settled, first = [], card("<=", 0, "dispatch_bytes_per_token_layer")
    for _ in range(2):
        kept = Journal(tmp_path / "journal", ["here"])
        told = options(tmp_path, launcher=stretched(500.0), profile="cpu", campaign=True, budget_s=400.0, journal=kept)
        settled.append([o.evidence.measured.claim.id for o in confirm.run([first, "long-context-cp-sizing/L1.m"], told)])
    assert settled == [["Z1"], ["Z1", "L1.m"]], "launches of an earlier command tell nothing of this one's time"


@pytest.mark.parametrize("campaign", [True, False])
def test_a_campaign_keeps_the_order_of_value(tmp_path, campaign):
    """Else cases that are cheap go first. W1 has no profile for a CPU and launches nothing here."""
    noting, found = Progress(), []
    noting.finished = lambda outcome: found.append(outcome.name)
    confirm.run(["recompute/W1", QUICK[0]], options(tmp_path, profile="cpu", campaign=campaign), noting)
    assert [name for name in found if not name.endswith(".m")] == (["W1", "L9"] if campaign else ["L9", "W1"])


def test_a_fresh_machine_goes_on_from_the_folders_that_were_brought_along(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    first = confirm.run(QUICK[:1], options(before, profile="cpu", campaign=True, journal=Journal(before / "journal", ["host-a", "GPU-1"])))
    shutil.copytree(before, after)
    shutil.rmtree(before)
    found = confirm.run(QUICK, options(after, profile="cpu", campaign=True, journal=Journal(after / "journal", ["host-b", "GPU-2"])))
    assert found[0].evidence.evidence_id == first[0].evidence.evidence_id
    assert len(list((after / "results" / "cpu").glob("*.json"))) == 2


def test_what_was_undecided_after_all_of_its_pairs_waits_and_what_time_cut_goes_on():
    """Else a campaign would spend its first minutes on a claim that eight pairs could not settle."""
    records = read([data_root("results")], CARDS)
    late = undecided(records)
    waiting = untested_claims(CARDS, records, "h200x1", DAY)
    assert late
    assert set(waiting[-len(late) :]) == late
    cut = next(r for r in records if of_one_gpu(r) and r.claim and not r.altered and r.content.derived.verdict.reason == "budget")
    home = by_claim(CARDS)[cut.claim][0]
    before = [r for r in records if r.claim != cut.claim or r is cut]
    assert f"{home}/{cut.claim}" in untested_claims(CARDS, before, "h200x1", DAY)[: -len(late)], "time ended its series"


def test_a_campaign_of_named_claims_keeps_their_order_and_leaves_out_what_is_settled(tmp_path, capsys):
    words = ["confirm", "long-context-cp-sizing/L9", "long-context-cp-sizing/L2", "--untested", "--profile", "cpu"]
    assert "0 claims" in run(capsys, *words, "--results", str(tmp_path))[2]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("words", [["--untested"], ["--all", "--untested"], ["recompute/W1", "--untested"]])
def test_a_campaign_names_its_machine_class(words, capsys):
    code, _, err = run(capsys, "confirm", *words)
    assert code == 2
    assert "--" in err


def test_a_campaign_first_traces_what_an_earlier_call_had_no_time_to_trace(tmp_path, monkeypatch, capsys):
    """V10 is settled and its trace is taken away here; nothing of it waits for a verdict. L9 is settled by arithmetic and has nothing to trace."""
    records = [r for r in read([data_root("results")], CARDS) if "recompute-selective-vs-full" not in r.path.name]
    asked = []
    monkeypatch.setattr("playbook_app.cli.commands.confirm.records_here", lambda *_: records)
    monkeypatch.setattr(
        "playbook_app.cli.commands.confirm.harness.run", lambda chosen, options, _: asked.append((chosen, list(options.untraced))) or []
    )
    words = ["confirm", "recompute/V10", "long-context-cp-sizing/L9", "--untested", "--profile", "h200x1", "--results", str(tmp_path)]
    said = [run(capsys, *words, *more)[2] for more in ([], ["--no-trace"])]
    assert asked == [([], ["recompute-selective-vs-full"]), ([], [])]
    assert "1 verdict without a trace: recompute/V10" in said[0]


def test_what_has_a_trace_or_was_not_timed_on_gpus_of_its_own_waits_for_none():
    records = read([data_root("results")], CARDS)
    waiting = untraced_verdicts(CARDS, records, "h200x1", DAY)
    assert "recompute-selective-vs-full" not in waiting
    assert not {"vlm-recompiles", "recompute-saved-bytes", "offload-to-fit"} & waiting.keys()
    untraced = [r for r in records if r.schema != "trace/1"]
    assert len(untraced_verdicts(CARDS, untraced, "h200x1", DAY)) > len(waiting) + 20
    assert untraced_verdicts(CARDS, untraced, "cpu", DAY) == {}
    assert untraced_verdicts(CARDS, untraced, "h200x1", date(2099, 1, 1)) == {}


def test_verdicts_of_earlier_calls_are_traced_before_the_first_series(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "follow_up", lambda case, records, *_: told.append((case.id, records)))
    told, noting = [], Progress()
    noting.finished = lambda outcome: told.append(outcome.name)
    left = {"recompute-selective-vs-full": "its record"}
    confirm.run(QUICK[:1], options(tmp_path, profile="cpu", campaign=True, untraced=left), noting)
    assert told == [("recompute-selective-vs-full", ["its record"]), "L9"]
