"""Bytes that one decoder layer keeps for its backward pass, per microbatch and rank, tensor by tensor.

bf16 tensors, flash or fused attention, grouped expert GEMMs with the routing weights applied inside the activation, no dropped tokens.
Sources: Megatron-LM, `megatron/core/transformer/attention.py`, `multi_latent_attention.py`, `moe/experts.py`, `moe/token_dispatcher.py`
and the recompute modules of `transformer_config.py`; Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from playbook.planner.parameters import adapters, parts
from playbook.planner.plan import LOSSES, Plan
from playbook.planner.shapes import LinearAttention, Mamba, Shape

BF16 = 2
FP32 = 4

_SCORE_BYTES = 5
"""Of each score of unfused attention: softmax and dropout in bf16, and the mask. Source: arXiv 2205.05198, section 4.1."""

CHUNK = 64
"""Tokens of a chunk of linear attention, which keeps a square matrix for each."""

OFFLOADED = {
    "attn_norm": "attention norm in",
    "qkv_linear": "attention norm out",
    "core_attn": "q, k, v",
    "attn_proj": "attention out",
    "mlp_norm": "mlp norm in",
    "expert_fc1": "dispatched tokens",
    "moe_act": "expert fc1 out",
}
"""The tensor that each module of fine-grained offloading sends away: its input. Source:
`megatron/core/transformer/transformer_config.py`."""

FREED = {
    "layernorm": frozenset({"attention norm out", "mlp norm out"}),
    "mla_up_proj": frozenset({"q, k, v"}),
    "core_attn": frozenset({"attention scores"}),
    "mlp": frozenset({"mlp fc1 out", "mlp act out"}),
    "moe_act": frozenset({"expert act out"}),
    "shared_experts": frozenset({"shared experts"}),
    "moe": frozenset({"router", "dispatched tokens", "expert fc1 out", "expert act out", "shared experts", "latent"}),
    "gdn_norm_out": frozenset({"linear attention norm out"}),
}
"""What each recompute module frees; `core_attn` frees the scores of unfused attention; flash or fused attention keeps nothing that it
frees."""


@dataclass(frozen=True)
class Kept:
    """Bytes of a layer between its passes: on the GPU, in host memory, and what comes back when it is run again."""

    stays: float
    sent: float = 0.0
    again: float = 0.0


def tokens(plan: Plan) -> int:
    """Tokens of one microbatch that a CP rank holds."""
    return plan.seq_len * plan.mbs // plan.cp


def saved(plan: Plan, index: int) -> dict[str, float]:
    """Bytes of each tensor that a layer keeps, without recompute; the first is its input."""
    mixer, ffn = parts(plan.shape, index)
    cp_tokens = tokens(plan)
    sp_tokens = cp_tokens / plan.tp if plan.sequence_parallel else cp_tokens
    row, eight = BF16 * sp_tokens * plan.shape.hidden, 0.5 if plan.options.fp8 else 1.0
    tensors: dict[str, float] = {}
    if plan.options.backend == "torch" and not plan.options.compiled:
        return _eager(plan, index)
    if mixer:
        tensors |= {"attention norm in": row, "attention norm out": row * eight, **_MIXERS[mixer](plan, cp_tokens, sp_tokens)}
        if plan.options.attention == "unfused" and mixer == "attention":
            tensors["attention scores"] = _SCORE_BYTES * cp_tokens * plan.seq_len * plan.shape.heads / plan.tp
    if ffn == "mlp":
        act = BF16 * cp_tokens * plan.shape.ffn
        tensors |= {"mlp norm in": row, "mlp norm out": row * eight}
        tensors |= {"mlp fc1 out": act * plan.shape.up / plan.tp, "mlp act out": act * eight / plan.tp}
    elif ffn:
        tensors |= {"mlp norm in": row, "mlp norm out": row, **_experts(plan, cp_tokens, sp_tokens)}
    return tensors


def _eager(plan: Plan, index: int) -> dict[str, float]:
    """The same of a layer as transformers has it, uncompiled, each operation with what it keeps.

    A norm has its input in float32, and the normalised values where its own weight is trained. A product keeps its input where its weight
    is trained or an
    adapter stands beside it; where autocast makes the products bf16 (nothing is sharded, so nothing is cast before), each has a copy of its
    own.

    Sources: transformers 5, `models/llama/modeling_llama.py` and `models/qwen3/modeling_qwen3.py`; peft 0.18, `tuners/lora/layer.py`;
    counted with
    torch's `saved_tensors_hooks` in `tests/trainer/test_saved_tensors.py`.
    """
    shape, o, (mixer, ffn) = plan.shape, plan.options, parts(plan.shape, index)
    cp_tokens, autocast = tokens(plan), plan.options.sharding == "none"
    sp_tokens = cp_tokens / plan.tp if plan.sequence_parallel else cp_tokens
    frozen = o.lora > 0 or "decoder" in o.frozen
    normed = FP32 + (0 if frozen else FP32 if autocast else BF16)
    beside = {a.name for a in adapters(shape, index, o)}
    tensors: dict[str, float] = {}

    def inputs(width: int, *products: str) -> float:
        """Bytes for each token of the input that these products share, with what their adapters have between their two matrices."""
        keeping = sum(not frozen or name in beside for name in products)
        return BF16 * (width * (keeping if autocast else min(1, keeping)) + o.lora * keeping)

    if mixer:
        tensors["attention norm in"] = sp_tokens * (normed * shape.hidden + FP32)
    if mixer == "attention" and shape.mla is None:
        h, n, g, d = shape.hidden, shape.heads, max(shape.kv_heads, plan.tp), shape.head_dim
        tensors["attention norm out"] = cp_tokens * inputs(h, "q", "k", "v")
        heads = (n + g) * ((FP32 + (0 if frozen else BF16)) * d + FP32) if shape.qk_norm else 0
        tensors["q, k, v"] = cp_tokens * (BF16 * (n + 2 * g) * d + heads) / plan.tp
        out = inputs(n * d, "o")
        apart = out if frozen and (autocast or not out) else out - BF16 * n * d  # the product's input is attention's output itself
        tensors["attention out"] = cp_tokens * (n * (BF16 * d + FP32) + apart) / plan.tp
    elif mixer:
        tensors |= {"attention norm out": BF16 * sp_tokens * shape.hidden, **_MIXERS[mixer](plan, cp_tokens, sp_tokens)}
    if ffn:
        tensors["mlp norm in"] = sp_tokens * (normed * shape.hidden + FP32)
    if ffn == "mlp":
        h, f = shape.hidden, shape.ffn
        tensors["mlp norm out"] = cp_tokens * inputs(h, *("up", "gate")[: shape.up])
        tensors["mlp fc1 out"] = (
            BF16 * cp_tokens * (2 * shape.up - 1) * f / plan.tp
        )  # before and after the activation, and what it is multiplied with
        tensors["mlp act out"] = cp_tokens * inputs(f, "down") / plan.tp
    elif ffn:
        tensors |= {"mlp norm out": BF16 * sp_tokens * shape.hidden, **_experts(plan, cp_tokens, sp_tokens)}
    return tensors


def entry(plan: Plan, index: int) -> float:
    """Bytes of a layer's input, which is kept where all of the layer is computed again."""
    if plan.options.backend == "torch" and not plan.options.compiled:
        value_bytes = FP32 if plan.options.sharding == "none" and not (plan.options.lora or plan.options.frozen) else BF16
        return value_bytes * tokens(plan) / (plan.tp if plan.sequence_parallel else 1) * plan.shape.hidden
    return next(iter(saved(plan, index).values()))


def layer(plan: Plan, index: int) -> Kept:
    """What a layer keeps from its forward to its backward pass, with the plan's recompute and offload."""
    tensors = saved(plan, index)
    if "full" in plan.options.recompute:
        stays = entry(plan, index)
        return Kept(stays, 0.0, sum(tensors.values()) - stays)
    if "selective" in plan.options.recompute:
        stays = entry(plan, index) + _selective_recompute_bytes(plan, index)
        return Kept(stays, 0.0, sum(tensors.values()) - stays)
    freed = frozenset[str]().union(*(FREED.get(module, frozenset()) for module in plan.options.recompute))
    stay = {name: size for name, size in tensors.items() if name not in freed}
    whole = sum(stay.values())
    sent = (
        whole * plan.options.offload_percent / 100
        if plan.options.offload
        else sum(stay.get(OFFLOADED[m], 0.0) for m in plan.options.offload_modules)
    )
    return Kept(whole - sent, sent, sum(tensors.values()) - whole)


class Matmul(NamedTuple):
    """One plain product of a layer: its widths, and which of them TP splits, `in`, `out` or neither."""

    wide_in: float
    wide_out: float
    split: str = ""


def matmuls(shape: Shape, mixer: str, ffn: str) -> tuple[list[Matmul], list[Matmul]]:
    """The products of a layer whose outputs torchtitan's op-level selective recompute keeps, and those that it runs again.

    In order of execution it keeps the 1st, 3rd, 5th ...; the router's is not counted and always runs again. Grouped ones do too, and are
    not in these lists. Source: torchtitan 0.3, `distributed/activation_checkpoint.py` (`SelectiveAC`).
    """
    h, ordered, mla = shape.hidden, list[Matmul](), shape.mla
    if mixer and mla is not None:
        queries = shape.heads * (mla.nope_dim + mla.rope_dim)
        ordered = [Matmul(h, mla.q_rank), Matmul(mla.q_rank, queries, "out")] if mla.q_rank else [Matmul(h, queries, "out")]
        ordered += [Matmul(h, mla.kv_rank + mla.rope_dim), Matmul(mla.kv_rank, shape.heads * (mla.nope_dim + mla.v_dim), "out")]
        ordered += [Matmul(shape.heads * mla.v_dim, h, "in")]
    elif mixer:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        ordered = [Matmul(h, queries, "out"), Matmul(h, keys, "out"), Matmul(h, keys, "out"), Matmul(queries, h, "in")]
    inner = shape.ffn if ffn == "mlp" else shape.shared_ffn
    if inner and ffn:
        ordered += [Matmul(h, inner, "out")] * shape.up + [Matmul(inner, h, "in")]
    router = [Matmul(h, shape.experts)] if ffn == "experts" else []
    return ordered[::2], router + ordered[1::2]


def _selective_recompute_bytes(plan: Plan, index: int) -> float:
    """Bytes per rank and micro-batch that torchtitan's op-level selective recompute keeps in addition to the layer's input.

    They are the bf16 outputs of every other product, attention's output with its float32 log-sum-exp, and what all-to-alls of experts
    bring, both ways.
    """
    shape, (mixer, ffn) = plan.shape, parts(plan.shape, index)
    cp_tokens, tp = tokens(plan), plan.tp
    sp_tokens = cp_tokens / tp if plan.sequence_parallel else cp_tokens
    outputs = sum((cp_tokens / tp if m.split == "out" else sp_tokens) * m.wide_out for m in matmuls(shape, mixer, ffn)[0])
    value_dim = shape.head_dim if shape.mla is None else shape.mla.v_dim
    attention_bytes = cp_tokens / tp * shape.heads * (BF16 * value_dim + FP32) if mixer else 0.0
    sent = 2 * sp_tokens * shape.top_k * plan.imbalance * shape.expert_hidden if ffn == "experts" and plan.ep > 1 else 0.0
    return attention_bytes + BF16 * (outputs + sent)


def kept(plan: Plan, index: int) -> float:
    """Bytes that a layer keeps from its forward to its backward pass, on the GPU or the host."""
    layer_bytes = layer(plan, index)
    return layer_bytes.stays + layer_bytes.sent


def loss(plan: Plan) -> float:
    """Bytes of the logits and of what the loss adds, on the last stage only.

    Each depth of multi-token prediction has logits of its own, and a loss whose gradient waits for the backward pass, so all are there at
    once.
    Source: Megatron-LM, `megatron/core/models/gpt/gpt_model.py` (`_postprocess`), `multi_token_prediction.py` (`MTPLossAutoScaler`).
    """
    parallel = FP32 if plan.loss == "torch" and plan.tp > 1 else 0  # the exponentials stand beside their gradient
    return (LOSSES[plan.loss] + parallel) * (1 + plan.shape.mtp) * tokens(plan) * plan.shape.vocab / plan.tp


def _attention(plan: Plan, cp_tokens: int, sp_tokens: float) -> dict[str, float]:
    """Projections, inputs of attention, its output and softmax statistics; under FP8 the output projection keeps its own copy.

    A rank has one key-value head at least, so several have the same where TP exceeds them.
    """
    shape, tp = plan.shape, plan.tp
    n, g, d = shape.heads, max(shape.kv_heads, plan.tp), shape.head_dim
    if shape.mla is not None:
        mla, d = shape.mla, shape.mla.v_dim
        heads = 2 * (mla.nope_dim + mla.rope_dim) + mla.v_dim
        rows = {
            "compressed q, k, v": BF16 * sp_tokens * (mla.q_rank + mla.kv_rank + mla.rope_dim),
            "q, k, v": BF16 * cp_tokens * n * heads / tp,
        }
    else:
        normed = (n + g) * d if shape.qk_norm else 0
        gate = n * d if shape.attention_gate else 0
        rows = {"q, k, v": BF16 * cp_tokens * ((n + 2 * g) * d + normed + gate) / tp}
    copy = BF16 / 2 if plan.options.fp8 else 0
    return {**rows, "attention out": cp_tokens * n * ((BF16 + copy) * d + FP32) / tp}


def _linear(plan: Plan, cp_tokens: int, sp_tokens: float) -> dict[str, float]:
    """Gated delta net: the input projection, q, k and v after the convolution, q and k normed and repeated over value heads, the chunks'
    triangular matrices, the recurrence's output, and the gated norm's.

    Source: Megatron-LM, `megatron/core/ssm/gated_delta_net.py`; flash-linear-attention, `ops/gated_delta_rule/chunk.py`. No run has checked
    it.
    """
    gdn = plan.shape.linear or LinearAttention()
    qk, v, one = gdn.key_heads * gdn.head_dim, gdn.value_heads * gdn.head_dim, BF16 * cp_tokens / plan.tp
    return {
        "linear attention in": one * (2 * qk + 2 * v + 2 * gdn.value_heads),
        "linear attention q, k, v": one * (2 * qk + v + 2 * v + CHUNK * gdn.value_heads),
        "linear attention out": one * v,
        "linear attention norm out": one * v,
    }


def _mamba(plan: Plan, cp_tokens: int, sp_tokens: float) -> dict[str, float]:
    """Mamba-2: the input projection, the scan's output, and the gated norm's; convolution and states are made again.

    Source: Megatron-LM, `megatron/core/ssm/mamba_mixer.py`; mamba-ssm, `ops/triton/ssd_combined.py`.
    """
    ssm = plan.shape.mamba or Mamba()
    inner, one = ssm.heads * ssm.head_dim, BF16 * cp_tokens / plan.tp
    return {
        "mamba in": one * (2 * inner + 2 * ssm.groups * ssm.state + ssm.heads),
        "mamba out": one * inner,
        "mamba norm out": one * inner,
    }


_MIXERS = {"attention": _attention, "linear": _linear, "mamba": _mamba}


def _experts(plan: Plan, cp_tokens: int, sp_tokens: float) -> dict[str, float]:
    """A rank's experts see `top_k` copies of as many tokens as it has; ETP gathers tokens and splits widths, so only the input grows."""
    shape, eight = plan.shape, 0.5 if plan.options.fp8 else 1.0
    rows = sp_tokens * shape.top_k * plan.imbalance
    tensors = {
        "router": 2 * FP32 * sp_tokens * shape.experts,
        "dispatched tokens": BF16 * rows * plan.etp * shape.expert_hidden * eight,
        "expert fc1 out": BF16 * rows * shape.up * shape.expert_ffn,
        "expert act out": BF16 * rows * shape.expert_ffn * eight,
    }
    if shape.latent:
        tensors["latent"] = 2 * BF16 * sp_tokens * shape.latent
    if shape.shared_ffn:
        tensors["shared experts"] = BF16 * cp_tokens * (shape.up + eight) * shape.shared_ffn / plan.tp
    return tensors
