"""Claims of kind prediction say what their cases say."""

from __future__ import annotations

import pytest

from playbook.cards.load import load_all
from playbook.records.case import load_case

CLAIMS = [claim for card in load_all().values() for claim in card.claims if claim.kind == "prediction"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_a_prediction_states_the_intervals_of_its_case(claim):
    case = load_case(claim.case)
    assert case.values
    for value in case.values:
        assert f"{value.predicted.low:,.0f} to {value.predicted.high:,.0f}" in claim.statement


def test_eight_predictions_for_one_gpu_are_registered():
    """Dense and with experts, two lengths, both backends."""
    cases = [load_case(claim.case) for claim in CLAIMS]
    assert all(list(case.profiles) == ["h200x1"] for case in cases)
    settings = [case.profiles["h200x1"] for case in cases]
    kinds = {
        (s["model"], s.get("data.seq_len", case.values[0].set.get("data.seq_len")), s.get("backend", "torch"))
        for s, case in zip(settings, cases, strict=True)
    }
    assert len(kinds) >= 8
