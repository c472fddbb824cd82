"""Images under context and sequence parallelism: each visual token goes to the one rank whose rows hold its place."""

from __future__ import annotations

import parity
import pytest
import torch

from playbook.paths import data_root
from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import load
from playbook_trainer.megatron import inputs

CONFIG = load(data_root("configs") / "qwen3_vl_moe_tiny.yaml", {"backend": "megatron"})
GRIDS = [[(1, 4, 6), (1, 2, 4)], [], [(1, 6, 4)]]


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_each_visual_token_has_one_place_and_its_position(cp: int, tp: int) -> None:
    # Lengths that sequence parallelism divides as they are, where no context parallelism fills documents up.
    documents = [parity.Document(CONFIG.model, text, grids, i) for i, (text, grids) in enumerate(zip((19, 31, 13), GRIDS, strict=True))]
    batch = parity.pack(documents)
    assert batch.vision is not None
    position = {int(n): batch.positions[:, i].tolist() for n, i in enumerate(batch.vision.visual_index_V)}
    seen: dict[int, list[int]] = {}
    for c in range(cp):
        for t in range(tp):
            axes = Axes(tp=Axis("tp", tp, t), cp=Axis("cp", cp, c), sequence_parallel=tp > 1)
            made = inputs.make(batch, CONFIG, axes)
            rows = made.tokens.numel() // tp
            assert made.tokens.numel() == rows * tp
            assert made.vision is not None
            taken = made.vision.visual_take_V
            numbers = range(len(position)) if taken is None else taken.tolist()
            for row, number in zip(made.vision.visual_index_V.tolist(), numbers, strict=True):
                assert 0 <= row < rows
                assert int(made.tokens[0, t * rows + row]) == CONFIG.model.image_token_id
                seen[number] = made.positions[:, t * rows + row].tolist()
            assert torch.equal(made.vision.pixels_PC, batch.vision.pixels_PC), "every rank encodes every image"
    assert seen == position
