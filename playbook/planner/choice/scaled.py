"""A plan cut down to fewer GPUs, so that its kernels can be timed without the cluster that it is for."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from playbook.planner import pipeline
from playbook.planner.plan import Plan


def scaled(plan: Plan, gpus: int, layers: int, samples: int = 0) -> Plan:
    """The plan on `gpus` GPUs with so many layers and samples per step; what a rank holds of a layer stays.

    The degrees are those that divide the GPUs. What a larger degree would have split is cut from the model itself: heads, widths and
    vocabulary by tensor parallelism, experts by
    expert parallelism, the sequence by context parallelism; so products keep their shapes, and attention over a cut sequence is shorter.
    Transfers between ranks that are left out, and the pipeline's bubble, take no time there.
    """
    shape = plan.shape
    tp = gcd(plan.tp, gpus)
    cp = gcd(plan.cp, gpus // tp)
    etp = gcd(plan.etp, gpus)
    ep = gcd(plan.ep, gpus // etp)
    heads = shape.heads * tp // plan.tp
    experts = max(shape.experts * ep // plan.ep, shape.top_k)
    dense = layers if shape.dense_layers == shape.layers else min(layers, shape.dense_layers)
    cut = replace(
        shape, layers=layers, dense_layers=dense, blocks=shape.blocks[:layers], heads=heads,
        kv_heads=heads if shape.mla else max(1, shape.kv_heads * tp // plan.tp), vocab=shape.vocab * tp // plan.tp,
        ffn=shape.ffn * tp // plan.tp, shared_ffn=shape.shared_ffn * tp // plan.tp, experts=experts,
        expert_ffn=shape.expert_ffn * etp // plan.etp,
    )  # fmt: skip
    routed = ep * etp > 1
    options = replace(plan.options, dispatcher=plan.options.dispatcher if routed else "", ep_overlap=plan.options.ep_overlap and ep > 1)
    return replace(
        plan, shape=cut, gpus=gpus, tp=tp, cp=cp, pp=1, vpp=1, ep=ep, etp=etp, gbs=samples or plan.mbs * gpus // (tp * cp),
        seq_len=plan.seq_len * cp // plan.cp, options=options,
    )  # fmt: skip


def deepest(plan: Plan) -> int:
    """Layers of the plan's fullest pipeline stage."""
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return max(sum(map(len, pipeline.indices(sizes, plan.pp, stage))) for stage in range(plan.pp))
