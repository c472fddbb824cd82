"""What is asked of the planner, every layout and option that an answer may have, and what a run leaves open of its layout (chunks,
recompute, the width of states), filled in one way for every command. Whatever is filled in comes back as
words, so that an answer says it once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from playbook.errors import ConfigError
from playbook.planner import memory, pipeline
from playbook.planner.choice.routing import Routing
from playbook.planner.layout import grid
from playbook.planner.options import Options
from playbook.planner.plan import Plan, idle, parse, powers
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import Cluster

WIDTHS = ("grad_bytes", "master_bytes", "moment_bytes", "precision_aware")
"""Settings that say how wide gradients and the optimizer's states are."""


def recompute_ladder(shape: Shape, backend: str) -> list[tuple[str, ...]]:
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
    return "" if fits(plan, gpu_gib) else f"does not fit: {held(plan) / memory.GIB:.0f} GiB by the estimate, and a GPU has {gpu_gib:g}"


def _tries(plan: Plan, stated: Container[str]) -> Iterator[Plan]:
    """What the plan may be, the likeliest first."""
    o = plan.options
    rungs = [o.recompute] if "recompute" in stated else recompute_ladder(plan.shape, o.backend)
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


_GOALS = ("tokens/s", "memory", "gpus")
ALLOWED = ("fp8", "bf16-moments", "bf16-gradients", "offload", "graphs")
"""What `--allow` widens: numerics, an optimizer on the host, CUDA graphs of attention and router."""

_MOST_TP = 8
_MICRO_BATCHES = (1, 2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 6, 8, 12)
_LEAST_CP_TOKENS = 2048
"""Tokens of a CP rank below which no layout goes."""
_MOST_STAGES = 64
_TOKENS = 1 << 22
"""Tokens of a step where no global batch is given."""

GRAPHS: Mapping[bool, tuple[str, ...]] = {True: ("attn", "moe_router", "moe_preprocess"), False: ("attn", "mlp")}
"""Modules that are captured, by whether the model has experts."""


@dataclass(frozen=True)
class Question:
    """A model, a cluster, a batch and a goal; `fixed` are words such as `tp=1` that every answer keeps, `allow` what it may do beyond BF16.

    A `gbs` of 0 stands for steps of four million tokens.
    """

    shape: Shape
    model: str
    cluster: Cluster
    gpus: int
    seq_len: int = 4096
    gbs: int = 0
    goal: str = "tokens/s"
    memory_share: float = 0.92
    backend: str = "megatron"
    fixed: tuple[str, ...] = ()
    allow: frozenset[str] = frozenset()
    routing: Routing | None = None
    """How uneven tokens are routed, where somebody measured it."""

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that a plan may allocate."""
        return self.memory_share * self.cluster.memory_gib * memory.GIB

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.gbs or max(1, _TOKENS // self.seq_len)

    @cached_property
    def base(self) -> Plan:
        """What all answers share.

        Raises:
            ConfigError: a word is no setting.
        """
        named = {word.partition("=")[0] for word in self.fixed}
        reserved = named & {"gpus", "seq_len", "gbs", "layers", "experts"}
        if reserved:
            raise ConfigError(f"--fix {', '.join(sorted(reserved))}: --gpus, --seq, --gbs, --layers and --experts say that")
        words = [f"gpus={self.gpus}", f"seq_len={self.seq_len}", f"gbs={self.global_batch}", *self.fixed]
        words += ["backend=torch", *([] if "loss" in named else ["loss=compiled"])] if self.backend == "torch" else []
        for kind, word in (("bf16-moments", "moment_bytes=2"), ("bf16-gradients", "grad_bytes=2")):
            words += [word] if kind in self.allow and word.partition("=")[0] not in named else []
        plan = parse(self.model, words, shape=self.shape)
        if "bf16-moments" in self.allow and self.backend == "megatron" and "precision_aware" not in named:
            plan = replace(plan, options=replace(plan.options, precision_aware=plan.options.sharding in ("optimizer", "fsdp")))
        return plan

    @cached_property
    def kept(self) -> frozenset[str]:
        """Settings that are fixed."""
        named = frozenset(word.partition("=")[0] for word in self.fixed)
        return named | {"cp", "cp_comm"} if "ulysses" in named else named


def check(question: Question) -> None:
    """Refuse a question that cannot be asked.

    Raises:
        ConfigError: a goal, permission or number that is not one.
    """
    unknown = sorted(question.allow - set(ALLOWED))
    if question.goal not in _GOALS:
        raise ConfigError(f"--goal is '{question.goal[:40]}'; expected one of {', '.join(_GOALS)}")
    if unknown:
        raise ConfigError(f"--allow {', '.join(unknown)[:80]} is not known; expected some of {', '.join(ALLOWED)}")
    if question.backend not in ("megatron", "torch"):
        raise ConfigError(f"--backend is '{question.backend[:40]}'; expected megatron or torch")
    if not 0 < question.memory_share <= 1:
        raise ConfigError(f"--memory is {question.memory_share:g}; expected a share of the GPU's memory, such as 0.92")
    if question.routing and (not question.shape.experts or "imbalance" in question.kept):
        instead = "the model has no experts" if not question.shape.experts else "--fix imbalance says it too"
        raise ConfigError(
            f"--imbalance: {instead}; leave one of them out" if question.shape.experts else f"--imbalance: {instead}; leave it out"
        )
    if "fp8" in question.allow and not question.cluster.has_fp8:
        raise ConfigError(f"--allow fp8: {question.cluster.name} has no 8-bit products; leave it out")
    open_degrees: dict[str, Any] = {
        k: 2 for k in ("tp", "cp", "pp", "ep") if k not in question.kept and (k != "ep" or question.shape.experts)
    }
    useless = idle(replace(question.base, **open_degrees), sorted(question.kept))  # what some degree would make useful is not
    if useless:
        raise ConfigError(f"--fix: {'; '.join(useless)}")


def axes(question: Question, *, lean: bool = False) -> dict[str, list[int]]:
    """The values that each setting of a layout may take; one that is fixed has one. `lean` ones need the least memory: one sample, no
    interleaving.
    """
    shape, gpus, seq = question.shape, question.gpus, question.seq_len
    torch = question.backend == "torch"
    degrees: dict[str, list[int]] = {
        "tp": [n for n in powers(min(_MOST_TP, question.cluster.domain)) if shape.heads % n == 0],
        "cp": [n for n in powers(max(1, seq // _LEAST_CP_TOKENS)) if n == 1 or seq % (2 * n) == 0],
        "pp": [n for n in range(1, min(_MOST_STAGES, shape.layers, gpus) + 1) if gpus % n == 0],
        "ep": [n for n in range(1, min(shape.experts, gpus) + 1) if shape.experts % n == 0 and gpus % n == 0] or [1],
        "etp": [n for n in (1, 2, 4, 8) if shape.experts and shape.expert_ffn % n == 0] or [1],
        "vpp": [1] if torch or lean else list(_CHUNKS),
        "mbs": [1] if lean else list(_MICRO_BATCHES),
    }
    return {k: [getattr(question.base, k)] if k in question.kept else v for k, v in degrees.items()}


def enumerated(question: Question) -> int:
    """Number of combinations that the axes have."""
    return prod(len(values) for values in axes(question).values())


def layouts(question: Question, *, lean: bool = False) -> Iterator[Plan]:
    """Every legal layout, or the `lean` ones, with the options that all share.

    Expert tensor parallelism is 1 or as wide as tensor parallelism. Megatron-FSDP is not among them unless it is fixed: on four H200s it
    ran at
    half of what its time adds up to (`docs/experiments/peers-on-four-h200s.md`).
    """
    base, of, gpus, batch = question.base, axes(question, lean=lean), question.gpus, question.global_batch
    for tp, cp, pp in product(of["tp"], of["cp"], of["pp"]):
        dp, remainder = divmod(gpus, tp * cp * pp)
        if remainder or batch % dp:
            continue
        grids = [(ep, etp) for ep, etp in product(of["ep"], of["etp"]) if etp in (1, tp) or "etp" in question.kept]
        for (ep, etp), vpp, mbs in product(grids, of["vpp"], of["mbs"]):
            micro, incomplete = divmod(batch, mbs * dp)
            if incomplete or gpus % (ep * etp * pp) or (vpp != 1 and (pp == 1 or micro % pp)):
                continue
            plan = replace(base, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, mbs=mbs)
            plan = question.routing.on(plan) if question.routing else plan
            if not (_workless(plan) or plan.broken()):
                yield plan


def _workless(plan: Plan) -> str:
    """What leaves a pipeline without work: a chunk without a layer, or fewer micro-batches than stages."""
    if plan.pp * plan.vpp > plan.shape.layers:
        return f"pp {plan.pp} x vpp {plan.vpp} are more chunks than the {plan.shape.layers} layers; lower pp or vpp"
    if plan.pp > 1 and plan.microbatches < plan.pp:
        return f"pp {plan.pp} needs as many micro-batches, and a step has {plan.microbatches}; raise gbs or lower pp"
    return ""


def most_broken(question: Question) -> tuple[str, ...]:
    """The rule that most of the leanest layouts break, with what it says of the first of them; several where they break them equally often.

    Combinations that do not fill the GPUs count only where none does: they are many, and hide what is in the way of the others.
    """
    plans = [
        replace(question.base, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, mbs=mbs)
        for tp, cp, pp, ep, etp, vpp, mbs in product(*axes(question, lean=True).values())
        if etp in (1, tp) or "etp" in question.kept
    ]
    filling = [p for p in plans if not grid(gpus=p.gpus, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, etp=p.etp)]
    broken: Counter[str] = Counter()
    message_of: dict[str, str] = {}
    for plan in filling or plans:
        for sentence in plan.broken() or filter(None, [_workless(plan)]):
            rule = re.sub("[0-9]+", "", sentence)  # what one rule says of two layouts differs in figures
            broken[rule] += 1
            message_of.setdefault(rule, sentence)
    most = max(broken.values(), default=0)
    return tuple(message_of[rule] for rule, number in broken.items() if number == most)


def ladder(question: Question) -> list[tuple[str, ...]]:
    """What may be recomputed, from nothing to whole layers."""
    return [question.base.options.recompute] if "recompute" in question.kept else recompute_ladder(question.shape, question.backend)


def switches(question: Question, layout: Plan) -> list[Options]:
    """Options that change how fast a layout is beside recompute: dispatcher, overlap, and what is allowed."""
    o, fixed_options = layout.options, question.kept
    routed = layout.ep * layout.etp > 1
    hybridep = question.cluster.name.startswith(("h1", "h2", "h8", "b", "gb"))  # it runs on Hopper and Blackwell
    flex = routed and question.backend == "megatron" and hybridep
    dispatchers = ["alltoall", *(["hybridep"] if flex else [])] if routed else [""]
    overlap = [False, True] if routed and layout.ep > 1 and (layout.pp == 1 or layout.vpp > 1) and layout.shape.mtp < 2 else [False]
    graphs = [(), GRAPHS[bool(layout.shape.experts)]] if "graphs" in question.allow else [()]
    variants = []
    for dispatcher, both, recipe, graphed in product(
        dispatchers, overlap if question.backend == "megatron" else [False], recipes(question), graphs
    ):
        options: dict[str, Any] = {"dispatcher": dispatcher, "ep_overlap": both, "fp8": recipe, "graphs": graphed}
        variants.append(replace(o, **{k: v for k, v in options.items() if k not in fixed_options}))
    return list(dict.fromkeys(variants))


def recipes(question: Question) -> list[str]:
    """8-bit recipes that may be used, and none."""
    if "fp8" in question.kept:
        return [question.base.options.fp8]
    return ["", "mxfp8" if question.cluster.name.startswith(("b", "gb")) else "blockwise"] if "fp8" in question.allow else [""]


def hosts(question: Question) -> list[int]:
    """Percent of the optimizer that may live on the host."""
    if "optimizer_offload" in question.kept:
        return [question.base.options.optimizer_offload]
    return [0, 100] if "offload" in question.allow and question.backend == "megatron" else [0]
