"""What readers say of a verdict and of a decision rule: the machine, the backend, and the word hypothesis where nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from playbook.cards.load import load_all
from playbook.cards.model import Decision, by_claim
from playbook.paths import data_root
from playbook.records.read import read, verdicts
from playbook.records.standing import bases, basis, in_words, standing
from playbook_app.cli.commands.cards import card_lines
from playbook_app.site.cards import Shelf, card_page
from playbook_app.site.llms import plain_card

CARDS = load_all()
CLAIMS = by_claim(CARDS)
DAY = date(2026, 11, 24)


@pytest.fixture(scope="module")
def records():
    return read([data_root("results")], CARDS)


@pytest.mark.parametrize(
    ("claim", "wanted"),
    [
        ("V10.c", "confirmed, one H200, megatron"),
        ("W1", "confirmed, one H200, torch"),
        ("P1.t", "confirmed, two H200s, megatron and torch"),
        ("T5", "refuted, one H200, torch"),
        ("L9", "confirmed, arithmetic"),
        ("V14", "confirmed, check of the software"),
    ],
)
def test_a_verdict_names_the_machine_and_the_backend_or_that_it_needed_none(records, claim, wanted):
    (found,) = verdicts(records, claim)
    assert in_words(found) == wanted
    assert in_words(found, "it has expired") == wanted.replace(", ", ", stale, ", 1)


def test_ranks_that_shared_a_gpu_are_told_of(records):
    (found,) = verdicts(records, "W1")
    runs = [run.model_copy(update={"ranks": 4}) for run in found.content.measured.runs]
    shared = found.content.model_copy(update={"measured": found.content.measured.model_copy(update={"runs": runs})})
    assert in_words(replace(found, content=shared)) == "confirmed, four ranks on one H200, torch"


@pytest.mark.parametrize(("backend", "wanted"), [("megatron", "untested"), ("torch", "confirmed, one H200, torch")])
def test_a_statement_about_one_backend_is_not_confirmed_on_the_other(backend, wanted):
    card = CARDS["recompute"]
    about = [c.model_copy(update={"scope": {**c.scope, "backend": backend}}) if c.id == "W1" else c for c in card.claims]
    cards = {card.id: card.model_copy(update={"claims": about})}
    known = read([data_root("results")], cards)
    assert standing(known, by_claim(cards)["W1"][1], DAY) == wanted


@pytest.mark.parametrize(
    ("when", "because", "wanted"),
    [
        ({}, ["W1"], "measured"),
        ({}, ["W2", "L9"], "measured"),
        ({"backend": "torch"}, ["W1"], "measured"),
        ({"backend": "megatron"}, ["W1"], "hypothesis"),
        ({"backend": "megatron"}, ["W1", "V10.c"], "measured"),
        ({}, ["T5"], "refuted"),
        ({}, ["L13.b"], "hypothesis"),
        ({}, ["W2"], "hypothesis"),
    ],
)
def test_a_rule_without_a_fresh_verdict_for_it_is_a_hypothesis(records, when, because, wanted):
    rule = Decision(when=when, set={"x": 1}, because=because)
    assert basis(rule, records, CLAIMS, DAY) == wanted
    assert basis(rule, records, CLAIMS, date(2099, 1, 1)) == "hypothesis"


def test_terminal_site_and_plain_text_mark_the_same_rules(records):
    card = CARDS["communication-overlap"]
    found = bases(card, records, CLAIMS, DAY)
    assert {"measured", "hypothesis"} == set(found)
    shelf = Shelf(CARDS, records, DAY, {i: home for i, (home, _) in CLAIMS.items()})
    status = {i: {"status": "untested", "verdicts": []} for i in CLAIMS}
    for text in ("\n".join(card_lines(card, status, found)), card_page(shelf, card), plain_card(shelf, card)):
        assert text.count("hypothesis") == found.count("hypothesis")
