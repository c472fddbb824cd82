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
from playbook.planner.rules import Degrees, Options
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
) -> list[str]:
    """The rules that a layout breaks, each as found, expected and what to do; an empty list means that it can run.

    With `options`, the rules of the chosen features are checked too, and with `shape` those that need the model's widths.
    """
    low = [
        f"{k} is {v}; set it to 1 or more" for k, v in {"gpus": gpus, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}.items() if v < 1
    ]
    low += [f"{k} is {v}; set it to 1 or more" for k, v in {"vpp": vpp, "micro_batch_size": micro_batch_size}.items() if v < 1]
    if low:
        return low
    uneven = options is not None and options.uneven
    broken = grid(gpus=gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    broken += _heads(heads, kv_heads, tp) + _chunks(layers, pp, vpp, uneven) + _experts(experts, ep)
    if cp > 1 and seq_len % (2 * cp):
        broken.append(f"seq_len {seq_len} is not a multiple of 2 x cp = {2 * cp} (each rank takes two chunks); change data.seq_len")
    if not gpus % (tp * pp * cp):
        broken += _batch(global_batch_size, micro_batch_size, gpus // (tp * pp * cp), pp, vpp)
    if options is None:
        return broken
    return broken + rules.broken(
        Degrees(gpus, heads, kv_heads, experts, seq_len, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp, shape=shape), options
    )


def _heads(heads: int, kv_heads: int, tp: int) -> list[str]:
    """TP shards attention heads. Source: Megatron-LM, `megatron/core/transformer/transformer_config.py`."""
    broken = []
    if heads % tp:
        broken.append(f"{heads} attention heads do not divide over tp {tp}; set parallel.tp to a divisor of {heads}")
    if kv_heads % tp and tp % kv_heads:
        broken.append(f"{kv_heads} key-value heads and tp {tp}: one must be a multiple of the other; change parallel.tp")
    return broken


def _chunks(layers: int, pp: int, vpp: int, uneven: bool) -> list[str]:
    """The pipeline cuts the decoder into chunks, equal ones unless a pipeline layout lists them.

    In a listed layout the embedding and the output layer may have a chunk of their own.
    Source: Megatron-LM, `megatron/training/arguments.py` and `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
    """
    broken, chunks = [], pp * vpp
    if uneven and chunks > layers + 2:
        broken.append(f"{layers} layers, embedding and output do not fill pp {pp} x vpp {vpp} = {chunks} chunks; change parallel.pp")
    elif not uneven and layers % chunks:
        broken.append(f"{layers} layers do not divide into pp {pp} x vpp {vpp} = {chunks} chunks; change parallel.pp")
    if vpp > 1 and pp == 1:
        broken.append(f"vpp {vpp} needs pp > 1; set vpp to 1 or raise parallel.pp")
    return broken


def _batch(global_batch_size: int, micro_batch_size: int, dp: int, pp: int, vpp: int) -> list[str]:
    """A step has whole micro-batches, and the interleaved schedule takes them in groups of pp.

    Source: Megatron-LM, `megatron/core/num_microbatches_calculator.py` and `megatron/core/pipeline_parallel/schedules.py`
    (`forward_backward_pipelining_with_interleaving`).
    """
    rows = micro_batch_size * dp
    if global_batch_size % rows:
        return [
            f"global batch {global_batch_size} is not a multiple of micro batch {micro_batch_size} x dp {dp} = {rows};"
            f" set train.global_batch_size to a multiple of {rows}"
        ]
    microbatches = global_batch_size // rows
    if vpp > 1 and microbatches % pp:
        return [
            f"vpp {vpp} needs micro-batches in a multiple of pp {pp}, and a step has {microbatches};"
            f" change train.global_batch_size or set parallel.vpp: 1"
        ]
    return []


def _experts(experts: int, ep: int) -> list[str]:
    """EP shards experts. Source: Megatron-LM, `megatron/core/transformer/moe/moe_layer.py`."""
    if ep > 1 and not experts:
        return [f"ep {ep} on a model without experts; set parallel.ep to 1"]
    if experts % ep:
        return [f"{experts} experts do not divide over ep {ep}; set parallel.ep to a divisor of {experts}"]
    return []


def grid(*, gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> list[str]:
    """The rules of the two grids that a layout breaks on this many GPUs."""
    broken = []
    if gpus % (tp * pp * cp):
        broken.append(
            f"{gpus} ranks do not divide into tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}; start a multiple of {tp * pp * cp} ranks"
        )
    if gpus % (etp * ep * pp):
        broken.append(
            f"{gpus} ranks do not divide into ep {ep} x etp {etp} x pp {pp} = {etp * ep * pp}; start a multiple of {etp * ep * pp} ranks"
        )
    return broken


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
