"""Shapes of published models: the counts that decide which layouts are possible, how much they store and how much they compute."""

from __future__ import annotations

from dataclasses import dataclass

HUB = "https://huggingface.co/"
OURS = "trainer/configs/models/qwen3_vl_2b_a300m.yaml"
"""A model of this repository; it has no published counterpart."""


@dataclass(frozen=True)
class Mla:
    """Ranks and head sizes of compressed keys and values (multi-head latent attention)."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net layers; every `full_every`-th layer has full attention instead."""

    key_heads: int = 16
    value_heads: int = 32
    head_dim: int = 128
    conv: int = 4
    full_every: int = 4


@dataclass(frozen=True)
class Vision:
    """A vision tower with its mergers; `deepstack` counts the mergers that feed inner decoder layers."""

    depth: int = 27
    hidden: int = 1152
    ffn: int = 4304
    positions: int = 2304
    patch_values: int = 3 * 2 * 16 * 16
    merge: int = 2
    deepstack: int = 3


@dataclass(frozen=True)
class Shape:
    """A decoder's counts; `kv_heads` equals `heads` where keys and values are compressed instead of grouped (MLA).

    `dense_layers` counts the layers with a plain MLP, which come first; all of them in a model without experts. `tied` models have one
    matrix for embedding and output layer.
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int
    source: str
    hidden: int = 0
    vocab: int = 0
    head_dim: int = 128
    ffn: int = 0
    dense_layers: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    attention_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    window: int = 0
    tied: bool = False
    mtp: int = 0
    mla: Mla | None = None
    linear: LinearAttention | None = None
    vision: Vision | None = None


def _qwen3(name: str, layers: int, heads: int, hidden: int, expert_ffn: int, vision: Vision | None = None) -> Shape:
    source = f"{HUB}Qwen/{name}/blob/main/config.json"
    return Shape(layers, heads, 4, 128, source, hidden, 151936, top_k=8, expert_ffn=expert_ffn, qk_norm=True, vision=vision)


def _qwen3_dense(name: str, layers: int, heads: int, hidden: int, ffn: int, *, tied: bool = False, vision: Vision | None = None) -> Shape:
    source = f"{HUB}Qwen/{name}/blob/main/config.json"
    return Shape(layers, heads, 8, 0, source, hidden, 151936, ffn=ffn, dense_layers=layers, qk_norm=True, tied=tied, vision=vision)


def _qwen3_gdn(name: str, layers: int, experts: int, top_k: int, vocab: int, mtp: int) -> Shape:
    return Shape(
        layers, 16, 2, experts, f"{HUB}Qwen/{name}/blob/main/config.json", 2048, vocab, head_dim=256, top_k=top_k, expert_ffn=512,
        shared_ffn=512, shared_gate=True, qk_norm=True, attention_gate=True, mtp=mtp, linear=LinearAttention(),
    )  # fmt: skip


def _mla(name: str, heads: int, experts: int, dense_layers: int, vocab: int, mtp: int) -> Shape:
    return Shape(
        61, heads, heads, experts, f"{HUB}{name}/blob/main/config.json", 7168, vocab, head_dim=192, ffn=18432, dense_layers=dense_layers, top_k=8,
        expert_ffn=2048, shared_ffn=2048, mtp=mtp, mla=Mla(),
    )  # fmt: skip


def _mixtral(name: str, layers: int, heads: int, hidden: int, expert_ffn: int, vocab: int) -> Shape:
    return Shape(layers, heads, 8, 8, f"{HUB}mistralai/{name}/blob/main/config.json", hidden, vocab, top_k=2, expert_ffn=expert_ffn)


def _gpt_oss(name: str, layers: int, experts: int) -> Shape:
    return Shape(
        layers, 64, 8, experts, f"{HUB}openai/{name}/blob/main/config.json", 2880, 201088, head_dim=64, top_k=4, expert_ffn=2880,
        attention_bias=True, expert_bias=True, sinks=True, window=128,
    )  # fmt: skip


def _llama3(name: str, layers: int, heads: int, hidden: int, ffn: int) -> Shape:
    source = f"{HUB}meta-llama/{name}/blob/main/config.json"
    return Shape(layers, heads, 8, 0, source, hidden, 128256, ffn=ffn, dense_layers=layers)


MODELS: dict[str, Shape] = {
    "qwen3_30b_a3b": _qwen3("Qwen3-30B-A3B", 48, 32, 2048, 768),
    "qwen3_vl_30b_a3b": _qwen3("Qwen3-VL-30B-A3B-Instruct", 48, 32, 2048, 768, Vision()),
    "qwen3_235b_a22b": _qwen3("Qwen3-235B-A22B", 94, 64, 4096, 1536),
    "qwen3_vl_235b_a22b": _qwen3("Qwen3-VL-235B-A22B-Instruct", 94, 64, 4096, 1536, Vision()),
    "qwen3_0_6b": _qwen3_dense("Qwen3-0.6B", 28, 16, 1024, 3072, tied=True),
    "qwen3_1_7b": _qwen3_dense("Qwen3-1.7B", 28, 16, 2048, 6144, tied=True),
    "qwen3_8b": _qwen3_dense("Qwen3-8B", 36, 32, 4096, 12288),
    "qwen3_vl_2b": _qwen3_dense("Qwen3-VL-2B-Instruct", 28, 16, 2048, 6144, tied=True, vision=Vision(24, 1024, 4096)),
    "qwen3_vl_8b": _qwen3_dense("Qwen3-VL-8B-Instruct", 36, 32, 4096, 12288, vision=Vision()),
    "qwen3_vl_2b_a300m": Shape(
        16, 16, 4, 64, OURS, 1024, 151936, top_k=4, expert_ffn=512, qk_norm=True, tied=True, vision=Vision(12, 768, 3072)
    ),
    "qwen3_next_80b_a3b": _qwen3_gdn("Qwen3-Next-80B-A3B-Instruct", 48, 512, 10, 151936, 1),
    "qwen3_5_35b_a3b": _qwen3_gdn("Qwen3.5-35B-A3B", 40, 256, 8, 248320, 0),
    "deepseek_v3": _mla("deepseek-ai/DeepSeek-V3", 128, 256, 3, 129280, 1),
    "kimi_k2": _mla("moonshotai/Kimi-K2-Instruct", 64, 384, 1, 163840, 0),
    "mixtral_8x7b": _mixtral("Mixtral-8x7B-v0.1", 32, 32, 4096, 14336, 32000),
    "mixtral_8x22b": _mixtral("Mixtral-8x22B-v0.1", 56, 48, 6144, 16384, 32768),
    "gpt_oss_20b": _gpt_oss("gpt-oss-20b", 24, 32),
    "gpt_oss_120b": _gpt_oss("gpt-oss-120b", 36, 128),
    "llama3_8b": _llama3("Meta-Llama-3-8B", 32, 32, 4096, 14336),
    "llama3_70b": _llama3("Meta-Llama-3-70B", 80, 64, 8192, 28672),
}
"""Decoders by name. Source: the `config.json` that each row links; `qwen3_vl_2b_a300m` is ours. `qwen3_5_35b_a3b` is its text model, without the MTP layer."""
