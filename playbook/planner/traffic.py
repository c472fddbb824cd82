"""What a plan sends: bytes per layer, micro-batch and step, the share of them that leaves the fast interconnect, and all of it as one
table.

Rings send `(n - 1) / n` of the gathered tensor; all-to-all sends all but a rank's own share. bf16 unless a docstring says otherwise;
nothing overlaps.
Sources: Megatron-LM, `megatron/core/tensor_parallel/mappings.py`, `megatron/core/transformer/moe/token_dispatcher.py`,
`megatron/core/distributed/param_and_grad_buffer.py`; Ring Attention, arXiv 2310.01889; DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playbook.planner import flops, memory, pipeline
from playbook.planner.activations import BF16, tokens
from playbook.planner.options import FLEX
from playbook.planner.parameters import parts
from playbook.planner.plan import Plan


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in the forward and in the backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def per_layer(plan: Plan, index: int) -> dict[str, Sent]:
    """What one layer sends per microbatch, by kind of parallelism; kinds of degree one are left out."""
    mixer, ffn = parts(plan.shape, index)
    blocks = bool(mixer) + (ffn == "mlp" or (ffn == "experts" and plan.shape.shared_ffn > 0))
    by_kind = {"tp": tensor(plan, blocks), "cp": context(plan) if mixer == "attention" else Sent(0, 0)}
    if ffn == "experts":
        by_kind |= {"ep": experts(plan), "etp": expert_tensor(plan)}
    return {kind: sent for kind, sent in by_kind.items() if sent.total}


def tensor(plan: Plan, blocks: int) -> Sent:
    """Tensor parallelism with sequence parallelism: gather before and scatter after each of a layer's `blocks`, attention and MLP.

    Routed experts work on the split sequence, shared experts do not. The backward pass gathers each block's input once more, for the
    gradient of its weight.
    """
    one = _ring(plan.tp) * BF16 * tokens(plan) * plan.shape.hidden
    return Sent(2 * blocks * one, (2 * blocks + (blocks if plan.sequence_parallel else 0)) * one)


def experts(plan: Plan) -> Sent:
    """Dispatch and combine of routed tokens, balanced over ranks; the backward pass repeats both the other way.

    The all-gather dispatcher moves each token to every rank of EP x ETP instead of each copy to one; `expert_tensor` is then part of it.
    DeepEP and HybridEP
    send a token once to each rank that has one of its experts. Source: DeepEP, `csrc/kernels/internode.cu` and `intranode.cu`; DeepSeek-V3,
    arXiv 2412.19437,
    section 3.2.2.
    """
    local = BF16 * _local(plan) * plan.shape.expert_hidden
    if plan.options.dispatcher == "allgather":
        one = (plan.ep * plan.etp - 1) * local
    else:
        copies = distinct(plan.ep, plan.shape.top_k) if plan.options.dispatcher in FLEX else plan.shape.top_k
        one = local * copies * plan.imbalance * _ring(plan.ep)
    return Sent(2 * one, 2 * one)


def expert_tensor(plan: Plan) -> Sent:
    """Tensor parallelism inside experts: gather of dispatched tokens, scatter of results."""
    if plan.options.dispatcher == "allgather":
        return Sent(0, 0)
    one = (plan.etp - 1) * BF16 * _local(plan) * plan.shape.top_k * plan.shape.expert_hidden * plan.imbalance
    return Sent(2 * one, 2 * one)


def context(plan: Plan) -> Sent:
    """Context parallelism: keys and values in a ring (`p2p`, the default) or gathered, an all-to-all over heads, or that within a ring.

    Either way a rank's keys and values reach all others; the backward pass sends them again, and their gradients back.
    """
    shape, local, apart = plan.shape, tokens(plan), plan.options.heads_apart(plan.cp)
    if shape.mla is not None:
        key, value = shape.heads * (shape.mla.nope_dim + shape.mla.rope_dim), shape.heads * shape.mla.v_dim
        query, out = key, value
    else:
        key = value = max(shape.kv_heads, plan.tp * apart) * shape.head_dim  # a rank has one head at least
        query = out = shape.heads * shape.head_dim
    exchanged = BF16 * local * (query + key + value + out) / plan.tp * _ring(apart)
    ring = BF16 * (plan.cp // apart - 1) * local * (key + value) / plan.tp
    return Sent(exchanged + ring, exchanged + 2 * ring)


def boundary(plan: Plan) -> Sent:
    """Pipeline parallelism: what a stage passes on per microbatch and chunk."""
    one = BF16 * _local(plan) * plan.shape.hidden if plan.pp > 1 else 0.0
    return Sent(one, one)


def data_parallel(plan: Plan, held: memory.Weights) -> dict[str, float]:
    """Bytes that a rank sends per step for gradients and parameters.

    Distributed optimizer: one reduce-scatter of gradients, one all-gather of parameters. Full sharding gathers parameters for both
    passes and scatters gradients, in each microbatch. No sharding: an all-reduce. Dense over DP x CP, experts over EDP. Several instances
    share parameters and gradients among the ranks of each, and reduce each rank's share of the gradients among all, once per step.
    """
    inside, across = 0.0, 0.0
    degrees = {"dense": plan.dp * plan.cp, "experts": plan.edp}
    for kind, count in (("dense", held.dense), ("experts", held.experts)):
        shard = memory.shards(plan)[kind]
        inside += count * _ring(shard)
        across += 2 * count / shard * _ring(degrees[kind] // shard)
    if plan.options.sharding in ("fsdp", "fsdp2"):
        return {"gradients": plan.grad_bytes * (plan.microbatches * inside + across), "parameters": plan.microbatches * 2 * BF16 * inside}
    return {"gradients": plan.grad_bytes * (inside + across), "parameters": BF16 * inside}


def distinct(groups: int, top_k: int) -> float:
    """Groups of ranks, such as nodes, that a token's `top_k` experts lie in, on average over random routing.

    A dispatcher that sends each token once per node sends that many copies out instead of `top_k`.
    """
    return groups * (1 - (1 - 1 / groups) ** top_k)


def traffic(plan: Plan) -> dict[str, Any]:
    """FLOPs per token, bubble, and what a rank sends; data-parallel bytes are those of the first stage.

    Raises:
        ConfigError: the plan breaks a rule.
    """
    plan.require()
    first = {parts(plan.shape, i): i for i in reversed(range(plan.shape.layers))}
    kinds = {_NAMES.get(halves, " and ".join(filter(None, halves)) + " layer"): i for halves, i in first.items()}
    kinds = kinds if len(kinds) > 1 else {"layer": 0}
    sent = [
        {"what": kind, "per": f"{name} and microbatch", "forward": bytes_sent.forward, "backward": bytes_sent.backward}
        for name, index in kinds.items()
        for kind, bytes_sent in per_layer(plan, index).items()
    ]
    if plan.pp > 1:
        bytes_sent = boundary(plan)
        sent.append({"what": "pp", "per": "chunk boundary and microbatch", "forward": bytes_sent.forward, "backward": bytes_sent.backward})
    chunks = pipeline.indices(pipeline.split(plan.shape.layers, plan.pp, plan.vpp), plan.pp, 0)
    step = data_parallel(plan, memory.weights(plan, 0, chunks))
    sent.append({"what": "dp", "per": "step", "forward": step["parameters"], "backward": step["gradients"]})
    return {
        "flops_per_token": flops.trained_per_token(plan.shape, plan.seq_len, plan.options),
        "bubble": pipeline.bubble(pp=plan.pp, microbatches=plan.microbatches, vpp=plan.vpp),
        "unit": "bytes",
        "sent": sent,
    }


_NAMES = {("attention", "mlp"): "MLP layer", ("attention", "experts"): "MoE layer"}


def outside(*, degree: int, stride: int, domain: int) -> float:
    """The share of a rank's peers that lie in other domains, for a group whose members are `stride` ranks apart.

    Domains hold `domain` consecutive ranks; `domain` and `stride` divide one another, as do `degree` and what a domain holds of it.
    """
    inside = min(degree, max(1, domain // stride))
    return (degree - inside) / (degree - 1) if degree > 1 else 0.0


def boundaries_outside(*, pp: int, stride: int, domain: int) -> float:
    """The share of the boundaries between stages that lie between domains; stages are `stride` ranks apart."""
    inside = min(pp, max(1, domain // stride))
    return (-(-pp // inside) - 1) / (pp - 1) if pp > 1 else 0.0


def _ring(degree: int) -> float:
    return (degree - 1) / degree


def _local(plan: Plan) -> float:
    """Tokens per rank once the sequence is split over TP too."""
    return tokens(plan) / (plan.tp if plan.sequence_parallel else 1)
