"""Claims that arithmetic settles: each function is the statement of one case, with the sentence and the figures behind its answer."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from playbook.errors import ConfigError
from playbook.planner import flops, memory, pipeline, traffic
from playbook.planner.activations import tokens
from playbook.planner.layout import Statement
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.plan import Plan
from playbook.planner.rules import Options
from playbook.planner.shapes import Shape


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


def platform_walls(
    *, model: str, ep: int, seq_len: int, kernels_per_layer: int, launch_s: float, platforms: Mapping[str, Mapping[str, float]]
) -> Statement:
    """Whether expert communication weighs more against computation on the first platform, and kernel launches more on the second.

    A platform has `peak_flops_per_s`, `domain` (GPUs of one fast interconnect), `fast_bytes_per_s` and `slow_bytes_per_s`. Every rank
    sends to its peers evenly, nothing overlaps, and a launch takes `launch_s` everywhere: only the order of the ratios is of interest.

    Raises:
        ConfigError: not two platforms, or a model or layout that is not possible.
    """
    if len(platforms) != 2:
        raise ConfigError(f"{len(platforms)} platforms; expected two, the one with dearer communication first")
    plan = Plan(shape(model), model, gpus=ep, ep=ep, seq_len=seq_len).require()
    layers = range(plan.shape.layers)
    sent = sum(traffic.per_layer(plan, i).get("ep", traffic.Sent(0, 0)).total for i in layers)
    work = flops.per_token(plan.shape, seq_len) * tokens(plan)
    launches = kernels_per_layer * plan.shape.layers * launch_s
    weights: dict[str, tuple[float, float]] = {}
    for name, p in platforms.items():
        leaves = traffic.outside(degree=ep, stride=1, domain=int(p["domain"]))
        compute = work / p["peak_flops_per_s"]
        moved = sent * (leaves / p["slow_bytes_per_s"] + (1 - leaves) / p["fast_bytes_per_s"])
        weights[name] = (moved / compute, launches / compute)
    first, second = weights.values()
    parts = [f"{name} {moved:.2f} and {launched:.2f}" for name, (moved, launched) in weights.items()]
    sentence = (
        f"{model}, ep {ep}: seconds of expert communication and of kernel launches per second of computation at peak: {'; '.join(parts)}"
    )
    figures = {name: {"communication": moved, "host": launched} for name, (moved, launched) in weights.items()}
    return first[0] > second[0] and first[1] < second[1], sentence, {"platforms": figures}


def offload_makes_it_fit(
    *,
    model: str,
    gpu_gib: float,
    gpus: int,
    seq_len: int,
    cp: int,
    pp: int,
    ep: int,
    tp: int = 1,
    vpp: int = 1,
    global_batch_size: int = 0,
    recompute: Sequence[str] = (),
    fp8: str = "",
    dispatcher: str = "",
) -> Statement:
    """Whether a layout exceeds the GPU as it is and fits once the optimizer's state lies in host memory; layers may divide unevenly.

    Of the logits those of the next token count, and not those of prediction depths: so the claim's record has them.

    Raises:
        ConfigError: the layout breaks a rule.
    """
    options = Options(uneven=True, recompute=tuple(recompute), fp8=fp8, dispatcher=dispatcher)
    plan = Plan(
        shape(model), model, gpus=gpus, tp=tp, cp=cp, pp=pp, ep=ep, vpp=vpp, gbs=global_batch_size, seq_len=seq_len, options=options
    )  # fmt: skip
    stages = memory.estimate(plan)
    peaks = [s.peak - s.transient + max(s.loss / (1 + plan.shape.mtp), s.replayed) for s in stages]
    whole, without = max(peaks), max(peak - s.optimizer for peak, s in zip(peaks, stages, strict=True))
    sentence = (
        f"{model} at {seq_len} tokens on {gpus} GPUs of {gpu_gib:g} GiB: {whole / GIB:.1f} GiB allocated at peak,"
        f" {without / GIB:.1f} GiB with the optimizer's state in host memory"
    )
    return without <= gpu_gib * GIB < whole, sentence, {"peak_bytes": whole, "peak_bytes_with_offload": without}


def mfu_falls_as_throughput_rises(*, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether each published pair of runs is faster in FP8 and shows a lower MFU, because the peak that it is divided by doubles.

    A row has: model, gpu, `bf16_tflops` and `fp8_tflops` (model FLOPs per second and GPU), `bf16_peak` and `fp8_peak`.
    """
    found = [
        {
            **row,
            "gain": row["fp8_tflops"] / row["bf16_tflops"] - 1,
            "bf16_mfu": row["bf16_tflops"] / row["bf16_peak"],
            "fp8_mfu": row["fp8_tflops"] / row["fp8_peak"],
        }
        for row in rows
    ]
    parts = [f"{r['model']} on {r['gpu']}: {r['gain']:+.1%} throughput, MFU {r['bf16_mfu']:.1%} -> {r['fp8_mfu']:.1%}" for r in found]
    return bool(found) and all(r["gain"] > 0 and r["fp8_mfu"] < r["bf16_mfu"] for r in found), "; ".join(parts), {"rows": found}


def shape(model: str) -> Shape:
    """The counts of a model.

    Raises:
        ConfigError: the model is not in the table.
    """
    if model not in MODELS:
        raise ConfigError(f"model '{model[:40]}' is not known; expected one of {', '.join(MODELS)}")
    return MODELS[model]


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
