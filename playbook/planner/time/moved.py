"""Bytes that kernels move beside a layer's compiled ones: adapters, a base in 4 bits, and the separate operations of transformers'
layers.
"""

from __future__ import annotations

from playbook.planner.memory import BASE_BYTES
from playbook.planner.options import Options
from playbook.planner.parameters import adapters, layer
from playbook.planner.shapes import Shape

_BF16 = 2
_NORM, _TURN, _GATE = 32, 12, 4
"""Bytes that a norm moves for each value beyond a fused one where each operation is a kernel (to float32, square, mean, product, back,
weight), and
rotation for each of queries and keys, and the activation for each of an MLP's inner values."""


def uncompiled(shape: Shape, mixer: str, ffn: str, rows: float, local: float, tp: int) -> float:
    """What a layer of transformers moves in its forward pass beyond a compiled one; `rows` are tokens of a CP rank, `local` those of a TP
    rank.

    Source: transformers 5, `models/llama/modeling_llama.py` (`LlamaRMSNorm.forward`, `apply_rotary_pos_emb`, `LlamaMLP.forward`).
    """
    heads = (shape.heads + shape.kv_heads) * shape.head_dim / tp
    turned = (_TURN + (_NORM if shape.qk_norm else 0)) * rows * heads if mixer == "attention" else 0.0
    gated = _GATE * rows * shape.ffn / tp if ffn == "mlp" else 0.0
    return _NORM * local * shape.hidden * (bool(mixer) + bool(ffn)) + turned + gated


def beside(shape: Shape, index: int, options: Options, rows: float, local: float, tp: int, grid: int) -> tuple[float, float]:
    """What adapters beside a layer's products move in both passes, and a 4-bit base that is made bf16 for each; `grid` is EP x ETP.

    A pair reads the matrix's input, and reads, scales and adds its output; the backward pass reads both gradients and adds one. So peft has
    them, unfused.
    Sources: peft 0.18, `tuners/lora/layer.py` (`Linear.forward`); bitsandbytes, `autograd/_functions.py` (`MatMul4Bit`).
    """
    pairs = [(_BF16 * (local * a.passed if a.passed > 1 else rows / tp), a.wide_in, a.wide_out) for a in adapters(shape, index, options)]
    weights = layer(shape, index)
    unpacked = (weights.sharded / tp + weights.experts / grid) * (BASE_BYTES[options.base] + _BF16) if options.base else 0.0
    forward = sum(each * (wide_in + 3 * wide_out) for each, wide_in, wide_out in pairs)
    return forward + unpacked, sum(each * (3 * wide_in + 2 * wide_out) for each, wide_in, wide_out in pairs) + unpacked
