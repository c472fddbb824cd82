"""Tokens that go to other experts because router logits are rounded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from playbook_bench.judge.verdict import Statement
from playbook_bench.statements.number_formats import significant


def _chosen(logits: Sequence[float], top_k: int) -> frozenset[int]:
    return frozenset(sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k])


def routing_flips(*, experts: int, top_k: int, tokens: int, spread: float, least: float, seed: int = 0) -> Statement:
    """Whether rounding router logits to bfloat16 changes the chosen experts of at least a share `least` of the tokens.

    Logits are normally distributed with standard deviation `spread`; ties go to the lower index, as top-k implementations do.
    """
    draw = random.Random(seed)
    changed = 0
    for _ in range(tokens):
        logits = [draw.gauss(0.0, spread) for _ in range(experts)]
        changed += _chosen(logits, top_k) != _chosen([significant(x, 8) for x in logits], top_k)
    share = changed / tokens
    sentence = f"top-{top_k} of {experts} logits rounded to bfloat16: other experts for {share:.1%} of {tokens} tokens"
    return share >= least, sentence, {"share": share, "tokens": tokens}
