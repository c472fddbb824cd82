"""Random plans for every trainer that a plan is exported to, and what must be read back from an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from playbook.errors import ConfigError
from playbook.planner import pipeline
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan, parse
from playbook.planner.time.cluster import cluster

GPUS = (1, 2, 4, 8, 8, 16, 16, 32, 64, 64, 128, 256)
HARDWARE = ("a100", "h100", "h100", "h200", "b200", "gb200")
_RECOMPUTE = (
    (),
    (),
    (),
    ("full",),
    ("layernorm",),
    ("layernorm", "mlp"),
    ("layernorm", "moe_act"),
    ("core_attn",),
    ("mla_up_proj",),
    ("moe",),
)
_GRAPHS = ((), (), (), (), ("attn",), ("moe_router", "moe_preprocess"), ("attn", "moe_router"), ("full_iteration",))
BACKEND: Mapping[str, str] = {
    "megatron-lm": "megatron",
    "megatron-bridge": "megatron",
    "playbook": "",
    "torchtitan": "torch",
    "accelerate": "torch",
    "deepspeed": "torch",
}
"""The backend of the plans that a target is given; none where it takes either."""


def random_plans(seed: int, backend: str = "") -> Iterator[tuple[Plan, str]]:
    """Legal plans without end, each with a kind of GPU: every model that is known, in turn, with degrees and options drawn at random."""
    draw, models = Random(seed), sorted(MODELS)
    while True:
        draw.shuffle(models)
        for name in models:
            yield next(plan for plan in iter(lambda n=name: _drawn(draw, n, backend), None) if _legal(plan)), draw.choice(HARDWARE)


def planned(text: str) -> Plan:
    """The plan of a model and settings, for the torch backend."""
    model, *words = text.split()
    return parse(model, ["backend=torch", *words]).require()


def searched(seed: int, gpus: Sequence[int], fixed: Sequence[tuple[str, ...]], express: Callable[[Plan, str], object]) -> Iterator[Plan]:
    """Plans that a target can express, one for each search of a question that chance asks."""
    chance = Random(seed)
    while True:
        name, count, words = chance.choice(sorted(MODELS)), chance.choice(gpus), chance.choice(fixed)
        gpu, seq_len = cluster(chance.choice(("a100", "h100", "h200", "b200", "gb200"))), chance.choice((2048, 4096, 8192, 32768))
        try:
            choices = search(Question(MODELS[name], name, gpu, count, seq_len, backend="torch", fixed=words), 3).choices
        except ConfigError:
            continue
        for plan in chance.sample([c.plan for c in choices], len(choices)):
            with suppress(ConfigError):
                express(plan, gpu.name)
                yield plan
                break


def expected(plan: Plan) -> dict[str, Any]:
    """A plan's layout as it is read back: degrees, the layers of each chunk in the order of the model, batch, recompute and dispatcher."""
    routed = bool(plan.shape.experts)
    return {
        **{k: getattr(plan, k) for k in ("tp", "cp", "pp", "vpp", "dp", "mbs", "seq_len")},
        "ep": plan.ep if routed else 1, "etp": plan.etp if routed else 1, "gbs": plan.global_batch,
        "chunks": pipeline.split(plan.shape.layers, plan.pp, plan.vpp), "recompute": sorted(plan.options.recompute),
        "dispatcher": (plan.options.dispatcher or "alltoall") if routed else "",
    }  # fmt: skip


def _legal(plan: Plan) -> bool:
    return plan.pp * plan.vpp <= plan.shape.layers and plan.microbatches >= plan.pp and not plan.broken()


def _drawn(draw: Random, model: str, backend: str) -> Plan:
    """A plan that may be legal; most are not, for degrees hardly ever divide by chance."""
    shape, gpus = MODELS[model], draw.choice(GPUS)
    kind = backend or draw.choice(("megatron", "torch"))
    tp, cp = (draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 1, 2, 4)))
    pp = draw.choice([n for n in (1, 1, 2, 3, 4, 6, 8, 16) if gpus % (n * tp * cp) == 0] or [1])
    ep = draw.choice([n for n in (1, 2, 4, 8, 16, 32, 64) if shape.experts and gpus % (n * pp) == 0] or [1])
    vpp = draw.choice((1, 2, 3, 5, 8)) if pp > 1 and kind == "megatron" else 1
    mbs, dp = draw.choice((1, 1, 2, 4)), max(1, gpus // (tp * cp * pp))
    plan = Plan(
        shape, model, gpus=gpus, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=draw.choice((1, 1, tp)) if shape.experts else 1, mbs=mbs,
        gbs=mbs * dp * pp * draw.choice((1, 2, 4)), seq_len=draw.choice((2048, 4096, 8192, 32768)),
    )  # fmt: skip
    return _torch(draw, plan) if kind == "torch" else _megatron(draw, plan)


def _torch(draw: Random, plan: Plan) -> Plan:
    recompute = draw.choice(((), ("selective",), ("full",)))
    return replace(plan, loss="compiled", options=Options(backend="torch", sharding="fsdp2", recompute=recompute))


def _megatron(draw: Random, plan: Plan) -> Plan:
    routed = plan.ep * plan.etp > 1
    options = Options(
        dispatcher=draw.choice(("alltoall", "hybridep", "deepep", "allgather")) if routed else "",
        sharding=draw.choice(("optimizer", "optimizer", "optimizer", "none", "fsdp")), recompute=draw.choice(_RECOMPUTE),
        ep_overlap=routed and draw.random() < 0.3, graphs=draw.choice(_GRAPHS), fp8=draw.choice(("", "", "", "tensorwise", "blockwise", "mxfp8")),
        cp_comm=draw.choice(("", "p2p", "a2a", "all_gather")) if plan.cp > 1 else "", shared_overlap=draw.random() < 0.1,
        optimizer_offload=draw.choice((0, 0, 0, 50)), precision_aware=draw.random() < 0.2,
    )  # fmt: skip
    sharded = options.sharding in ("optimizer", "fsdp")
    narrow = draw.random() < 0.2
    offload = options.optimizer_offload if sharded else 0
    return replace(
        plan, grad_bytes=draw.choice((4, 4, 2)), moment_bytes=2 if narrow and sharded else 4,
        options=replace(options, optimizer_offload=offload, precision_aware=sharded and (options.precision_aware or narrow)),
    )  # fmt: skip
