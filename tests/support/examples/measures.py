"""What the tests of kernels measure: distances from a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm of `b`, in float64; 0 where both are empty."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def errors(f: Callable[..., Any], reference: Callable[..., Any], given: Sequence[Tensor], grad: Tensor) -> list[float]:
    """How far a function's value and its gradient by each tensor are from those of a reference in float64; they are printed (pytest -s)."""
    ours, exact = [t.clone().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    out, expected = f(*ours), reference(*exact)
    out.backward(grad)
    expected.backward(grad.double())
    found = [relative(out, expected), *(relative(a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    print(f.__name__, *(tuple(t.shape) for t in given), *(f"{e:.1e}" for e in found))
    return found
