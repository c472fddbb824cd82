"""Statements about megatron-core are put to the library itself, and what it takes is not counted as refused."""

import pytest

from playbook_bench.statements.rules import megatron_core_refuses

EXPERTS = {"settings": {"cuda_graph_scope": ["attn", "moe"]}, "refused": True}
ROUTER = {"settings": {"cuda_graph_scope": ["attn", "moe_router"]}, "refused": False}


@pytest.mark.full
def test_the_library_decides_and_not_our_table():
    pytest.importorskip("megatron.core")
    holds, sentence, figures = megatron_core_refuses([EXPERTS, ROUTER])
    assert holds, sentence
    assert sorted(figures["refused"].values()) == [False, True]
    holds, sentence, _ = megatron_core_refuses([{**ROUTER, "refused": True}, {**EXPERTS, "refused": False}])
    assert not holds
    assert "moe_router'] is accepted" in sentence
    assert "'moe'] is refused: " in sentence
