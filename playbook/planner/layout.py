"""Layouts: which combinations of parallel degrees are possible, and what follows from them. Pure arithmetic.

`world = tp x cp x pp x dp` for attention and `world = etp x ep x pp x edp` for experts: two grids over the same ranks.
Source: Megatron-LM, `megatron/core/parallel_state.py` and `megatron/training/arguments.py` (the divisibility checks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import lcm
from typing import Any

from playbook.planner import rules
from playbook.planner.models import MODELS
from playbook.planner.rules import Case, Options, Words
from playbook.planner.shapes import Shape

Statement = tuple[bool, str, dict[str, Any]]
"""Whether an arithmetic claim holds, one sentence that says why, and the figures behind it."""

CP_SHARD_TOKENS = 4096
"""Tokens per CP rank that the sizing rule aims at. Source: Megatron Bridge, long-context guidance for MoE training."""


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
    table = rules.LAYOUT if options is None else (*rules.LAYOUT, *rules.LABEL, *rules.FEATURES, *rules.EXCLUSIONS)
    if options is None and shape is not None:
        table = (*table, *rules.WIDTHS)
    return rules.broken(case, rules.COUNTS, words=words) or rules.broken(case, table, words=words)


def grid(*, gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> list[str]:
    """The rules of the two grids that a layout breaks on this many GPUs."""
    return rules.broken(Case(gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), rules.GRIDS)


def min_gpus(*, pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """The fewest GPUs that hold one copy: pp times the least common multiple of `tp x cp` and `ep x etp`, so their larger where one divides the other."""
    return pp * lcm(tp * cp, ep * etp)


def cp_for(seq_len: int) -> int:
    """CP by the sizing rule: the sequence over 4096 tokens, rounded up to a power of two."""
    wanted = -(-seq_len // CP_SHARD_TOKENS)
    return 1 << max(0, wanted - 1).bit_length()


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


def min_gpus_families(*, families: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether each published long-context layout needs at least the GPUs that it names, and which ones need uneven pipelines.

    A family has: model (a key of `playbook.planner.shapes.MODELS`), seq_len, gpus (as published), uneven (as published), and the degrees.
    """
    rows = []
    for family in families:
        degrees = {k: int(family.get(k, 1)) for k in ("pp", "tp", "cp", "ep", "etp")}
        chunks = degrees["pp"] * int(family.get("vpp", 1))
        layers = MODELS[family["model"]].layers
        need = min_gpus(**degrees)
        rows.append(
            {
                "model": family["model"],
                "seq_len": family["seq_len"],
                "gpus": need,
                "layers": layers,
                "chunks": chunks,
                "uneven": bool(layers % chunks),
                "agrees": need == family["gpus"] and bool(layers % chunks) == family["uneven"] and not grid(gpus=need, **degrees),
            }
        )
    parts = [
        f"{r['model']} at {r['seq_len']} tokens needs {r['gpus']} GPUs"
        + (f" and splits {r['layers']} layers unevenly over {r['chunks']} chunks" if r["uneven"] else "")
        for r in rows
    ]
    return bool(rows) and all(r["agrees"] for r in rows), "; ".join(parts), {"families": rows}
