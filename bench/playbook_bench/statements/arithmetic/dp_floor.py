"""Longer sequences at a fixed number of GPUs: data parallelism falls to one, and then there is no layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from playbook.planner.layout import cp_for, min_gpus
from playbook_bench.judge.verdict import Statement


def dp_floor(*, gpus: int, pp: int, tp: int, seq_lens: Sequence[int]) -> Statement:
    """Whether sizing CP by the rule at a fixed GPU count drives DP to 1, and the next longer sequence then has no layout.

    `seq_lens` are consecutive doublings.
    """
    rows = []
    for seq_len in seq_lens:
        cp = cp_for(seq_len)
        rest, over = divmod(gpus, tp * pp * cp)
        rows.append({"seq_len": seq_len, "cp": cp, "dp": 0 if over else rest})
    dps = [row["dp"] for row in rows]
    halves = all(b == a // 2 for a, b in pairwise(dps) if a)
    floor = next((row for row in rows if row["dp"] == 1), None)
    cliff = next((row for row in rows if row["dp"] == 0), None)
    holds = halves and floor is not None and cliff is not None
    if not holds or floor is None or cliff is None:
        return (
            False,
            f"on {gpus} GPUs with pp {pp} and tp {tp}, dp goes {dps} and does not fall by halves to 1 and then to no layout",
            {"rows": rows},
        )
    need = min_gpus(pp=pp, tp=tp, cp=cp_for(cliff["seq_len"]))
    sentence = (
        f"on {gpus} GPUs with pp {pp} and tp {tp}, dp halves with each doubling, reaches 1 at {floor['seq_len']} tokens,"
        f" and {cliff['seq_len']} tokens need {need} GPUs"
    )
    return True, sentence, {"rows": rows, "gpus": gpus, "gpus_needed_next": need}
