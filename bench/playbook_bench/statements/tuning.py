"""Statements about fine-tuning: steps of reinforcement learning, full sharding on slow links, tokens between nodes, logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.diagnosis import rl_step
from playbook.planner import flops, parameters
from playbook.planner.memory import GIB
from playbook.planner.models import find
from playbook.planner.traffic import distinct
from playbook_bench.judge.verdict import Statement

_BF16, _FP32 = 2, 4


def published_rl_walls(*, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether the wall of each published step of reinforcement learning, by its seconds or shares alone, is the one that its authors name.

    A row has: `source`, `phases` (by names of `rl_step.PHASES`), `step` (of the same unit; the sum, if not given) and `wall`.
    """
    found = [{**row, "computed": rl_step.diagnose(rl_step.Step(row.get("step"), row["phases"]))["wall"]} for row in rows]
    words = "; ".join(f"{r['source']}: {r['computed']}" + ("" if r["computed"] == r["wall"] else f", not {r['wall']}") for r in found)
    return bool(found) and all(r["computed"] == r["wall"] for r in found), words, {"rows": found}


def engine_room(*, model: str, gpu_gib: float, share: float, tps: Sequence[int], at_least: float) -> Statement:
    """Whether an engine of the second number of GPUs has at least so many times the room for keys and values, per GPU, as one of the first.

    `share` of each GPU's memory is the engine's, weights in 16 bits first.
    """
    rows = []
    for tp in tps:
        engine = rl_step.engine(find(model), tp)
        rows.append({"tp": tp, "tokens_per_gpu": (share * gpu_gib * GIB - engine.weights) / engine.kv_per_token / tp})
    ratio = rows[1]["tokens_per_gpu"] / rows[0]["tokens_per_gpu"]
    words = ", ".join(f"{r['tokens_per_gpu']:,.0f} tokens on each GPU at tp {r['tp']}" for r in rows)
    return rows[0]["tokens_per_gpu"] > 0 and ratio >= at_least, f"{model}: {words}: {ratio:.1f} times as many", {"rows": rows}


def full_sharding_break_even(
    *, models: Sequence[str], gb_per_s: float, tflops: float, seq_len: int, at_least: float, at_most: float
) -> Statement:
    """Tokens that a GPU must compute in each micro-batch for full sharding's transfers to hide behind it, for each model, whether within the two bounds.

    Two gathers of bf16 parameters and a scatter of fp32 gradients, (n - 1) / n taken as one, at `gb_per_s` for each GPU; computing at `tflops`.
    """
    rows: list[dict[str, Any]] = []
    for model in models:
        shape = find(model)
        sent = (2 * _BF16 + _FP32) * parameters.total(shape)
        rows.append({"model": model, "tokens": sent / (gb_per_s * 1e9) * tflops * 1e12 / flops.per_token(shape, seq_len)})
    words = ", ".join(f"{r['model']} {r['tokens']:,.0f}" for r in rows)
    holds = all(at_least <= float(r["tokens"]) <= at_most for r in rows)
    return holds, f"tokens of a micro-batch on each GPU at {gb_per_s:g} GB/s and {tflops:g} TFLOP/s: {words}", {"rows": rows}


def sharding_inside_nodes(*, gpus: int, per_node: int, microbatches: int, at_least: float) -> Statement:
    """Whether sharding inside each node and copies across nodes sends at least so many times fewer bytes over a node's links than sharding over all.

    Over all: each micro-batch gathers bf16 parameters twice and scatters fp32 gradients, and a ring crosses each node's edge once with all of them.
    Inside: an all-reduce of fp32 gradients crosses it, once a step. Bytes for each parameter that cross an edge; `n` nodes.
    """
    nodes = gpus // per_node
    everywhere = microbatches * (2 * _BF16 + _FP32) * (gpus - 1) / gpus
    inside = 2 * _FP32 * (nodes - 1) / nodes
    words = f"{everywhere:.2f} against {inside:.2f} bytes for each parameter leave a node of {per_node}, {microbatches} micro-batches on {gpus} GPUs"
    return everywhere / inside >= at_least, f"{words}: {everywhere / inside:.1f} times fewer", {"over_all": everywhere, "inside": inside}


def tokens_between_nodes(*, model: str, nodes: int, at_least: float) -> Statement:
    """Whether sending a token once to each node of its experts moves at least so many times fewer copies than once to each expert, with random routing.

    Copies that stay in a token's own node are left out of both.
    """
    shape, away = find(model), (nodes - 1) / nodes
    each, once = shape.top_k * away, distinct(nodes, shape.top_k) * away
    return each / once >= at_least, f"{model} on {nodes} nodes: {each:.2f} copies of a token, or {once:.2f}", {"each": each, "once": once}


def published_rates(*, rows: Sequence[Mapping[str, Any]], reference: float, at_most: float) -> Statement:
    """Whether each published rate is at most so large a share of the `reference`. A row has: `source` and `rate`, in one unit."""
    found = [{**row, "share": row["rate"] / reference} for row in rows]
    words = ", ".join(f"{r['source']} {r['rate']:g} ({r['share']:.0%})" for r in found)
    return bool(found) and all(r["share"] <= at_most for r in found), f"of {reference:g}: {words}", {"rows": found}


def logits_of_a_row(*, vocab: int, tokens: int, chunk: int, copies_bytes: int, at_least_gib: float, at_most_gib: float) -> Statement:
    """Whether logits of all tokens, with `copies_bytes` for each, take at least so much, and those of a chunk at most so much."""
    whole, part = (n * vocab * copies_bytes / GIB for n in (tokens, chunk))
    words = f"{tokens:,} tokens of a vocabulary of {vocab:,} take {whole:.1f} GiB, a chunk of {chunk:,} {part:.1f} GiB"
    return whole >= at_least_gib and part <= at_most_gib, words, {"whole_gib": whole, "chunk_gib": part}
