"""Statements about layouts: what a degree costs, what fits, what is sent, and which settings exclude one another."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from playbook.errors import ConfigError
from playbook.lint.base import show
from playbook.lint.labels import excluded, label_problems, table_for, tables
from playbook.planner import flops, memory, pipeline
from playbook.planner.activations import tokens
from playbook.planner.layout import cp_for, grid, min_gpus
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.planner.traffic import Sent, boundaries_outside, boundary, outside, per_layer
from playbook.yaml_files import did_you_mean
from playbook_bench.judge.verdict import Statement


def _shape_of(model: str) -> Shape:
    """The counts of a model.

    Raises:
        ConfigError: the model is not in the table.
    """
    if model not in MODELS:
        raise ConfigError(f"model '{model[:40]}' is not known; expected one of {', '.join(MODELS)}")
    return MODELS[model]


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
    first_accumulation, shrunk = first["accumulation"], last["batch_at_first_accumulation"]
    sentence = (
        f"from {first['seq_len']} to {last['seq_len']} tokens on {gpus} GPUs, dp goes {first['dp']} -> {last['dp']}: a global batch of"
        f" {global_batch_size} takes {first_accumulation} -> {last['accumulation']} micro-batches per rank, or at {first_accumulation} "
        f"it shrinks to {shrunk}"
    )
    return grows and shrinks and len(rows) > 1, sentence, {"rows": rows}


def dp_floor(*, gpus: int, pp: int, tp: int, seq_lens: Sequence[int]) -> Statement:
    """Whether sizing CP by the rule at a fixed GPU count drives DP to 1, and the next longer sequence then has no layout.

    `seq_lens` are consecutive doublings.
    """
    rows = []
    for seq_len in seq_lens:
        cp = cp_for(seq_len)
        dp, over = divmod(gpus, tp * pp * cp)
        rows.append({"seq_len": seq_len, "cp": cp, "dp": 0 if over else dp})
    dps = [row["dp"] for row in rows]
    halves = all(b == a // 2 for a, b in pairwise(dps) if a)
    floor = next((row for row in rows if row["dp"] == 1), None)
    cliff = next((row for row in rows if row["dp"] == 0), None)
    if not halves or floor is None or cliff is None:
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
        _shape_of(model), model, gpus=gpus, tp=tp, cp=cp, pp=pp, ep=ep, vpp=vpp, gbs=global_batch_size, seq_len=seq_len, options=options
    )  # fmt: skip
    stages = memory.estimate(plan)
    peaks = [s.peak - s.transient + max(s.loss / (1 + plan.shape.mtp), s.replayed) for s in stages]
    whole, without = max(peaks), max(peak - s.optimizer for peak, s in zip(peaks, stages, strict=True))
    sentence = (
        f"{model} at {seq_len} tokens on {gpus} GPUs of {gpu_gib:g} GiB: {whole / GIB:.1f} GiB allocated at peak,"
        f" {without / GIB:.1f} GiB with the optimizer's state in host memory"
    )
    return without <= gpu_gib * GIB < whole, sentence, {"peak_bytes": whole, "peak_bytes_with_offload": without}


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
    sentence = (
        f"pp {pp}, share of the step spent idle, {'; '.join(parts)}; boundaries between chunks {rows[0]['boundaries']} -> "
        f"{rows[-1]['boundaries']}"
    )
    return holds, sentence, {"rows": rows}


_AXES = ("tp", "cp", "ep")


def hot_inside(
    *,
    model: str,
    axis: str,
    degree: int,
    pp: int,
    domain: int,
    fast_bytes_per_s: float,
    slow_bytes_per_s: float,
    seq_len: int = 4096,
    micro_batch_size: int = 1,
) -> Statement:
    """Whether the axis that sends more should have the fast domain: bytes over bandwidth of one microbatch, both ways round.

    Either `axis` (tp, cp or ep) takes consecutive ranks and the pipeline strides over them, or the other way round. Every rank sends its
    pipeline boundary to one neighbour, the axis's bytes evenly to its peers; nothing overlaps.

    Raises:
        ConfigError: an axis, model or layout that is not possible.
    """
    if axis not in _AXES or model not in MODELS:
        raise ConfigError(f"axis '{axis}' of model '{model}': expected an axis of {', '.join(_AXES)} and a model of {', '.join(MODELS)}")
    if domain < 1 or fast_bytes_per_s <= 0 or slow_bytes_per_s <= 0:
        raise ConfigError("a domain and its bandwidths must be positive; change domain or the two bandwidths")
    along: dict[str, Any] = {axis: degree}
    plan = Plan(MODELS[model], gpus=degree * pp, pp=pp, mbs=micro_batch_size, seq_len=seq_len, options=Options(uneven=True), **along)
    layers = range(plan.require().shape.layers)
    of_axis = sum(per_layer(plan, i).get(axis, Sent(0, 0)).total for i in layers) / pp
    of_pp = boundary(plan).total

    def seconds(axis_stride: int, pp_stride: int) -> float:
        leaves = outside(degree=degree, stride=axis_stride, domain=domain)
        crosses = boundaries_outside(pp=pp, stride=pp_stride, domain=domain)
        out = of_axis * leaves + of_pp * crosses
        return out / slow_bytes_per_s + (of_axis + of_pp - out) / fast_bytes_per_s

    inner, outer = seconds(1, degree), seconds(pp, 1)
    hot_first, cold_first = (inner, outer) if of_axis >= of_pp else (outer, inner)
    figures = {"axis_bytes": of_axis, "pp_bytes": of_pp, "axis_inside_s": inner, "pp_inside_s": outer}
    name = axis if of_axis >= of_pp else "pp"
    sentence = (
        f"{model}, {axis} {degree} x pp {pp}, domains of {domain}: a microbatch sends {of_axis / 1e6:.0f} MB on {axis} and "
        f"{of_pp / 1e6:.0f} MB"
        f" on pp; with {name} inside the domain that takes {hot_first * 1e3:.2f} ms, with the other one {cold_first * 1e3:.2f} ms"
    )
    return hot_first < cold_first, sentence, figures


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
    plan = Plan(_shape_of(model), model, gpus=ep, ep=ep, seq_len=seq_len).require()
    layers = range(plan.shape.layers)
    sent = sum(per_layer(plan, i).get("ep", Sent(0, 0)).total for i in layers)
    work = flops.per_token(plan.shape, seq_len) * tokens(plan)
    launches = kernels_per_layer * plan.shape.layers * launch_s
    weights: dict[str, tuple[float, float]] = {}
    for name, p in platforms.items():
        leaves = outside(degree=ep, stride=1, domain=int(p["domain"]))
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


def rows_per_rank(*, tokens: int, experts: int, top_k: int, ranks: int, batches: int, capacity_factor: float, seed: int = 0) -> Statement:
    """Whether dropless routing gives a rank another number of rows in most batches, and drop-and-pad always the same.

    Each token chooses `top_k` different experts at random; a rank holds `experts / ranks` of them. Padded to capacity, every expert has
    `ceil(capacity_factor x tokens x top_k / experts)` rows: what exceeds that is dropped.
    Source: Megatron-LM, `megatron/core/transformer/moe/moe_utils.py` (`get_capacity`).
    """
    draw = random.Random(seed)
    capacity = math.ceil(capacity_factor * tokens * top_k / experts)
    per_rank, dropped, shapes = experts // ranks, 0, set()
    for _ in range(batches):
        load = Counter(e for _ in range(tokens) for e in draw.sample(range(experts), top_k))
        shapes.add(sum(load[e] for e in range(per_rank)))
        dropped += sum(max(0, n - capacity) for n in load.values())
    share = dropped / (batches * tokens * top_k)
    sentence = (
        f"a rank with {per_rank} of {experts} experts gets {len(shapes)} different numbers of rows in {batches} batches without dropping;"
        f" padded to {capacity} rows per expert it always gets {per_rank * capacity}, and {share:.1%} of the copies are dropped"
    )
    return len(shapes) > batches / 2, sentence, {"different": len(shapes), "batches": batches, "dropped": share}


def refused_together(*, megatron_core: str, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether megatron-core refuses exactly the settings that `rows` mark as refused, by the rules of `playbook.planner.rules`.

    Each row has `settings` (as a configuration family writes them) and `refused`. The labels must be those of the named version.
    """
    table = table_for(megatron_core)
    if table is None:
        raise ValueError(f"no label table for megatron-core {megatron_core}{did_you_mean(megatron_core, tables())}")
    wrong, reasons = [], {}
    for row in rows:
        settings, words = row["settings"], ", ".join(f"{k} {show(v)}" for k, v in row["settings"].items())
        unknown = [message for _, message in label_problems(settings, table)]
        if unknown:
            raise ValueError("; ".join(unknown))
        exclusions = excluded(settings, {})
        reasons[words] = exclusions
        if bool(exclusions) != row["refused"]:
            wrong.append(f"{words} is {'refused' if exclusions else 'accepted'}")
    refused = sum(bool(r) for r in reasons.values())
    sentence = f"megatron-core {megatron_core} refuses {refused} of {len(rows)} settings" + (
        f"; against the claim: {'; '.join(wrong)}" if wrong else ""
    )
    return not wrong, sentence, {"settings": [{"settings": k, "refused_because": v} for k, v in reasons.items()]}
