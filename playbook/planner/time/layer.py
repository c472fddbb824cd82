"""What one layer takes for one micro-batch: products, attention, elementwise kernels, host and communication, by pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from operator import add, mul
from typing import NamedTuple

from playbook.planner import activations, parameters
from playbook.planner.memory import BASE_BYTES
from playbook.planner.options import FLEX, Options
from playbook.planner.parameters import adapters, parts, projections
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape
from playbook.planner.time import collectives, constants
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.laws import TILE, Product

BF16 = 2
_FP32 = 4
_CASTS = {"mxfp8": (2, 3), "blockwise": (4, 4)}
_SCALED_CASTS = (6, 6)
"""Bytes that quantising one value moves, in the forward and the backward pass: one written for each direction of the product, two read
where no norm or activation writes it, and two more where one scale for the whole tensor needs its maximum first."""
_SCORES_FORWARD, _SCORES_BACKWARD = 13, 19
"""Bytes moved for each score: written, read and written by softmax and by dropout with its mask, and read; backwards likewise."""
_BIASED_GLU = 18
"""Widths that an expert's activation reads and writes where it has biases and clamps, which only the kernel of MXFP8 experts fuses: two
biases, two clamps, sigmoid, two products."""
_NARROW = 0.5
"""Rate of batched products as narrow as a head, as a share of that of wide ones."""
_TORCH_EXPERTS = 64
"""The torch backend launches one product for all experts. The host time of at most so many launches stands for what FSDP does beside them:
with it three runs of MoE layers on two H200s are predicted within 3 % (text) and 17 % (with a tower), without it 18 to 37 % too fast. One
rank that shards nothing has one launch."""
_NORM_PASSES = 5
"""Times that the hidden state is read or written by a block's norm and residual addition together, in the forward pass. No source is
recorded."""
_BACKWARD_NORM = 1.6
"""Bytes that the backward pass of norm, residual and rotation moves over those of the forward pass. No source is recorded."""
_BACKWARD_TP = 1.5
"""Seconds of TP's transfers for shared experts in the backward pass over those in the forward pass: three transfers instead of two, for
the block's input is gathered again, as in `_gathers_back`."""
_SCAN_PASSES = 12
"""Times that a chunked recurrence passes over its inputs: gates, convolution, states, outputs and their norm."""


_NORM, _TURN, _GATE = 32, 12, 4
"""Bytes that a norm moves for each value beyond a fused one where each operation is a kernel (to float32, square, mean, product, back,
weight), and
rotation for each of queries and keys, and the activation for each of an MLP's inner values."""


class Work(NamedTuple):
    """What decides a layer's time beside its kind: degrees, sizes and options that act inside a layer."""

    tp: int
    cp: int
    ep: int
    etp: int
    mbs: int
    seq_len: int
    sp: bool
    imbalance: float
    searched: float
    dispatcher: str
    cp_comm: str
    fp8: str
    recompute: tuple[str, ...]
    graphs: tuple[str, ...]
    ep_overlap: bool
    torch: bool
    sharded: bool
    attention: str
    frozen: bool
    native_loss: bool
    capacity: bool
    lora: int
    lora_targets: tuple[str, ...]
    base: str
    compiled: bool
    apart: int
    weight_grad: int
    """Bytes that a product moves for each gradient of a weight: written in 16 bits, or added to what earlier micro-batches left."""
    added: int
    """Bytes that a kernel of its own moves for each gradient, to add it to those of earlier micro-batches."""
    at_once: bool


class Kind(NamedTuple):
    """What tells a layer from others of its model: its two halves, and whether its attention has a window."""

    mixer: str
    ffn: str
    windowed: bool


class Parts(NamedTuple):
    """Seconds of one pass, by part; communication is what is exposed."""

    products: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of the GPU, communication included."""
        return sum(self) - self.host

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        """The sum with so many of another."""
        return Parts(*map(add, self, map(mul, other, repeat(times))))


class Cost(NamedTuple):
    """A layer's passes; what is run again counts with the backward pass."""

    forward: Parts
    backward: Parts


_NOTHING = Cost(Parts(), Parts())


def work(plan: Plan) -> Work:
    """The part of a plan that a layer's time depends on."""
    o = plan.options
    torch = o.backend == "torch" or o.sharding == "fsdp2"
    return Work(
        plan.tp, plan.cp, plan.ep, plan.etp, plan.mbs, plan.seq_len, plan.sequence_parallel, plan.imbalance,
        0.0 if torch else searched(plan), o.dispatcher or "alltoall", o.cp_comm or "p2p", o.fp8, o.recompute, o.graphs, o.ep_overlap, torch,
        o.sharding != "none", o.attention or ("flash2" if torch else "cudnn"),
        bool(o.lora) or "decoder" in o.frozen, plan.loss == "native",
        o.capacity, o.lora, o.lora_targets, o.base, not torch or o.compiled, o.heads_apart(plan.cp),
        BF16 if torch or plan.gradients_added else 2 * plan.grad_bytes, BF16 + 2 * plan.grad_bytes if plan.gradients_added else 0,
        plan.experts_at_once,
    )  # fmt: skip


def searched(plan: Plan) -> float:
    """The share of experts' products for which cuBLAS looks for a kernel, where their rows differ: sizes come again within a step the
    sooner, the more products it has and the fewer rows. Rows of 8-bit products are padded, so that their sizes come again at once.
    Source: Megatron-LM, `megatron/core/transformer/moe/experts.py` (Fp8Padding).
    """
    if not plan.shape.experts or plan.options.fp8 or (plan.even_rows and plan.imbalance == 1):
        return 0.0
    experts = plan.shape.experts / plan.ep
    tokens = plan.mbs * plan.seq_len / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    rows = tokens * plan.shape.top_k * plan.imbalance * plan.etp / experts
    products = (plan.shape.layers - plan.shape.dense_layers) / plan.pp * plan.microbatches * experts
    return 1 / (1 + products / (rows * constants.SIZES_REMEMBERED.value))


def kind(shape: Shape, index: int) -> Kind:
    """The kind of the layer with this index."""
    full = shape.window_every and (index + 1) % shape.window_every == 0
    return Kind(*parts(shape, index), bool(shape.window) and not full)


@lru_cache(maxsize=65536)
def index_of(shape: Shape, wanted_kind: Kind) -> int:
    """The first layer of a kind; the depth of prediction where no layer is."""
    return next((i for i in range(shape.layers) if kind(shape, i) == wanted_kind), shape.layers)


@lru_cache(maxsize=200_000)
def cost(cluster: Cluster, shape: Shape, kind: Kind, w: Work) -> Cost:
    """Seconds of one layer of a kind for one micro-batch."""
    blocks = [
        _attention(cluster, shape, kind, w) if kind.mixer else _NOTHING,
        _moe(cluster, shape, w) if kind.ffn == "experts" else _mlp(cluster, shape, w) if kind.ffn else _NOTHING,
    ]
    forward = blocks[0].forward.plus(blocks[1].forward)
    backward = blocks[0].backward.plus(blocks[1].backward)
    if not w.compiled:
        more = Parts(elementwise=moving(cluster, _uncompiled(shape, kind, w)))
        forward, backward = forward.plus(more), backward.plus(more, 2)
        blocks[0] = blocks[0]._replace(forward=blocks[0].forward.plus(more))
    if w.added and not w.frozen:
        counts = parameters.layer(shape, index_of(shape, kind))
        held = counts.sharded / w.tp + counts.repeated + counts.experts / (w.ep * w.etp)
        backward = backward._replace(elementwise=backward.elementwise + moving(cluster, w.added * held))
    if w.frozen:  # half of the gradients' products, those of weights, are not needed
        backward = backward._replace(products=backward.products / 2, grouped=backward.grouped / 2)
    if w.lora:
        pairs = _beside(cluster, shape, kind, w)
        forward, backward = forward.plus(pairs.forward), backward.plus(pairs.backward)
        blocks[1] = Cost(blocks[1].forward.plus(pairs.forward), blocks[1].backward)
    recomputed = _again(cluster, shape, kind, w, blocks)
    routed = kind.ffn == "experts" and not w.capacity
    return Cost(_waited(forward, w, routed=routed), _waited(backward.plus(recomputed), w, routed=routed))


def _waited(parts: Parts, w: Work, *, routed: bool) -> Parts:
    """`host` as what the host adds to the device's time: both are busy at once, but each waits for the other at times.

    Where the host can run ahead, the longer of the two counts. Where it must read how many tokens each expert has before it goes on, it is
    the root of the sum of squares, between perfect overlap and none. A graph of the whole step needs no host.
    """
    if "full_iteration" in w.graphs:
        return parts._replace(host=0.0)
    host = parts.host * (constants.HOST_GRAPHED.value if w.graphs else 1.0) * (constants.HOST_TORCH.value if w.torch else 1.0)
    host *= constants.HOST_FP8.value if w.fp8 == "blockwise" else 1.0
    device = parts.device
    both = (device**2 + host**2) ** 0.5 if routed else max(device, host)
    return parts._replace(host=both - device)


def _dense(cluster: Cluster, rows: float, wide_in: float, wide_out: float, w: Work, *, wide: bool = False) -> Cost:
    """One matrix product with its two gradients; casts to 8 bits, which `wide` ones never have, are among the elementwise kernels."""
    fp8 = "" if wide else w.fp8
    flops, weight = 2.0 * rows * wide_in * wide_out, wide_in * wide_out
    sides = BF16 * rows * (wide_in + wide_out)
    laws, peak, bandwidth = cluster.laws, cluster.bf16_flops_per_s, cluster.memory_bytes_per_s
    slower = 1 / constants.IN_STEP.value

    def one(law: Product, read: float, written: float = 0.0) -> float:
        if fp8:
            law, rate, read = laws.fp8, cluster.fp8_flops_per_s, read / 2
        else:
            rate = peak
        return slower * law.seconds(flops, read + written, rate, bandwidth)

    forward = Parts(products=one(laws.forward, sides + BF16 * weight))
    backward = Parts(products=one(laws.input_gradient, sides + BF16 * weight) + one(laws.weight_gradient, sides, w.weight_grad * weight))
    return _cast(cluster, Cost(forward, backward), fp8, rows * wide_in, rows * wide_out)


def _cast(cluster: Cluster, products: Cost, fp8: str, values_in: float, values_out: float) -> Cost:
    """Products with the casts of what they read in each pass, if to 8 bits."""
    if not fp8:
        return products
    there, back = _CASTS.get(fp8, _SCALED_CASTS)
    forward = products.forward._replace(elementwise=moving(cluster, there * values_in))
    return Cost(forward, products.backward._replace(elementwise=moving(cluster, back * values_out)))


def _grouped(cluster: Cluster, rows: float, experts: float, wide_in: float, wide_out: float, w: Work) -> Cost:
    """One product for each local expert, with its gradients; an expert's rows are rounded up to whole tiles."""
    fp8 = w.fp8
    padded = max(TILE, -(-rows // TILE) * TILE) if rows < 8 * TILE else rows
    flops, weight = 2.0 * padded * experts * wide_in * wide_out, experts * wide_in * wide_out
    sides = BF16 * experts * rows * (wide_in + wide_out)
    laws, bandwidth, slower = cluster.laws, cluster.memory_bytes_per_s, 1 / constants.IN_STEP.value
    fast = (cluster.fp8_flops_per_s / cluster.bf16_flops_per_s) * laws.fp8.share / laws.forward.share if fp8 else 1.0
    first, second = laws.grouped["torch" if w.torch else "megatron"]
    size = 0.5 if fp8 else 1.0

    def one(law: Product, read: float, written: float = 0.0) -> float:
        return slower * law.seconds(flops / fast, read * size + written, cluster.bf16_flops_per_s, bandwidth)

    forward = Parts(grouped=one(first, sides + BF16 * weight))
    backward = Parts(grouped=one(second, sides + BF16 * weight) + one(second, sides, w.weight_grad * weight))
    return _cast(cluster, Cost(forward, backward), fp8, rows * experts * wide_in, rows * experts * wide_out)


def _sum(costs: Iterator[Cost]) -> Cost:
    forward, backward = Parts(), Parts()
    for one in costs:
        forward, backward = forward.plus(one.forward), backward.plus(one.backward)
    return Cost(forward, backward)


def moving(cluster: Cluster, num_bytes: float) -> float:
    """Seconds of kernels that only move bytes."""
    return num_bytes / (cluster.laws.memory_share * cluster.memory_bytes_per_s)


def _tokens(w: Work) -> tuple[float, float]:
    """Tokens of a CP rank, and of a TP rank within it."""
    all_ = w.seq_len * w.mbs / w.cp
    return all_, all_ / (w.tp if w.sp else 1)


def _attention(cluster: Cluster, shape: Shape, kind: Kind, w: Work) -> Cost:
    """Seconds of a layer's first half, both passes: projections, attention, norm and rotation, and what TP and CP send."""
    rows, local = _tokens(w)
    products = _sum(_dense(cluster, rows, i, o, w) for _, i, o in projections(shape, kind.mixer, w.tp))
    core = _core(cluster, shape, kind, w)
    h = shape.hidden
    more = constants.HOST_MLA.value if shape.mla is not None and kind.mixer == "attention" else 1.0
    hosts = [_host(cluster, more * x.value) for x in constants.HOST_ATTENTION]
    # Norm and residual, then what is done to queries and keys: rotation, and their own norms.
    heads = _turned(shape, kind, w)
    moved = BF16 * (_NORM_PASSES * local * h + 2 * rows * heads)
    gather = _tensor(cluster, shape, w)
    exchanged, ring = _context(cluster, shape, kind, w)
    first = _sum(_dense(cluster, rows, i, o, w) for _, i, o in projections(shape, kind.mixer, w.tp)[:-1])
    return Cost(
        products.forward._replace(
            attention=core[0],
            elementwise=products.forward.elementwise + moving(cluster, moved),
            host=hosts[0],
            tp=2 * gather,
            cp=exchanged + _exposed(w, ring, core[0]),
        ),
        products.backward._replace(
            attention=core[1],
            elementwise=products.backward.elementwise + moving(cluster, _BACKWARD_NORM * moved),
            host=hosts[1],
            tp=_gathers_back(w, gather, first),
            cp=2 * exchanged + _exposed(w, 2 * ring, core[1]),
        ),
    )


def _turned(shape: Shape, kind: Kind, w: Work) -> float:
    """Values of a token that rotation, norms of heads and their like read, and as many that they write."""
    if shape.mla is not None and kind.mixer == "attention":
        mla = shape.mla
        return shape.heads / w.tp * (2 * mla.nope_dim + mla.rope_dim + 2 * mla.v_dim) / 2 + mla.q_rank + mla.kv_rank
    return sum(o for _, _, o in projections(shape, kind.mixer, w.tp)[:-1]) * (2 if shape.qk_norm else 1)


def _host(cluster: Cluster, seconds: float) -> float:
    return seconds / cluster.host_speed


def _exposed(w: Work, sent: float, beside: float) -> float:
    """What of a ring's messages the attention beside them does not hide; other kinds hide nothing."""
    return max(0.0, sent - beside) if w.cp_comm.endswith("p2p") else sent


def _core(cluster: Cluster, shape: Shape, kind: Kind, w: Work) -> tuple[float, float]:
    """Attention itself, both passes."""
    rows = w.seq_len * w.mbs / w.cp
    peak, laws = cluster.bf16_flops_per_s, cluster.laws
    if kind.mixer == "mamba" and shape.mamba is not None:
        inner = shape.mamba.heads * shape.mamba.head_dim
        return _scan(cluster, rows / w.tp, inner, inner * shape.mamba.state)
    if kind.mixer == "linear" and shape.linear is not None:
        gdn = shape.linear
        return _scan(cluster, rows / w.tp, (gdn.value_heads + gdn.key_heads) * gdn.head_dim, gdn.value_heads * gdn.head_dim**2)
    context = w.seq_len / 2
    if kind.windowed and w.seq_len > shape.window:
        context = shape.window - shape.window * (shape.window - 1) / (2 * w.seq_len)
    width = 2 * shape.head_dim if shape.mla is None else shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim
    flops = 2.0 * rows * shape.heads * width * context / w.tp
    length = 2 * context / (1 if kind.windowed else w.cp)
    slower = (constants.FLASH_1.value if w.attention == "flash1" else 1.0) / constants.IN_STEP.value
    kernel = "flash" if w.attention != "cudnn" and cluster.has_fp8 else "cudnn"
    if w.attention == "unfused":
        return _unfused(cluster, rows * shape.heads / w.tp, w.seq_len / w.cp, flops)
    forward = laws.attention_fixed + slower * flops / (laws.attention_share(kernel, shape.head_dim, "forward", length) * peak)
    return forward, laws.attention_fixed + slower * 2.5 * flops / (laws.attention_share(kernel, shape.head_dim, "backward", length) * peak)


def _unfused(cluster: Cluster, rows: float, keys: float, causal_flops: float) -> tuple[float, float]:
    """Attention as two batched products around a softmax and a dropout over all scores, which memory holds; nothing is skipped above the
    diagonal.
    """
    product = 2 * causal_flops / (_NARROW * cluster.laws.forward.share * cluster.bf16_flops_per_s)
    return product + moving(cluster, _SCORES_FORWARD * rows * keys), 2 * product + moving(cluster, _SCORES_BACKWARD * rows * keys)


def _scan(cluster: Cluster, rows: float, width: float, states: float) -> tuple[float, float]:
    """A chunked recurrence, both passes: passes over its inputs, and small products with the state and within chunks."""
    moved = moving(cluster, _SCAN_PASSES * BF16 * rows * width)
    multiplied = 2.0 * 4 * rows * states / constants.SCAN_RATE.value
    return moved + multiplied, 2 * (moved + multiplied)


def _tensor(cluster: Cluster, shape: Shape, w: Work) -> float:
    """One gather or scatter of a micro-batch's activations over TP."""
    return collectives.ring(cluster, w.tp, 1, BF16 * w.seq_len * w.mbs / w.cp * shape.hidden)


def _gathers_back(w: Work, gather: float, first: Cost) -> float:
    """Exposed seconds of TP's transfers in a block's backward pass, whose `first` products are split by columns.

    With sequence parallelism the gradient of the block's output is gathered before anything else; its input is gathered beside the first
    products' gradient of
    the input, which is scattered beside their gradients of weights. FSDP2's trainers send without anything beside it.
    Source: Megatron-LM, `megatron/core/tensor_parallel/layers.py` (`LinearWithGradAccumulationAndAsyncCommunication.backward`).
    """
    if not w.sp:
        return 2 * gather
    return 3 * gather if w.torch else gather + max(0.0, 2 * gather - first.backward.products)


def _context(cluster: Cluster, shape: Shape, kind: Kind, w: Work) -> tuple[float, float]:
    """All heads in an all-to-all, and keys and values over the rest of CP, in the forward pass."""
    if w.cp == 1:
        return 0.0, 0.0
    rows = w.seq_len * w.mbs / w.cp
    if shape.mla is not None:
        keys = shape.heads * (shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim) / w.tp
        queries = keys
    else:
        keys = 2 * max(shape.kv_heads, w.tp * w.apart) * shape.head_dim / w.tp
        queries = 2 * shape.heads * shape.head_dim / w.tp
    apart = w.apart if kind.mixer == "attention" else w.cp
    exchanged = collectives.all_to_all(cluster, apart, w.tp, BF16 * rows * (keys + queries)) if apart > 1 else 0.0
    around = w.cp // apart
    return exchanged, collectives.ring(cluster, around, w.tp * apart, BF16 * rows * keys * around) if around > 1 else 0.0


def _mlp(cluster: Cluster, shape: Shape, w: Work) -> Cost:
    rows, local = _tokens(w)
    products = _swiglu(cluster, shape, rows, shape.ffn / w.tp, w)
    moved = BF16 * _NORM_PASSES * local * shape.hidden
    gather = _tensor(cluster, shape, w)
    first = _dense(cluster, rows, shape.hidden, shape.up * shape.ffn / w.tp, w)
    return Cost(
        products.forward._replace(elementwise=products.forward.elementwise + moving(cluster, moved), host=_host(cluster,
        constants.HOST_MLP[0].value), tp=2 * gather),
        products.backward._replace(
            elementwise=products.backward.elementwise + moving(cluster, _BACKWARD_NORM * moved),
            host=_host(cluster, constants.HOST_MLP[1].value), tp=_gathers_back(w, gather, first),
        ),
    )  # fmt: skip


def _swiglu(cluster: Cluster, shape: Shape, rows: float, width: float, w: Work) -> Cost:
    """A dense MLP: up, activation, down."""
    up = shape.up
    products = _sum(iter([_dense(cluster, rows, shape.hidden, up * width, w), _dense(cluster, rows, width, shape.hidden, w)]))
    act = moving(cluster, BF16 * rows * width * (up + 1))
    return Cost(
        products.forward._replace(elementwise=products.forward.elementwise + act),
        products.backward._replace(elementwise=products.backward.elementwise + act * (2 * up + 1) / (up + 1)),
    )


def _moe(cluster: Cluster, shape: Shape, w: Work) -> Cost:
    """Seconds of one MoE feed-forward block for one micro-batch on one rank, forward and backward apart.

    They are those of norm, router, routed and shared experts, permutation, host launches, and exposed EP and TP communication.
    """
    cp_tokens, sp_tokens = _tokens(w)
    token_copies, h = sp_tokens * shape.top_k * w.imbalance, shape.hidden
    local_experts, expert_hidden = shape.experts / w.ep, shape.expert_hidden
    per_expert = token_copies * w.etp / local_experts  # a rank gets as many copies as it sends
    expert_ffn = shape.expert_ffn / w.etp
    products = [
        _grouped(cluster, per_expert, local_experts, expert_hidden, shape.up * expert_ffn, w),
        _grouped(cluster, per_expert, local_experts, expert_ffn, expert_hidden, w),
        _dense(cluster, sp_tokens, h, shape.experts, w, wide=True),
    ]
    if shape.latent:
        products += [_dense(cluster, sp_tokens, h, expert_hidden, w), _dense(cluster, sp_tokens, expert_hidden, h, w)]
    if shape.shared_ffn:
        products.append(_swiglu(cluster, shape, cp_tokens, shape.shared_ffn / w.tp, w))
    costs = _sum(iter(products))
    passes = _BIASED_GLU if shape.expert_bias and w.fp8 != "mxfp8" else shape.up + 1
    activation_bytes = BF16 * token_copies * w.etp * expert_ffn * passes
    # One way: each copy is read and written, and again where rows travel and the dispatcher does not sort by expert itself: there those of
    # all ETP ranks (megatron-core, `MoEAlltoAllTokenDispatcher.dispatch_postprocess`), twice on one rank too.
    sorted_copies = token_copies * (w.etp if w.dispatcher in FLEX or (w.torch and w.ep * w.etp == 1) else 1 + w.etp)
    permute_bytes = BF16 * expert_hidden * sorted_copies * 2
    norm_and_router_bytes = BF16 * _NORM_PASSES * sp_tokens * h + 3 * _FP32 * sp_tokens * shape.experts
    forward = moving(cluster, activation_bytes + 2 * permute_bytes + norm_and_router_bytes)
    backward = moving(
        cluster, activation_bytes * (2 * shape.up + 1) / (shape.up + 1) + 2 * permute_bytes + _BACKWARD_NORM * norm_and_router_bytes
    )
    dispatch_s = _dispatch(cluster, shape, w)
    exposed_share = 1 - constants.EP_HIDDEN.value if w.ep_overlap else 1.0
    shared_expert_tp_s = 2 * _tensor(cluster, shape, w) if shape.shared_ffn else 0.0
    shared_expert_host_s = [x.value if shape.shared_ffn else 0.0 for x in constants.HOST_MLP]
    hosts = [
        _host(cluster, base.value + launched + other)
        for base, launched, other in zip(constants.HOST_MOE, _launched(local_experts, w), shared_expert_host_s, strict=True)
    ]
    return Cost(
        costs.forward._replace(
            elementwise=costs.forward.elementwise + forward, ep=2 * dispatch_s * exposed_share, tp=shared_expert_tp_s, host=hosts[0]
        ),
        costs.backward._replace(
            elementwise=costs.backward.elementwise + backward,
            ep=2 * dispatch_s * exposed_share,
            tp=_BACKWARD_TP * shared_expert_tp_s,
            host=hosts[1],
        ),
    )


def _launched(experts: float, w: Work) -> tuple[float, float]:
    """Host seconds of the experts' products in both passes: megatron-core launches each by itself, and looks for a kernel where its rows
    are a new number.

    That is cuBLAS, the default. One CUTLASS kernel for all experts leaves it the gradients of the weights, half of the backward pass.
    Source: Transformer Engine, `common/gemm/cublaslt_gemm.cu` (nvte_multi_tensor_gemm).
    """
    if w.torch:
        experts = min(experts, _TORCH_EXPERTS if w.sharded else 1)
    forward, backward = (
        launch.value + w.searched * search.value for launch, search in zip(constants.HOST_EXPERT, constants.HOST_SEARCH, strict=True)
    )
    if w.at_once:
        return 0.0, experts * backward / 2
    return experts * forward, experts * backward


def _dispatch(cluster: Cluster, shape: Shape, w: Work) -> float:
    """Seconds of one dispatch or combine over EP, and over ETP within it."""
    _, local = _tokens(w)
    token_bytes = BF16 * local * shape.expert_hidden
    if w.dispatcher == "allgather":
        return collectives.ring(cluster, w.ep * w.etp, 1, token_bytes * w.ep * w.etp)
    copies = token_bytes * shape.top_k * w.imbalance
    inner = collectives.ring(cluster, w.etp, 1, copies * w.etp)
    if w.dispatcher in FLEX:
        return inner + collectives.dispatch_once(cluster, w.ep, w.etp, token_bytes * w.imbalance, shape.top_k)
    return inner + collectives.all_to_all(cluster, w.ep, w.etp, copies)


def _again(cluster: Cluster, shape: Shape, kind: Kind, w: Work, blocks: list[Cost]) -> Parts:
    """What recompute runs once more in the backward pass."""
    names = set(w.recompute)
    if not names:
        return Parts()
    if "selective" in names:
        # Attention's output, what is scattered and what all-to-alls bring is kept; products run again are torchtitan's own.
        both = blocks[0].forward.plus(blocks[1].forward)
        widths = [(m.wide_in / (w.tp if m.split == "in" else 1), m.wide_out / (w.tp if m.split == "out" else 1)) for m in
                  activations.matmuls(shape, kind.mixer, kind.ffn)[1]]  # fmt: skip
        again = _sum(_dense(cluster, _tokens(w)[0], wide_in, wide_out, w) for wide_in, wide_out in widths).forward
        return both._replace(products=again.products, attention=0.0, tp=both.tp / 2, ep=0.0, cp=0.0)
    if "full" in names:
        return blocks[0].forward.plus(blocks[1].forward)
    rows, local = _tokens(w)
    recomputed = Parts()
    if "core_attn" in names:
        recomputed = recomputed.plus(Parts(attention=blocks[0].forward.attention, cp=blocks[0].forward.cp))
    if "mla_up_proj" in names:
        ups = [(i, o) for name, i, o in projections(shape, kind.mixer, w.tp) if name == "mla_up_proj"]
        recomputed = recomputed.plus(_sum(_dense(cluster, rows, i, o, w) for i, o in ups).forward)
    if "layernorm" in names:
        recomputed = recomputed.plus(Parts(elementwise=moving(cluster, 2 * 2 * BF16 * local * shape.hidden)))
    if kind.ffn != "experts":
        return recomputed.plus(blocks[1].forward) if "mlp" in names else recomputed
    if "moe" in names:
        return recomputed.plus(blocks[1].forward)
    if "moe_act" in names:
        recomputed = recomputed.plus(Parts(elementwise=moving(cluster, BF16 * local * shape.top_k * shape.expert_ffn * (shape.up + 1))))
    if "shared_experts" in names and shape.shared_ffn:
        recomputed = recomputed.plus(_swiglu(cluster, shape, rows, shape.shared_ffn / w.tp, w).forward)
    return recomputed


def _uncompiled(shape: Shape, kind: Kind, w: Work) -> float:
    """What a layer of transformers moves in its forward pass beyond a compiled one.

    Source: transformers 5, `models/llama/modeling_llama.py` (`LlamaRMSNorm.forward`, `apply_rotary_pos_emb`, `LlamaMLP.forward`).
    """
    rows, local = _tokens(w)
    heads = (shape.heads + shape.kv_heads) * shape.head_dim / w.tp
    turned = (_TURN + (_NORM if shape.qk_norm else 0)) * rows * heads if kind.mixer == "attention" else 0.0
    gated = _GATE * rows * shape.ffn / w.tp if kind.ffn == "mlp" else 0.0
    return _NORM * local * shape.hidden * (bool(kind.mixer) + bool(kind.ffn)) + turned + gated


def _beside(cluster: Cluster, shape: Shape, kind: Kind, w: Work) -> Cost:
    """Adapters beside a layer's products, and a base in 4 bits that is made bf16 for each pass: both only move bytes.

    A pair reads the matrix's input, and reads, scales and adds its output; the backward pass reads both gradients and adds one. So peft has
    them, unfused.
    Sources: peft 0.18, `tuners/lora/layer.py` (`Linear.forward`); bitsandbytes, `autograd/_functions.py` (`MatMul4Bit`).
    """
    index, (rows, local) = index_of(shape, kind), _tokens(w)
    options = Options(backend="torch" if w.torch else "megatron", lora=w.lora, lora_targets=w.lora_targets, base=w.base)
    pairs = [(BF16 * (local * a.passed if a.passed > 1 else rows / w.tp), a.wide_in, a.wide_out) for a in adapters(shape, index, options)]
    weights = parameters.layer(shape, index)
    unpacked = (weights.sharded / w.tp + weights.experts / (w.ep * w.etp)) * (BASE_BYTES[w.base] + BF16) if w.base else 0.0
    forward = sum(each * (wide_in + 3 * wide_out) for each, wide_in, wide_out in pairs) + unpacked
    backward = sum(each * (3 * wide_in + 2 * wide_out) for each, wide_in, wide_out in pairs) + unpacked
    return Cost(*(Parts(elementwise=moving(cluster, each)) for each in (forward, backward)))
