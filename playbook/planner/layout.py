"""Layouts: which combinations of parallel degrees are possible, and what follows from them. Pure arithmetic.

`world = tp x cp x pp x dp` for attention and `world = etp x ep x pp x edp` for experts: two grids over the same ranks.
Source: Megatron-LM, `megatron/core/parallel_state.py` and `megatron/training/arguments.py` (the divisibility checks).
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from playbook.planner import rules
from playbook.planner.exclusions import EXCLUSIONS
from playbook.planner.options import Options
from playbook.planner.rules import Case, Words
from playbook.planner.shapes import Shape

CP_SHARD_TOKENS = 4096
"""Tokens per CP rank that the published rule aims at, with which L1, L2 and L6 count; the card's own rule is in its `sizes`. Source:
Megatron Bridge, long-context guidance for MoE training."""


_ALL = (*rules.LAYOUT, *rules.LABEL, *rules.FEATURES, *EXCLUSIONS)
_KNOWN = tuple(rule for rule in _ALL if rule not in rules.LABEL)


@lru_cache(maxsize=4096)
def _all_known(options: Options) -> bool:
    """Whether no option has a name that is not known; few sets of options come with many layouts."""
    return not rules.broken(Case(o=options), rules.LABEL)


def check(
    *,
    gpus: int,
    heads: int,
    kv_heads: int,
    layers: int,
    experts: int,
    seq_len: int,
    micro_batch_size: int,
    global_batch_size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vpp: int = 1,
    options: Options | None = None,
    shape: Shape | None = None,
    words: Words = rules.OWN,
) -> list[str]:
    """The rules that a layout breaks, each as found, expected and what to do; an empty list means that it can run.

    With `options`, the rules of the chosen features are checked too, and with `shape` those that need the model's widths; `words` are the
    caller's names of settings.
    """
    case = Case(
        gpus,
        heads,
        kv_heads,
        layers,
        experts,
        seq_len,
        micro_batch_size,
        global_batch_size,
        tp,
        pp,
        cp,
        ep,
        etp,
        vpp,
        shape,
        options or Options(uneven=False),
    )
    table = rules.LAYOUT if options is None else _KNOWN if _all_known(options) else _ALL
    if options is None and shape is not None:
        table = (*table, *rules.WIDTHS)
    return rules.broken(case, rules.COUNTS, words=words) or rules.broken(case, table, words=words)


def grid(*, gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> list[str]:
    """The rules of the two grids that a layout breaks on this many GPUs."""
    return rules.broken(Case(gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), rules.GRIDS)


def min_gpus(*, pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """The fewest GPUs that hold one copy: pp times the least common multiple of `tp x cp` and `ep x etp`, so their larger where one divides
    the other.
    """
    return pp * lcm(tp * cp, ep * etp)


def cp_for(seq_len: int) -> int:
    """CP by the sizing rule: the sequence over 4096 tokens, rounded up to a power of two."""
    shards = -(-seq_len // CP_SHARD_TOKENS)
    return 1 << max(0, shards - 1).bit_length()
