"""Whether the cards cover a question: the words of its kinds, and the fit of its weights."""

from __future__ import annotations

from dataclasses import fields, replace

import fit_coverage
import pytest

from playbook.cards.terms import MOST, Signs, kinds, load_weights


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        ("step time is slow", "aim"),
        ("crashes with a TypeError", "fault"),
        ("resume from a checkpoint", "things"),
        ("serve it with a KV cache", "serving"),
        ("where is the documentation", "project"),
    ],
)
def test_words_say_what_a_question_is_about(ask: str, kind: str) -> None:
    found = kinds(ask)
    assert found[kind] > 0
    assert found[kind] == max(found.values())
    assert kinds(" ".join([ask] * 9))[kind] == MOST


def test_an_aim_speaks_for_an_answer_and_all_else_against_it() -> None:
    weights = load_weights()
    assert {name for name, weight in weights.items() if weight > 0.05} == {"evidence", "passage", "own", "aim"}
    assert set(weights) == {"constant", *(f.name for f in fields(Signs))}


@pytest.mark.full
def test_the_weights_are_those_that_the_fit_gives() -> None:
    assert fit_coverage.main(["--check"]) == 0


def test_the_fit_finds_the_sign_that_decides() -> None:
    plain = Signs(**{f.name: 0.0 for f in fields(Signs)})
    signs = [
        replace(plain, evidence=i % 2, aim=i % 3, fault=i % 5, passage=i % 7, own=i % 11, beyond=i % 13, odds=i % 17) for i in range(200)
    ]
    signs = [replace(s, things=i % 4, serving=i % 6, project=i % 9) for i, s in enumerate(signs)]
    weights = fit_coverage.fit([(s, s.evidence > 0) for s in signs])
    assert max(weights, key=lambda name: abs(weights[name])) in ("evidence", "constant")
    assert weights["evidence"] > 4
