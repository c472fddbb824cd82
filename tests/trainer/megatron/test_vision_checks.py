"""What the megatron backend refuses of a vision-language model."""

from __future__ import annotations

from typing import Any

import pytest
from test_checks import config, problems

VL = "qwen3_vl_moe_tiny"  # four layers, DeepStack in the first two


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"pp": 2}},
        {"parallel": {"pp": 2, "pipeline_layout": [3, 1]}},
        {"train": {"freeze": ["vision"], "recompute": "full"}},
    ],
)
def test_what_can_run_is_not_refused(sections: dict[str, Any]) -> None:
    assert problems(config(VL, **sections), 2) == ""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"parallel": {"pp": 4}}, "first 2 decoder layers"),
        ({"parallel": {"pp": 2, "vpp": 2}}, "that has 1"),
        ({"parallel": {"pp": 2, "pipeline_layout": [1, 3]}}, "that has 1"),
        ({"train": {"cuda_graphs": ["attn"]}}, "set train.cuda_graphs: []"),
        ({"megatron": {"cuda_graph_impl": "full_iteration"}}, "set train.cuda_graphs: []"),
        ({"megatron": {"overlap_expert_parallel": True}}, "DeepStack's features enter whole ones"),
        ({"model": {"mtp_layers": 1}}, "set it to 0"),
        (
            {
                "parallel": {"tp": 2, "cp": 2, "sequence_parallel": True},
                "data": {"pack": False},
                "megatron": {"tp_comm_overlap": True},
            },
            "buffers of one size",
        ),
    ],
)
def test_what_deepstack_excludes_is_refused_with_a_way_out(sections: dict[str, Any], expected: str) -> None:
    assert expected in problems(config(VL, **sections), 4)
