"""What names of kernels and operators say, for traces of either tool and for the trainer's receipt alike."""

from __future__ import annotations

import re

COMMUNICATION = re.compile(r"nccl|gloo|c10d|deep_ep|deepep|hybrid_ep|nvshmem|multimem", re.IGNORECASE)
"""Libraries that send: those of collectives, and those of experts' exchanges, whose kernels lie below namespaces of their own."""
