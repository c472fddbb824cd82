"""Which keys ring attention moves: every pair of query and key that causal attention joins, each once, and no key that nobody needs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from playbook_trainer.axes import Axis
from playbook_trainer.torch.parallel import context
from playbook_trainer.torch.parallel.context import local_index


def borders(rng: random.Random, length: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, length), rng.randint(0, 9))), length]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_blocks_cover_the_causal_mask_once(cp: int, seed: int) -> None:
    length = 2 * cp * 6
    cu = borders(random.Random(seed), length)
    document = torch.bucketize(torch.arange(length), torch.tensor(cu), right=True)
    wanted = (document[:, None] == document[None, :]).tril().int()
    found = torch.zeros_like(wanted)
    places = [local_index(length, Axis("cp", cp, r), "ring") for r in range(cp)]
    plans = [context.plan(cu, length, Axis("cp", cp, r)) for r in range(cp)]
    for rank, plan in enumerate(plans):
        own = plan.cu_seqlens.tolist()
        assert plan.max_seqlen == max(b - a for a, b in itertools.pairwise(own))
        for a, b in itertools.pairwise(own):
            mine = places[rank][a:b]
            found[mine[:, None], mine[None, :]] += torch.ones(b - a, b - a, dtype=torch.int32).tril()
        for step, block in enumerate(plan.receive, 1):
            source = (rank - step) % cp
            if block is None:
                assert plans[source].send[step - 1] is None
                continue
            assert plans[source].send[step - 1] == (block.k0, block.k1)
            q, k = places[rank][block.q0 : block.q1], places[source][block.k0 : block.k1]
            found[q[:, None], k[None, :]] += 1
            assert block.cu_q.tolist() == [0, len(q)]
            assert block.cu_k.tolist() == [0, len(k)]
    assert torch.equal(found, wanted)


def test_short_documents_move_nothing() -> None:
    cu = list(range(0, 65, 8))
    assert all(context.plan(cu, 64, Axis("cp", 4, r)).receive == [None] * 3 for r in range(4))
