"""What the tests of kernels measure: distances and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm of `b`, in float64; 0 where both are empty."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def milliseconds(f: Callable[[], Any], repeats: int = 10) -> float:
    """The mean time of a call, after three."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        f()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / repeats
