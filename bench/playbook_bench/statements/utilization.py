"""Statements about time that is used and lost, by counting: published figures, the interval between saves, reinforcement learning,
sharding, logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from playbook.diagnosis import rl_step
from playbook.paths import data_root
from playbook.planner import flops, parameters
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS, find
from playbook.planner.runs import check
from playbook.planner.traffic import distinct
from playbook.yaml_files import did_you_mean
from playbook_bench.judge.verdict import Statement


def mfu_falls_as_throughput_rises(*, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether each published pair of runs is faster in FP8 and shows a lower MFU, because the peak that it is divided by doubles.

    A row has: model, gpu, `bf16_tflops` and `fp8_tflops` (model FLOPs per second and GPU), `bf16_peak` and `fp8_peak`.
    """
    computed = [
        {
            **row,
            "gain": row["fp8_tflops"] / row["bf16_tflops"] - 1,
            "bf16_mfu": row["bf16_tflops"] / row["bf16_peak"],
            "fp8_mfu": row["fp8_tflops"] / row["fp8_peak"],
        }
        for row in rows
    ]
    parts = [f"{r['model']} on {r['gpu']}: {r['gain']:+.1%} throughput, MFU {r['bf16_mfu']:.1%} -> {r['fp8_mfu']:.1%}" for r in computed]
    return bool(computed) and all(r["gain"] > 0 and r["fp8_mfu"] < r["bf16_mfu"] for r in computed), "; ".join(parts), {"rows": computed}


_PATCH = 16
"""Pixels on a side of a patch. Source: config.json of Qwen3-VL, vision_config.patch_size."""


def vision_left_out(*, model: str, samples: Sequence[Mapping[str, Any]], at_least: float, at_most: float) -> Statement:
    """Whether counting the decoder alone misses a share of the FLOPs within the two bounds, for every sample.

    A sample has `images`, as (height, width) in pixels, and `text_tokens`. Attention covers the sample's tokens alone, as in packed rows.
    Source: `playbook.planner.flops`, checked against PyTorch's counter.
    """
    shape = MODELS.get(model)
    if shape is None or shape.vision is None:
        raise ValueError(f"'{model}' is no model with a vision tower{did_you_mean(model, [n for n, s in MODELS.items() if s.vision])}")
    unit, rows = _PATCH * shape.vision.merge, []
    for sample in samples:
        # Both sides are rounded to whole visual tokens, as the image processor does.
        sizes = [tuple(max(1, round(side / unit)) * shape.vision.merge for side in image) for image in sample["images"]]
        patches = [rows_ * columns for rows_, columns in sizes]
        tokens = sample["text_tokens"] + sum(patches) // shape.vision.merge**2
        decoder = tokens * flops.per_token(shape, tokens)
        pairs = sum(n * n for n in patches)
        tower = flops.BACKWARD * sum(flops.vision_forward(shape.vision, shape.hidden, sum(patches), pairs).values())
        rows.append({"tokens": tokens, "patches": sum(patches), "left_out": tower / (tower + decoder)})
    shares = [row["left_out"] for row in rows]
    holds = all(at_least <= share <= at_most for share in shares)
    sentence = (
        f"{model}: without its vision tower {min(shares):.0%} to {max(shares):.0%} of the model FLOPs of {len(rows)} samples are left out; "
        f"claimed {at_least:.0%} to {at_most:.0%}"
    )
    return holds, sentence, {"rows": rows}


def published_utilization(*, rows: Sequence[Mapping[str, Any]], at_least: float, at_most: float) -> Statement:
    """Whether published rates, as shares of the data sheet's dense BF16 peak, lie within the two bounds."""
    computed = []
    for row in rows:
        peak = flops.dense_bf16(row["gpu"])
        if peak is None:
            raise ValueError(f"the peak of '{row['gpu']}' is not in the table")
        computed.append({**row, "peak": peak.name, "share": row["tflops_per_gpu"] * 1e12 / peak.flops_per_s})
    holds = all(at_least <= row["share"] <= at_most for row in computed)
    words = ", ".join(f"{row['tflops_per_gpu']:g} TFLOP/s on {row['gpu']} are {row['share']:.1%} of {row['peak']}" for row in computed)
    return holds, f"{words}; claimed {at_least:.0%} to {at_most:.0%}", {"rows": computed}


_MANY = 10
"""Runs above which a group's 90th percentile is looked at."""


def published_runs_predicted(*, leave_one_out: bool, bounds: Mapping[str, Sequence[float]]) -> Statement:
    """Whether each figure of `playbook plan check` on the shipped table lies within its two bounds; with `leave_one_out`, scaled to the
    others.

    Figures: `median_error`, `p90_error`, `covered`, `width` (median of high over low), `winner_within_5_percent`, `mean_regret`,
    `impossible` (runs that are said not to fit), and `behind_constant_mfu` (groups of more than ten runs whose 90th percentile a constant
    share of the peak beats).
    """
    figures = _figures(leave_one_out)
    checked = {name: {"value": figures[name], "at_least": low, "at_most": high} for name, (low, high) in bounds.items()}
    holds = all(f["at_least"] <= f["value"] <= f["at_most"] for f in checked.values())
    words = ", ".join(f"{name} {f['value']:.3g} [{f['at_least']:g}, {f['at_most']:g}]" for name, f in checked.items())
    return holds, f"{figures['runs']} published runs: {words}", {"runs": figures["runs"], **checked}


@cache
def _figures(leave_one_out: bool) -> dict[str, Any]:
    rows = check.check(data_root("tables") / "published_runs.csv", leave_out="configuration" if leave_one_out else "")
    total, order = check.total(rows), check.ranking(rows)
    if total is None or order is None:
        raise ValueError("the shipped table has no runs that can be compared")
    large = [g for g in check.groups(rows) if g["runs"] > _MANY]
    behind = sum(g["p90_error"] >= g["constant_mfu"]["p90_error"] for g in large)
    return {**total, **order, "impossible": len(check.impossible(rows)), "behind_constant_mfu": behind}


def save_interval(
    *, waits_s: Sequence[float], failures_h: Sequence[float], slack: float, at_h: float, before_s: float, after_s: float, gain: float
) -> Statement:
    """Whether Young's interval loses at most `slack` more of the time than the best interval, for each wait per save and each time between
    failures; and whether, with `at_h` hours between failures, a wait of `after_s` in place of `before_s` loses at least `gain` less.

    Sources: Young 1974 for the interval sqrt(2 x wait x time between failures); Daly 2006 for what is lost at any interval.
    """
    rows = []
    for hours in failures_h:
        for wait in waits_s:
            young = _young(wait, 3600 * hours)
            least = _least_lost(wait, 3600 * hours)
            rows.append(
                {"wait_s": wait, "failures_h": hours, "every_s": young, "lost": _lost(young, wait, 3600 * hours), "least_lost": least}
            )
    excess = max(row["lost"] - row["least_lost"] for row in rows)
    before, after = (_lost(_young(wait, 3600 * at_h), wait, 3600 * at_h) for wait in (before_s, after_s))
    sentence = (
        f"saving every sqrt(2 x wait x time between failures) loses at most {100 * excess:.2g} points more than the best interval;"
        f" with {at_h:g} h between failures {before:.1%} at {before_s:g} s a save (every {_young(before_s, 3600 * at_h):.0f} s)"
        f" and {after:.1%} at {after_s:g} s (every {_young(after_s, 3600 * at_h):.0f} s)"
    )
    return (
        excess <= slack and before - after >= gain,
        sentence,
        {"rows": rows, "excess": excess, "lost_before": before, "lost_after": after},
    )


def _young(wait: float, between: float) -> float:
    return math.sqrt(2 * wait * between)


def _lost(every: float, wait: float, between: float) -> float:
    """Share of the time that saves and work done twice take, where failures come at random, `between` seconds apart on average."""
    return 1 - every / (between * math.expm1((every + wait) / between))


def _least_lost(wait: float, between: float) -> float:
    """The share at the best interval."""
    from scipy.optimize import minimize_scalar  # start-up time: the table of statements is listed by commands that compute nothing

    return float(minimize_scalar(lambda log: _lost(math.exp(log), wait, between), bounds=(0, math.log(9 * between)), method="bounded").fun)


_BF16, _FP32 = 2, 4


def published_rl_walls(*, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether the wall of each published step of reinforcement learning, by its seconds or shares alone, is the one that its authors name.

    A row has: `source`, `phases` (by names of `rl_step.PHASES`), `step` (of the same unit; the sum, if not given) and `wall`.
    """
    diagnosed = [{**row, "computed": rl_step.diagnose(rl_step.Step(row.get("step"), row["phases"]))["wall"]} for row in rows]
    words = "; ".join(f"{r['source']}: {r['computed']}" + ("" if r["computed"] == r["wall"] else f", not {r['wall']}") for r in diagnosed)
    return bool(diagnosed) and all(r["computed"] == r["wall"] for r in diagnosed), words, {"rows": diagnosed}


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
    """Tokens that a GPU must compute in each micro-batch for full sharding's transfers to hide behind it, for each model, whether within
    the two bounds.

    Two gathers of bf16 parameters and a scatter of fp32 gradients, (n - 1) / n taken as one, at `gb_per_s` for each GPU; computing at
    `tflops`.
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
    """Whether sharding inside each node and copies across nodes sends at least so many times fewer bytes over a node's links than sharding
    over all.

    Over all: each micro-batch gathers bf16 parameters twice and scatters fp32 gradients, and a ring crosses each node's edge once with all
    of them. Inside: an all-reduce of fp32 gradients crosses it, once a step. Bytes for each parameter that cross an edge; `n` nodes.
    """
    nodes = gpus // per_node
    everywhere = microbatches * (2 * _BF16 + _FP32) * (gpus - 1) / gpus
    inside = 2 * _FP32 * (nodes - 1) / nodes
    words = (
        f"{everywhere:.2f} against {inside:.2f} bytes for each parameter leave a node of {per_node}, {microbatches} micro-batches on "
        f"{gpus} GPUs"
    )
    return everywhere / inside >= at_least, f"{words}: {everywhere / inside:.1f} times fewer", {"over_all": everywhere, "inside": inside}


def tokens_between_nodes(*, model: str, nodes: int, at_least: float) -> Statement:
    """Whether sending a token once to each node of its experts moves at least so many times fewer copies than once to each expert, with
    random routing.

    Copies that stay in a token's own node are left out of both.
    """
    shape, away = find(model), (nodes - 1) / nodes
    per_expert, per_node = shape.top_k * away, distinct(nodes, shape.top_k) * away
    return (
        per_expert / per_node >= at_least,
        f"{model} on {nodes} nodes: {per_expert:.2f} copies of a token, or {per_node:.2f}",
        {"each": per_expert, "once": per_node},
    )


def published_rates(*, rows: Sequence[Mapping[str, Any]], reference: float, at_most: float) -> Statement:
    """Whether each published rate is at most so large a share of the `reference`. A row has: `source` and `rate`, in one unit."""
    computed = [{**row, "share": row["rate"] / reference} for row in rows]
    words = ", ".join(f"{r['source']} {r['rate']:g} ({r['share']:.0%})" for r in computed)
    return bool(computed) and all(r["share"] <= at_most for r in computed), f"of {reference:g}: {words}", {"rows": computed}


def logits_of_a_row(*, vocab: int, tokens: int, chunk: int, copies_bytes: int, at_least_gib: float, at_most_gib: float) -> Statement:
    """Whether logits of all tokens, with `copies_bytes` for each, take at least so much, and those of a chunk at most so much."""
    whole, part = (n * vocab * copies_bytes / GIB for n in (tokens, chunk))
    words = f"{tokens:,} tokens of a vocabulary of {vocab:,} take {whole:.1f} GiB, a chunk of {chunk:,} {part:.1f} GiB"
    return whole >= at_least_gib and part <= at_most_gib, words, {"whole_gib": whole, "chunk_gib": part}
