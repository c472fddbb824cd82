from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from listeners import Recorder
from torch import nn
from torch.distributed.fsdp import fully_shard

from playbook_trainer.observe.ranges import listening

pytestmark = pytest.mark.full

pytest.importorskip("megatron.core")


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(8, 4)

    def forward(self, tokens):
        return self.word_embeddings(tokens)


class Model(nn.Module):
    """Called as megatron-core's are: its prediction layer looks tokens up once more, behind the decoder."""

    post_process = False

    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = Embedding(), nn.Linear(4, 4)

    def compute_language_model_loss(self, labels, logits):
        return logits.sum()

    def forward(self, tokens):
        return (self.decoder(self.embedding(tokens)) + self.embedding(tokens)).sum()


@pytest.fixture(params=["whole", "fully_shard"])
def model(request, tmp_path):
    found = Model()
    if request.param == "whole":
        yield found
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        fully_shard(found.embedding.word_embeddings)
        yield fully_shard(found)
    finally:
        dist.destroy_process_group()


def test_the_first_lookup_of_a_pass_ends_with_the_gradient_of_all(model):
    from playbook_trainer.megatron.hooks import announced

    recorder = Recorder()
    with announced(model), listening(recorder):
        for _ in range(2):
            model(torch.tensor([1, 2])).backward()
    one_pass = ["+embedding", "-embedding", "+decoder", "-decoder", "+embedding.bwd", "-embedding.bwd"]
    assert recorder.seen == 2 * one_pass
