"""State that an optimizer is given without a step, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from playbook_trainer.megatron.wrap import hold_state

pytestmark = pytest.mark.full


class Adam(torch.optim.AdamW):
    """Of Transformer Engine's optimizer, what makes its state."""

    store_param_remainders = True

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16 if store_param_remainders else torch.float32)


def test_state_is_made_as_a_step_of_transformer_engine_makes_it() -> None:
    """megatron-core's own function calls `initialize_state` without its second argument."""
    wide, narrow = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    inner = Adam([wide, narrow])
    hold_state(SimpleNamespace(optimizer=inner, init_state_fn=lambda opt, config: opt.initialize_state(wide), config=None))
    assert [inner.state[p]["master_param"].dtype for p in (wide, narrow)] == [torch.float32, torch.int16]


@pytest.mark.parametrize("function", [None, lambda opt, config: config.append(opt)])
def test_any_other_optimizer_has_megatron_cores_function_or_none(function: Any) -> None:
    inner, called = torch.optim.AdamW([torch.zeros(3)]), list[Any]()
    hold_state(SimpleNamespace(optimizer=inner, init_state_fn=function, config=called))
    assert called == ([inner] if function else [])
    assert not inner.state
