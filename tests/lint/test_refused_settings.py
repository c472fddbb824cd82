"""Which settings megatron-core refuses together, as a statement that holds or does not."""

from __future__ import annotations

import pytest

from playbook_bench.statements.layouts import refused_together

FULL = {"settings": {"recompute_granularity": "full", "cuda_graph": ["attn"]}, "refused": True}
CHEAP = {"settings": {"recompute": ["layernorm", "moe_act"], "cuda_graph": ["attn"]}, "refused": False}


def test_rows_that_agree_with_the_rules_hold() -> None:
    holds, sentence, figures = refused_together(megatron_core="0.19.2", rows=[FULL, CHEAP])
    assert holds
    assert sentence == "megatron-core 0.19.2 refuses 1 of 2 settings"
    assert [bool(row["refused_because"]) for row in figures["settings"]] == [True, False]


@pytest.mark.parametrize("row", [FULL, CHEAP])
def test_a_row_that_says_the_opposite_does_not_hold(row: dict[str, object]) -> None:
    holds, sentence, _ = refused_together(megatron_core="0.19.2", rows=[{**row, "refused": not row["refused"]}])
    assert not holds
    assert "against the claim" in sentence


def test_a_label_or_a_version_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know 'norm'; write layernorm"):
        refused_together(megatron_core="0.19.2", rows=[{"settings": {"recompute": ["norm"]}, "refused": False}])
    with pytest.raises(ValueError, match="no label table"):
        refused_together(megatron_core="0.1", rows=[FULL])
