"""One rank of the comparison of context-parallel attention with attention over the whole stream, in float64; see test_context.py."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from ranks import leave

from playbook_trainer.axes import Axis
from playbook_trainer.data.batch import Batch
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.parallel import context

HEADS, HEAD_DIM = 4, 8


def batch_of(borders: list[int]) -> Batch:
    n = borders[-1]
    tokens = torch.arange(n)
    longest = max(b - a for a, b in itertools.pairwise(borders))
    return Batch(tokens, tokens.clone(), tokens.clone(), torch.tensor(borders, dtype=torch.int32), longest, n, n, 0)


def error(comm: str, borders: list[int], kv_heads: int, axis: Axis, seed: int) -> float:
    """The largest relative difference of outputs and gradients between this rank's share and the whole."""
    generator = torch.Generator().manual_seed(seed)
    n = borders[-1]
    q, g = (torch.randn(n, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(n, kv_heads, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    whole: list[Any] = [t.clone().requires_grad_() for t in (q, k, v)]
    cu, top = torch.tensor(borders, dtype=torch.int32), n
    out = attend(*whole, cu, cu, top, top, causal=True)
    out.backward(g)
    plan = context.split(batch_of(borders), axis, comm)
    index = plan.labels_N  # the tokens are their own places, so the split tells what this rank holds
    mine: list[Any] = [t[index].clone().requires_grad_() for t in (q, k, v)]
    local = context.attend_across(*mine, plan, axis)
    local.backward(g[index])
    pairs = [(local, out[index]), *((a.grad, b.grad[index]) for a, b in zip(mine, whole, strict=True))]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    first = rank // 2 * 2
    axes = {
        world: Axis("cp", world, rank, dist.group.WORLD, tuple(range(world))),
        2: Axis("cp", 2, rank % 2, pairs[rank // 2], (first, first + 1)),
    }
    results = []
    for case in json.loads(os.environ["CASES"]):
        worst = torch.tensor(error(case["comm"], case["borders"], case["kv_heads"], axes[case["cp"]], case["seed"]), dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        results.append(worst.item())
    if rank == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
    leave()
