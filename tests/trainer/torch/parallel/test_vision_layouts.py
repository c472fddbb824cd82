"""Images in a layout: which visual tokens a context rank keeps, and where DeepStack's layers must be."""

from __future__ import annotations

import pytest
import torch

from playbook.errors import ConfigError
from playbook_trainer.axes import Axis
from playbook_trainer.config.checks import check
from playbook_trainer.config.tree import ModelConfig, TrainerConfig, VisionConfig
from playbook_trainer.data.batch import Batch, VisionBatch
from playbook_trainer.torch.parallel import context

N = 24


def batch(visual: list[int]) -> Batch:
    none = torch.zeros(0)
    vision = VisionBatch(none, none, 0, none, none, none, torch.tensor(visual))
    cu = torch.tensor([0, 10, N], dtype=torch.int32)
    return Batch(torch.arange(N), torch.arange(N), torch.arange(N).repeat(3, 1), cu, 14, N, N, 1, vision=vision)


@pytest.mark.parametrize("comm", ["allgather", "ring", "ulysses"])
def test_each_visual_token_goes_to_the_rank_that_holds_its_place(comm: str) -> None:
    visual = [2, 3, 4, 5, 6, 12, 13, 14, 21]
    found = {}
    for rank in range(2):
        own = context.split(batch(visual), Axis("cp", 2, rank), comm)
        assert own.vision is not None
        assert own.vision.visual_take_V is not None
        for place, number in zip(own.vision.visual_index_V.tolist(), own.vision.visual_take_V.tolist(), strict=True):
            found[number] = int(own.tokens_N[place])
    assert found == dict(enumerate(visual))


def config(pp: int, deepstack: list[int]) -> TrainerConfig:
    vision = VisionConfig(depth=4, hidden_size=64, num_heads=4, ffn_size=128, num_position_embeddings=2304, deepstack_layers=deepstack)
    sizes = {
        "name": "small",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 128,
    }
    model = ModelConfig.model_validate({**sizes, "mrope_section": [4, 2, 2], "image_token_id": 258, "vision": vision.model_dump()})
    return TrainerConfig.model_validate({"model": model.model_dump(), "parallel": {"pp": pp}})


def test_deepstack_layers_lie_on_the_first_stage() -> None:
    check(config(2, [1, 2]), 2)
    check(config(4, [1]), 4)
    with pytest.raises(ConfigError, match=r"first 2 decoder layers.*pp 4 x vpp 1 leaves 1 layers"):
        check(config(4, [1, 2]), 4)
