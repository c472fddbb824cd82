"""The bubble of an interleaved pipeline, and what interleaving sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from playbook.planner import pipeline
from playbook_bench.judge.verdict import Statement


def interleaving(*, pp: int, vpp: Sequence[int], microbatches: Sequence[int]) -> Statement:
    """Whether each further chunk per stage shrinks the bubble, for every number of micro-batches, and what it costs in transfers.

    `vpp` rises. Source: arXiv 2104.04473, section 2.2 (the bubble divides by the chunks, the boundaries multiply by them).
    """
    rows = [
        {"microbatches": m, "vpp": v, "bubble": pipeline.bubble(pp=pp, microbatches=m, vpp=v), "boundaries": pp * v - 1}
        for m in microbatches
        for v in vpp
    ]
    by_count = [[r for r in rows if r["microbatches"] == m] for m in microbatches]
    holds = len(vpp) > 1 and all(b["bubble"] < a["bubble"] for group in by_count for a, b in pairwise(group))
    parts = [
        f"{group[0]['microbatches']} micro-batches: " + ", ".join(f"{r['bubble']:.1%} at vpp {r['vpp']}" for r in group)
        for group in by_count
    ]
    sentence = f"pp {pp}, share of the step spent idle, {'; '.join(parts)}; boundaries between chunks {rows[0]['boundaries']} -> {rows[-1]['boundaries']}"
    return holds, sentence, {"rows": rows}
