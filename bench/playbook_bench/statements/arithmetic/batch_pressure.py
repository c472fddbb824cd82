"""Longer sequences at a fixed number of GPUs: more gradient accumulation, or a smaller global batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from playbook.planner.layout import cp_for
from playbook_bench.judge.verdict import Statement


def batch_pressure(*, gpus: int, pp: int, tp: int, micro_batch_size: int, global_batch_size: int, seq_lens: Sequence[int]) -> Statement:
    """Whether growing CP at a fixed GPU count makes either gradient accumulation grow or the global batch shrink."""
    rows: list[dict[str, Any]] = []
    for seq_len in seq_lens:
        cp = cp_for(seq_len)
        dp, over = divmod(gpus, tp * pp * cp)
        if over or not dp or global_batch_size % (micro_batch_size * dp):
            return (
                False,
                f"{seq_len} tokens: no layout of {gpus} GPUs with cp {cp} takes a global batch of {global_batch_size}",
                {"rows": rows},
            )
        accumulation = global_batch_size // (micro_batch_size * dp)
        first = rows[0]["accumulation"] if rows else accumulation
        batch = micro_batch_size * dp * first
        rows.append({"seq_len": seq_len, "cp": cp, "dp": dp, "accumulation": accumulation, "batch_at_first_accumulation": batch})
    grows = all(b["accumulation"] > a["accumulation"] for a, b in pairwise(rows))
    shrinks = all(b["batch_at_first_accumulation"] < a["batch_at_first_accumulation"] for a, b in pairwise(rows))
    first, last = rows[0], rows[-1]
    kept, shrunk = first["accumulation"], last["batch_at_first_accumulation"]
    sentence = (
        f"from {first['seq_len']} to {last['seq_len']} tokens on {gpus} GPUs, dp goes {first['dp']} -> {last['dp']}: a global batch of"
        f" {global_batch_size} takes {kept} -> {last['accumulation']} micro-batches per rank, or at {kept} it shrinks to {shrunk}"
    )
    return grows and shrinks and len(rows) > 1, sentence, {"rows": rows}
