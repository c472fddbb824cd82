"""What a run leaves open of its layout: chunks, recompute and the width of states, filled in one way for every command.

Whatever is filled in comes back as words, so that an answer says it once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from functools import lru_cache

from playbook.planner import memory, pipeline
from playbook.planner.memory import GIB
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape

WIDTHS = ("grad_bytes", "master_bytes", "moment_bytes", "precision_aware")
"""Settings that say how wide gradients and the optimizer's states are."""


def ladder(shape: Shape, backend: str) -> list[tuple[str, ...]]:
    """What may be recomputed, from nothing to whole layers."""
    if backend == "torch":
        return [(), ("selective",), ("full",)]
    always = ("mla_up_proj",) if shape.mla else ()
    dense = ("mlp",) if shape.dense_layers else ()
    if not shape.experts:
        return [(), ("layernorm",), ("layernorm", "mlp"), ("full",)]
    rungs = [(), always, (*always, "layernorm", "moe_act"), (*always, *dense, "layernorm", "moe"), ("full",)]
    return list(dict.fromkeys(rungs))


def chunks(plan: Plan) -> tuple[int, ...]:
    """Chunks of layers of a stage (`vpp`) that a run may have where it names none, the likeliest first.

    Where layers divide over the stages: 1, as trainers have it by default, or the most that divide too. Where they do not, megatron-core
    runs only a
    layout that lists them, and whoever lists the layers balances the stages: the most chunks whose fullest stage has the least, with
    embedding and
    output layer as one layer each. Llama 3 405B has 126 layers on 16 stages so, one layer a chunk (arXiv 2407.21783, section 3.3.2).
    torchtitan
    splits any number of layers, and has one chunk by default.
    """
    layers, pp = plan.shape.layers, plan.pp
    if pp == 1 or (layers % pp and plan.options.backend == "torch"):
        return (1,)
    if layers % pp == 0:
        return tuple(dict.fromkeys((1, layers // pp)))
    legal = [v for v in range(1, (layers + 2) // pp + 1) if _as_legal(replace(plan, vpp=v), replace(plan, vpp=1))]
    return (min(legal or [1], key=lambda v: (_fullest(layers, pp, v), -v)),)


def chunked(plan: Plan, stated: Container[str]) -> tuple[Plan, tuple[str, ...]]:
    """A plan with the likeliest chunks where they are not `stated`, and what was taken for granted."""
    likeliest = plan.vpp if "vpp" in stated else chunks(plan)[0]
    if likeliest == plan.vpp:
        return plan, ()
    message = f"vpp unknown: {likeliest}, the most chunks that balance {plan.shape.layers} layers on {plan.pp} stages"
    return replace(plan, vpp=likeliest), (message,)


def _fullest(layers: int, pp: int, vpp: int) -> int:
    """Layers of the fullest stage, embedding and output layer among them."""
    sizes = pipeline.split(layers, pp, vpp)
    sizes[0] += 1
    sizes[-1] += 1
    return max(sum(sizes[stage::pp]) for stage in range(pp))


def _as_legal(plan: Plan, other: Plan) -> bool:
    """Whether a plan breaks no rule that the other keeps."""
    return set(plan.broken()) <= set(other.broken())


@lru_cache(maxsize=8192)
def held(plan: Plan) -> float:
    """Bytes of the fullest rank at its peak; rules are not checked here."""
    return max(stage.peak for stage in memory.stages(plan))


def fits(plan: Plan, gpu_gib: float) -> bool:
    """Whether the fullest rank's peak is under what a GPU has; see `memory.fits`."""
    return memory.fits(held(plan), gpu_gib)


def fitted(plan: Plan, gpu_gib: float, stated: Container[str]) -> tuple[Plan, tuple[str, ...]]:
    """A plan with the least recompute that fits, then with the narrowest states, as far as neither is `stated`; and what was taken for
    granted.

    Where nothing fits, the plan that needs the least comes back.
    """
    tries = list(_tries(plan, stated))
    fitting = next((p for p in tries if fits(p, gpu_gib)), None) or min(tries, key=held)
    return fitting, tuple(_filled(plan, fitting, stated))


def over(plan: Plan, gpu_gib: float) -> str:
    """What is said of a plan that does not fit; nothing of one that does."""
    return "" if fits(plan, gpu_gib) else f"does not fit: {held(plan) / GIB:.0f} GiB by the estimate, and a GPU has {gpu_gib:g}"


def _tries(plan: Plan, stated: Container[str]) -> Iterator[Plan]:
    """What the plan may be, the likeliest first."""
    o = plan.options
    rungs = [o.recompute] if "recompute" in stated else ladder(plan.shape, o.backend)
    for wide in (plan, *_narrow(plan, stated)):
        for rung in rungs:
            tried = replace(wide, options=replace(wide.options, recompute=rung))
            if rung == o.recompute or _as_legal(tried, plan):
                yield tried


def _narrow(plan: Plan, stated: Container[str]) -> Iterator[Plan]:
    """The plan with 16-bit gradients, moments and remainders of master weights, where a trainer may have them and none is stated."""
    o = plan.options
    if o.backend == "megatron" and o.sharding in ("optimizer", "fsdp") and not any(name in stated for name in WIDTHS):
        yield replace(plan, grad_bytes=2, moment_bytes=2, master_bytes=2, options=replace(o, precision_aware=True))


def _filled(plan: Plan, fitting: Plan, stated: Container[str]) -> Iterator[str]:
    recompute = fitting.options.recompute
    if "recompute" not in stated and recompute:
        yield f"recompute unknown: the least that fits, {'+'.join(recompute)}"
    if fitting.grad_bytes < plan.grad_bytes:
        yield "widths of gradients and optimizer states unknown: 2 bytes each, since 4 do not fit"
