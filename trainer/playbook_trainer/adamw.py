"""AdamW whose moments may be kept in 16 bits, or whose update may be one kernel; the arithmetic is in float32 on float32 master weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 26
"""Values updated at once: the float32 copies of both moments exist for 64 Mi values (512 MiB) at a time."""


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with moments of another precision; its state has the same form.

    With `fused`, each parameter's update is one Triton kernel, which also multiplies the gradient with `scale`; gradients stay as they are.
    """

    def __init__(self, groups: list[dict[str, Any]], *, moments: torch.dtype, fused: bool = False, **how: Any) -> None:
        super().__init__(groups, **how)
        self.moments, self.is_fused = moments, fused
        self.scale: Tensor | None = None
        """A float32 value on the device; None leaves gradients as they are."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    self._update(param, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which casts a parameter's state to the parameter's precision; the moments keep theirs."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self.moments)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param, dtype=self.moments) for _ in range(2))
        state["step"] += 1
        tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
        if self.is_fused:
            from playbook_trainer.models.kernels import adamw as kernel

            scale = kernel.no_scale(param.device) if self.scale is None else self.scale
            kernel.update(*tensors, scale, group, int(state["step"].item()))
            return
        flat = [t.view(-1).split(PIECE) for t in tensors]
        for p, g, m, v in zip(*flat, strict=True):
            update(p, g, m, v, group, int(state["step"].item()))


def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> None:
    """One AdamW update in place; `m` and `v` are rounded to their own precision once, after they have been used.

    Source: Decoupled weight decay regularisation, arXiv 1711.05101, algorithm 2; the order of operations is torch.optim.AdamW's.
    """
    beta1, beta2 = group["betas"]
    wide_m, wide_v = m.float().lerp_(g, 1 - beta1), v.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
    m.copy_(wide_m)
    v.copy_(wide_v)
    root = wide_v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    p.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(wide_m, root, value=-group["lr"] / (1 - beta1**step))
