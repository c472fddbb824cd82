"""Shapes of published models: the counts that decide which layouts are possible."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder's counts; `kv_heads` equals `heads` where keys and values are compressed instead of grouped (MLA)."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    source: str


MODELS: dict[str, Shape] = {
    "qwen3_30b_a3b": Shape(48, 32, 4, 128, "https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"),
    "qwen3_vl_30b_a3b": Shape(48, 32, 4, 128, "https://huggingface.co/Qwen/Qwen3-VL-30B-A3B-Instruct/blob/main/config.json"),
    "qwen3_235b_a22b": Shape(94, 64, 4, 128, "https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json"),
    "qwen3_vl_235b_a22b": Shape(94, 64, 4, 128, "https://huggingface.co/Qwen/Qwen3-VL-235B-A22B-Instruct/blob/main/config.json"),
    "deepseek_v3": Shape(61, 128, 128, 256, "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json"),
}
"""Decoders by name. Source: the `config.json` that each row links."""
