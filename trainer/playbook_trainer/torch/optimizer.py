"""AdamW on each rank's own shards, clipping by the global norm, and the learning-rate schedule."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import OptimizerConfig
from playbook_trainer.observe.ranges import tally
from playbook_trainer.torch.parallel.sharding import Put, counts_in_norm, is_partial_over_tp, is_second_copy, set_values

# A float32 weight in two halves: its bfloat16 rounding, which the model computes with, and 16 bits that complete it.
# The upper half is the weight rounded to nearest, ties to even: what a cast gives. The lower half is the signed distance to it in units
# of the weight's last place, between -32768 and 32768. Those are 65,537 numbers, one more than 16 bits tell apart: +32768, a tie that was
# rounded down, is kept as -32768 with the sign of the second moment set, which is never negative otherwise. So the halves hold every
# finite weight exactly.
# Source: Megatron Core, `store_param_remainders` of its precision-aware optimizer, which keeps the same 16 bits but rounds ties up.


def split(whole: Tensor, high: Tensor, low: Tensor, second: Tensor) -> None:
    """Write float32 values into `high` (bfloat16), `low` (int16) and the signs of `second`, in place; all of one shape."""
    high.copy_(whole)
    # What is no number is one in its upper half alone: its bits depend on who casts, and a carry could make a number of them.
    remainder = (whole.view(torch.int32) - _shifted(high)).masked_fill_(whole.isnan(), 0)
    low.copy_(remainder)  # +32768 wraps
    magnitude = second.abs()
    second.copy_(torch.where(remainder > 32767, magnitude.neg(), magnitude))


def join(high: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """The float32 values, in memory of their own."""
    bits = _shifted(high).add_(low)
    return bits.add_(second.signbit().int().bitwise_left_shift_(16)).view(torch.float32)


def _shifted(high: Tensor) -> Tensor:
    return high.view(torch.int16).int().bitwise_left_shift_(16)


# AdamW whose moments may be kept in 16 bits, whose weights may be kept in two halves, or whose update may be one kernel; it computes in
# float32.

PIECE = 1 << 26
"""Values updated at once: the float32 copies of both moments exist for 64 Mi values (512 MiB) at a time."""


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with moments of another precision; its state has the same form.

    With `fused`, each parameter's update is one Triton kernel. With `split`, parameters are the upper halves of float32 weights, and the
    state holds the lower ones (`remainder`; see `halves`). Both multiply the gradient with `scale`; gradients stay as they are.
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
        return join(param, state["remainder"], state["exp_avg_sq"])

    @torch.no_grad()
    def put(self, param: Tensor, values: Tensor, at: tuple[slice, ...] = ()) -> None:
        """Set a bf16 parameter, or a box of it, and its 16-bit remainder from float32 values."""
        state = self.begin(param)
        values = values.to(param.device, torch.float32)
        split(values, param[at], state["remainder"][at], state["exp_avg_sq"][at])

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place, by the fused kernel or piece by piece."""
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
            for p, g, m, v, low_part in _pieces(*tensors, low):
                whole, grad = join(p, low_part, v), g.float()
                rule(whole, grad if scale is None else grad * scale, m, v.abs_(), group, step)
                split(whole, p, low_part, v)


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


@dataclass(frozen=True)
class Shard:
    """A parameter and this rank's part of it, on the same memory; the optimizer sees only the part."""

    name: str
    param: nn.Parameter
    local: nn.Parameter
    counts: bool
    """Whether this rank counts it in the norm: what several ranks, or two pipeline stages, hold in common is counted once."""
    partial: bool
    """Whether its gradient still has to be summed over the tensor-parallel ranks."""

    def grad(self) -> Tensor | None:
        """This rank's part of the gradient."""
        grad = self.param.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


def shards(model: nn.Module, axes: Axes) -> list[Shard]:
    """This rank's shard of every trained parameter."""
    out = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            local = param.to_local() if isinstance(param, DTensor) else param
            local = nn.Parameter(local.detach())
            counts = counts_in_norm(name, axes) and not is_second_copy(model, name)
            out.append(Shard(name, param, local, counts, is_partial_over_tp(name, axes)))
    return out


def sum_over_tp(parts: list[Shard], axes: Axes, device: torch.device) -> None:
    """Add up the gradients of which each tensor-parallel rank has computed a part: once per step, all in one all-reduce."""
    grads = [g for p in parts if p.partial and (g := p.grad()) is not None and g.numel()]
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads]).to(device)
    dist.all_reduce(flat, group=axes.tp.group)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def make(parts: list[Shard], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; norms, biases and embeddings of one dimension are not decayed."""
    decayed = [p.local for p in parts if p.param.ndim > 1]
    plain = [p.local for p in parts if p.param.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    how: dict[str, Any] = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    split, fused = config.master_weights == "remainder", config.fused is True
    if config.moments_dtype == "bf16" or fused or split:
        moments = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.moments_dtype]
        return AdamW(groups, moments=moments, fused=fused, split=split, **how)
    return torch.optim.AdamW(groups, fused=True, **how)


def ensure_state(optimizer: torch.optim.Optimizer, parts: Sequence[Shard]) -> None:
    """Give every part the optimizer state that its first step would give it, so that a checkpoint has somewhere to go."""
    for part in parts:
        if isinstance(optimizer, AdamW):
            optimizer.begin(part.local)
            continue
        state = optimizer.state[part.local]
        if state:
            continue
        # As torch.optim.AdamW makes it with fused=True, which counts steps on the device.
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.local.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(part.local, memory_format=torch.preserve_format)


class Frozen:
    """Frozen parameters in bfloat16, and in host memory the float32 values of those that it does not hold exactly:
    they come out as they went in.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and p.dtype == torch.bfloat16}
        self.local = {name: p.to_local() if isinstance(p, DTensor) else p.detach() for name, p in frozen.items()}
        """This rank's part of each."""
        self._exact: dict[str, Tensor] = {}  # the same in float32, where it differs

    def put(self, name: str, at: tuple[slice, ...], values: Tensor) -> None:
        """Set a box of this rank's part."""
        box = self.local[name][at]
        box.copy_(values)
        if name not in self._exact and not torch.equal(box.float(), values.to(box.device, torch.float32)):
            self._exact[name] = self.local[name].float().cpu()
        if name in self._exact:
            self._exact[name][at].copy_(values)

    def wholes(self) -> dict[str, Callable[[], Tensor]]:
        """For each, a function that returns this rank's part in float32."""
        return {name: partial(self._whole, name) for name in self.local}

    def _whole(self, name: str) -> Tensor:
        return self._exact[name] if name in self._exact else self.local[name].float()


def masters(optimizer: torch.optim.Optimizer, parts: Sequence[Shard]) -> dict[str, Callable[[], Tensor]]:
    """For each bf16 parameter with a 16-bit remainder, a function that returns this rank's float32 master weights;
    empty where masters are float32.
    """
    if not (isinstance(optimizer, AdamW) and optimizer.is_split):
        return {}
    return {part.name: partial(optimizer.whole, part.local) for part in parts}


def put_into(optimizer: torch.optim.Optimizer, parts: Sequence[Shard], frozen: Frozen) -> Put:
    """The function that sets values of a parameter, and what its bf16 rounds away, with `master_weights: remainder`."""
    if not (isinstance(optimizer, AdamW) and optimizer.is_split):
        return set_values
    upper = {part.name: part.local for part in parts}

    def put(name: str, local: Tensor, at: tuple[slice, ...], values: Tensor) -> None:
        if name in upper:
            optimizer.put(upper[name], values, at)
        else:
            frozen.put(name, at, values)

    return put


def add_in_float32(part: Shard) -> None:
    """Keep the gradient of a 16-bit parameter in float32 from its first reduction on, because more will be added to it.

    FSDP and autograd add in place to what they find, so the sum is then the one that float32 parameters get.
    """

    def widen(param: Tensor) -> None:
        if param.grad is not None:
            param.grad = param.grad.float()

    for tensor in (part.param, part.local):
        tensor.grad_dtype = None  # any
    if not isinstance(
        part.param, DTensor
    ):  # FSDP rounds what it reduces; autograd, with any type allowed, would add a norm's float32 gradient as it is
        part.param.register_hook(lambda grad: grad.to(part.param.dtype).to(grad.dtype))
    part.param.register_post_accumulate_grad_hook(widen)


def squared_norm(parts: list[Shard], device: torch.device) -> Tensor:
    """This rank's share of the squared gradient norm, float64; the sum over all ranks is the whole model's."""
    grads = [g for p in parts if p.counts and (g := p.grad()) is not None and g.numel()]
    if not grads:
        return torch.zeros((), device=device, dtype=torch.float64)
    return torch.stack(_norms(grads)).double().square().sum().to(device)


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """The norm of each, in the order given; those of 16 bits are added up in float32, and by themselves:
    a mixed list would take a slow path.
    """
    narrow = [g for g in grads if g.dtype == torch.bfloat16]
    wide = [g for g in grads if g.dtype != torch.bfloat16]
    by_width = [
        iter(torch._foreach_norm(narrow, dtype=torch.float32) if narrow else ()),
        iter(torch._foreach_norm(wide) if wide else ()),
    ]
    return [next(by_width[g.dtype != torch.bfloat16]) for g in grads]


def step(optimizer: torch.optim.AdamW, parts: list[Shard], norm: Tensor, clip_norm: float) -> None:
    """Clip by the global norm, update, and set all gradients to None; on the host, if the optimizer state is there."""
    grads = []
    for part in parts:
        grad = part.grad()
        if grad is not None:
            part.local.grad = grad
            grads.append(grad)
    offloaded = bool(grads) and grads[0].device.type != norm.device.type
    if offloaded:
        tally("offloaded_gradient_bytes", sum(g.numel() * g.element_size() for g in grads))
    with _host_threads(offloaded):
        if grads:
            clip = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            if isinstance(optimizer, AdamW) and (optimizer.is_fused or optimizer.is_split):
                optimizer.scale = clip.float()
            else:
                torch._foreach_mul_(grads, clip.to(grads[0]))
        optimizer.step()
    drop_gradients(parts)


def drop_gradients(parts: list[Shard]) -> None:
    """Set all gradients to None."""
    for part in parts:
        part.param.grad = part.local.grad = None


@contextmanager
def _host_threads(on: bool) -> Iterator[None]:
    """Where `on`, all of this rank's share of the cores: launchers leave a rank one thread, which is for the launching of kernels."""
    before = torch.get_num_threads()
    if on:
        torch.set_num_threads(max(before, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        if on:
            torch.set_num_threads(before)


def learning_rate(step_index: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of a step (from 0): linear warm-up, then constant, or decay to `min_lr_ratio`:
    cosine, linear, or linear over the last `decay_ratio` (wsd).
    """
    if step_index < config.warmup_steps:
        return config.lr * (step_index + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay = round(config.decay_ratio * steps) if config.schedule == "wsd" else steps
    begins = max(config.warmup_steps, steps - decay)
    done = min(1.0, max(0.0, (step_index - begins) / max(1, steps - begins)))
    low = config.lr * config.min_lr_ratio
    share = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return low + (config.lr - low) * share
