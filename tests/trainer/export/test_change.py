"""Keys of this trainer in the words of others, for cards."""

from __future__ import annotations

from typing import Any

import pytest

from playbook_trainer.export.render import change


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"moe.dispatcher": "deepep"},
            {
                "megatron-lm": ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"],
                "megatron-bridge": ["model.moe_token_dispatcher_type=flex", "model.moe_flex_dispatcher_backend=deepep"],
                "torchtitan": ["model_registry(moe_comm_backend='deepep')"],
            },
        ),
        (
            {"megatron.overlap_grad_reduce": "for exposed gradient reduction"},
            {"megatron-lm": ["--overlap-grad-reduce"], "megatron-bridge": ["ddp.overlap_grad_reduce=true"]},
        ),
        (
            {"checkpoint.async_save": True, "checkpoint.every": "now and then"},
            {
                "megatron-lm": ["--async-save"],
                "megatron-bridge": ["checkpoint.async_save=true"],
                "torchtitan": ["--checkpoint.async_mode async"],
            },
        ),
        ({"parallel.ep": "higher", "order": "first this"}, {}),
        ({}, {}),
    ],
)
def test_keys_are_said_in_the_words_of_each_trainer_that_has_some(keys: dict[str, Any], said: dict[str, list[str]]) -> None:
    assert change(keys) == said


def test_a_trainer_that_can_say_only_part_of_it_says_nothing() -> None:
    """Selective recompute without its modules would be another setting: torchtitan chooses by operator."""
    assert set(change({"train.recompute": "selective", "train.recompute_modules": ["layernorm", "moe"]})) == {
        "megatron-lm",
        "megatron-bridge",
    }
