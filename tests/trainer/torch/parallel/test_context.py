"""Attention over context-parallel ranks against attention over the whole stream in float64; which keys a ring moves, and which visual tokens a rank keeps."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch
from ranks import SUPPORT, run

from playbook_trainer.axes import Axis
from playbook_trainer.data.batch import Batch, VisionBatch
from playbook_trainer.torch.parallel import context
from playbook_trainer.torch.parallel.context import local_index


def borders(rng: random.Random, length: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, length), rng.randint(0, 9))), length]


def cases() -> list[dict[str, Any]]:
    rng = random.Random(5)
    out = []
    for comm in ("allgather", "ring", "ulysses"):
        for cp in (2, 4):
            # One document over everything, and one border exactly on each slice.
            shapes = [[0, 32], list(range(0, 33, 32 // (2 * cp)))] + [borders(rng, 32) for _ in range(10)]
            out += [{"comm": comm, "cp": cp, "borders": b, "kv_heads": rng.choice([1, 2, 4]), "seed": i} for i, b in enumerate(shapes)]
    return out


@pytest.mark.full
def test_context_parallel_attention_equals_attention_over_the_whole_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = cases()
    monkeypatch.setenv("CASES", json.dumps(wanted))
    results = run([], 4, script=SUPPORT / "ranks" / "context_ranks.py")
    assert [r[0] for r in results] == [0] * 4, results[0][2]
    errors = json.loads(results[0][1])
    assert len(errors) == len(wanted) == 72
    wrong = [(case, e) for case, e in zip(wanted, errors, strict=True) if not e < 1e-12]
    assert not wrong


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


@pytest.mark.parametrize("comm", ["allgather", "ring", "ulysses"])
def test_each_visual_token_goes_to_the_rank_that_holds_its_place(comm: str) -> None:
    visual, none, places = [2, 3, 4, 5, 6, 12, 13, 14, 21], torch.zeros(0), torch.arange(24)
    vision = VisionBatch(none, none, 0, none, none, none, torch.tensor(visual))
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)
    batch = Batch(places, places, places.repeat(3, 1), cu, 14, 24, 24, 1, vision=vision)
    found = {}
    for rank in range(2):
        own = context.split(batch, Axis("cp", 2, rank), comm)
        assert own.vision is not None
        assert own.vision.visual_take_V is not None
        for place, number in zip(own.vision.visual_index_V.tolist(), own.vision.visual_take_V.tolist(), strict=True):
            found[number] = int(own.tokens_N[place])
    assert found == dict(enumerate(visual))
