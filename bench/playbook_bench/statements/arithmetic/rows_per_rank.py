"""How many rows a rank of experts gets, dropless and padded."""

from __future__ import annotations

import math
import random
from collections import Counter

from playbook_bench.judge.verdict import Statement


def rows_per_rank(*, tokens: int, experts: int, top_k: int, ranks: int, batches: int, capacity_factor: float, seed: int = 0) -> Statement:
    """Whether dropless routing gives a rank another number of rows in most batches, and drop-and-pad always the same.

    Each token chooses `top_k` different experts at random; a rank holds `experts / ranks` of them. Padded to capacity, every expert has
    `ceil(capacity_factor x tokens x top_k / experts)` rows: what exceeds that is dropped.
    Source: Megatron-LM, `megatron/core/transformer/moe/moe_utils.py` (`get_capacity`).
    """
    draw = random.Random(seed)
    capacity = math.ceil(capacity_factor * tokens * top_k / experts)
    held, dropped, shapes = experts // ranks, 0, set()
    for _ in range(batches):
        load = Counter(e for _ in range(tokens) for e in draw.sample(range(experts), top_k))
        shapes.add(sum(load[e] for e in range(held)))
        dropped += sum(max(0, n - capacity) for n in load.values())
    share = dropped / (batches * tokens * top_k)
    sentence = (
        f"a rank with {held} of {experts} experts gets {len(shapes)} different numbers of rows in {batches} batches without dropping;"
        f" padded to {capacity} rows per expert it always gets {held * capacity}, and {share:.1%} of the copies are dropped"
    )
    return len(shapes) > batches / 2, sentence, {"different": len(shapes), "batches": batches, "dropped": share}
