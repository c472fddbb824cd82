"""What readers say of a verdict and of a decision rule: the machine, the backend, and the word hypothesis where nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from playbook.cards.load import load_all
from playbook.cards.model import Claim, Decision, by_claim
from playbook.paths import data_root
from playbook.records.read import DECIDED, read, verdicts
from playbook.records.standing import bases, basis, in_words, standing, stands
from playbook_app.cli.commands.cards import card_lines
from playbook_app.site.cards import Shelf, card_page
from playbook_app.site.indexes import plain_card

CARDS = load_all()
CLAIMS = by_claim(CARDS)
DAY = date(2026, 11, 24)


@pytest.fixture(scope="module")
def records():
    return read([data_root("results")], CARDS)


STANDING = {
    "on torch": "confirmed, one H200, torch",
    "on megatron": "confirmed, one H200, megatron",
    "against it": "refuted, one H200, torch",
    "by arithmetic": "confirmed, arithmetic",
    "untested": "untested",
}
"""What is said of a claim of each kind."""


@pytest.fixture(scope="module")
def example(records):
    """For each kind of standing a claim that ships with it."""
    said = {i: standing(records, claim, DAY) for i, (_, claim) in CLAIMS.items() if isinstance(claim, Claim)}
    return {kind: next(i for i, words in said.items() if words == wanted) for kind, wanted in STANDING.items()}


def test_a_verdict_names_the_machine_and_the_backend_or_that_it_needed_none(records):
    for record in (r for i in CLAIMS for r in verdicts(records, i)):
        words, logic = in_words(record), record.claim_ref.kind in ("arithmetic", "invariant")
        gpu = record.machine.partition("x")[0].upper()
        assert words.startswith(record.status.replace("_", " ") + ", "), words
        assert logic or all(b in words for b in record.backends), words
        assert logic or ((f"one {gpu}" if record.gpus == 1 else f"{gpu}s") if record.gpus else "CPU") in words, words
        assert not logic or ("H200" not in words and "CPU" not in words), words
        assert in_words(record, "it has expired") == words.replace(", ", ", stale, ", 1)


def test_ranks_that_shared_a_gpu_are_told_of(records, example):
    (found,) = verdicts(records, example["on torch"])
    runs = [run.model_copy(update={"ranks": 4}) for run in found.content.measured.runs]
    shared = found.content.model_copy(update={"measured": found.content.measured.model_copy(update={"runs": runs})})
    assert in_words(replace(found, content=shared)) == "confirmed, four ranks on one H200, torch"


@pytest.mark.parametrize(("backend", "wanted"), [("megatron", "untested"), ("torch", "confirmed, one H200, torch")])
def test_a_statement_about_one_backend_is_not_confirmed_on_the_other(example, backend, wanted):
    asked = example["on torch"]
    card = CARDS[CLAIMS[asked][0]]
    about = [c.model_copy(update={"scope": {**c.scope, "backend": backend}}) if c.id == asked else c for c in card.claims]
    cards = {card.id: card.model_copy(update={"claims": about})}
    known = read([data_root("results")], cards)
    assert standing(known, by_claim(cards)[asked][1], DAY) == wanted


@pytest.mark.parametrize(
    ("when", "because", "wanted"),
    [
        ({}, ["on torch"], "measured"),
        ({}, ["untested", "by arithmetic"], "measured"),
        ({"backend": "torch"}, ["on torch"], "measured"),
        ({"backend": "megatron"}, ["on torch"], "hypothesis"),
        ({"backend": "megatron"}, ["on torch", "on megatron"], "measured"),
        ({}, ["against it"], "refuted"),
        ({}, ["untested"], "hypothesis"),
    ],
)
def test_a_rule_without_a_fresh_verdict_for_it_is_a_hypothesis(records, example, when, because, wanted):
    rule = Decision(when=when, set={"x": 1}, because=[example[kind] for kind in because])
    assert basis(rule, records, CLAIMS, DAY) == wanted
    assert basis(rule, records, CLAIMS, date(2099, 1, 1)) == "hypothesis"


def test_terminal_site_and_plain_text_mark_the_same_rules(records):
    card, found = next(
        (card, found) for card in CARDS.values() if {"measured", "hypothesis"} == set(found := bases(card, records, CLAIMS, DAY))
    )
    shelf = Shelf(CARDS, records, DAY, {i: home for i, (home, _) in CLAIMS.items()})
    status = {i: {"status": "untested", "verdicts": []} for i in CLAIMS}
    for text in ("\n".join(card_lines(card, status, found)), card_page(shelf, card), plain_card(shelf, card)):
        assert text.count("hypothesis") == found.count("hypothesis")


def test_verdicts_of_the_gpus_that_are_named_come_first(records) -> None:
    twice = {r.claim for r in records if r.machine == "h100x1" and r.status in DECIDED} & {
        r.claim for r in records if r.machine == "h200x1"
    }
    assert twice
    for claim_id in twice:
        claim = CLAIMS[claim_id][1]
        assert "H100" in stands(records, claim, DAY, ("h100",))[0]
        assert "H200" in stands(records, claim, DAY, ("h200",))[0]
        assert sorted(stands(records, claim, DAY, ("h200",))) == sorted(stands(records, claim, DAY))
