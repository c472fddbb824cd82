"""The kernel of the loss against float64: tests/gpu calls this on a GPU, tests/trainer runs it as a program under Triton's interpreter."""

from __future__ import annotations

import torch

from playbook_trainer.axes import Axis
from playbook_trainer.torch.kernels.dense import BLOCK, fused_rows


def ruled_out(first: int, width: int, device: str) -> str:
    """Rows of which the first so many words have a logit of minus infinity, as masked vocabularies have; returns the errors."""
    torch.manual_seed(0)
    logits = torch.randn(5, width).to(device, torch.bfloat16)
    logits[:4, :first] = -float("inf")
    target = torch.tensor([first, width - 1, first, width - 1, 0], device=device)
    valid = torch.tensor([True, True, True, False, True], device=device)
    exact = logits.double().requires_grad_()
    each = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    reference = each[valid].sum()
    reference.backward()
    assert exact.grad is not None
    loss, gradient = fused_rows(logits.clone(), target, valid, Axis("tp"), need=True)
    far = abs(float(loss) / float(reference.detach()) - 1), float((gradient.double() - exact.grad).abs().max())
    line = f"first {first} of {width} ruled out: loss {far[0]:.1e}, gradient {far[1]:.1e}"
    assert far[0] < 1e-5, line
    assert far[1] < 4e-3, line  # numbers up to 1 in BF16, which the interpreter cuts off instead of rounding
    return line


SHAPES = [(0, 300), (1, 300), (299, 300), (BLOCK, BLOCK + 70), (BLOCK + 1, 2 * BLOCK + 9), (2 * BLOCK, 2 * BLOCK + 1)]


if __name__ == "__main__":
    for first, width in SHAPES:
        print(ruled_out(first, width, "cpu"))
    print("all cases passed")
