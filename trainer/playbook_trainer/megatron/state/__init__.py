"""Weights and checkpoints of the megatron backend."""
