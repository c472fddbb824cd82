"""AdamW whose moments may be kept in 16 bits, whose weights may be kept in two halves, or whose update may be one kernel; it computes in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from playbook_trainer.torch import param_remainders

PIECE = 1 << 26
"""Values updated at once: the float32 copies of both moments exist for 64 Mi values (512 MiB) at a time."""


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with moments of another precision; its state has the same form.

    With `fused`, each parameter's update is one Triton kernel. With `split`, parameters are the upper halves of float32 weights, and the state
    holds the lower ones (`remainder`; see `halves`). Both multiply the gradient with `scale`; gradients stay as they are.
    """

    def __init__(self, groups: list[dict[str, Any]], *, moments: torch.dtype, fused: bool = False, split: bool = False, **how: Any) -> None:
        super().__init__(groups, **how)
        self.moments, self.is_fused, self.is_split = moments, fused, split
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
        """As in torch, which casts a parameter's state to the parameter's precision; here it keeps its own."""
        super().load_state_dict(state_dict)
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for name, param in zip(names, chain.from_iterable(group["params"] for group in self.param_groups), strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if key != "step":
                    self.state[param][key] = value.to(param.device, value.dtype if key == "remainder" else self.moments, copy=True)

    def begin(self, param: Tensor) -> dict[str, Any]:
        """The optimizer state of a parameter; created at its first step, or before a checkpoint is read."""
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param, dtype=self.moments) for _ in range(2))
            if self.is_split:
                state["remainder"] = torch.zeros_like(param, dtype=torch.int16)
        return state

    @torch.no_grad()
    def whole(self, param: Tensor) -> Tensor:
        """The float32 master weights of a bf16 parameter, from it and its 16-bit remainder, in new memory."""
        state = self.begin(param)
        return param_remainders.join(param, state["remainder"], state["exp_avg_sq"])

    @torch.no_grad()
    def put(self, param: Tensor, values: Tensor, at: tuple[slice, ...] = ()) -> None:
        """Set a bf16 parameter, or a box of it, and its 16-bit remainder from float32 values."""
        state = self.begin(param)
        values = values.to(param.device, torch.float32)
        param_remainders.split(values, param[at], state["remainder"][at], state["exp_avg_sq"][at])

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        state = self.begin(param)
        state["step"] += 1
        step, scale, low = int(state["step"].item()), self.scale, state.get("remainder")
        tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
        if self.is_fused:
            from playbook_trainer.torch.kernels import adamw as kernel

            kernel.update(*tensors, kernel.no_scale(param.device) if scale is None else scale, group, step, low)
        elif low is None:
            for p, g, m, v in _pieces(*tensors):
                update(p, g, m, v, group, step)
        else:
            rule = _torchs if self.moments == torch.float32 else update
            for p, g, m, v, rest in _pieces(*tensors, low):
                whole, grad = param_remainders.join(p, rest, v), g.float()
                rule(whole, grad if scale is None else grad * scale, m, v.abs_(), group, step)
                param_remainders.split(whole, p, rest, v)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.view(-1).split(PIECE) for t in tensors), strict=True)


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


def _torchs(p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> None:
    """One AdamW update in float32 by torch's fused kernel: bit-identical to torch.optim.AdamW on float32 master weights."""
    beta1, beta2 = group["betas"]
    before = torch.full((), step - 1, dtype=torch.float32, device=p.device)
    adamw(
        [p], [g], [m], [v], [], [before], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
