"""Model FLOPs, by class of operation, and the peak rates of GPUs that utilisation is a share of. Recompute is not counted: it is work of
the system, not of the model.

Source: Megatron-LM, `megatron/training/training.py`, `num_floating_point_operations`: causal attention counts half of the square,
routers and norms count nothing. Sliding windows: Megatron Bridge, `training/utils/flop_utils.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from playbook.planner.options import Options
from playbook.planner.parameters import adapters, parts, projections
from playbook.planner.shapes import Shape, Vision

BACKWARD = 3
"""Forward and backward over forward: the backward pass multiplies twice, once for the input and once for the weight."""


@lru_cache(maxsize=1024)
def per_token(shape: Shape, seq_len: float) -> float:
    """Training FLOPs per token of sequences of `seq_len` tokens; MTP layers are like the last one. Routers are left out, as in the source.

    For packed rows pass the sum of the squares of the documents' lengths over their sum, since attention ends at each of them.
    Units: floating-point operations; one multiply-add is two.
    """
    return BACKWARD * sum(flops for name, flops in forward(shape, seq_len).items() if name != "router")


_FULL = Options()


def trained_per_token(shape: Shape, seq_len: float, options: Options = _FULL) -> float:
    """Training FLOPs per token where parts may be frozen: a weight without gradient costs 4 for each parameter and token instead of 6, an
    adapter 6.

    The backward pass multiplies once for the gradient of the input, which earlier layers wait for, and once for that of the weight, which a
    frozen one leaves out. Source: LoRA, arXiv 2106.09685, section 4.1; torch's `torch.utils.flop_counter` counts the same.
    """
    frozen = options.lora > 0 or "decoder" in options.frozen
    if not frozen:
        return per_token(shape, seq_len)
    weights = sum(flops for name, flops in forward(shape, seq_len).items() if name not in ("attention", "router"))
    met = sum(a.passed * (a.wide_in + a.wide_out) for i in range(shape.layers) for a in adapters(shape, i, options))
    return per_token(shape, seq_len) - weights + BACKWARD * (2.0 * options.lora * met)


def forward(shape: Shape, seq_len: float) -> dict[str, float]:
    """FLOPs of the decoder's forward pass per token, by class.

    attention: scores and weighted sums, or the recurrence of linear attention or Mamba. linear: projections of attention and MTP. mlp:
    dense MLPs.
    experts: routed and shared ones. router, head: one matrix product each.
    Units: floating-point operations per token.
    """
    depths = [*range(shape.layers), *[shape.layers] * shape.mtp]
    halves = Counter(half for i in depths for half in parts(shape, i))
    sparse, h, wide = halves["experts"], shape.hidden, shape.up + 1
    madds = {
        "attention": sum(_core(shape, i, seq_len) for i in depths),
        "linear": sum(_linear(shape, i) for i in depths) + shape.mtp * (2 * h**2 + 3 * h),
        "mlp": halves["mlp"] * wide * h * shape.ffn,
        "experts": sparse * (wide * (shape.expert_hidden * shape.top_k * shape.expert_ffn + h * shape.shared_ffn) + 2 * h * shape.latent),
        "router": sparse * h * shape.experts,
        "head": h * shape.vocab * (1 + shape.mtp),
    }
    return {name: 2.0 * n for name, n in madds.items()}


def vision_forward(tower: Vision, out: int, patches: float, pairs: float) -> dict[str, float]:
    """FLOPs of the forward pass of a vision tower over `patches` patches, by class; `out` is the decoder's width.

    patches: their embedding. vision: the blocks, with full attention inside each image; `pairs` is the sum of the squares of the images'
    numbers of patches. projector: the merger and its DeepStack companions, one visual token per merge x merge patches.
    Units: floating-point operations.
    Source: Hugging Face transformers, `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
    """
    h, wide = tower.hidden, tower.hidden * tower.merge**2
    madds = {
        "patches": patches * tower.patch_values * h,
        "vision": tower.depth * (patches * (4 * h * h + 2 * h * tower.ffn) + 2 * pairs * h),
        "projector": patches / tower.merge**2 * (1 + tower.deepstack) * (wide * wide + wide * out),
    }
    return {name: 2.0 * n for name, n in madds.items()}


def _linear(shape: Shape, index: int) -> float:
    """Multiply-adds per token of the matrix products around one layer's attention, and of the norms of compressed queries and keys."""
    mixer = parts(shape, index)[0]
    norms = shape.mla.q_rank + shape.mla.kv_rank if shape.mla is not None and mixer == "attention" else 0
    return sum(wide_in * wide_out for _, wide_in, wide_out in projections(shape, mixer)) + norms


def _core(shape: Shape, index: int, seq_len: float) -> float:
    """Multiply-adds per token of one layer's attention itself. A Mamba scan has 3.5 for each value and state, as the source counts it."""
    mixer = parts(shape, index)[0]
    if not mixer:
        return 0.0
    if shape.mamba is not None and mixer == "mamba":
        return 3.5 * shape.mamba.heads * shape.mamba.head_dim * shape.mamba.state
    if shape.linear is not None and mixer == "linear":
        gdn = shape.linear
        qk, v = gdn.key_heads * gdn.head_dim, gdn.value_heads * gdn.head_dim
        return gdn.conv * (2 * qk + v) + 4 * v * gdn.head_dim
    if shape.mla is not None:
        mla = shape.mla
        return seq_len * shape.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim) / 2
    return 2 * shape.heads * shape.head_dim * _context(shape, index, seq_len)


def _context(shape: Shape, index: int, seq_len: float) -> float:
    """Keys that a query meets on average."""
    full = shape.window_every and (index + 1) % shape.window_every == 0
    if not shape.window or full or seq_len <= shape.window:
        return seq_len / 2
    return shape.window - shape.window * (shape.window - 1) / (2 * seq_len)


@dataclass(frozen=True)
class Peak:
    """A rate that the data sheet names, without sparsity."""

    name: str
    flops_per_s: float
    source: str


_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_AMPERE = "https://www.nvidia.com/en-us/data-center/a100/"
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture"

# The first whose words all occur in the device's name; data sheets give twice these figures where they count sparsity.
_DENSE_BF16: tuple[tuple[tuple[str, ...], Peak], ...] = (
    (("GB300",), Peak("GB300 dense BF16", 2500e12, _BLACKWELL)),
    (("GB200",), Peak("GB200 dense BF16", 2500e12, _BLACKWELL)),
    (("B300",), Peak("B300 dense BF16", 2250e12, _BLACKWELL)),
    (("B200",), Peak("B200 dense BF16", 2250e12, _BLACKWELL)),
    (("H200", "NVL"), Peak("H200 NVL dense BF16", 835.5e12, _H200)),
    (("GH200",), Peak("GH200 dense BF16", 989.5e12, _HOPPER)),
    (("H200",), Peak("H200 SXM dense BF16", 989.5e12, _H200)),
    (("H100", "PCIe"), Peak("H100 PCIe dense BF16", 756.5e12, _HOPPER)),
    (("H100", "NVL"), Peak("H100 NVL dense BF16", 835.5e12, _HOPPER)),
    (("H100",), Peak("H100 SXM dense BF16", 989.5e12, _HOPPER)),
    (("H800",), Peak("H800 dense BF16", 989.5e12, _HOPPER)),
    (("A100",), Peak("A100 dense BF16", 312e12, _AMPERE)),
    (("A800",), Peak("A800 dense BF16", 312e12, _AMPERE)),
    (("L40S",), Peak("L40S dense BF16", 362e12, "https://www.nvidia.com/en-us/data-center/l40s/")),
)


def dense_bf16(device_name: str) -> Peak | None:
    """The dense BF16 peak of a GPU by the name that its driver gives; None where it is not known.

    Units: floating-point operations per second; one multiply-add is two.
    """
    words_of_name = re.findall("[A-Za-z0-9]+", device_name)  # whole words: an RTX A1000 is no A100
    return next((peak for words, peak in _DENSE_BF16 if all(w in words_of_name for w in words)), None)
