"""Model FLOPs per token, forward and backward. Recompute is not counted: it is work of the system, not of the model.

Source: Megatron-LM, `megatron/training/training.py`, `num_floating_point_operations`: causal attention counts half of the square,
routers and norms count nothing. Sliding windows: Megatron Bridge, `training/utils/flop_utils.py`.
"""

from __future__ import annotations

from playbook.parameters import is_linear
from playbook.shapes import Shape

BACKWARD = 3
"""Forward and backward over forward: the backward pass multiplies twice, once for the input and once for the weight."""


def per_token(shape: Shape, seq_len: float) -> float:
    """Training FLOPs per token of sequences of `seq_len` tokens; MTP layers are like the last one.

    For packed rows pass `packed_length` of the documents, since attention ends at each of them.
    Units: floating-point operations; one multiply-add is two.
    """
    depths = [*range(shape.layers), *[shape.layers - 1] * shape.mtp]
    layers = sum(_attention(shape, i, seq_len) + _mlp(shape, i) for i in depths)
    heads = shape.hidden * shape.vocab * (1 + shape.mtp) + shape.mtp * (2 * shape.hidden**2 + 3 * shape.hidden)
    return 2 * BACKWARD * (layers + heads)


def packed_length(documents: list[int]) -> float:
    """The sequence length that costs as much per token as these documents packed into one row."""
    return sum(n * n for n in documents) / sum(documents)


def _mlp(shape: Shape, index: int) -> float:
    if index < shape.dense_layers:
        return 3 * shape.hidden * shape.ffn
    return 3 * shape.hidden * (shape.top_k * shape.expert_ffn + shape.shared_ffn)


def _attention(shape: Shape, index: int, seq_len: float) -> float:
    """Multiply-adds per token of one layer's attention."""
    h, n = shape.hidden, shape.heads
    if shape.linear is not None and is_linear(shape, index):
        gdn = shape.linear
        qk, v = gdn.key_heads * gdn.head_dim, gdn.value_heads * gdn.head_dim
        return h * (2 * qk + 2 * v + 2 * gdn.value_heads) + gdn.conv * (2 * qk + v) + 4 * v * gdn.head_dim + h * v
    if shape.mla is not None:
        mla = shape.mla
        q, kv = mla.q_rank * (h + n * (mla.nope_dim + mla.rope_dim) + 1), mla.kv_rank * (h + n * (mla.nope_dim + mla.v_dim) + 1)
        core = seq_len * n * (mla.nope_dim + mla.rope_dim + mla.v_dim) / 2
        return q + kv + h * mla.rope_dim + n * mla.v_dim * h + core
    d = shape.head_dim
    linear = h * (n * d * (2 if shape.attention_gate else 1) + 2 * shape.kv_heads * d) + n * d * h
    return linear + 2 * n * d * _context(shape, index, seq_len)


def _context(shape: Shape, index: int, seq_len: float) -> float:
    """Keys that a query meets on average; windows are on every other layer, the first one included."""
    if not shape.window or index % 2 or seq_len <= shape.window:
        return seq_len / 2
    return shape.window - shape.window * (shape.window - 1) / (2 * seq_len)
