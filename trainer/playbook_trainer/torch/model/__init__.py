"""Qwen3 decoders and the Qwen3-VL vision tower."""
