"""How many parameters a model has, layer by layer. Pure arithmetic over `playbook.planner.shapes`.

Source: Megatron-LM, `megatron/training/theoretical_memory_usage.py`, and the modules that own each weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from playbook.planner.options import LORA_TARGETS, Options
from playbook.planner.shapes import LinearAttention, Mamba, Mla, Shape, Vision


@dataclass(frozen=True)
class Layer:
    """Parameters of one decoder layer: what tensor parallelism shards, what each of its ranks repeats, what expert parallelism shards."""

    sharded: int
    repeated: int
    experts: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.sharded + self.repeated + self.experts


_HALVES = {"M": ("mamba", ""), "*": ("attention", ""), "E": ("", "experts"), "-": ("", "mlp")}


def parts(shape: Shape, index: int) -> tuple[str, str]:
    """The halves of a layer: `attention`, `linear`, `mamba` or none, and `mlp`, `experts` or none. Layers of equal parts have equal sizes.

    An index past the last layer is a depth of multi-token prediction: like the last layer, or attention and experts in a hybrid model.
    """
    if shape.blocks:
        return _HALVES[shape.blocks[index]] if index < shape.layers else ("attention", "experts")
    index = min(index, shape.layers - 1)
    linear = shape.linear is not None and (index + 1) % shape.linear.full_every != 0
    return "linear" if linear else "attention", "mlp" if index < shape.dense_layers else "experts"


def layer(shape: Shape, index: int) -> Layer:
    """Parameters of the decoder layer with this index."""
    mixer, ffn = parts(shape, index)
    sharded, repeated = _mixer(shape, mixer)
    repeated += (2 if shape.norm_bias else 1) * shape.norms * shape.hidden * (bool(mixer) + bool(ffn)) // 2
    if ffn != "experts":
        biases = (shape.up * shape.ffn, shape.hidden) if shape.mlp_bias and ffn else (0, 0)
        wide = (shape.up + 1) * shape.hidden * shape.ffn if ffn else 0
        return Layer(sharded + wide + biases[0], repeated + biases[1], 0)
    sharded += (shape.up + 1) * shape.hidden * shape.shared_ffn
    repeated += shape.hidden * shape.experts + (shape.hidden if shape.shared_gate else 0) + 2 * shape.hidden * shape.latent
    repeated += shape.experts if shape.expert_bias else 0
    return Layer(sharded, repeated, shape.experts * expert(shape))


def projections(shape: Shape, mixer: str, tp: int = 1) -> list[tuple[str, float, float]]:
    """The matrix products around one layer's attention on a TP rank: what recomputes them, width in, width out."""
    if not mixer:
        return []
    h, n, d = shape.hidden, shape.heads / tp, shape.head_dim
    if mixer == "mamba" and shape.mamba is not None:
        ssm, inner = shape.mamba, shape.mamba.heads * shape.mamba.head_dim
        return [("", h, (2 * inner + 2 * ssm.groups * ssm.state + ssm.heads) / tp), ("", inner / tp, h)]
    if mixer == "linear" and shape.linear is not None:
        gdn = shape.linear
        qk, v = gdn.key_heads * gdn.head_dim, gdn.value_heads * gdn.head_dim
        return [("", h, (2 * qk + 2 * v + 2 * gdn.value_heads) / tp), ("", v / tp, h)]
    if shape.mla is not None:
        m = shape.mla
        query = (
            [("", h, m.q_rank), ("mla_up_proj", m.q_rank, n * (m.nope_dim + m.rope_dim))]
            if m.q_rank
            else [("", h, n * (m.nope_dim + m.rope_dim))]
        )
        return [*query, ("", h, m.kv_rank + m.rope_dim), ("mla_up_proj", m.kv_rank, n * (m.nope_dim + m.v_dim)), ("", n * m.v_dim, h)]
    kv = max(shape.kv_heads / tp, 1)
    return [("", h, (n * (2 if shape.attention_gate else 1) + 2 * kv) * d), ("", n * d, h)]


def expert(shape: Shape) -> int:
    """Parameters of one expert: gate, up and down projection, and their biases where the model has them."""
    bias = shape.up * shape.expert_ffn + shape.expert_hidden if shape.expert_bias else 0
    return (shape.up + 1) * shape.expert_hidden * shape.expert_ffn + bias


class Adapter(NamedTuple):
    """A low-rank pair beside a matrix: the matrix's name or group and widths, how many pairs a layer holds, and how many of them a token
    passes.
    """

    name: str
    wide_in: int
    wide_out: int
    pairs: int = 1
    passed: int = 1


@lru_cache(maxsize=4096)
def adapters(shape: Shape, index: int, options: Options) -> tuple[Adapter, ...]:
    """The adapters of one layer; none without `lora`. Each has `lora * (wide_in + wide_out)` parameters.

    Megatron fuses queries, keys and values, and gate and up projection, so a whole group has one pair for each product, and its experts
    share one;
    single matrices that are named have their own. peft has one for each matrix, reaches stacked experts only where they are named, and then
    has one for each expert.

    Sources: LoRA, arXiv 2106.09685, section 4.1; Megatron Bridge, `peft/lora.py` and `peft/canonical_lora.py`; peft 0.18,
    `tuners/lora/layer.py`
    (`ParamWrapper`, for stacked experts) and `utils/constants.py`.
    """
    if not options.lora:
        return ()
    torch = options.backend == "torch"
    names = options.lora_targets or (("attention", "mlp") if torch else ("attention", "mlp", "experts"))
    single = frozenset(n for group in names if torch or group not in LORA_TARGETS for n in LORA_TARGETS.get(group, (group,)))
    fused = frozenset(names) & LORA_TARGETS.keys() if not torch else frozenset()
    mixer, ffn = parts(shape, index)
    covered = {n for group in fused for n in LORA_TARGETS[group]}
    beside = [
        *(_attention_adapters(shape, mixer, "attention" in fused, single - covered) if mixer else ()),
        *(_mlp_adapters(shape.hidden, shape.ffn, shape.up, "mlp" in fused, single - covered) if ffn == "mlp" else ()),
    ]
    if ffn == "experts":
        if shape.shared_ffn:
            beside += _mlp_adapters(shape.hidden, shape.shared_ffn, shape.up, "mlp" in fused, single - covered)
        if "experts" in names:
            pairs = shape.experts if torch else 1
            wide, inner = shape.expert_hidden, shape.expert_ffn
            beside += [Adapter("experts", wide, shape.up * inner, pairs, shape.top_k), Adapter("experts", inner, wide, pairs, shape.top_k)]
    return tuple(beside)


def _attention_adapters(shape: Shape, mixer: str, fused: bool, single: frozenset[str]) -> Iterator[Adapter]:
    """Those of attention. Compressed attention has two matrices for queries (`q`), and those down to (`k`) and up from (`v`) compressed
    keys and values.
    """
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    compressed = shape.mla is not None and mixer == "attention"
    if shape.mla is not None and compressed:
        mla, n = shape.mla, shape.heads
        up = n * (mla.nope_dim + mla.rope_dim)
        matrices = {
            "q": ((h, mla.q_rank), (mla.q_rank, up)) if mla.q_rank else ((h, up),),
            "k": ((h, mla.kv_rank + mla.rope_dim),),
            "v": ((mla.kv_rank, n * (mla.nope_dim + mla.v_dim)),),
            "o": ((n * mla.v_dim, h),),
        }
    else:
        if fused:
            yield Adapter("attention", h, q + 2 * kv)
            yield Adapter("attention", q, h)
        matrices = {"q": ((h, q),), "k": ((h, kv),), "v": ((h, kv),), "o": ((q, h),)}
    for name, sizes in matrices.items():
        if name in single or (fused and compressed):
            yield from (Adapter(name, *size) for size in sizes)


def _mlp_adapters(hidden: int, inner: int, up: int, fused: bool, single: frozenset[str]) -> Iterator[Adapter]:
    """Those of an MLP; one that is not gated has no gate."""
    if fused:
        yield Adapter("mlp", hidden, up * inner)
        yield Adapter("mlp", inner, hidden)
    yield from (Adapter(name, hidden, inner) for name in ("up", "gate")[:up] if name in single)
    if "down" in single:
        yield Adapter("down", inner, hidden)


def adapter_parameters(shape: Shape, index: int, options: Options) -> int:
    """Parameters of a layer's adapters."""
    return sum(options.lora * a.pairs * (a.wide_in + a.wide_out) for a in adapters(shape, index, options))


def embedding(shape: Shape) -> int:
    """Parameters of the token embedding; the output layer has as many, and where the two are tied, the same."""
    return shape.vocab * shape.hidden


def decoder(shape: Shape) -> int:
    """Parameters of the decoder with embedding and output layer, without multi-token prediction and vision."""
    tables = (1 if shape.tied else 2) * embedding(shape) + shape.positions * shape.hidden
    alike = Counter(parts(shape, i) for i in range(shape.layers))
    first = {parts(shape, i): i for i in reversed(range(shape.layers))}
    return sum(n * layer(shape, first[k]).total for k, n in alike.items()) + tables + final_norm(shape)


def final_norm(shape: Shape) -> int:
    """Parameters of the norm before the output layer."""
    return (2 if shape.norm_bias else 1) * shape.hidden


def mtp(shape: Shape) -> Layer:
    """Parameters of one multi-token prediction depth: a layer, a projection of two inputs, three norms."""
    last = layer(shape, shape.layers)
    return Layer(last.sharded + 2 * shape.hidden**2, last.repeated + 3 * shape.hidden, last.experts)


def active(shape: Shape) -> int:
    """Parameters that one token meets, embedding and output layer included."""
    sparse = sum(parts(shape, i)[1] == "experts" for i in range(shape.layers))
    return decoder(shape) - sparse * (shape.experts - shape.top_k) * expert(shape)


def vision(shape: Shape) -> int:
    """Parameters of the vision tower with its mergers; 0 without one.

    Source: Hugging Face transformers, `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
    """
    tower = shape.vision
    if tower is None:
        return 0
    h, wide = tower.hidden, tower.hidden * tower.merge**2
    patches = tower.patch_values * h + h + tower.positions * h
    block = 4 * h * h + 4 * h + 2 * h * tower.ffn + tower.ffn + h + 4 * h
    merger = _merger(tower, shape.hidden) + 2 * h
    return patches + tower.depth * block + merger + tower.deepstack * (_merger(tower, shape.hidden) + 2 * wide)


def total(shape: Shape) -> int:
    """All parameters: decoder, multi-token prediction, vision tower."""
    return decoder(shape) + (shape.mtp * mtp(shape).total if shape.mtp else 0) + vision(shape)


def _merger(tower: Vision, out: int) -> int:
    wide = tower.hidden * tower.merge**2
    return wide * wide + wide + wide * out + out


def _mixer(shape: Shape, kind: str) -> tuple[int, int]:
    """Parameters of a layer's attention, or what it has instead, that TP shards, and those that each TP rank repeats."""
    if not kind:
        return 0, 0
    if shape.linear is not None and kind == "linear":
        return _linear(shape.linear, shape.hidden)
    if shape.mamba is not None and kind == "mamba":
        return _mamba(shape.mamba, shape.hidden)
    if shape.mla is not None:
        return _mla(shape.mla, shape.hidden, shape.heads)
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sharded = h * q * (2 if shape.attention_gate else 1) + 2 * h * kv + q * h
    repeated = (q + kv if shape.qk_norm_wide else 2 * shape.head_dim) if shape.qk_norm else 0
    if shape.attention_bias:
        sharded += q + 2 * kv
    if shape.output_bias:
        repeated += h
    return sharded + (shape.heads if shape.sinks else 0), repeated


def _mla(mla: Mla, hidden: int, heads: int) -> tuple[int, int]:
    """The down projections and their norms repeat on each TP rank; the up projections are split over heads, as are queries without
    compression.
    """
    down = hidden * mla.q_rank + hidden * (mla.kv_rank + mla.rope_dim) + mla.q_rank + mla.kv_rank
    up = (mla.q_rank or hidden) * heads * (mla.nope_dim + mla.rope_dim) + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
    return up + heads * mla.v_dim * hidden, down


def _mamba(mamba: Mamba, hidden: int) -> tuple[int, int]:
    """Input projection, causal convolution with bias, decay, skip and step size per head, the gated norm, and the output projection.

    Source: Megatron-LM, `megatron/core/ssm/mamba_mixer.py`.
    """
    inner, shared = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    sharded = hidden * (2 * inner + shared + mamba.heads) + (mamba.conv + 1) * (inner + shared) + 3 * mamba.heads + inner + inner * hidden
    return sharded, 0


def _linear(gdn: LinearAttention, hidden: int) -> tuple[int, int]:
    """Input projection, causal convolution, decay and step size per head, and the output projection.

    Source: Megatron-LM, `megatron/core/ssm/gated_delta_net.py`.
    """
    qk, v = gdn.key_heads * gdn.head_dim, gdn.value_heads * gdn.head_dim
    sharded = hidden * (2 * qk + 2 * v + 2 * gdn.value_heads) + gdn.conv * (2 * qk + v) + 2 * gdn.value_heads + v * hidden
    return sharded, gdn.head_dim
