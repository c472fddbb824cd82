"""What to try: each action with the planner's difference, the claims that speak for it, and what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import exp
from typing import Any

from playbook.diagnosis.claims import OF_DEGREE
from playbook.diagnosis.seen import changed, composition
from playbook.diagnosis.setting import Setting
from playbook.planner.choice import space
from playbook.planner.choice.search import Choice
from playbook.planner.plan import Plan
from playbook.planner.time import spread
from playbook.planner.time.step import Estimate, step_time

_LEAST = 0.005
"""Gains below this are not worth an action."""
_CHUNKS = (2, 3, 4, 6, 8, 12)
_BATCHES = (2, 4, 8, 16, 32, 64)
_MOST_TOKENS = 1 << 26
"""Tokens of a step above which no batch is proposed. Source: DeepSeek-V3, arXiv 2412.19437, section 4.2: 15,360 samples of 4,096 tokens."""
_BUBBLE = 0.05
"""Share of a step from which on the pipeline's bubble is a wall."""
_LIGHTER = {True: ("V10.c", "V10", "W1", "W1.d", "L3.b", "L4.c"), False: ("W1.f", "V10.c", "D2")}
"""Claims about less recompute: where some is left, and where none is."""


@dataclass(frozen=True)
class Action:
    """Something to change, from one plan to another or in keys of the trainer alone.

    `measures` are claims whose effect is the action's; `also` are claims beside them. `part` is what of a step it shortens, as the planner
    names it. `peak_bytes` is what the fullest rank then holds. Units: bytes.
    """

    id: str
    title: str
    walls: tuple[str, ...]
    off: Plan
    on: Plan
    gain: Estimate | None = None
    """By how much tokens per second rise."""
    measures: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    peak_bytes: float | None = None
    keys: tuple[tuple[str, Any, Any], ...] = ()
    """Settings of this trainer that no plan has a word for, each as name, value before and value after."""
    part: str = ""
    done: bool = False
    """Whether the plan that it starts from has it already: the gain is what leaving it out costs."""
    note: str = ""


def actions(where: Setting, best: Choice | None) -> list[Action]:
    """All that applies to the setting, from its own layout where that is known, else from the planner's."""
    base = where.plan or (best.plan if best else None)
    if base is None:
        return []
    makers = (_recompute, _micro_batch, _batch, _interleave, _dispatcher, _overlap, _graphs, _fp8, _checks)
    options = [action for make in makers for action in make(where, base)]
    if where.plan is not None and best is not None and all(a.on != best.plan for a in options):
        options += _layout(where, where.plan, best)
    return [a for a in options if a.gain is None or a.gain.value >= _LEAST]


def _try(where: Setting, off: Plan, on: Plan, **about: Any) -> Iterator[Action]:
    """The action from a plan to another, with its gain and what it holds; none where that is not legal or does not fit."""
    if on.broken():
        return
    peak_bytes = space.held(on)
    if peak_bytes > max(where.question.capacity, space.held(off)):  # a layout that runs fits, whatever the estimate says
        return
    cluster = where.question.cluster
    before, after = step_time(off, cluster).parts, step_time(on, cluster).parts
    shares = composition(before, where.seen)
    remaining = changed(shares, before, after)
    unchanged = 1 - sum(shares.values())  # what was seen and no plan knows, such as a wait for data
    ratio = on.global_batch / off.global_batch / (unchanged * on.global_batch / off.global_batch + sum(remaining.values()))
    wide = exp(spread.QUANTILE * spread.between(shares, remaining))
    yield Action(off=off, on=on, gain=Estimate(ratio - 1, ratio / wide - 1, ratio * wide - 1), peak_bytes=peak_bytes, **about)


def _largest(tried: Iterable[Action]) -> list[Action]:
    """The action that gains the most, the first of equals; none where there is none."""
    return sorted(tried, key=lambda action: action.gain.value if action.gain else 0.0, reverse=True)[:1]


def _switch(where: Setting, base: Plan, plain: Mapping[str, Any], after: Mapping[str, Any], **about: Any) -> Iterator[Action]:
    """An option of the plan: tried where it is off, and where the planner's own plan has it, what leaving it out costs."""
    off, on = (replace(base, options=replace(base.options, **each)) for each in (plain, after))
    done = all(getattr(base.options, k) == v for k, v in after.items())
    if not done or where.plan is None:
        yield from _try(where, off if done else base, on, done=done, **about)


def _recompute(where: Setting, base: Plan) -> Iterator[Action]:
    """The least recompute that fits."""
    now = base.options.recompute
    rungs = space.ladder(replace(where.question, fixed=()))
    lighter = rungs[: rungs.index(now)] if now in rungs else rungs
    # Neither graphs nor overlap go with whole layers computed again.
    plain = replace(base, options=replace(base.options, graphs=(), ep_overlap=False))
    full = replace(plain, options=replace(plain.options, recompute=("full",)))
    about: dict[str, Any] = {"id": "recompute", "title": "recompute less", "walls": ("memory",)}
    if where.plan is None and now != ("full",):
        yield from _try(where, full, plain, done=True, also=_LIGHTER[bool(now)], **about)
        return
    for rung in lighter:
        measures = ("V10.c", "V10") if now == ("full",) and set(rung) == {"layernorm", "moe_act"} else ()
        on = replace(base, options=replace(base.options, recompute=rung))
        for action in _try(where, base, on, measures=measures, also=_LIGHTER[bool(rung)], **about):
            yield action
            return


def _from_least(where: Setting, base: Plan) -> list[tuple[str, ...]]:
    """The plan's own recompute, then all others from the least on."""
    return list(dict.fromkeys([base.options.recompute, *space.ladder(replace(where.question, fixed=()))]))


def _micro_batch(where: Setting, base: Plan) -> Iterator[Action]:
    """A larger micro-batch, with more recompute where it needs room."""
    if where.plan is None:
        return
    tried: list[Action] = []
    for mbs, rung in product((base.mbs * 2, base.mbs * 4), _from_least(where, base)):
        on = replace(base, mbs=mbs, options=replace(base.options, recompute=rung))
        if base.global_batch % (mbs * base.dp) or (base.vpp > 1 and on.microbatches % base.pp):
            continue
        also = ("V7", "V9") if base.shape.vision is not None else ("W1.c", "W1.b", *(["W1.f"] if "moe" in rung else []))
        walls = ("host-bound", "exposed communication")
        tried += _try(where, base, on, id="micro-batch", title=f"micro-batches of {mbs}", walls=walls, also=also)
    yield from _largest(tried)


def _interleave(where: Setting, base: Plan) -> Iterator[Action]:
    """More chunks of layers for each stage, where the pipeline's wait costs: the number that gains the most."""
    if where.plan is None or base.pp == 1 or base.options.backend == "torch":
        return
    about: dict[str, Any] = {"id": "interleave", "walls": ("bubble",), "measures": ("W4",), "also": ("W4.b",)}
    tried: list[Action] = []
    for vpp in _CHUNKS:
        if vpp > base.vpp and base.pp * vpp <= base.shape.layers and base.microbatches % base.pp == 0:
            tried += _try(where, base, replace(base, vpp=vpp), title=f"{vpp} chunks of layers on each stage", **about)
    yield from _largest(tried)


def _batch(where: Setting, base: Plan) -> Iterator[Action]:
    """More micro-batches for a pipeline that waits for them: as few as take the bubble under its threshold."""
    if where.plan is None or base.pp == 1:
        return
    note = "changes the optimization: learning rate and number of steps go with the batch"
    about: dict[str, Any] = {"id": "batch", "walls": ("bubble",), "also": ("W4.b",), "note": note}
    best: Action | None = None
    before = step_time(base, where.question.cluster).parts
    shares = composition(before, where.seen)
    for factor in _BATCHES:
        remaining = changed(shares, before, step_time(best.on, where.question.cluster).parts) if best else shares
        enough = remaining.get("bubble", 0.0) <= _BUBBLE * sum(remaining.values())
        if enough or (best is not None and factor * base.global_batch * base.seq_len > _MOST_TOKENS):
            break
        larger = replace(base, gbs=factor * base.global_batch)
        title = f"{larger.microbatches} micro-batches a step: a global batch of {larger.global_batch}"
        plans = (replace(larger, options=replace(base.options, recompute=rung)) for rung in _from_least(where, base))
        best = next((action for on in plans for action in _try(where, base, on, title=title, **about)), best)
    if best:
        yield best


def _dispatcher(where: Setting, base: Plan) -> Iterator[Action]:
    offered = {o.dispatcher for o in space.switches(where.question, base)}
    if "hybridep" in offered and base.options.dispatcher in ("", "alltoall", "allgather", "hybridep"):
        yield from _switch(
            where, base, {"dispatcher": "alltoall"}, {"dispatcher": "hybridep"}, id="dispatcher", title="HybridEP for the exchange of "
                                                                                                        "tokens",
            walls=("exposed communication",), measures=("W10.b", "V5"), also=("W10", "W9", "V5.b"),
        )  # fmt: skip


def _overlap(where: Setting, base: Plan) -> Iterator[Action]:
    if any(o.ep_overlap for o in space.switches(where.question, base)):
        yield from _switch(
            where, base, {"ep_overlap": False}, {"ep_overlap": True}, id="expert-overlap", title="expert transfers beside computation",
            walls=("exposed communication",), measures=("W11",),
        )  # fmt: skip


def _graphs(where: Setting, base: Plan) -> Iterator[Action]:
    wide = replace(where.question, allow=where.question.allow | {"graphs"})
    graphed = next((o.graphs for o in space.switches(wide, base) if o.graphs), ())
    if graphed and base.options.backend == "megatron":
        yield from _switch(
            where, base, {"graphs": ()}, {"graphs": graphed}, id="cuda-graphs", title="CUDA graphs of attention and router"
            if base.shape.experts else "CUDA graphs of attention and MLP", walls=("host-bound",), measures=("V6.t", "V6.u"),
            also=("V6", "V11.b", "V11"), note="captured parts take memory that the estimate leaves out"
            + "; begin with the router, and add attention where a pair shows that it gains" * bool(base.shape.experts),
        )  # fmt: skip


def _fp8(where: Setting, base: Plan) -> Iterator[Action]:
    if not where.question.cluster.has_fp8 or base.options.backend == "torch":
        return
    if where.plan is not None and base.options.fp8:
        yield from _switch(
            where, base, {"fp8": base.options.fp8}, {"fp8": ""}, id="bf16", title="BF16 products: FP8 pays where products are large",
            walls=("memory-bound kernels", "host-bound"), also=("W12.b", "W20.b"),
        )  # fmt: skip
        return
    recipe = space.recipes(replace(where.question, allow=where.question.allow | {"fp8"}, fixed=()))[-1]
    yield from _switch(
        where, base, {"fp8": ""}, {"fp8": recipe}, id="fp8", title=f"FP8 products, {recipe}", walls=("compute-bound",),
        measures=("W12.c", "W12.e", "W13"), also=("W12", "W12.b", "W20"), note="changes numerics: compare losses",
    )  # fmt: skip


def _checks(where: Setting, base: Plan) -> Iterator[Action]:
    """What the planner takes for granted, and what it has no time for."""
    if base.options.backend == "megatron":
        if base.dp > 1:
            yield Action(
                "gradient-overlap", "gradients and parameters beside the passes", ("exposed communication",), base, base, measures=("W11.g",
                ),
                keys=(("megatron.overlap_grad_reduce", False, True), ("megatron.overlap_param_gather", False, True)),
                note="the prediction takes it for granted: check that it is on",
            )  # fmt: skip
        if base.tp > 1:
            yield Action(
                "tensor-overlap", "tensor-parallel collectives beside products", ("exposed communication",), base, base, measures=("W11.t",
                ),
                keys=(("megatron.tp_comm_overlap", False, True),),
            )  # fmt: skip
        if base.shape.experts:
            yield Action(
                "grouped-experts", "one kernel for all experts of a rank", ("compute-bound",), base, base, measures=("W21.b",), also=("W21",
                ),
                keys=(("megatron.grouped_gemm", "cublas", "cutlass"),), part="grouped",
            )  # fmt: skip
    elif not base.options.compiled:
        on = replace(base, loss="compiled", options=replace(base.options, compiled=True))
        yield from _try(where, base, on, id="compile", title="compile layers and loss", walls=("memory-bound kernels", "memory"))
    else:
        yield Action(
            "compile", "compile decoder and loss", ("host-bound", "memory-bound kernels"), base, base,
            keys=(("train.compile.decoder", False, True), ("train.compile.loss", False, True)), note="the prediction takes a compiled "
                                                                                                     "loss for granted",
        )  # fmt: skip
    if base.shape.vision is not None:
        yield Action(
            "packing", "several samples packed into each row", ("data wait",), base, base, measures=("T1",), also=("V3", "T11"),
            keys=(("data.pack", False, True),),
        )  # fmt: skip


def _layout(where: Setting, current: Plan, best: Choice) -> Iterator[Action]:
    """The planner's layout in place of the run's."""
    changed = [k for k in ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs") if getattr(current, k) != getattr(best.plan, k)]
    if changed:
        also = tuple(dict.fromkeys(c for k in changed for c in OF_DEGREE.get(k, ())))
        title = f"the planner's layout: {', '.join(f'{k} {getattr(best.plan, k)}' for k in changed)}"
        walls = ("exposed communication", "bubble", "memory")
        yield from _try(where, current, best.plan, id="layout", title=title, walls=walls, also=also)
