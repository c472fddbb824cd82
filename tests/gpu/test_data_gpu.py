"""What of a batch lies in pinned memory, and that it reaches the GPU whole."""

from __future__ import annotations

import pytest
import torch
from ranks import ROOT

from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.data.loader import OF_PATCHES, build_loader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_of_patches_is_pinned_and_nothing_else(workers: int) -> None:
    config = load(ROOT / "trainer/configs/qwen3_vl_moe_tiny.yaml", parse_overrides([f"data.num_workers={workers}"]))
    loader = build_loader(config, dp_rank=0, dp_size=1)
    batch = next(iter(loader))[0]
    loader.close()
    assert batch.vision is not None
    assert all(getattr(batch.vision, name).is_pinned() for name in OF_PATCHES)
    # Ranks take their shares of these, and so read them.
    for read in (batch.tokens_N, batch.labels_N, batch.positions, batch.cu_seqlens, batch.vision.visual_index_V, batch.vision.cu_seqlens):
        assert not read.is_pinned()
    there = batch.to(torch.device("cuda", 0))
    assert there.vision is not None
    assert there.tokens_N.is_cuda
    assert torch.equal(there.tokens_N.cpu(), batch.tokens_N)
    assert torch.equal(there.vision.pixels_PC.cpu(), batch.vision.pixels_PC)
