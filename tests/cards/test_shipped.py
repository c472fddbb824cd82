"""Every card and case that ships: found by folder, so a new one is tested without an edit here."""

from __future__ import annotations

from itertools import combinations

import pytest

from playbook.cards.load import LOGIC_KINDS, load_all
from playbook.lint.base import overlap
from playbook.paths import data_root
from playbook_app.services.check import read_cases

CARDS = load_all()
CASES, _ = read_cases(data_root("cases"))


@pytest.mark.parametrize("card_id", sorted(CARDS))
def test_a_card_has_an_answer_and_says_what_to_do_and_what_goes_wrong(card_id):
    card = CARDS[card_id]
    assert card.summary.strip()
    assert card.decide
    assert card.pitfalls
    assert card.families
    assert card.aliases
    known = {c.id for other in CARDS.values() for c in other.claims}
    assert all(set(d.because) <= known for d in card.decide)


@pytest.mark.parametrize("card_id", sorted(CARDS))
def test_a_claim_with_a_cpu_profile_and_a_scope_of_its_own_says_what_a_cpu_may_settle(card_id):
    for claim in CARDS[card_id].claims:
        if claim.cpu_scope:
            assert claim.case in CASES
            assert "cpu" in CASES[claim.case].case.profiles, f"{claim.id} has cpu_scope, and its case has no cpu profile"
        if claim.mechanism_check:
            assert "cpu" in CASES[claim.mechanism_check.case].case.profiles


@pytest.mark.parametrize("card_id", sorted(CARDS))
def test_a_claim_that_the_trainer_settles_says_which_backend_it_is_about(card_id):
    """`cards check` finds a backend that the case does not train on."""
    silent = [c.id for c in CARDS[card_id].claims if c.kind not in LOGIC_KINDS and "backend" not in c.scope]
    assert silent == []


def test_every_card_file_is_read():
    assert len(list(data_root("cards").glob("*.yaml"))) == len(CARDS)


def test_two_cards_do_not_tell_one_run_to_set_one_trainer_key_differently():
    """On one card a row with more conditions refines another; a reader of one card does not see the row of the other."""
    rows = [(card.id, d) for card in CARDS.values() for d in card.decide]
    for (first, a), (second, b) in combinations(rows, 2):
        if first == second or not a.when.keys() & b.when.keys() or not overlap(a.when, b.when):
            continue
        differ = {k: (a.set[k], b.set[k]) for k in a.set.keys() & b.set.keys() if "." in k and a.set[k] != b.set[k]}
        assert not differ, f"{first} at {a.when} and {second} at {b.when}: {differ}"
