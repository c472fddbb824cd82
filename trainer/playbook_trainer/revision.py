"""The performance revision of each backend. Torch-free, so that the harness reads it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PERFORMANCE_REVISION: Mapping[str, int] = MappingProxyType({"torch": 4, "megatron": 3})
"""Raise a backend's number in the commit that makes its hot path faster or slower, and both for what they share (data, loop): verdicts from older
runs of that backend are then stale. A change that only some configurations see may edit the cases that have them instead."""
