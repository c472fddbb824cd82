"""Layouts: FSDP2, expert, context, tensor and pipeline parallelism."""
